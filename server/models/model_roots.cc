// SPDX-License-Identifier: Apache-2.0
#include "server/models/model_roots.h"

#include <algorithm>

#include "server/status/quote.h"

namespace denoised {
namespace {

namespace fs = std::filesystem;

void AddOnce(const fs::path& path, std::vector<fs::path>* paths) {
  if (std::find(paths->begin(), paths->end(), path) == paths->end()) paths->push_back(path);
}

}  // namespace

bool IsModelDirectory(const fs::path& path) {
  std::error_code error;
  return fs::exists(path / "model_index.json", error) || fs::exists(path / "config.json", error);
}

absl::StatusOr<ModelRoots> ModelRoots::Make(const std::vector<std::string>& roots,
                                            const std::vector<ModelSource>& models,
                                            const std::string& directory) {
  std::vector<fs::path> found;
  std::error_code error;
  for (const std::string& root : roots) {
    const fs::path canonical = fs::canonical(root, error);
    if (error || !fs::is_directory(canonical, error)) {
      return NotFound(
          "--model-roots: \"{}\" is not a directory that can be read; give directories below which "
          "admins may load models",
          root);
    }
    AddOnce(canonical, &found);
  }
  if (!roots.empty()) return ModelRoots(std::move(found));
  // The models in it may all be links to somewhere else.
  const fs::path holder = directory.empty() ? fs::path() : fs::canonical(directory, error);
  if (!holder.empty() && !error) AddOnce(holder, &found);
  for (const ModelSource& model : models) {
    const fs::path canonical = fs::canonical(model.directory, error);
    if (error) continue;
    const fs::path parent = canonical.parent_path();
    AddOnce(parent == parent.root_path() ? canonical : parent, &found);
  }
  return ModelRoots(std::move(found));
}

bool ModelRoots::Contains(const fs::path& canonical) const {
  return std::any_of(roots_.begin(), roots_.end(), [&](const fs::path& root) {
    // By components: /models-private is not in /models.
    return std::mismatch(root.begin(), root.end(), canonical.begin(), canonical.end()).first ==
           root.end();
  });
}

std::string ModelRoots::Names() const {
  std::string names;
  for (const fs::path& root : roots_) names += (names.empty() ? "" : ", ") + root.string();
  return names.empty() ? "there are none" : names;
}

absl::StatusOr<std::string> ModelRoots::Resolve(const std::string& directory) const {
  std::error_code error;
  // The system would read the path only up to a NUL.
  const bool whole = directory.find('\0') == std::string::npos;
  const fs::path canonical = fs::canonical(directory, error);
  if (whole && !error && Contains(canonical) && fs::is_directory(canonical, error)) {
    return canonical.string();
  }
  return InvalidArgument(
      "{} is not a directory in one of the server's --model-roots ({}); give one that holds "
      "model_index.json or config.json",
      Quote(directory), Names());
}

absl::StatusOr<std::string> ModelRoots::Find(const std::string& name) const {
  for (const fs::path& root : roots_) {
    auto directory = Resolve((root / name).string());
    if (directory.ok() && IsModelDirectory(*directory)) return directory;
  }
  return NotFound(
      "there is no model {} in the server's --model-roots ({}); put it there, or say with "
      "directory "
      "where it is",
      Quote(name), Names());
}

}  // namespace denoised
