// SPDX-License-Identifier: Apache-2.0
#include "engine/io/safetensors.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <future>
#include <numeric>

#include "tests/io/temporary_directory.h"

namespace denoised {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// A file: the header's length, the header, `data_bytes` bytes 0, 1, 2, …
std::string File(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string file(reinterpret_cast<const char*>(&length), sizeof length);
  file += header;
  for (size_t i = 0; i < data_bytes; ++i) file += static_cast<char>(i);
  return file;
}

absl::StatusOr<Safetensors> Parse(const std::string& file) {
  auto bytes = std::make_shared<std::string>(file);
  return Safetensors::Parse(bytes->data(), bytes->size(), "m.safetensors", bytes);
}

TEST(Safetensors, ReadsEveryDType) {
  const auto parsed = Parse(File(
      R"({"__metadata__":{"format":"pt"},"l":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},)"
      R"("f":{"dtype":"F32","shape":[2,1],"data_offsets":[8,16]},"i":{"dtype":"I32","shape":[1],"data_offsets":[16,20]},)"
      R"("h":{"dtype":"F16","shape":[1],"data_offsets":[20,22]},"b":{"dtype":"BF16","shape":[],"data_offsets":[22,24]},)"
      R"("u":{"dtype":"U8","shape":[3],"data_offsets":[24,27]}})",
      27));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->tensors().size(), 6u);
  EXPECT_EQ(parsed->metadata().at("format"), "pt");
  EXPECT_EQ(parsed->tensors().at("f").shape(), (Shape{2, 1}));
  EXPECT_EQ(parsed->tensors().at("b").shape().rank(), 0);
  EXPECT_EQ(*parsed->tensors().at("i").as<int32_t>(), 0x13121110);
  EXPECT_EQ(*parsed->tensors().at("b").as<uint16_t>(), 0x1716);
  EXPECT_THAT(parsed->tensors().at("u").span<uint8_t>(), ElementsAre(24, 25, 26));
}

TEST(Safetensors, CopiesWhatIsNotAligned) {
  // Every length of padding, so that most variants misalign the data.
  for (size_t padding = 0; padding < 8; ++padding) {
    const auto parsed = Parse(File(R"({"u":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                                   R"("f":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})" +
                                       std::string(padding, ' '),
                                   5));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    const Tensor& tensor = parsed->tensors().at("f");
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data()) % 4, 0u);
    EXPECT_EQ(*tensor.as<uint32_t>(), 0x04030201u);
  }
}

TEST(Safetensors, ReadsEmptyFilesAndEmptyTensors) {
  EXPECT_TRUE(Parse(File("{}", 0)).ok());
  const auto parsed = Parse(File(R"({"e":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]}})", 0));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->tensors().at("e").elements(), 0);
}

TEST(Safetensors, TensorsOutliveTheFile) {
  TemporaryDirectory directory;
  const std::string path = directory.Write(
      "a.safetensors", File(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 2));
  Tensor tensor;
  {
    const auto opened = Safetensors::Open(path);
    ASSERT_TRUE(opened.ok()) << opened.status();
    tensor = opened->tensors().at("a");
  }
  std::filesystem::remove(path);
  EXPECT_THAT(tensor.span<uint8_t>(), ElementsAre(0, 1));
}

struct Damage {
  const char* name;
  std::string file;
  const char* message;  // a part of what must be said
};

class DamagedSafetensors : public ::testing::TestWithParam<Damage> {};

TEST_P(DamagedSafetensors, IsRefusedByName) {
  const auto parsed = Parse(GetParam().file);
  ASSERT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(parsed.status().message()),
              AllOf(HasSubstr("m.safetensors"), HasSubstr(GetParam().message)));
}

/// One tensor "w" of the given fields, and 8 bytes of data.
std::string One(const std::string& fields) { return File("{\"w\":{" + fields + "}}", 8); }

