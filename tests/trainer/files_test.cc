// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>

#include "engine/io/safetensors.h"
#include "trainer/checkpoint.h"
#include "trainer/data/archive.h"
#include "trainer/event_file.h"

namespace denoised::trainer {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::StartsWith;

std::vector<std::string>* synced = nullptr;  // paths, while a test wants them

/// Ends the process in the middle of its work on a folder, as a power cut would: what was written
/// and not synced is lost.
struct PowerCut {
  static constexpr int kExitCode = 42;
  fs::path folder;
  int after = 0;                // this many syncs, renames and removals
  std::set<ino_t> synced = {};  // also what was there before

  void Act() {
    if (after-- > 0) return;
    for (const auto& entry : fs::recursive_directory_iterator(folder))
      if (entry.is_regular_file() && !synced.contains(Inode(entry.path())))
        if (truncate(entry.path().c_str(), 0) != 0) _exit(1);
    _exit(kExitCode);
  }
  static ino_t Inode(const fs::path& path) {
    struct stat status {};
    return stat(path.c_str(), &status) == 0 ? status.st_ino : 0;
  }
};
PowerCut* cut = nullptr;  // in a forked child

}  // namespace

// Instead of libc's.
extern "C" int fsync(int fd) {
  std::error_code error;
  const fs::path path = fs::read_symlink(fmt::format("/proc/self/fd/{}", fd), error);
  if (synced != nullptr) synced->push_back(path);
  if (cut != nullptr) cut->Act();
  const int failed = static_cast<int>(syscall(SYS_fsync, fd));
  if (cut != nullptr) cut->synced.insert(PowerCut::Inode(path));
  return failed;
}
extern "C" int rename(const char* from, const char* to) noexcept {
  if (cut != nullptr) cut->Act();
  return static_cast<int>(syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to));
}
// std::filesystem::remove_all() calls it.
extern "C" int unlinkat(int folder, const char* name, int flags) noexcept {
  if (cut != nullptr) cut->Act();
  return static_cast<int>(syscall(SYS_unlinkat, folder, name, flags));
}

namespace {

class FilesTest : public testing::Test {
 protected:
  FilesTest() {
    folder_ = fs::temp_directory_path() / fmt::format("files_test.{}", getpid());
    fs::create_directories(folder_);
  }
  ~FilesTest() override { fs::remove_all(folder_); }
  static Checkpoint At(int64_t step) {
    const auto flat = [](float value) {
      return Tensor::HostF32({16}, std::vector<float>(16, value));
    };
    Checkpoint checkpoint;
    checkpoint.state = {.step = step,
                        .skipped = 2,
                        .trained = flat(1),
                        .fixed = flat(2),
                        .m = flat(3),
                        .v = flat(4),
                        .averages = {flat(5), flat(6)}};
    checkpoint.run = {{"batch", 16}};
    return checkpoint;
  }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_))
      names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }
  fs::path folder_;
};

TEST_F(FilesTest, CheckpointsComeBackAndOldOnesGo) {
  for (const int64_t step : {10, 20, 30, 40})
    ASSERT_TRUE(SaveCheckpoint(folder_, At(step), 2).ok());
  EXPECT_THAT(Names(), testing::ElementsAre("step-000000030", "step-000000040"));
  std::vector<std::string> broken;
  const auto latest = LoadLatestCheckpoint(folder_, &broken);
  ASSERT_TRUE(latest.ok() && latest->has_value()) << latest.status();
  const training::TrainerState& state = (*latest)->state;
  EXPECT_EQ(state.step, 40);
  EXPECT_EQ(state.skipped, 2);
  EXPECT_EQ(state.averages.at(1).as<float>()[3], 6);
  EXPECT_EQ((*latest)->run["batch"], 16);
}

TEST_F(FilesTest, UnfinishedAndDamagedCheckpointsArePassedOver) {
  for (const int64_t step : {10, 20, 30, 40})
    ASSERT_TRUE(SaveCheckpoint(folder_, At(step), 9).ok());
  fs::remove(folder_ / "step-000000040/DONE");
  fs::resize_file(folder_ / "step-000000030/state.safetensors", 100);
  std::fstream(folder_ / "step-000000020/run.json", std::ios::in | std::ios::out).put('!');
  fs::create_directories(folder_ / "step-000000050.partial");
  std::vector<std::string> broken;
  const auto latest = LoadLatestCheckpoint(folder_, &broken);
  ASSERT_TRUE(latest.ok() && latest->has_value());
  EXPECT_EQ((*latest)->state.step, 10);
  ASSERT_EQ(broken.size(), 3u);
  EXPECT_THAT(broken[0], HasSubstr("has no DONE"));
  EXPECT_THAT(broken[1], HasSubstr("cut off"));
  EXPECT_THAT(broken[2], HasSubstr("checksum"));
}

