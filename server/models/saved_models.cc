// SPDX-License-Identifier: Apache-2.0
#include "server/models/saved_models.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/core/config_reader.h"
#include "server/status/name.h"

namespace denoised {
namespace {

constexpr char kFile[] = "models.json";
constexpr char kTemporary[] = "models.json.new";
constexpr int kFormat = 1;

/// Writes `text` to a new file of the directory and syncs it. Sets errno on failure.
bool WriteNew(int directory, const char* name, const std::string& text) {
  const int fd = openat(directory, name, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC,
                        S_IRUSR | S_IWUSR);
  if (fd < 0) return false;
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t n = write(fd, text.data() + written, text.size() - written);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    written += static_cast<size_t>(n);
  }
  const bool done = written == text.size() && fsync(fd) == 0;
  const int error = errno;
  const bool closed = close(fd) == 0;
  if (!done) errno = error;
  return done && closed;
}

absl::Status ReadVersions(const nlohmann::json& list, const std::string& where,
                          SavedModels::Model* model) {
  if (!list.is_array()) return InvalidArgument("{}: versions is not a list", where);
  std::set<std::string> versions;
  for (const nlohmann::json& object : list) {
    if (!object.is_object()) return InvalidArgument("{}: a version is not an object", where);
    SavedModels::Version& version = model->versions.emplace_back();
    ConfigReader reader(object, where);
    reader.Read("version", &version.version);
    reader.Read("directory", &version.directory);
    if (!IsName(version.version)) reader.Complain("version", kNameRule);
    if (!versions.insert(version.version).second) reader.Complain("version", "it is there twice");
    if (version.directory.empty()) reader.Complain("directory", "it is missing");
    DENOISED_RETURN_IF_ERROR(reader.Finish());
  }
  if (model->versions.empty() ? !model->current.empty() : !versions.count(model->current)) {
    return InvalidArgument("{}: current is \"{}\", which is none of its versions", where,
                           model->current);
  }
  return absl::OkStatus();
}

absl::StatusOr<SavedModels> Parse(const std::string& path) {
  DENOISED_ASSIGN_OR_RETURN(const nlohmann::json file, ReadJsonFile(path));
  ConfigReader reader(file, path);
  int format = 0;
  reader.Read("format", &format);
  const nlohmann::json models = reader.Raw("models"), aliases = reader.Raw("aliases");
  if (format != kFormat) reader.Complain("format", fmt::format("only {} is known", kFormat));
  if (!models.is_array()) reader.Complain("models", "it must be a list");
  if (!aliases.is_object()) reader.Complain("aliases", "it must be an object");
  DENOISED_RETURN_IF_ERROR(reader.Finish());

  SavedModels saved;
  std::set<std::string> names;
  for (const nlohmann::json& object : models) {
    if (!object.is_object()) return InvalidArgument("{}: a model is not an object", path);
    SavedModels::Model& model = saved.models.emplace_back();
    ConfigReader fields(object, path);
    fields.Read("name", &model.name);
    fields.Read("configured", &model.configured);
    fields.Read("current", &model.current);
    const nlohmann::json versions = fields.Raw("versions");
    if (!IsName(model.name)) fields.Complain("name", kNameRule);
    if (!names.insert(model.name).second) fields.Complain("name", "it is there twice");
    DENOISED_RETURN_IF_ERROR(fields.Finish());
    DENOISED_RETURN_IF_ERROR(
        ReadVersions(versions, fmt::format("{}: model \"{}\"", path, model.name), &model));
  }
  for (const auto& [alias, target] : aliases.items()) {
    if (!IsName(alias) || !target.is_string()) {
      return InvalidArgument("{}: aliases: \"{}\" is not a name of a model's name", path, alias);
    }
    saved.aliases[alias] = target.get<std::string>();
  }
  return saved;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SavedModelsFile>> SavedModelsFile::Open(
    const std::string& state_dir) {
  std::error_code error;
  std::filesystem::create_directories(state_dir, error);
  const int directory = open(state_dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) {
    return InvalidArgument(
        "--state-dir: \"{}\" cannot be opened: {}; give a directory that this user may write to",
        state_dir, std::strerror(errno));
  }
  const std::string path = (std::filesystem::path(state_dir) / kFile).string();
  std::unique_ptr<SavedModelsFile> file(new SavedModelsFile(path, directory));
  if (flock(directory, LOCK_EX | LOCK_NB) != 0) {
    return Unavailable(
        "--state-dir: \"{}\" cannot be locked: {}; stop the server that uses it, or give each "
        "server a directory of its own",
        state_dir, std::strerror(errno));
  }
  // Fail now, not when an admin changes something.
  if (!WriteNew(directory, kTemporary, "") || unlinkat(directory, kTemporary, 0) != 0) {
    return InvalidArgument(
        "--state-dir: \"{}\" cannot be written to: {}; give a directory that this user may write "
        "to",
        state_dir, std::strerror(errno));
  }
  return file;
}

absl::Status SavedModelsFile::CheckCreatable(const std::string& state_dir) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::path parent = fs::absolute(state_dir);
  while (parent.has_relative_path() && !fs::exists(parent, error) && !error) {
    parent = parent.parent_path();
  }
  if (access((parent / "").c_str(), W_OK | X_OK) == 0) return absl::OkStatus();
  return InvalidArgument(
      "--state-dir: \"{}\" cannot be made in \"{}\": {}; give a directory that this user may "
      "write to",
      state_dir, parent.string(), std::strerror(errno));
}

SavedModelsFile::~SavedModelsFile() { close(directory_); }

absl::StatusOr<SavedModels> SavedModelsFile::Read() const {
  std::error_code error;
  if (!std::filesystem::exists(path_, error) && !error) return SavedModels();
  auto saved = Parse(path_);
  if (saved.ok()) return saved;
  return InvalidArgument(
      "--state-dir: {}; correct the file, or move it away to start with the models of the "
      "configuration alone",
      std::string(saved.status().message()));
}

absl::Status SavedModelsFile::Write(const SavedModels& models) const {
  nlohmann::ordered_json json = {{"format", kFormat}};
  auto& list = json["models"] = nlohmann::ordered_json::array();
  for (const SavedModels::Model& model : models.models) {
    nlohmann::ordered_json object = {{"name", model.name}};
    object["configured"] =
        model.configured ? nlohmann::ordered_json(*model.configured) : nlohmann::ordered_json();
    object["versions"] = nlohmann::ordered_json::array();
    for (const SavedModels::Version& version : model.versions) {
      object["versions"].push_back(
          {{"version", version.version}, {"directory", version.directory}});
    }
    object["current"] = model.current;
    list.push_back(std::move(object));
  }
  json["aliases"] = nlohmann::ordered_json::object();
  for (const auto& [alias, target] : models.aliases) json["aliases"][alias] = target;
  const std::string text =
      json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  // Sync the directory too, or the new name may not survive a power failure.
  if (!WriteNew(directory_, kTemporary, text) ||
      renameat(directory_, kTemporary, directory_, kFile) != 0 || fsync(directory_) != 0) {
    return Internal("{} cannot be written: {}", path_, std::strerror(errno));
  }
  return absl::OkStatus();
}

}  // namespace denoised
