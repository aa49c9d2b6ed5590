// SPDX-License-Identifier: Apache-2.0
#include "trainer/data/archive.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>
#include <system_error>

namespace denoised::trainer {
namespace {

/// A little-endian number of a file.
template <typename T>
T Little(std::string_view bytes, uint64_t at) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i)
    value |= uint64_t{static_cast<unsigned char>(bytes[at + i])} << (8 * i);
  return static_cast<T>(value);
}

/// `window_bits` as inflateInit2: −15 raw, 31 gzip. `expected`: the size, where it is known.
absl::StatusOr<std::string> Inflate(std::string_view bytes, int window_bits, uint64_t limit,
                                    uint64_t expected, const std::string& name) {
  z_stream stream{};
  if (inflateInit2(&stream, window_bits) != Z_OK) return ResourceExhausted("{}: no memory", name);
  std::string out;
  constexpr size_t kStep = 1 << 20;
  size_t read = 0;
  int result = Z_OK;
  try {
    // Not `expected` at once: a header may lie.
    out.resize(std::min<uint64_t>(expected > 0 ? expected : kStep, 16 * kStep));
    size_t written = 0;
    while (result == Z_OK) {
      if (written == out.size()) {
        if (out.size() > limit) break;
        out.resize(out.size() * 2);
      }
      const size_t in = std::min(bytes.size() - read, kStep);
      stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data() + read));
      stream.avail_in = static_cast<uInt>(in);
      const size_t room = std::min(out.size() - written, kStep);
      stream.next_out = reinterpret_cast<Bytef*>(out.data() + written);
      stream.avail_out = static_cast<uInt>(room);
      result = inflate(&stream, Z_NO_FLUSH);
      read += in - stream.avail_in;
      written += room - stream.avail_out;
      if (result == Z_BUF_ERROR || (result == Z_OK && in == 0 && stream.avail_out == room)) break;
    }
    out.resize(written);
  } catch (const std::bad_alloc&) {
    inflateEnd(&stream);
    return ResourceExhausted("{}: not enough memory to unpack it", name);
  }
  inflateEnd(&stream);
  if (out.size() > limit) return InvalidArgument("{}: unpacks to more than {} bytes", name, limit);
  if (result != Z_STREAM_END)
    return InvalidArgument("{}: its compressed data is damaged or cut off", name);
  return out;
}

}  // namespace

namespace {

/// Unavailable for what may be well another time, such as a disk or the number of open files.
absl::Status CannotRead(const std::string& path, int error) {
  const std::string why = std::generic_category().message(error);
  for (const int of_path : {0, ENOENT, ENOTDIR, EACCES, EPERM, ELOOP, ENAMETOOLONG, ESPIPE})
    if (error == of_path)
      return NotFound("{}: cannot be read{}; check the path and its permissions", path,
                      error == 0 ? "" : ": " + why);
  return Unavailable("{}: cannot be read: {}", path, why);
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error))
    return InvalidArgument("{} is a folder; a file is needed", path);
  errno = 0;
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return CannotRead(path, errno);
  const auto size = file.tellg();
  try {
    std::string bytes(static_cast<size_t>(std::max<std::streamoff>(0, size)), '\0');
    file.seekg(0);
    file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!file)
      return Unavailable("{}: cannot be read to its end: {}", path,
                         errno == 0 ? "it became shorter" : std::generic_category().message(errno));
    return bytes;
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("{}: {} bytes do not fit the memory", path,
                             static_cast<int64_t>(size));
  }
}

absl::StatusOr<MappedFile> MappedFile::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return CannotRead(path, errno);
  struct stat status {};
  MappedFile file;
  void* data = nullptr;
  int error = 0;
  const bool regular = fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  if (regular && status.st_size > 0) {
    file.size_ = static_cast<size_t>(status.st_size);
    data = mmap(nullptr, file.size_, PROT_READ, MAP_PRIVATE, fd, 0);
    error = errno;
  }
  close(fd);
  if (!regular) return InvalidArgument("{} is not a file; a file is needed", path);
  if (data == MAP_FAILED)
    return Unavailable("{}: cannot be mapped into memory: {}", path,
                       std::generic_category().message(error));
  file.data_ = std::shared_ptr<const void>(data, [size = file.size_](const void* mapped) {
    if (mapped != nullptr) munmap(const_cast<void*>(mapped), size);
  });
  return file;
}

absl::StatusOr<std::shared_ptr<void>> MapScratch(const std::string& folder, size_t bytes) {
  const auto refused = [&](int error) {
    return ResourceExhausted(
        "{}: {} MiB of unpacked pictures cannot be kept there: {}. Free some space, or let more of "
        "them stay in memory (--data-memory)",
        folder, bytes >> 20, std::generic_category().message(error));
  };
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  std::string path = folder + "/pictures-XXXXXX";
  const int fd = mkstemp(path.data());
  if (fd < 0) return refused(errno);
  unlink(path.c_str());
  // The blocks are taken now: a full disk would otherwise be a signal later.
  const int failed = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  void* const data =
      failed != 0 ? MAP_FAILED : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const int map_error = errno;
  close(fd);
  if (failed != 0) return refused(failed);
  if (data == MAP_FAILED) return refused(map_error);
  return std::shared_ptr<void>(data, [bytes](void* mapped) { munmap(mapped, bytes); });
}

absl::StatusOr<std::string> Gunzip(std::string_view bytes, const std::string& name,
                                   uint64_t limit) {
  if (bytes.size() < 2 || bytes[0] != '\x1f' || bytes[1] != '\x8b') return std::string(bytes);
  return Inflate(bytes, 31, limit, 0, name);
}