TEST_F(FilesTest, FlagsAreThoseOfTheNewestWholeCheckpoint) {
  EXPECT_EQ(LatestFlags(folder_)->settings, nullptr);
  for (const int64_t step : {10, 20, 30, 40}) {
    Checkpoint checkpoint = At(step);
    if (step != 10) checkpoint.flags = {{"steps", std::to_string(step)}};
    ASSERT_TRUE(SaveCheckpoint(folder_, checkpoint, 9).ok());
  }
  EXPECT_EQ(LatestFlags(folder_)->settings["steps"], "40");
  // Of the same size, and JSON.
  const std::string file = folder_ / "step-000000040/run.json";
  std::string run = *ReadFile(file);
  std::ofstream(file) << run.replace(run.find("\"40\""), 4, "\"99\"");
  EXPECT_EQ(LatestFlags(folder_)->settings["steps"], "30");
  const absl::Status damaged = FlagsOf(folder_ / "step-000000040").status();
  EXPECT_TRUE(absl::IsDataLoss(damaged)) << damaged;
  EXPECT_THAT(damaged.message(), HasSubstr("run.json: its checksum is not the one in DONE"));
  fs::resize_file(folder_ / "step-000000030/state.safetensors", 100);
  EXPECT_EQ(LatestFlags(folder_)->settings["steps"], "20");
  EXPECT_EQ(LatestFlags(folder_)->file, folder_ / "step-000000020/run.json");
  // Not those of a run before it: an older program may have gone on with other settings.
  ASSERT_TRUE(SaveCheckpoint(folder_, At(50), 9).ok());
  EXPECT_EQ(LatestFlags(folder_)->settings, nullptr);
  EXPECT_TRUE(absl::IsNotFound(FlagsOf(folder_ / "none").status()));
  // What cannot be read now may be whole.
  fs::remove(folder_ / "step-000000050/run.json");
  fs::create_symlink("/proc/self/mem", folder_ / "step-000000050/run.json");
  std::ofstream(folder_ / "step-000000050/DONE")
      << R"({"run.json": {"bytes": 0, "crc32": 0}, "state.safetensors": )"
      << nlohmann::json::parse(*ReadFile(folder_ / "step-000000020/DONE"))["state.safetensors"]
      << "}";
  EXPECT_TRUE(absl::IsUnavailable(LatestFlags(folder_).status()));
  for (const int step : {10, 20, 30, 40, 50})
    fs::remove(folder_ / fmt::format("step-{:09}/DONE", step));
  const absl::Status none = LatestFlags(folder_).status();
  EXPECT_TRUE(absl::IsDataLoss(none)) << none;
  EXPECT_THAT(none.message(), HasSubstr("step-000000050: has no DONE"));
}

TEST_F(FilesTest, DamagedCheckpointsAreNotAmongThoseThatAreKept) {
  for (const int64_t step : {10, 20, 30, 40, 50})
    ASSERT_TRUE(SaveCheckpoint(folder_, At(step), 9).ok());
  fs::remove(folder_ / "step-000000050/DONE");
  fs::resize_file(folder_ / "step-000000040/state.safetensors", 100);
  std::ofstream(folder_ / "step-000000030/DONE") << "{}";
  ASSERT_TRUE(SaveCheckpoint(folder_, At(60), 2).ok());
  EXPECT_THAT(Names(), testing::ElementsAre("step-000000020", "step-000000030", "step-000000040",
                                            "step-000000050", "step-000000060"));
  // They go when they are old.
  ASSERT_TRUE(SaveCheckpoint(folder_, At(70), 2).ok());
  EXPECT_THAT(Names(), testing::ElementsAre("step-000000060", "step-000000070"));
}

TEST_F(FilesTest, WhatKilledProcessesLeftIsRemoved) {
  fs::create_directories(folder_ / "step-000000005.partial");
  fs::create_directories(folder_ / "step-000000050.partial");
  std::ofstream(folder_ / "step-000000050.partial/state.safetensors") << "part";
  std::ofstream(folder_ / "notes.partial") << "not of the trainer";
  ASSERT_TRUE(SaveCheckpoint(folder_, At(10), 2).ok());
  EXPECT_THAT(Names(), testing::ElementsAre("notes.partial", "step-000000010"));
}

