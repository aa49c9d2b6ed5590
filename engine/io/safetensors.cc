// SPDX-License-Identifier: Apache-2.0
#include "engine/io/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "engine/core/config_reader.h"
#include "engine/core/status.h"

namespace denoised {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

namespace fs = std::filesystem;
using json = nlohmann::json;

constexpr size_t kLengthBytes = 8;
/// The reference implementation's limit (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
/// {"name": {"shape": [..]}}: nothing nests deeper than an array in a tensor's object.
constexpr int kMaxHeaderDepth = 3;

/// Names come from the file: keeps what is printed short and on one line.
std::string Quoted(const std::string& name) {
  const std::string text = json(name).dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() <= 120 ? text : text.substr(0, 116) + "...\"";
}

std::optional<DType> DTypeFromName(const std::string& name) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kI64, DType::kI32, DType::kU8})
    if (name == Name(dtype)) return dtype;
  return std::nullopt;
}

/// One tensor of the header, checked by itself. Offsets count from the end of the header.
struct Entry {
  std::string name;
  DType dtype;
  Shape shape;
  uint64_t begin, end;
};

absl::StatusOr<Entry> ParseEntry(const std::string& name, const json& fields, uint64_t data_bytes,
                                 const std::string& file) {
  const std::string where = fmt::format("{}: tensor {}", file, Quoted(name));
  if (!fields.is_object())
    return InvalidArgument("{}: expected an object with dtype, shape and data_offsets", where);
  for (const auto& [field, value] : fields.items())
    if (field != "dtype" && field != "shape" && field != "data_offsets")
      return InvalidArgument("{}: unknown field {}; only dtype, shape and data_offsets are", where,
                             Quoted(field));

  const json dtype_name = fields.value("dtype", json());
  if (!dtype_name.is_string()) return InvalidArgument("{}: dtype must be a string", where);
  const auto dtype = DTypeFromName(dtype_name.get<std::string>());
  if (!dtype)
    return InvalidArgument("{}: dtype {} is not supported; save weights as F32, F16 or BF16", where,
                           Quoted(dtype_name.get<std::string>()));

  const json dims = fields.value("shape", json());
  if (!dims.is_array()) return InvalidArgument("{}: shape must be a list of extents", where);
  if (dims.size() > Shape::kMaxRank)
    return InvalidArgument("{}: shape has {} dimensions; at most {} are supported", where,
                           dims.size(), Shape::kMaxRank);
  std::vector<int64_t> extents;
  for (const json& dim : dims) {
    if (!dim.is_number_unsigned() ||
        dim.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()})
      return InvalidArgument("{}: shape {} holds something else than an extent ≥ 0", where,
                             dims.dump());
    extents.push_back(dim.get<int64_t>());
  }
  // Left to right like Shape::elements(), so that a zero at the end hides no overflow on the way.
  uint64_t bytes = SizeOf(*dtype);
  for (int64_t extent : extents)
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(extent), &bytes) ||
        bytes > uint64_t{std::numeric_limits<int64_t>::max()})
      return InvalidArgument("{}: shape {} overflows", where, dims.dump());

  const json offsets = fields.value("data_offsets", json());
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned())
    return InvalidArgument("{}: data_offsets must be [begin, end]", where);
  const auto begin = offsets[0].get<uint64_t>(), end = offsets[1].get<uint64_t>();
  if (begin > end || end > data_bytes)
    return InvalidArgument(
        "{}: data_offsets [{}, {}] lie outside the {} bytes of data; the file is "
        "truncated or damaged: copy it again",
        where, begin, end, data_bytes);
  if (end - begin != bytes)
    return InvalidArgument("{}: data_offsets span {} bytes, but {} {} needs {}", where, end - begin,
                           Name(*dtype), dims.dump(), bytes);
  return Entry{name, *dtype, Shape(extents), begin, end};
}

/// Every byte of data belongs to exactly one tensor, as the format demands.
absl::Status CheckCoverage(std::vector<Entry>& entries, uint64_t data_bytes,
                           const std::string& file) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t covered = 0;
  for (const Entry& entry : entries) {
    if (entry.begin < covered)
      return InvalidArgument(
          "{}: tensor {} begins at byte {}, inside the one before, which ends at {}; save the file "
          "again",
          file, Quoted(entry.name), entry.begin, covered);
    if (entry.begin > covered)
      return InvalidArgument(
          "{}: bytes {} to {} before tensor {} belong to no tensor; save the file again", file,
          covered, entry.begin, Quoted(entry.name));
    covered = entry.end;
  }
  if (covered != data_bytes)
    return InvalidArgument("{}: the last {} bytes belong to no tensor; save the file again", file,
                           data_bytes - covered);
  return absl::OkStatus();
}