std::string Two(const char* offsets_a, const char* offsets_b, size_t data_bytes) {
  return File(fmt::format(R"({{"a":{{"dtype":"F32","shape":[2],"data_offsets":{}}},)"
                          R"("b":{{"dtype":"F32","shape":[2],"data_offsets":{}}}}})",
                          offsets_a, offsets_b),
              data_bytes);
}

std::string WithLength(uint64_t length) {
  std::string file = File("{}", 0);
  std::memcpy(file.data(), &length, sizeof length);
  return file;
}

const Damage kDamage[] = {
    {"Empty", "", "too short"},
    {"SevenBytes", std::string(7, '\0'), "too short"},
    {"PointerOfGitLfs", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n",
     "run git lfs pull"},
    {"NoHeader", std::string(8, '\0'), "the header: is not valid JSON"},
    {"HeaderTooLong", WithLength(100'000'001), "100000000"},
    {"HeaderLengthAllOnes", WithLength(~0ull), "more than"},
    {"HeaderTruncated", WithLength(3), "truncated"},
    {"NotJson", File("{\"w\":", 0), "the header: is not valid JSON"},
    {"NotAnObject", File("[1]", 0), "the header: is not a JSON object"},
    {"JsonThenMore", File("{} x", 0), "the header: is not valid JSON"},
    {"InvalidUtf8", File("{\"\xff\":1}", 0), "the header: is not valid JSON"},
    {"HugeNumber", One(R"("dtype":"F32","shape":[1e999],"data_offsets":[0,8])"), "not valid JSON"},
    {"DeepJson", File("{\"w\":" + std::string(100000, '[') + std::string(100000, ']') + "}", 0),
     "deeper"},
    {"DuplicateTensor",
     File(R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
          R"("w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
          1),
     "\"w\" twice"},
    {"DuplicateField", One(R"("dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8])"),
     "\"shape\" twice"},
    {"TensorNotAnObject", File(R"({"w":3})", 0), "tensor \"w\": expected an object"},
    {"MetadataNotAnObject", File(R"({"__metadata__":"x"})", 0), "__metadata__ must be"},
    {"MetadataNotAString", File(R"({"__metadata__":{"epoch":3}})", 0), "field \"epoch\" must be"},
    {"UnknownField", One(R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"stride":[1])"),
     "tensor \"w\": unknown field \"stride\""},
    {"NoDType", One(R"("shape":[2],"data_offsets":[0,8])"), "tensor \"w\": dtype"},
    {"UnknownDType", One(R"("dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8])"),
     "tensor \"w\": dtype \"F8_E4M3\" is not supported"},
    {"NoShape", One(R"("dtype":"F32","data_offsets":[0,8])"), "tensor \"w\": shape"},
    {"NegativeExtent", One(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"),
     "tensor \"w\": shape [-2]"},
    {"FractionalExtent", One(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"),
     "tensor \"w\": shape"},
    {"ExtentBeyondInt64",
     One(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8])"),
     "tensor \"w\": shape"},
    {"ShapeOverflows",
     One(R"("dtype":"F32","shape":[4294967296,4294967296,2],"data_offsets":[0,8])"), "overflows"},
    // 2^62 · 4 bytes wraps to 0, which the offsets below would match.
    {"ShapeWrapsToZero", One(R"("dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0])"),
     "overflows"},
    {"OverflowBeforeZero",
     One(R"("dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,0])"), "overflows"},
    {"RankSix", One(R"("dtype":"F32","shape":[1,1,1,1,1,2],"data_offsets":[0,8])"), "6 dimensions"},
    {"NoOffsets", One(R"("dtype":"F32","shape":[2])"), "tensor \"w\": data_offsets"},
    {"OneOffset", One(R"("dtype":"F32","shape":[2],"data_offsets":[0])"), "data_offsets must"},
    {"NegativeOffset", One(R"("dtype":"F32","shape":[2],"data_offsets":[-8,0])"),
     "data_offsets must"},
    {"OffsetsReversed", One(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), "lie outside"},
    {"DataTruncated", One(R"("dtype":"F32","shape":[4],"data_offsets":[0,16])"), "lie outside"},
    {"OffsetsOverflow", One(R"("dtype":"F32","shape":[2],"data_offsets":[18446744073709551608,0])"),
     "lie outside"},
    {"SizeDoesNotFitShape", One(R"("dtype":"F32","shape":[1],"data_offsets":[0,8])"),
     "span 8 bytes, but F32 [1] needs 4"},
    {"SizeDoesNotFitDType", One(R"("dtype":"F16","shape":[2],"data_offsets":[0,8])"),
     "F16 [2] needs 4"},
    {"Overlap", Two("[0,8]", "[4,12]", 12), "tensor \"b\" begins at byte 4"},
    {"SameRange", Two("[0,8]", "[0,8]", 8), "tensor \"b\" begins at byte 0"},
    {"Gap", Two("[0,8]", "[12,20]", 20), "bytes 8 to 12 before tensor \"b\""},
    {"GapAtTheBeginning", Two("[4,12]", "[12,20]", 20), "bytes 0 to 4"},
    {"DataLeftOver", Two("[0,8]", "[8,16]", 20), "last 4 bytes"},
};