TEST_F(FilesTest, WhenAMachineDiesTheOldOrTheNewCheckpointIsWhole) {
  struct Case {
    const char* name;
    std::function<void(const fs::path&)> before;
    int keep;
  };
  const auto save = [](const fs::path& folder, int64_t step, int keep) {
    return SaveCheckpoint(folder, At(step), keep);
  };
  for (const Case& each : {
           Case{"the old one goes", [](const fs::path&) {}, 1},
           Case{"the old one is kept", [](const fs::path&) {}, 2},
           Case{"the run resumed from an earlier one",
                [&](const fs::path& folder) { ASSERT_TRUE(save(folder, 20, 2).ok()); }, 2},
           Case{"one of the same step is damaged",
                [&](const fs::path& folder) {
                  ASSERT_TRUE(save(folder, 20, 2).ok());
                  fs::resize_file(folder / "step-000000020/state.safetensors", 100);
                },
                2},
       }) {
    int rc = PowerCut::kExitCode, after = 0;
    std::set<int64_t> loaded;
    for (; rc == PowerCut::kExitCode; ++after) {
      SCOPED_TRACE(fmt::format("{}, after {} calls", each.name, after));
      const fs::path folder = folder_ / fmt::format("{}", after);
      fs::create_directories(folder);
      ASSERT_TRUE(save(folder, 10, 2).ok());
      each.before(folder);
      const pid_t child = fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        PowerCut here{.folder = folder, .after = after};
        for (const auto& entry : fs::recursive_directory_iterator(folder))
          here.synced.insert(PowerCut::Inode(entry.path()));
        cut = &here;
        _exit(save(folder, 20, each.keep).ok() ? 0 : 1);
      }
      int status = 0;
      ASSERT_EQ(waitpid(child, &status, 0), child);
      ASSERT_TRUE(WIFEXITED(status));
      rc = WEXITSTATUS(status);
      ASSERT_NE(rc, 1);
      std::vector<std::string> broken;
      const auto latest = LoadLatestCheckpoint(folder, &broken);
      ASSERT_TRUE(latest.ok() && latest->has_value())
          << latest.status() << testing::PrintToString(broken);
      const training::TrainerState& state = (*latest)->state;
      EXPECT_TRUE(state.step == 20 || (state.step == 10 && rc != 0)) << state.step;
      EXPECT_EQ(state.averages.at(1).as<float>()[15], 6);
      loaded.insert(state.step);
      // The next process cleans up.
      ASSERT_TRUE(save(folder, 30, 1).ok());
      std::vector<std::string> names;
      for (const auto& entry : fs::directory_iterator(folder))
        names.push_back(entry.path().filename());
      EXPECT_THAT(names, testing::ElementsAre("step-000000030"));
      fs::remove_all(folder);
    }
    EXPECT_GT(after, 8) << each.name;  // the calls were seen
    EXPECT_THAT(loaded, testing::ElementsAre(10, 20)) << each.name;
  }
}

TEST_F(FilesTest, ADamagedDoneIsNamed) {
  ASSERT_TRUE(SaveCheckpoint(folder_, At(10), 2).ok());
  const std::string directory = folder_ / "step-000000010", done = directory + "/DONE";
  const auto whole = nlohmann::json::parse(*ReadFile(done));
  const auto load = [&](const nlohmann::json& json) {
    std::ofstream(done) << json.dump();
    return LoadCheckpoint(directory).status();
  };
  EXPECT_TRUE(load(whole).ok());
  for (const auto& [pointer, value] : std::initializer_list<std::pair<const char*, nlohmann::json>>{
           {"/run.json", 3},
           {"/run.json", nullptr},
           {"/run.json", nlohmann::json::array()},
           {"/run.json/bytes", "many"},
           {"/run.json/bytes", nullptr},
           {"/run.json/crc32", -1},
           {"/run.json/crc32", 0.5}}) {
    nlohmann::json json = whole;
    json[nlohmann::json::json_pointer(pointer)] = value;
    const absl::Status status = load(json);
    EXPECT_TRUE(absl::IsDataLoss(status)) << json << status;
    EXPECT_EQ(status.message(), done + ": is damaged: it does not say bytes and crc32 of run.json");
  }
  nlohmann::json shorter = whole;
  shorter["run.json"]["bytes"] = 3;
  EXPECT_TRUE(
      std::string(load(shorter).message()).ends_with(" bytes where DONE says 3; it is damaged"));
  // A file that can be opened and not be read.
  fs::remove(directory + "/run.json");
  fs::create_symlink("/proc/self/mem", directory + "/run.json");
  nlohmann::json json = whole;
  json["run.json"] = {{"bytes", 0}, {"crc32", 0}};
  const absl::Status status = load(json);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              StartsWith(directory + "/run.json: cannot be read: Input/output error; "));
  // It is not passed over: it may be read another time.
  std::vector<std::string> broken;
  EXPECT_EQ(LoadLatestCheckpoint(folder_, &broken).status(), status);
  ASSERT_TRUE(SaveCheckpoint(folder_, At(5), 2).ok());
  EXPECT_EQ(LoadLatestCheckpoint(folder_, &broken).status(), status) << "it would be replaced";
  EXPECT_TRUE(broken.empty());
  fs::remove(done);
  fs::create_symlink("DONE", done);  // a link to itself
  EXPECT_TRUE(absl::IsUnavailable(LoadLatestCheckpoint(folder_, &broken).status()));
  EXPECT_TRUE(absl::IsUnavailable(LatestFlags(folder_).status()));
}

