// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "absl/status/statusor.h"
#include "denoised/generation.h"

/// Whether the same request gives the same bytes.

namespace denoised::command {

/// The C++ library's hash of an image's file or array. Another library may have another one.
uint64_t HashOf(const client::Image& image);

/// What decides an image's bytes: model, seed, label, sampler, steps, size, format. `image` needs
/// no content.
std::string ImageKey(const client::EffectiveParams& params, const client::Image& image);

/// The hashes of all images of a run. Not thread-safe.
class ImageHashes {
 public:
  /// Remembers the first hash of a key; another one makes the key a difference.
  void Add(const std::string& key, uint64_t hash);
  const std::set<std::string>& differences() const { return differences_; }
  size_t size() const { return hashes_.size(); }

  /// Compares with an earlier run: how many images both have. Those that differ become differences.
  int64_t CompareWith(const ImageHashes& earlier);

  nlohmann::json ToJson() const;
  /// INVALID_ARGUMENT when it is not what ToJson writes.
  static absl::StatusOr<ImageHashes> FromJson(const nlohmann::json& json);

 private:
  std::map<std::string, uint64_t> hashes_;
  std::set<std::string> differences_;
};

}  // namespace denoised::command
