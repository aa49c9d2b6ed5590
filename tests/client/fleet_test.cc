// SPDX-License-Identifier: Apache-2.0
// Three servers, processes of the real program on the CPU, under load from the library: one is
// killed and one drains.
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <thread>

#include "denoised/client.h"
#include "tests/client/process.h"
#include "tests/eventually.h"
#include "tests/io/temporary_directory.h"

namespace denoised::client {
namespace {

namespace fs = std::filesystem;

/// A model of 8 x 8 pixels: its golden weights with a scheduler.
void MakeModel(const fs::path& folder) {
  const fs::path golden = fs::path(DENOISED_SOURCE_DIR) / "tests/models/goldens/class_labels";
  fs::create_directory(folder);
  for (const char* file : {"config.json", "diffusion_pytorch_model.safetensors"}) {
    fs::copy_file(golden / file, folder / file);
  }
  std::ofstream(folder / "scheduler_config.json") << R"({"_class_name": "DDPMScheduler"})";
}

class Server {
 public:
  Server(const fs::path& model, fs::path log)
      : log_(std::move(log)),
        // The shell becomes the server: a log that nobody reads must not fill a pipe.
        process_(
            {"/bin/sh", "-c", R"(log=$1; shift; exec "$@" 2>"$log")", "sh", log_, DENOISED_BINARY,
             "--device", "cpu", "--model", "tiny=" + model.string(), "--listen", "127.0.0.1:0",
             "--http-listen", "", "--metrics-listen", "", "--log-format", "json"},
            // Threads that wait for each other are slow where processes share the cores.
            {"OMP_NUM_THREADS=1"}, /*on_terminal=*/false) {}

  bool WaitUntilServing() {
    const bool serving =
        Eventually([this] { return Log().find(R"("message":"serving")") != std::string::npos; });
    const std::string log = Log(), key = R"("address":")";
    const size_t begin = log.find(key) + key.size();
    address_ = log.substr(begin, log.find('"', begin) - begin);
    return serving;
  }
  const std::string& address() const { return address_; }
  Process& process() { return process_; }

 private:
  std::string Log() const {
    std::ifstream file(log_);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  const fs::path log_;
  std::string address_;
  Process process_;
};

using Pictures = std::map<int, std::string>;  // files by index

class FleetTest : public testing::Test {
 protected:
  FleetTest() {
    MakeModel(folder_ / "tiny");
    for (int i = 0; i < 3; ++i) {
      servers_.push_back(
          std::make_unique<Server>(folder_ / "tiny", folder_ / ("log-" + std::to_string(i))));
    }
  }

  TemporaryDirectory folder_;
  std::vector<std::unique_ptr<Server>> servers_;
};

/// Request `i` of the load; there are eight kinds.
Generation Request(int i) {
  Generation generation;
  generation.seed = i % 8;
  generation.steps = 600 + 50 * (i % 8);
  generation.count = 1 + i % 2;
  return generation;
}

/// Sends requests, so many at any time, and keeps the books.
class Load {
 public:
  Load(const Client& client, const std::vector<Pictures>& references)
      : client_(client), references_(references) {}

  /// Until Stop. Every fifth request is unary: in step with no number of servers.
  void Run() {
    for (int i = Next(); i >= 0; i = Next()) i % 5 == 0 ? Unary(i) : Stream(i);
  }
  void Stop() {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }

  int done() const {
    std::lock_guard lock(mutex_);
    return done_;
  }
  int in_flight_at(const std::string& address) const {
    std::lock_guard lock(mutex_);
    const auto found = in_flight_.find("ipv4:" + address);
    return found == in_flight_.end() ? 0 : found->second;
  }

 private:
  int Next() {
    std::lock_guard lock(mutex_);
    return stopped_ ? -1 : next_++;
  }
  void Judge(int i, const absl::Status& status, const Pictures& pictures) {
    EXPECT_TRUE(status.ok()) << "request " << i << ": " << status;
    EXPECT_TRUE(pictures == references_[i % 8]) << "request " << i << " drew something else";
    std::lock_guard lock(mutex_);
    ++done_;
  }

  void Unary(int i) {
    const auto result = client_.Generate(Request(i));
    Pictures pictures;
    if (result.ok()) {
      for (const Image& image : result->images) {
        pictures[image.index] = std::get<std::string>(image.content);
      }
    }
    Judge(i, result.status(), pictures);
  }

  void Stream(int i) {
    Pictures pictures;
    std::string server;
    const auto on_event = [&](const Event& event) {
      if (const auto* queued = std::get_if<Queued>(&event)) {
        std::lock_guard lock(mutex_);
        server = queued->server;
        ++in_flight_[server];
      } else if (const auto* image = std::get_if<Image>(&event)) {
        EXPECT_TRUE(pictures.emplace(image->index, std::get<std::string>(image->content)).second);
      }
    };
    const absl::Status status =
        client_
            .StreamGenerate(Request(i), PreviewOptions{.every_evaluations = 50},
                            {.on_event = on_event})
            ->Wait();
    {
      std::lock_guard lock(mutex_);
      --in_flight_[server];
    }
    Judge(i, status, pictures);
  }

  const Client& client_;
  const std::vector<Pictures>& references_;
  mutable std::mutex mutex_;
  int next_ = 0, done_ = 0;               // guarded by mutex_, as all below
  std::map<std::string, int> in_flight_;  // streams by the server that took them first
  bool stopped_ = false;
};

TEST_F(FleetTest, LosesNothingWhenOneIsKilledAndOneDrains) {
  for (auto& server : servers_) ASSERT_TRUE(server->WaitUntilServing());
  Server &killed = *servers_[0], &drained = *servers_[1], &left = *servers_[2];

  std::vector<Pictures> references;
  const Client idle(*Connect(left.address()));
  for (int i = 0; i < 8; ++i) {
    const auto result = idle.Generate(Request(i));
    ASSERT_TRUE(result.ok()) << result.status();
    Pictures& pictures = references.emplace_back();
    for (const Image& image : result->images) {
      pictures[image.index] = std::get<std::string>(image.content);
    }
  }

  const Client fleet(*Connect(killed.address() + "," + drained.address() + "," + left.address()));
  Load load(fleet, references);
  std::vector<std::jthread> threads;
  for (int i = 0; i < 12; ++i) threads.emplace_back([&] { load.Run(); });

  EXPECT_TRUE(Eventually([&] { return load.done() >= 8; }));
  EXPECT_TRUE(Eventually([&] {
    // It is stopped before it is asked about: what is under way then ends by the kill alone.
    killed.process().Signal(SIGSTOP);
    if (load.in_flight_at(killed.address()) >= 2) return true;
    killed.process().Signal(SIGCONT);
    return false;
  })) << "nothing was under way";
  killed.process().Signal(SIGKILL);
  EXPECT_EQ(killed.process().Wait().exit_code, 128 + SIGKILL);

  int done = load.done();
  EXPECT_TRUE(Eventually(
      [&] { return load.done() >= done + 8 && load.in_flight_at(drained.address()) >= 2; }));
  drained.process().Signal(SIGTERM);
  EXPECT_EQ(drained.process().Wait().exit_code, 0);

  done = load.done();
  EXPECT_TRUE(Eventually([&] { return load.done() >= done + 12; }));
  load.Stop();
  threads.clear();
  left.process().Signal(SIGTERM);
  EXPECT_EQ(left.process().Wait().exit_code, 0);
}

}  // namespace
}  // namespace denoised::client