INSTANTIATE_TEST_SUITE_P(All, DamagedSafetensors, ::testing::ValuesIn(kDamage),
                         [](const auto& info) { return info.param.name; });

/// A good file, cut at every length and with every byte of it changed: an error or a good result,
/// and every tensor that is returned can be read (AddressSanitizer watches).
TEST(Safetensors, EveryTruncationAndFlipIsSurvived) {
  const std::string good = File(R"({"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
                                R"("b":{"dtype":"U8","shape":[3],"data_offsets":[16,19]}})",
                                19);
  for (size_t length = 0; length < good.size(); ++length)
    EXPECT_FALSE(Parse(good.substr(0, length)).ok()) << length;
  int refused = 0;
  for (size_t i = 0; i < good.size(); ++i)
    for (const int flip : {0x01, 0x10, 0x80}) {
      std::string damaged = good;
      damaged[i] = static_cast<char>(damaged[i] ^ flip);
      const auto parsed = Parse(damaged);
      if (!parsed.ok()) {
        ++refused;
        continue;
      }
      for (const auto& [name, tensor] : parsed->tensors()) {
        const auto* bytes = static_cast<const uint8_t*>(tensor.data());
        std::ignore = std::accumulate(bytes, bytes + tensor.bytes(), 0u);
      }
    }
  EXPECT_GT(refused, 200);
}

TEST(Safetensors, WritesWhatItReads) {
  TemporaryDirectory directory;
  const float floats[] = {1, -2, 3};
  Tensor bytes = Tensor::Host({3}, DType::kU8);
  std::memcpy(bytes.data(), "abc", 3);
  const std::map<std::string, Tensor> tensors = {
      {"a", bytes}, {"b", Tensor::HostF32({3, 1}, floats)}, {"c", Tensor::Host({0}, DType::kF16)}};
  const std::string path = directory / "out.safetensors";
  ASSERT_TRUE(WriteSafetensors(path, tensors, {{"seed", "7"}}).ok());
  const auto read = Safetensors::Open(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->metadata(), (std::map<std::string, std::string>{{"seed", "7"}}));
  ASSERT_EQ(read->tensors().size(), 3u);
  EXPECT_THAT(read->tensors().at("a").span<uint8_t>(), ElementsAre('a', 'b', 'c'));
  EXPECT_THAT(read->tensors().at("b").ToFloats(), ElementsAre(1, -2, 3));
  EXPECT_EQ(read->tensors().at("b").shape(), (Shape{3, 1}));
  EXPECT_FALSE(std::filesystem::exists(path + ".partial"));
}

TEST(Safetensors, WriteErrorsNameThePath) {
  const absl::Status status = WriteSafetensors("/no/such/folder/x.safetensors", {}, {});
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/no/such/folder/x.safetensors"));
  EXPECT_EQ(
      WriteSafetensors("/tmp/x", {{"__metadata__", Tensor::Host({1}, DType::kU8)}}, {}).code(),
      absl::StatusCode::kInvalidArgument);
}

