// SPDX-License-Identifier: Apache-2.0
// An image has the same bytes whatever the number of threads (docs/architecture.md, "Determinism").
// That number is decided once for a process (engine/backend/cpu/parallel.h), so each is a process
// of its own: this program again, with this case alone.

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "engine/backend/cpu/parallel.h"
#include "tests/engine/submit.h"
#include "tests/io/temporary_directory.h"

namespace denoised {
namespace {

namespace fs = std::filesystem;

constexpr char kInto[] = "DENOISED_TEST_DRAW_INTO";  // where such a process writes its images

/// One image, whose rows are split over the threads, and five, of which threads take whole rows:
/// of a model for classes and of one for texts with an autoencoder.
void DrawInto(const fs::path& path) {
  std::ofstream file(path, std::ios::binary);
  auto engine = Engine::Create({.device = "cpu"});
  ASSERT_TRUE(engine.ok()) << engine.status();
  for (const char* model : {"models/mnist-32", "tests/models/latent/sd1"}) {
    const absl::Status opened = (*engine)->Open(model, fs::path(DENOISED_SOURCE_DIR) / model);
    ASSERT_TRUE(opened.ok()) << opened;
    for (const int count : {1, 5}) {
      JobSpec spec{.model = model, .seed = 3, .count = count, .guidance_scale = 3};
      spec.sampler.steps = 2;
      if (std::strcmp(model, "models/mnist-32") == 0)
        spec.class_labels = {5};
      else
        spec.prompts = {{.text = "a red apple"}};
      const auto job = Submit(**engine, spec);
      ASSERT_TRUE(job->Wait().ok()) << job->Wait();
      ASSERT_EQ(job->images().size(), static_cast<size_t>(count));
      for (const auto& [index, image] : job->images())
        file.write(reinterpret_cast<const char*>(image.data()),
                   static_cast<std::streamsize>(image.size() * sizeof(float)));
    }
  }
  file << cpu::Workers();
  EXPECT_TRUE(file.good());
}

TEST(Threads, AnyNumberDrawsTheSameBytes) {
#ifdef DENOISED_THREAD_SANITIZER
  GTEST_SKIP() << "OpenMP is not instrumented: ThreadSanitizer calls its hand-overs races";
#endif
  if (const char* into = std::getenv(kInto)) return DrawInto(into);
  const TemporaryDirectory folder;
  const std::string program = fs::read_symlink("/proc/self/exe");
  std::string one;
  for (const int threads : {1, 2, 3, 8}) {
    SCOPED_TRACE(threads);
    const fs::path into = folder / std::to_string(threads);
    const std::string command = fmt::format(
        "env -u GTEST_OUTPUT -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX OMP_NUM_THREADS={} {}='{}' "
        "'{}' --gtest_filter=Threads.AnyNumberDrawsTheSameBytes",
        threads, kInto, into.string(), program);
    ASSERT_EQ(std::system(command.c_str()), 0);
    std::ifstream file(into, std::ios::binary);
    std::string drawn{std::istreambuf_iterator<char>(file), {}};
    ASSERT_FALSE(drawn.empty());
    EXPECT_EQ(drawn.back(), static_cast<char>('0' + threads)) << "it had another number of threads";
    drawn.pop_back();
    EXPECT_GT(drawn.size(), 8 * 32 * 32 * sizeof(float));
    if (threads == 1) one = drawn;
    EXPECT_TRUE(drawn == one);  // not EXPECT_EQ, which would print them
  }
}

}  // namespace
}  // namespace denoised
