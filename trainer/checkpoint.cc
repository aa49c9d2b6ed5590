// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <set>
#include <system_error>

#include "absl/strings/numbers.h"
#include "engine/core/config_reader.h"
#include "engine/io/safetensors.h"

namespace denoised::trainer {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFiles[] = {"run.json", "state.safetensors"};

bool IsFull(int error) { return error == ENOSPC || error == EDQUOT || error == EFBIG; }

absl::Status Refused(const std::string& path, int error) {
  const std::string why = std::generic_category().message(error);
  if (IsFull(error))
    return ResourceExhausted(
        "{}: cannot be written: {}. Free some space, or keep fewer checkpoints (--keep)", path,
        why);
  return Internal("{}: cannot be written: {}", path, why);
}

/// WriteSafetensors(), but where the disk is full, the message says what helps.
absl::Status WriteTensors(const std::string& path, const std::map<std::string, Tensor>& tensors,
                          const std::map<std::string, std::string>& metadata) {
  errno = 0;
  const absl::Status written = WriteSafetensors(path, tensors, metadata);
  return !written.ok() && IsFull(errno) ? Refused(path, errno) : written;
}

/// What is not there is missing; what is there but cannot be read may be whole.
absl::Status Unreadable(const std::string& path, int error) {
  if (error == ENOENT || error == ENOTDIR) return DataLoss("{}: is missing", path);
  return Unavailable(
      "{}: cannot be read: {}; mend that, or move the checkpoint away to resume from an older one",
      path, std::generic_category().message(error));
}

/// False also for what cannot be looked at.
bool IsThere(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

/// Makes what was written or renamed in a folder, or into a file, survive a power cut.
absl::Status Sync(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Refused(path, errno);
  const int failed = fsync(fd) == 0 ? 0 : errno;
  close(fd);
  return failed == 0 || failed == EINVAL ? absl::OkStatus() : Refused(path, failed);
}

absl::Status MakeFolder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) return Refused(path, error.value());
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> ChecksumOf(const std::string& path) {
  std::FILE* const file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return Unreadable(path, errno);
  std::vector<unsigned char> block(1 << 20);
  uLong checksum = crc32(0, nullptr, 0);
  while (const size_t got = std::fread(block.data(), 1, block.size(), file))
    checksum = crc32(checksum, block.data(), static_cast<uInt>(got));
  const int failed = std::ferror(file) != 0 ? errno : 0;
  std::fclose(file);
  if (failed != 0) return Unreadable(path, failed);
  return static_cast<uint32_t>(checksum);
}

/// A JSON file of a checkpoint. DataLoss if it is read and is damaged.
absl::StatusOr<nlohmann::json> ReadJson(const std::string& path) {
  std::FILE* const file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return Unreadable(path, errno);
  std::string text;
  char block[4096];
  while (const size_t got = std::fread(block, 1, sizeof block, file)) text.append(block, got);
  const int failed = std::ferror(file) != 0 ? errno : 0;
  std::fclose(file);
  if (failed != 0) return Unreadable(path, failed);
  auto json = ParseJsonObject(text, path);
  if (!json.ok()) return DataLoss("{}", std::string(json.status().message()));
  return json;
}

std::string NameOf(int64_t step) { return fmt::format("step-{:09}", step); }

/// The step of a checkpoint's folder, or −1.
int64_t StepOf(const std::string& name) {
  int64_t step = -1;
  const bool is_one = name.starts_with("step-") &&
                      name.find_first_not_of("0123456789", 5) == std::string::npos &&
                      absl::SimpleAtoi(name.substr(5), &step);
  return is_one ? step : -1;
}

/// Newest first.
std::vector<int64_t> StepsIn(const std::string& folder) {
  std::vector<int64_t> steps;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    if (const int64_t step = StepOf(at->path().filename()); step >= 0) steps.push_back(step);
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

/// Removes what processes left that were killed while they saved.
void RemovePartials(const std::string& folder) {
  std::vector<fs::path> partials;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    if (at->path().extension() == ".partial" && StepOf(at->path().stem()) >= 0)
      partials.push_back(at->path());
  for (const fs::path& partial : partials) fs::remove_all(partial, error);
}

absl::Status CheckIsCheckpoint(const std::string& directory) {
  if (access((directory + "/.").c_str(), X_OK) != 0 && (errno == EACCES || errno == EIO))
    return Unreadable(directory, errno);
  std::error_code error;
  if (!fs::is_directory(directory, error))
    return NotFound(
        "{}: there is no such checkpoint; pass --resume latest, or a folder such as "
        "run/checkpoints/step-000001000",
        directory);
  if (!IsThere(directory + "/run.json") && !IsThere(directory + "/DONE"))
    return NotFound(
        "{}: is not the folder of a checkpoint, such as run/checkpoints/step-000001000; or pass "
        "--resume latest",
        directory);
  return absl::OkStatus();
}

/// Compares the sizes of the files with DONE, and those in `contents` also with their checksums.
absl::Status CheckDone(const std::string& directory, const std::set<std::string>& contents) {
  const std::string path = directory + "/DONE";
  if (access(path.c_str(), R_OK) != 0) {
    if (errno == ENOENT)
      return DataLoss("{}: has no DONE; it was not written to its end", directory);
    return Unreadable(path, errno);
  }
  const auto done = ReadJson(path);
  if (absl::IsDataLoss(done.status())) return Annotate(done.status(), path + ": is damaged");
  DENOISED_RETURN_IF_ERROR(done.status());
  for (const char* const file : kFiles) {
    const nlohmann::json entry = done->value(file, nlohmann::json());
    const auto field = [&](const char* name) {
      return entry.is_object() ? entry.value(name, nlohmann::json()) : nlohmann::json();
    };
    const nlohmann::json bytes = field("bytes"), crc = field("crc32");
    if (!bytes.is_number_unsigned() || !crc.is_number_unsigned())
      return DataLoss("{}: is damaged: it does not say bytes and crc32 of {}", path, file);
    const std::string whole = directory + "/" + file;
    std::error_code error;
    const auto size = fs::file_size(whole, error);
    if (error) return Unreadable(whole, error.value());
    if (bytes != size)
      return DataLoss("{}: has {} bytes where DONE says {}; it {}", whole, size, bytes.dump(),
                      bytes > size ? "was cut off" : "is damaged");
    if (!contents.contains(file)) continue;
    DENOISED_ASSIGN_OR_RETURN(const uint32_t checksum, ChecksumOf(whole));
    if (crc != checksum)
      return DataLoss("{}: its checksum is not the one in DONE; it is damaged", whole);
  }
  return absl::OkStatus();
}

/// Copies the files of `from` that `to` does not have.
absl::Status CopyFolder(const std::string& from, const std::string& to) {
  DENOISED_RETURN_IF_ERROR(MakeFolder(to));
  std::error_code error;
  for (fs::directory_iterator at(from, error), end; !error && at != end; at.increment(error)) {
    std::error_code ignored;
    const std::string path = to + "/" + at->path().filename().string(), partial = path + ".partial";
    if (!at->is_regular_file(ignored) || IsThere(path)) continue;
    fs::copy_file(at->path(), partial, fs::copy_options::overwrite_existing, error);
    if (error) return Refused(partial, error.value());
    DENOISED_RETURN_IF_ERROR(Sync(partial));
    if (std::rename(partial.c_str(), path.c_str()) != 0) return Refused(path, errno);
  }
  if (error) return NotFound("{}: cannot be read: {}", from, error.message());
  return Sync(to);
}

std::map<std::string, Tensor> ToHalf(const std::map<std::string, Tensor>& weights) {
  std::map<std::string, Tensor> halves;
  for (const auto& [name, tensor] : weights) {
    const Tensor& half = halves[name] = Tensor::Host(tensor.shape(), DType::kF16);
    const std::span<const float> from = tensor.span<float>();
    std::transform(from.begin(), from.end(), half.as<uint16_t>(), FloatToHalf);
  }
  return halves;
}

}  // namespace

absl::Status SyncFolder(const std::string& path) { return Sync(path); }

absl::Status WriteFileWhole(const std::string& path, const std::string& text) {
  const std::string partial = path + ".partial";
  const int fd = open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return Refused(partial, errno);
  size_t written = 0;
  int failed = 0;
  while (written < text.size() && failed == 0) {
    const ssize_t got = write(fd, text.data() + written, text.size() - written);
    if (got >= 0) {
      written += static_cast<size_t>(got);
    } else if (errno != EINTR) {
      failed = errno;
    }
  }
  if (failed == 0 && fsync(fd) != 0) failed = errno;
  if (close(fd) != 0 && failed == 0) failed = errno;
  if (failed == 0 && std::rename(partial.c_str(), path.c_str()) != 0) failed = errno;
  if (failed == 0) return absl::OkStatus();
  std::remove(partial.c_str());
  return Refused(path, failed);
}

absl::Status SaveCheckpoint(const std::string& folder, const Checkpoint& checkpoint, int keep) {
  const std::string name = NameOf(checkpoint.state.step), whole = folder + "/" + name,
                    partial = whole + ".partial";
  const training::TrainerState& state = checkpoint.state;
  std::error_code ignored;
  fs::remove_all(partial, ignored);
  const auto write = [&]() -> absl::Status {
    DENOISED_RETURN_IF_ERROR(MakeFolder(partial));
    std::map<std::string, Tensor> tensors = {
        {"trained", state.trained}, {"fixed", state.fixed}, {"m", state.m}, {"v", state.v}};
    for (size_t i = 0; i < state.averages.size(); ++i)
      tensors[fmt::format("average_{}", i)] = state.averages[i];
    DENOISED_RETURN_IF_ERROR(WriteTensors(partial + "/state.safetensors", tensors, {}));
    const nlohmann::json run = {{"step", state.step},
                                {"skipped", state.skipped},
                                {"skipped_in_row", state.skipped_in_row},
                                {"averages", state.averages.size()},
                                {"machine", checkpoint.machine},
                                {"flags", checkpoint.flags},
                                {"sampler", checkpoint.sampler},
                                {"configuration", checkpoint.run}};
    DENOISED_RETURN_IF_ERROR(WriteFileWhole(partial + "/run.json", run.dump(2) + "\n"));
    nlohmann::json done;
    for (const char* const file : kFiles) {
      const std::string path = partial + "/" + file;
      DENOISED_ASSIGN_OR_RETURN(const uint32_t checksum, ChecksumOf(path));
      std::error_code error;
      const uint64_t bytes = fs::file_size(path, error);
      if (error) return Refused(path, error.value());
      done[file] = {{"bytes", bytes}, {"crc32", checksum}};
    }
    DENOISED_RETURN_IF_ERROR(WriteFileWhole(partial + "/DONE", done.dump(2) + "\n"));
    DENOISED_RETURN_IF_ERROR(Sync(partial));
    // One of the same step is there if it was not whole, or if the run resumed from an earlier one.
    fs::remove_all(whole, ignored);
    if (std::rename(partial.c_str(), whole.c_str()) != 0) return Refused(whole, errno);
    return Sync(folder);
  };
  if (absl::Status status = write(); !status.ok()) {
    fs::remove_all(partial, ignored);
    return status;
  }
  int whole_ones = 0;
  for (const int64_t step : StepsIn(folder)) {
    const std::string directory = folder + "/" + NameOf(step);
    if (step < state.step && whole_ones >= keep) {
      fs::remove_all(directory, ignored);
    } else {
      whole_ones += CheckDone(directory, {}).ok();  // to read all would take long
    }
  }
  RemovePartials(folder);
  return absl::OkStatus();
}

bool HasCheckpoints(const std::string& folder) { return !StepsIn(folder).empty(); }

absl::StatusOr<Checkpoint> LoadCheckpoint(const std::string& directory) {
  DENOISED_RETURN_IF_ERROR(CheckIsCheckpoint(directory));
  DENOISED_RETURN_IF_ERROR(CheckDone(directory, {std::begin(kFiles), std::end(kFiles)}));
  DENOISED_ASSIGN_OR_RETURN(const nlohmann::json run, ReadJson(directory + "/run.json"));
  errno = 0;
  const auto opened = Safetensors::Open(directory + "/state.safetensors");
  // Its checksum is right, so what it cannot do now, such as to map it, it can do another time.
  if (!opened.ok() && errno != 0) return Unreadable(directory + "/state.safetensors", errno);
  DENOISED_RETURN_IF_ERROR(opened.status());
  const Safetensors& file = *opened;
  Checkpoint checkpoint;
  training::TrainerState& state = checkpoint.state;
  size_t averages = 0;
  try {
    state.step = run.at("step");
    state.skipped = run.at("skipped");
    state.skipped_in_row = run.at("skipped_in_row");
    averages = run.at("averages");
    checkpoint.run = run.at("configuration");
    checkpoint.machine = run.value("machine", std::string());
  } catch (const nlohmann::json::exception& error) {
    return DataLoss("{}/run.json: {}", directory, error.what());
  }
  // A copy under another name would count as another checkpoint, perhaps as the newest.
  if (const int64_t named = StepOf(fs::path(directory).filename());
      named >= 0 && named != state.step)
    return DataLoss("{}: is a copy of the checkpoint of step {}; give it its name", directory,
                    state.step);
  const auto take = [&](const std::string& name) -> absl::StatusOr<Tensor> {
    const auto found = file.tensors().find(name);
    if (found == file.tensors().end() || found->second.dtype() != DType::kF32)
      return DataLoss("{}/state.safetensors: has no F32 tensor \"{}\"", directory, name);
    return found->second;
  };
  DENOISED_ASSIGN_OR_RETURN(state.trained, take("trained"));
  DENOISED_ASSIGN_OR_RETURN(state.fixed, take("fixed"));
  DENOISED_ASSIGN_OR_RETURN(state.m, take("m"));
  DENOISED_ASSIGN_OR_RETURN(state.v, take("v"));
  for (size_t i = 0; i < averages && averages <= 64; ++i) {
    DENOISED_ASSIGN_OR_RETURN(Tensor average, take(fmt::format("average_{}", i)));
    state.averages.push_back(std::move(average));
  }
  return checkpoint;
}

absl::StatusOr<std::optional<Checkpoint>> LoadLatestCheckpoint(const std::string& folder,
                                                               std::vector<std::string>* broken) {
  for (const int64_t step : StepsIn(folder)) {
    absl::StatusOr<Checkpoint> checkpoint = LoadCheckpoint(folder + "/" + NameOf(step));
    if (checkpoint.ok()) return *std::move(checkpoint);
    // The run would go on from an older one, and in time replace this one.
    if (absl::IsUnavailable(checkpoint.status())) return checkpoint.status();
    broken->push_back(std::string(checkpoint.status().message()));
  }
  return std::nullopt;
}

absl::Status CannotResume(const absl::Status& status) {
  if (!absl::IsDataLoss(status)) return status;
  return InvalidArgument("{}. Resume from another checkpoint", std::string(status.message()));
}

absl::StatusOr<SettingsFile> FlagsOf(const std::string& directory) {
  DENOISED_RETURN_IF_ERROR(CheckIsCheckpoint(directory));
  DENOISED_RETURN_IF_ERROR(CheckDone(directory, {"run.json"}));
  SettingsFile saved{directory + "/run.json", {}};
  DENOISED_ASSIGN_OR_RETURN(saved.run, ReadJson(saved.file));
  saved.settings = saved.run.value("flags", nlohmann::json());
  return saved;
}

absl::StatusOr<SettingsFile> LatestFlags(const std::string& folder) {
  absl::StatusOr<SettingsFile> newest = SettingsFile();
  for (const int64_t step : StepsIn(folder)) {
    absl::StatusOr<SettingsFile> saved = FlagsOf(folder + "/" + NameOf(step));
    if (saved.ok() || absl::IsUnavailable(saved.status())) return saved;
    if (newest.ok()) newest = saved.status();
  }
  return newest;
}

absl::Status WritePipeline(const std::string& directory, const Pipeline& pipeline) {
  DENOISED_RETURN_IF_ERROR(MakeFolder(directory));
  DENOISED_RETURN_IF_ERROR(
      WriteFileWhole(directory + "/model_index.json", pipeline.index.dump(2) + "\n"));
  if (!pipeline.scheduler.is_null()) {
    DENOISED_RETURN_IF_ERROR(MakeFolder(directory + "/scheduler"));
    DENOISED_RETURN_IF_ERROR(WriteFileWhole(directory + "/scheduler/scheduler_config.json",
                                            pipeline.scheduler.dump(2) + "\n"));
  }
  for (const std::string& folder : pipeline.copied)
    DENOISED_RETURN_IF_ERROR(
        CopyFolder(folder, directory + "/" + fs::path(folder).filename().string()));
  for (const Pipeline::Part& part : pipeline.parts) {
    DENOISED_RETURN_IF_ERROR(MakeFolder(directory + "/" + part.folder));
    DENOISED_RETURN_IF_ERROR(
        WriteFileWhole(directory + "/" + part.folder + "/config.json", part.config.dump(2) + "\n"));
  }
  constexpr const char* kNext = ".next";
  const auto weights_of = [&](const Pipeline::Part& part) {
    return directory + "/" + part.folder + "/" + part.file + ".safetensors";
  };
  for (const Pipeline::Part& part : pipeline.parts) {
    const bool half = pipeline.dtype == DType::kF16;
    absl::Status written = WriteTensors(
        weights_of(part) + kNext, half ? ToHalf(part.weights) : part.weights, {{"format", "pt"}});
    if (written.ok()) continue;
    std::error_code ignored;  // the disk may be full: leave nothing on it
    for (const Pipeline::Part& other : pipeline.parts)
      fs::remove(weights_of(other) + kNext, ignored);
    return written;
  }
  // Renamed in a row, so that a server hardly ever reads parts of two states. If it does, it finds
  // another change and reads again.
  for (const Pipeline::Part& part : pipeline.parts) {
    std::error_code error;
    fs::rename(weights_of(part) + kNext, weights_of(part), error);
    if (error) return Refused(weights_of(part), error.value());
  }
  for (const Pipeline::Part& part : pipeline.parts)
    DENOISED_RETURN_IF_ERROR(Sync(directory + "/" + part.folder));
  if (!pipeline.scheduler.is_null()) DENOISED_RETURN_IF_ERROR(Sync(directory + "/scheduler"));
  return Sync(directory);
}

}  // namespace denoised::trainer