TEST(Safetensors, OpenErrorsNameThePath) {
  TemporaryDirectory directory;
  const std::string missing = directory / "missing.safetensors";
  EXPECT_EQ(Safetensors::Open(missing).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(Safetensors::Open(missing).status().message()), HasSubstr(missing));
  const std::string empty = directory.Write("empty.safetensors", "");
  EXPECT_THAT(std::string(Safetensors::Open(empty).status().message()),
              AllOf(HasSubstr(empty), HasSubstr("too short")));
  EXPECT_THAT(std::string(Safetensors::Open(directory.path()).status().message()),
              HasSubstr("not a regular file"));
}

/// What `open` says of a FIFO at `fifo`. A reader that waits for a writer fails the test and is let
/// go.
template <typename Open>
absl::Status OfFifo(const std::string& fifo, Open open) {
  EXPECT_EQ(::mkfifo(fifo.c_str(), 0600), 0) << fifo;
  auto opened = std::async(std::launch::async, [&] { return open().status(); });
  EXPECT_EQ(opened.wait_for(std::chrono::seconds(10)), std::future_status::ready)
      << fifo << " is waited for";
  const int writer = ::open(fifo.c_str(), O_RDWR | O_NONBLOCK);
  const absl::Status status = opened.get();
  ::close(writer);
  return status;
}

TEST(Safetensors, WhatIsNoRegularFileIsRefusedAtOnce) {
  TemporaryDirectory directory;
  const std::string fifo = directory / "m.safetensors";
  const absl::Status refused = OfFifo(fifo, [&] { return Safetensors::Open(fifo); });
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr(fifo + ": is not a regular file"));

  EXPECT_THAT(std::string(Safetensors::Open("/dev/null").status().message()),
              HasSubstr("/dev/null: is not a regular file"));

  const std::string path = directory / "s";
  const int file = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  ASSERT_LT(path.size(), sizeof address.sun_path);
  std::strcpy(address.sun_path, path.c_str());
  ASSERT_EQ(::bind(file, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  EXPECT_THAT(std::string(Safetensors::Open(path).status().message()),
              HasSubstr(path + ": is not a regular file"));
  ::close(file);
}

/// A shard with one U8 tensor of one byte.
std::string Shard(const std::string& tensor) {
  return File("{\"" + tensor + R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1);
}

TEST(OpenDirectory, FindsPlainFilesShardsAndVariants) {
  for (const std::string variant : {"", ".fp16", ".bf16"}) {
    TemporaryDirectory plain;
    plain.Write("m" + variant + ".safetensors", Shard("w"));
    EXPECT_TRUE(Safetensors::OpenDirectory(plain.path(), "m").ok()) << variant;

    TemporaryDirectory sharded;
    sharded.Write("m-1" + variant + ".safetensors", Shard("a"));
    sharded.Write("m-2" + variant + ".safetensors", Shard("b"));
    sharded.Write("m.safetensors.index" + variant + ".json",
                  R"({"metadata":{"total_size":2},"weight_map":{"a":"m-1)" + variant +
                      R"(.safetensors","b":"m-2)" + variant + R"(.safetensors"}})");
    const auto opened = Safetensors::OpenDirectory(sharded.path(), "m");
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_EQ(opened->tensors().size(), 2u);
  }
}

TEST(OpenDirectory, PrefersThePlainFile) {
  TemporaryDirectory directory;
  directory.Write("m.fp16.safetensors", Shard("half"));
  directory.Write("m.safetensors", Shard("full"));
  const auto opened = Safetensors::OpenDirectory(directory.path(), "m");
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->tensors().count("full"), 1u);
}

