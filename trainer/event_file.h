// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "engine/core/status.h"

namespace denoised::trainer {

/// A TensorBoard event file (tensorflow/core/util/event.proto in TFRecord framing). A reader stops
/// at a record that is not whole, so nothing follows a failed write: it returns Internal, and later
/// ones do nothing.
class EventFile {
 public:
  /// Creates `directory`/events.out.tfevents.… . Readers drop what earlier files of the directory
  /// say of `first_step` and later ones. Internal when that is impossible.
  static absl::StatusOr<EventFile> Create(const std::string& directory, int64_t first_step);

  absl::Status Scalars(int64_t step, const std::map<std::string, double>& values);
  /// A PNG file.
  absl::Status Image(int64_t step, const std::string& tag, const std::string& png, int width,
                     int height, int channels);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  EventFile(std::string path, std::FILE* file) : path_(std::move(path)), file_(file) {}
  absl::Status Write(int64_t step, const std::string& event);

  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;  // null after a failed write
};

/// CRC-32C (Castagnoli) as TFRecord masks it: ((crc ≫ 15) | (crc ≪ 17)) + 0xa282ead8.
uint32_t MaskedCrc32c(const std::string& bytes);

}  // namespace denoised::trainer
