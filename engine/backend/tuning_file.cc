// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/tuning_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "engine/core/config_reader.h"

namespace denoised {

namespace fs = std::filesystem;
namespace {

/// Increase it also when names of launches or candidates change. Files of other versions are
/// ignored.
constexpr int kVersion = 2;

}  // namespace

absl::StatusOr<TunedChoices> TuningFile::Read() const {
  const auto json = ReadJsonFile(path_);
  if (absl::IsNotFound(json.status())) return TunedChoices();
  const auto garbled = [](const absl::Status& status) {
    return InvalidArgument("{}; what it should hold is measured again and will replace it",
                           std::string(status.message()));
  };
  if (!json.ok()) return garbled(json.status());
  std::string device, kernels;
  int version = 1;
  ConfigReader config(*json, path_);
  config.Read("version", &version);
  const nlohmann::json& written = config.Raw("version");
  if ((written.is_null() || written.is_number_integer()) && version != kVersion)
    return TunedChoices();
  config.Read("device", &device);
  config.Read("kernels", &kernels);
  TunedChoices choices;
  const nlohmann::json& held = config.Raw("choices");
  if (!held.is_object()) config.Complain("choices", "it must be an object");
  for (const auto& [what, choice] : held.items()) {
    if (choice.is_string()) {
      choices[what] = choice.get<std::string>();
    } else if (held.is_object()) {
      config.Complain("choices", "\"" + what + "\" must be a string");
    }
  }
  if (const absl::Status status = config.Finish(); !status.ok()) return garbled(status);
  if (device != device_ || kernels != kernels_) return TunedChoices();
  return choices;
}

absl::Status TuningFile::Add(const TunedChoices& choices) const {
  const auto held = Read();
  TunedChoices all = choices;
  if (held.ok()) all.insert(held->begin(), held->end());
  const std::string text =
      nlohmann::ordered_json{
          {"version", kVersion}, {"device", device_}, {"kernels", kernels_}, {"choices", all}}
          .dump(1, ' ', false, nlohmann::json::error_handler_t::replace) +
      "\n";

  const auto failed = [this](const std::string& why) {
    return FailedPrecondition("{} cannot be written: {}", path_, why);
  };
  std::error_code error;
  fs::create_directories(fs::path(path_).parent_path(), error);
  if (error) return failed(error.message());
  std::string unfinished = path_ + ".XXXXXX";
  const int file = ::mkstemp(unfinished.data());
  if (file < 0) return failed(std::strerror(errno));
  int problem = ::fchmod(file, 0644) == 0 ? 0 : errno;  // other users' servers may read it
  for (size_t written = 0; problem == 0 && written < text.size();) {
    const ssize_t more = ::write(file, text.data() + written, text.size() - written);
    if (more <= 0) problem = more < 0 ? errno : EIO;
    if (more > 0) written += static_cast<size_t>(more);
  }
  if (::close(file) != 0 && problem == 0) problem = errno;
  if (problem == 0) {
    fs::rename(unfinished, path_, error);
    if (!error) return absl::OkStatus();
  }
  ::unlink(unfinished.c_str());
  return failed(error ? error.message() : std::strerror(problem));
}

}  // namespace denoised