/// A view of `data`, or a copy where the file does not align it for its type.
Tensor MakeTensor(const Entry& entry, const std::byte* data,
                  const std::shared_ptr<const void>& storage) {
  const std::byte* begin = data + entry.begin;
  if (reinterpret_cast<uintptr_t>(begin) % SizeOf(entry.dtype) == 0)
    return Tensor(const_cast<std::byte*>(begin), entry.shape, entry.dtype, Device::kCpu, storage);
  Tensor copy = Tensor::Host(entry.shape, entry.dtype);
  std::memcpy(copy.data(), begin, entry.end - entry.begin);
  return copy;
}

std::string ErrnoText() { return std::generic_category().message(errno); }

}  // namespace

absl::StatusOr<Safetensors> Safetensors::Parse(const void* bytes, size_t size,
                                               const std::string& name,
                                               const std::shared_ptr<const void>& storage) {
  if (size < kLengthBytes)
    return InvalidArgument("{}: {} bytes is too short for a safetensors file; copy it again", name,
                           size);
  if (std::string_view(reinterpret_cast<const char*>(bytes), size)
          .starts_with("version https://git-lfs"))
    return InvalidArgument("{}: is a pointer of Git LFS, not the weights; run git lfs pull", name);
  uint64_t header_bytes;
  std::memcpy(&header_bytes, bytes, kLengthBytes);
  if (header_bytes > kMaxHeaderBytes)
    return InvalidArgument(
        "{}: a header of {} bytes is more than the {} the format allows; is it a "
        "safetensors file?",
        name, header_bytes, kMaxHeaderBytes);
  if (header_bytes > size - kLengthBytes)
    return InvalidArgument(
        "{}: the header has {} bytes, but only {} follow; the file is truncated: copy "
        "it again",
        name, header_bytes, size - kLengthBytes);
  const uint64_t data_bytes = size - kLengthBytes - header_bytes;
  const std::string_view text(static_cast<const char*>(bytes) + kLengthBytes, header_bytes);
  DENOISED_ASSIGN_OR_RETURN(const json header,
                            ParseJsonObject(text, name + ": the header", kMaxHeaderDepth));

  Safetensors result;
  std::vector<Entry> entries;
  for (const auto& [key, value] : header.items()) {
    if (key == "__metadata__") {
      if (!value.is_object()) return InvalidArgument("{}: __metadata__ must be an object", name);
      for (const auto& [field, entry] : value.items()) {
        if (!entry.is_string())
          return InvalidArgument("{}: __metadata__ field {} must be a string", name, Quoted(field));
        result.metadata_[field] = entry.get<std::string>();
      }
      continue;
    }
    DENOISED_ASSIGN_OR_RETURN(Entry entry, ParseEntry(key, value, data_bytes, name));
    entries.push_back(std::move(entry));
  }
  DENOISED_RETURN_IF_ERROR(CheckCoverage(entries, data_bytes, name));
  const auto* data = static_cast<const std::byte*>(bytes) + kLengthBytes + header_bytes;
  for (const Entry& entry : entries)
    result.tensors_.emplace(entry.name, MakeTensor(entry, data, storage));
  return result;
}

absl::StatusOr<Safetensors> Safetensors::Open(const std::string& path) {
  // To open a FIFO would wait for a writer; O_NONBLOCK changes nothing for regular files.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  const auto irregular = [&] {
    return InvalidArgument("{}: is not a regular file; put a safetensors file there", path);
  };
  if (file < 0) {
    if (errno == ENXIO) return irregular();  // a socket, or a device that is not there
    if (errno == ENOENT) return NotFound("{}: no such file", path);
    return InvalidArgument("{}: cannot be opened ({}); check its permissions", path, ErrnoText());
  }
  struct stat info;
  if (::fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(file);
    return irregular();
  }
  const auto size = static_cast<size_t>(info.st_size);
  // mmap refuses a length of 0; Parse says what is wrong with such a file.
  if (size == 0) {
    ::close(file);
    return Parse("", 0, path, nullptr);
  }
  void* mapped = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
  const std::string error = mapped == MAP_FAILED ? ErrnoText() : "";
  ::close(file);
  if (mapped == MAP_FAILED) return InvalidArgument("{}: cannot be mapped ({})", path, error);
  std::shared_ptr<const void> storage(
      mapped, [size](const void* address) { ::munmap(const_cast<void*>(address), size); });
  return Parse(mapped, size, path, storage);
}

