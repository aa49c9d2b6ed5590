// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/status.h"

namespace denoised::trainer {

/// At most this much is unpacked from one entry, so that a small file cannot fill the memory.
inline constexpr uint64_t kMaxUnpacked = uint64_t{1} << 34;

/// A whole file. NotFound, InvalidArgument for a folder, ResourceExhausted.
absl::StatusOr<std::string> ReadFile(const std::string& path);

/// A file that is read as it is needed, and never changed.
class MappedFile {
 public:
  /// NotFound, InvalidArgument for a folder.
  static absl::StatusOr<MappedFile> Open(const std::string& path);
  std::string_view bytes() const { return {static_cast<const char*>(data_.get()), size_}; }

 private:
  std::shared_ptr<const void> data_;
  size_t size_ = 0;
};

/// `bytes` of zeros in a file below `folder` that has no name, so nothing is left of it when the
/// process ends, however it ends. ResourceExhausted when the disk has no room.
absl::StatusOr<std::shared_ptr<void>> MapScratch(const std::string& folder, size_t bytes);

/// `bytes`, unpacked if they are a gzip file. InvalidArgument when they are damaged or unpack to
/// more than `limit`. `name` appears in messages.
absl::StatusOr<std::string> Gunzip(std::string_view bytes, const std::string& name,
                                   uint64_t limit = kMaxUnpacked);

/// The entries of a ZIP file in memory, which must outlive it: stored or deflated, ZIP64 too. Every
/// offset is checked before it is used.
class ZipArchive {
 public:
  struct Entry {
    std::string name;
    uint64_t packed = 0, unpacked = 0, offset = 0;  // offset of the local header
    uint32_t crc = 0;
    uint16_t method = 0, flags = 0;
  };
  /// InvalidArgument names the file and what is wrong.
  static absl::StatusOr<ZipArchive> Parse(std::string_view bytes, const std::string& name);
  const std::vector<Entry>& entries() const { return entries_; }
  const Entry* Find(const std::string& name) const;
  /// InvalidArgument when it is damaged, encrypted, packed in an unknown way or over `limit`.
  absl::StatusOr<std::string> Read(const Entry& entry, uint64_t limit = kMaxUnpacked) const;

 private:
  ZipArchive(std::string_view bytes, std::string name) : bytes_(bytes), name_(std::move(name)) {}
  std::string_view bytes_;
  std::string name_;
  std::vector<Entry> entries_;
};

}  // namespace denoised::trainer