absl::StatusOr<ZipArchive> ZipArchive::Parse(std::string_view bytes, const std::string& name) {
  constexpr uint64_t kEnd = 22, kHeader = 46;
  const auto bad = [&](const char* what) {
    return InvalidArgument("{}: not a ZIP file that can be read: {}", name, what);
  };
  if (bytes.size() < kEnd) return bad("it is too short");
  // The end record is followed by a comment of at most 65535 bytes.
  const size_t end = bytes.rfind(std::string_view("PK\x05\x06", 4), bytes.size() - kEnd);
  if (end == std::string_view::npos) return bad("it has no directory; was it cut off?");
  uint64_t count = Little<uint16_t>(bytes, end + 10), size = Little<uint32_t>(bytes, end + 12),
           at = Little<uint32_t>(bytes, end + 16);
  if (count == 0xffff || size == 0xffffffff || at == 0xffffffff) {
    // ZIP64: a locator stands before the end record.
    if (end < 20 || bytes.substr(end - 20, 4) != std::string_view("PK\x06\x07", 4))
      return bad("its ZIP64 directory is missing");
    const auto record = Little<uint64_t>(bytes, end - 12);
    if (record > bytes.size() || bytes.size() - record < 56 ||
        bytes.substr(record, 4) != std::string_view("PK\x06\x06", 4))
      return bad("its ZIP64 directory is damaged");
    count = Little<uint64_t>(bytes, record + 32);
    size = Little<uint64_t>(bytes, record + 40);
    at = Little<uint64_t>(bytes, record + 48);
  }
  if (at > bytes.size() || size > bytes.size() - at || count > size / kHeader)
    return bad("its directory lies outside the file");
  ZipArchive archive(bytes, name);
  const uint64_t stop = at + size;
  for (uint64_t i = 0; i < count; ++i) {
    if (stop - at < kHeader || bytes.substr(at, 4) != std::string_view("PK\x01\x02", 4))
      return bad("its directory is damaged");
    Entry entry;
    entry.flags = Little<uint16_t>(bytes, at + 8);
    entry.method = Little<uint16_t>(bytes, at + 10);
    entry.crc = Little<uint32_t>(bytes, at + 16);
    entry.packed = Little<uint32_t>(bytes, at + 20);
    entry.unpacked = Little<uint32_t>(bytes, at + 24);
    const uint64_t name_size = Little<uint16_t>(bytes, at + 28),
                   extra_size = Little<uint16_t>(bytes, at + 30),
                   comment_size = Little<uint16_t>(bytes, at + 32);
    entry.offset = Little<uint32_t>(bytes, at + 42);
    at += kHeader;
    if (stop - at < name_size + extra_size + comment_size) return bad("its directory is damaged");
    entry.name = bytes.substr(at, name_size);
    // Sizes beyond 4 GiB stand in extra field 1, only those that are all ones.
    uint64_t extra = at + name_size;
    const uint64_t extra_end = extra + extra_size;
    while (extra_end - extra >= 4) {
      const auto id = Little<uint16_t>(bytes, extra);
      const uint64_t length = Little<uint16_t>(bytes, extra + 2);
      extra += 4;
      if (extra_end - extra < length) break;
      uint64_t field = extra;
      const auto take = [&](uint64_t* value) {
        if (*value != 0xffffffff || extra + length - field < 8) return;
        *value = Little<uint64_t>(bytes, field);
        field += 8;
      };
      if (id == 1) take(&entry.unpacked), take(&entry.packed), take(&entry.offset);
      extra += length;
    }
    at += name_size + extra_size + comment_size;
    if (!entry.name.empty() && entry.name.back() != '/') archive.entries_.push_back(entry);
  }
  return archive;
}

const ZipArchive::Entry* ZipArchive::Find(const std::string& name) const {
  for (const Entry& entry : entries_)
    if (entry.name == name) return &entry;
  return nullptr;
}

absl::StatusOr<std::string> ZipArchive::Read(const Entry& entry, uint64_t limit) const {
  const std::string where = name_ + "/" + entry.name;
  constexpr uint64_t kHeader = 30;
  if (entry.offset > bytes_.size() || bytes_.size() - entry.offset < kHeader ||
      bytes_.substr(entry.offset, 4) != std::string_view("PK\x03\x04", 4))
    return InvalidArgument("{}: its header is damaged", where);
  if (entry.flags & 1) return InvalidArgument("{}: it is encrypted", where);
  const uint64_t begin = entry.offset + kHeader + Little<uint16_t>(bytes_, entry.offset + 26) +
                         Little<uint16_t>(bytes_, entry.offset + 28);
  if (begin > bytes_.size() || entry.packed > bytes_.size() - begin)
    return InvalidArgument("{}: it lies outside the file; was the file cut off?", where);
  if (entry.unpacked > limit)
    return InvalidArgument("{}: unpacks to {} bytes; at most {} are taken", where, entry.unpacked,
                           limit);
  const std::string_view packed = bytes_.substr(begin, entry.packed);
  std::string out;
  if (entry.method == 0) {
    out = packed;
  } else if (entry.method == 8) {
    DENOISED_ASSIGN_OR_RETURN(out, Inflate(packed, -15, entry.unpacked, entry.unpacked, where));
  } else {
    return InvalidArgument("{}: packed by method {}; only stored and deflated files can be read",
                           where, entry.method);
  }
  // crc32() itself takes fewer than 4 GiB.
  if (out.size() != entry.unpacked ||
      crc32_z(0, reinterpret_cast<const Bytef*>(out.data()), out.size()) != entry.crc)
    return InvalidArgument("{}: its checksum is wrong", where);
  return out;
}

}  // namespace denoised::trainer