namespace {

/// A shard lies beside its index: a name that could lead elsewhere is refused.
bool IsPlainFileName(const std::string& name) {
  return !name.empty() && name != "." && name.find("..") == std::string::npos &&
         name.find_first_of(std::string("/\\\0", 3)) == std::string::npos;
}

using WeightMap = std::map<std::string, std::string>;  // tensor → shard

absl::StatusOr<WeightMap> ReadWeightMap(const std::string& path) {
  DENOISED_ASSIGN_OR_RETURN(json index, ReadJsonFile(path));
  const json map = index.value("weight_map", json());
  if (!map.is_object() || map.empty())
    return InvalidArgument("{}: weight_map must be an object of tensor names and shards", path);
  WeightMap result;
  for (const auto& [tensor, shard] : map.items()) {
    if (!shard.is_string() || !IsPlainFileName(shard.get<std::string>()))
      return InvalidArgument(
          "{}: weight_map puts tensor {} into {}; expected the name of a file beside the index, "
          "without '/' or '..'",
          path, Quoted(tensor),
          Quoted(shard.is_string() ? shard.get<std::string>()
                                   : shard.dump(-1, ' ', true, json::error_handler_t::replace)));
    result[tensor] = shard.get<std::string>();
  }
  return result;
}

}  // namespace

absl::StatusOr<Safetensors> Safetensors::OpenIndex(const std::string& path) {
  DENOISED_ASSIGN_OR_RETURN(WeightMap weight_map, ReadWeightMap(path));
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : weight_map) shards.insert(shard);

  Safetensors all;
  for (const std::string& shard : shards) {
    const std::string shard_path = fs::path(path).replace_filename(shard).string();
    absl::StatusOr<Safetensors> part = Open(shard_path);
    if (!part.ok())
      return Annotate(part.status(), fmt::format("shard {} of {}", Quoted(shard), path));
    for (const auto& [name, tensor] : part->tensors()) {
      const auto listed = weight_map.find(name);
      if (listed == weight_map.end())
        return InvalidArgument("{}: holds tensor {}, which {} does not list", shard_path,
                               Quoted(name), path);
      if (listed->second != shard)
        return InvalidArgument("{}: holds tensor {}, which {} lists in shard {}", shard_path,
                               Quoted(name), path, Quoted(listed->second));
      all.tensors_.emplace(name, tensor);
    }
    all.metadata_.merge(part->metadata_);
  }
  for (const auto& [tensor, shard] : weight_map)
    if (!all.tensors_.count(tensor))
      return InvalidArgument("{}: lists tensor {} in shard {}, which does not hold it", path,
                             Quoted(tensor), Quoted(shard));
  return all;
}

absl::StatusOr<Safetensors> Safetensors::OpenDirectory(const std::string& directory,
                                                       const std::string& stem) {
  // Open() and OpenIndex() refuse by name what is there but is no regular file.
  const auto exists = [&](const std::string& name) {
    std::error_code error;
    return fs::exists(fs::path(directory) / name, error);
  };
  std::vector<std::string> looked_for;
  for (const std::string variant : {"", ".fp16", ".bf16"}) {
    const std::string file = fmt::format("{}{}.safetensors", stem, variant);
    if (exists(file)) return Open((fs::path(directory) / file).string());
    // diffusers puts the variant before the last suffix (utils/hub_utils.py, _add_variant).
    const std::string index = fmt::format("{}.safetensors.index{}.json", stem, variant);
    if (exists(index)) return OpenIndex((fs::path(directory) / index).string());
    looked_for.insert(looked_for.end(), {file, index});
  }
  std::string pickle;
  std::error_code error;
  for (fs::directory_iterator file(directory, error), end; !error && file != end;
       file.increment(error))
    if (file->path().extension() == ".bin")
      pickle = fmt::format("; {} is not read: save it again as safetensors",
                           file->path().filename().string());
  return NotFound("{}: no weights; looked for {}{}", directory, fmt::join(looked_for, ", "),
                  pickle);
}

}  // namespace denoised
