// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>

#include "engine/core/status.h"

namespace denoised::trainer {

/// A TensorBoard event file (tensorflow/core/util/event.proto in TFRecord framing). Errors of the
/// disk are not the run's errors: what cannot be written is left out.
class EventFile {
 public:
  /// Creates `directory`/events.out.tfevents.… . Internal when that is impossible.
  static absl::StatusOr<EventFile> Create(const std::string& directory);

  void Scalars(int64_t step, const std::map<std::string, double>& values);
  /// A PNG file.
  void Image(int64_t step, const std::string& tag, const std::string& png, int width, int height,
             int channels);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  explicit EventFile(std::FILE* file) : file_(file) {}
  void Write(const std::string& event);
  std::unique_ptr<std::FILE, Close> file_;
};

/// CRC-32C (Castagnoli) as TFRecord masks it: ((crc ≫ 15) | (crc ≪ 17)) + 0xa282ead8.
uint32_t MaskedCrc32c(const std::string& bytes);

}  // namespace denoised::trainer