TEST_F(FilesTest, WhenAMachineDiesTheFirstCheckpointIsWholeOrNotThere) {
  int rc = PowerCut::kExitCode, after = 0, loaded = 0;
  for (; rc == PowerCut::kExitCode; ++after) {
    SCOPED_TRACE(after);
    const fs::path folder = folder_ / fmt::format("{}", after);
    fs::create_directories(folder);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      PowerCut here{.folder = folder, .after = after};
      cut = &here;
      _exit(SaveCheckpoint(folder, At(20), 2).ok() ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    rc = WEXITSTATUS(status);
    ASSERT_NE(rc, 1);
    // One that is not whole could not be resumed, and would have to be moved away.
    std::vector<std::string> broken;
    const auto latest = LoadLatestCheckpoint(folder, &broken);
    ASSERT_TRUE(latest.ok()) << latest.status();
    EXPECT_TRUE(broken.empty()) << testing::PrintToString(broken);
    loaded += latest->has_value();
    EXPECT_TRUE(latest->has_value() || rc != 0);
  }
  EXPECT_GT(after, 4);  // the calls were seen
  EXPECT_GT(loaded, 0);
}

TEST_F(FilesTest, ACopyOfACheckpointIsNotANewerOne) {
  ASSERT_TRUE(SaveCheckpoint(folder_, At(10), 2).ok());
  fs::copy(folder_ / "step-000000010", folder_ / "step-000000099");
  std::vector<std::string> broken;
  const auto latest = LoadLatestCheckpoint(folder_, &broken);
  ASSERT_TRUE(latest.ok() && latest->has_value()) << latest.status();
  EXPECT_EQ((*latest)->state.step, 10);
  ASSERT_EQ(broken.size(), 1u);
  EXPECT_THAT(broken[0], HasSubstr("step-000000099: is a copy of the checkpoint of step 10"));
}

TEST_F(FilesTest, WeightsOfAllPartsAreSyncedBeforeTheyGetTheirNames) {
  Pipeline pipeline;
  pipeline.index = nlohmann::json::object();
  for (const char* const folder : {"text_encoder", "unet"})
    pipeline.parts.push_back({folder,
                              nlohmann::json::object(),
                              "weights",
                              {{"w", Tensor::HostF32({1}, std::vector<float>{1})}}});
  std::vector<std::string> paths;
  synced = &paths;
  const absl::Status status = WritePipeline(folder_, pipeline);
  synced = nullptr;
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_GE(paths.size(), 5u);
  paths.erase(paths.begin(), paths.end() - 5);
  EXPECT_THAT(paths,
              testing::ElementsAre(folder_ / "text_encoder/weights.safetensors.next.partial",
                                   folder_ / "unet/weights.safetensors.next.partial",
                                   folder_ / "text_encoder", folder_ / "unet", folder_));  // names
  EXPECT_TRUE(fs::exists(folder_ / "unet/weights.safetensors"));
  EXPECT_FALSE(fs::exists(folder_ / "unet/weights.safetensors.next"));
}

TEST_F(FilesTest, WhatWasCopiedOnceStays) {
  const auto write = [&](const char* file, const std::string& text) {
    fs::create_directories((folder_ / file).parent_path());
    std::ofstream(folder_ / file) << text;
  };
  Pipeline pipeline;
  pipeline.index = nlohmann::json::object();
  pipeline.copied = {folder_ / "1/vae"};
  write("1/vae/weights", "first");
  ASSERT_TRUE(WritePipeline(folder_ / "model", pipeline).ok());
  write("1/vae/weights", "other");
  write("1/vae/more", "more");
  ASSERT_TRUE(WritePipeline(folder_ / "model", pipeline).ok());
  EXPECT_EQ(*ReadFile(folder_ / "model/vae/weights"), "first");
  EXPECT_EQ(*ReadFile(folder_ / "model/vae/more"), "more");
  EXPECT_FALSE(fs::exists(folder_ / "model/vae/weights.partial"));
}

TEST_F(FilesTest, ModelsMayHaveHalfPrecision) {
  Pipeline pipeline;
  pipeline.index = pipeline.scheduler = nlohmann::json::object();
  pipeline.parts = {{"unet",
                     nlohmann::json::object(),
                     "weights",
                     {{"w", Tensor::HostF32({2}, std::vector<float>{1.0f / 3, -2})}}}};
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    pipeline.dtype = dtype;
    ASSERT_TRUE(WritePipeline(folder_, pipeline).ok());
    const auto file = Safetensors::Open(folder_ / "unet/weights.safetensors");
    ASSERT_TRUE(file.ok()) << file.status();
    const Tensor& weights = file->tensors().at("w");
    EXPECT_EQ(weights.dtype(), dtype);
    const float third = dtype == DType::kF32 ? 1.0f / 3 : 0x1.554p-2f;
    EXPECT_THAT(weights.ToFloats(), testing::ElementsAre(third, -2));
  }
}

