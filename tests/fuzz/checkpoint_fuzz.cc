// SPDX-License-Identifier: Apache-2.0
// A checkpoint's DONE and run.json: whatever they hold, the checkpoint is refused with a message
// that names its folder, or it comes back whole. An input is run.json, a zero byte, and DONE. If
// DONE is empty, it is the one that belongs to run.json, or no run.json would be read.

#include <zlib.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "engine/io/safetensors.h"
#include "tests/io/temporary_directory.h"
#include "trainer/checkpoint.h"
#include "trainer/data/archive.h"

namespace {

using denoised::Tensor;

nlohmann::json Entry(const std::string& text) {
  return {{"bytes", text.size()},
          {"crc32", crc32_z(0, reinterpret_cast<const Bytef*>(text.data()), text.size())}};
}

struct Folder : denoised::TemporaryDirectory {
  Folder() {
    std::filesystem::create_directories(*this / "step-000000004");
    const float one[] = {1};
    std::map<std::string, Tensor> tensors;
    for (const char* const name : {"trained", "fixed", "m", "v", "average_0"})
      tensors[name] = Tensor::HostF32({1}, one);
    const std::string file = *this / "step-000000004/state.safetensors";
    if (!denoised::WriteSafetensors(file, tensors, {}).ok()) abort();
    state = Entry(*denoised::trainer::ReadFile(file));
  }
  nlohmann::json state;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Folder folder;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const std::string run(bytes.substr(0, bytes.find('\0')));
  std::string done(bytes.substr(std::min(size, run.size() + 1)));
  if (done.empty())
    done = nlohmann::json{{"run.json", Entry(run)}, {"state.safetensors", folder.state}}.dump();
  folder.Write("step-000000004/run.json", run);
  folder.Write("step-000000004/DONE", done);

  const std::string path = folder / "step-000000004";
  const auto checkpoint = denoised::trainer::LoadCheckpoint(path);
  if (!checkpoint.ok() &&
      checkpoint.status().message().find("step-000000004") == std::string_view::npos)
    abort();
  if (checkpoint.ok() &&
      (checkpoint->state.trained.elements() != 1 || checkpoint->state.v.elements() != 1 ||
       checkpoint->state.averages.size() > 1))
    abort();
  std::vector<std::string> broken;
  const auto latest = denoised::trainer::LoadLatestCheckpoint(folder.path(), &broken);
  if (!latest.ok() || latest->has_value() != checkpoint.ok() ||
      broken.size() != (checkpoint.ok() ? 0 : 1))
    abort();
  return 0;
}