TEST(OpenDirectory, SaysWhatItLookedFor) {
  TemporaryDirectory directory;
  directory.Write("m.bin", "pickle");
  const absl::Status status = Safetensors::OpenDirectory(directory.path(), "m").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("m.safetensors"), HasSubstr("m.safetensors.index.json"),
                    HasSubstr("m.fp16.safetensors"), HasSubstr("m.bin is not read")));
  // transformers' name of a file of another stem.
  TemporaryDirectory encoder;
  encoder.Write("pytorch_model.bin", "pickle");
  EXPECT_THAT(std::string(Safetensors::OpenDirectory(encoder.path(), "model").status().message()),
              HasSubstr("pytorch_model.bin is not read"));
}

// Neither is it called missing, nor is another variant read instead.
TEST(OpenDirectory, RefusesWhatIsNoRegularFile) {
  for (const std::string name : {"m.safetensors", "m.safetensors.index.json"}) {
    TemporaryDirectory directory;
    directory.Write("m.fp16.safetensors", Shard("half"));
    const absl::Status refused =
        OfFifo(directory / name, [&] { return Safetensors::OpenDirectory(directory.path(), "m"); });
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr(directory / name + ": is not a regular file"));
  }
}

struct IndexDamage {
  const char* name;
  std::string index;
  absl::StatusCode code;
  const char* message;
};

class DamagedIndex : public ::testing::TestWithParam<IndexDamage> {};

/// Beside the index lie shard1 with tensor "a" and shard2 with tensor "b"; above it, a good file.
TEST_P(DamagedIndex, IsRefusedByName) {
  TemporaryDirectory directory;
  directory.Write("outside.safetensors", Shard("a"));
  directory.Write("model/shard1.safetensors", Shard("a"));
  directory.Write("model/shard2.safetensors", Shard("b"));
  directory.Write("model/short.safetensors", Shard("a").substr(0, 20));
  directory.Write("model/m.safetensors.index.json", GetParam().index);
  const absl::Status status = Safetensors::OpenDirectory(directory / "model", "m").status();
  EXPECT_EQ(status.code(), GetParam().code) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("m.safetensors.index.json"), HasSubstr(GetParam().message)));
}

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

const IndexDamage kIndexDamage[] = {
    {"NotJson", "{", kInvalid, "not valid JSON"},
    {"NoWeightMap", R"({"metadata":{}})", kInvalid, "weight_map"},
    {"EmptyWeightMap", R"({"weight_map":{}})", kInvalid, "weight_map"},
    {"ShardNotAString", R"({"weight_map":{"a":1}})", kInvalid, "tensor \"a\" into \"1\""},
    {"ParentDirectory", R"({"weight_map":{"a":"../outside.safetensors"}})", kInvalid,
     "\"../outside.safetensors\""},
    {"AbsolutePath", R"({"weight_map":{"a":"/etc/passwd"}})", kInvalid, "without '/' or '..'"},
    {"Folder", R"({"weight_map":{"a":"."}})", kInvalid, "without"},
    {"NullByte", R"({"weight_map":{"a":"shard1.safetensors\u0000"}})", kInvalid, "without"},
    {"MissingShard", R"({"weight_map":{"a":"shard9.safetensors"}})", absl::StatusCode::kNotFound,
     "shard9.safetensors: no such file"},
    {"TruncatedShard", R"({"weight_map":{"a":"short.safetensors"}})", kInvalid,
     "short.safetensors: the header has"},
    {"WrongShard", R"({"weight_map":{"a":"shard2.safetensors","b":"shard1.safetensors"}})",
     kInvalid, "which"},
    {"TensorNotListed", R"({"weight_map":{"x":"shard1.safetensors","b":"shard2.safetensors"}})",
     kInvalid, "does not list"},
    {"TensorNotInShard", R"({"weight_map":{"a":"shard1.safetensors","z":"shard1.safetensors"}})",
     kInvalid, "lists tensor \"z\" in shard \"shard1.safetensors\""},
};

INSTANTIATE_TEST_SUITE_P(All, DamagedIndex, ::testing::ValuesIn(kIndexDamage),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace denoised