TEST_F(FilesTest, EventsAreFramedRecords) {
  EXPECT_EQ(MaskedCrc32c("123456789"), (0xe3069283u >> 15 | 0xe3069283u << 17) + 0xa282ead8u);
  {
    auto events = EventFile::Create(folder_, 7);
    ASSERT_TRUE(events.ok()) << events.status();
    EXPECT_TRUE(events->Scalars(7, {{"loss", 0.5}, {"rate", 2}}).ok());
    EXPECT_TRUE(events->Image(8, "samples", "PNG", 3, 4, 1).ok());
  }
  const std::string bytes = *ReadFile(folder_ / Names().at(0));
  size_t at = 0;
  std::vector<std::string> records;
  while (at < bytes.size()) {
    uint64_t length = 0;
    std::memcpy(&length, bytes.data() + at, 8);
    uint32_t crc = 0;
    std::memcpy(&crc, bytes.data() + at + 8, 4);
    EXPECT_EQ(crc, MaskedCrc32c(bytes.substr(at, 8)));
    records.push_back(bytes.substr(at + 12, length));
    std::memcpy(&crc, bytes.data() + at + 12 + length, 4);
    EXPECT_EQ(crc, MaskedCrc32c(records.back()));
    at += 16 + length;
  }
  ASSERT_EQ(records.size(), 4u);
  EXPECT_THAT(records[0], HasSubstr("brain.Event:2"));
  // Step 7, and a SessionLog of START.
  EXPECT_EQ(records[1].substr(9), std::string("\x10\x07\x3a\x02\x08\x01", 6));
  records.erase(records.begin());
  // Step 7, then a Summary of two Values of a tag and a float.
  EXPECT_THAT(records[1].substr(9), HasSubstr(std::string("\x10\x07\x2a", 3)));
  EXPECT_THAT(records[1], HasSubstr(std::string("\x0a\x04loss\x15\x00\x00\x00\x3f", 11)));
  EXPECT_THAT(records[2], HasSubstr(std::string("\x08\x04\x10\x03\x18\x01\x22\x03PNG", 11)));
}

TEST_F(FilesTest, EventsEndWithAFailedWrite) {
  auto events = EventFile::Create(folder_, 7);
  ASSERT_TRUE(events.ok()) << events.status();
  ASSERT_TRUE(events->Scalars(1, {{"loss", 0.5}}).ok());
  const std::string path = folder_ / Names().at(0);
  const auto whole = fs::file_size(path);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit full{whole + 10, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &full), 0);
  const absl::Status failed = events->Scalars(2, {{"loss", 0.5}});
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(failed.message(),
            fmt::format("{}: cannot be written from step 2 on: File too large", path));
  // Nothing after the part of a record.
  EXPECT_TRUE(events->Image(3, "samples", "PNG", 3, 4, 1).ok());
  EXPECT_TRUE(events->Scalars(3, {{"loss", 0.5}}).ok());
  EXPECT_LE(fs::file_size(path), whole + 10);
}

}  // namespace
}  // namespace denoised::trainer
