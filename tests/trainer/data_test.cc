// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "engine/images/formats.h"
#include "engine/images/jpeg.h"
#include "engine/images/webp.h"
#include "tests/server/peak_memory.h"
#include "trainer/data/archive.h"
#include "trainer/data/arrays.h"
#include "trainer/data/pictures.h"

namespace denoised::trainer {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

std::string Little(uint64_t value, size_t bytes) {
  std::string text;
  for (size_t i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i));
  return text;
}

std::string Deflate(const std::string& text, int window_bits) {
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 9, Z_DEFLATED, window_bits, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(text.size() + 200, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

/// A ZIP file, each entry deflated if `packed`.
std::string Zip(const std::vector<std::pair<std::string, std::string>>& files, bool packed) {
  std::string zip, directory;
  for (const auto& [name, text] : files) {
    const std::string data = packed ? Deflate(text, -15) : text;
    const auto crc =
        crc32(0, reinterpret_cast<const Bytef*>(text.data()), static_cast<uInt>(text.size()));
    const std::string common = Little(0, 2) + Little(packed ? 8 : 0, 2) + Little(0, 4) +
                               Little(crc, 4) + Little(data.size(), 4) + Little(text.size(), 4) +
                               Little(name.size(), 2) + Little(0, 2);
    directory += "PK\x01\x02" + Little(20, 2) + Little(20, 2) + common + Little(0, 2) +
                 Little(0, 2) + Little(0, 2) + Little(0, 4) + Little(zip.size(), 4) + name;
    zip += "PK\x03\x04" + Little(20, 2) + common + name + data;
  }
  const size_t at = zip.size();
  return zip + directory + "PK\x05\x06" + Little(0, 4) + Little(files.size(), 2) +
         Little(files.size(), 2) + Little(directory.size(), 4) + Little(at, 4) + Little(0, 2);
}

std::string Npy(const std::string& type, const std::string& shape, const std::string& data,
                const std::string& fortran = "False") {
  std::string header =
      "{'descr': '" + type + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }";
  header.resize((header.size() + 10 + 64) / 64 * 64 - 10, ' ');
  return std::string("\x93NUMPY\x01\x00", 8) + Little(header.size(), 2) + header + data;
}

/// A picture of one colour.
std::string Png(int edge, uint8_t value) {
  Pixels pixels{edge, edge, 1, std::vector<uint8_t>(edge * edge, value)};
  return *EncodePng(pixels, {});
}

class DataTest : public testing::Test {
 protected:
  DataTest() {
    folder_ = fs::temp_directory_path() / fmt::format("data_test.{}", getpid());
    fs::create_directories(folder_);
  }
  ~DataTest() override { fs::remove_all(folder_); }
  std::string Write(const std::string& name, const std::string& bytes) {
    const fs::path path = folder_ / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  static PictureOptions Options(int edge) {
    PictureOptions options;
    options.channels = 1;
    options.height = options.width = edge;
    options.wants_labels = true;
    return options;
  }
  void ExpectRefused(const std::string& path, const std::string& labels, const std::string& what) {
    const auto pictures = ReadPictures(path, labels, Options(2));
    ASSERT_FALSE(pictures.ok()) << what;
    EXPECT_THAT(std::string(pictures.status().message()), HasSubstr(what));
  }
  fs::path folder_;
};

TEST_F(DataTest, FolderLabelsAreFoldersInOrderOfTheirNames) {
  Write("cats/b.png", Png(2, 10));
  Write("cats/deep/a.PNG", Png(2, 20));
  Write("ants/c.png", Png(2, 30));
  Write("ants/notes.txt", "no picture");
  const auto pictures = ReadPictures(folder_, "", Options(2));
  ASSERT_TRUE(pictures.ok()) << pictures.status();
  EXPECT_THAT(pictures->class_names, ElementsAre("ants", "cats"));
  EXPECT_THAT(pictures->dataset.labels, ElementsAre(0, 1, 1));
  EXPECT_EQ(pictures->dataset.images.as<uint8_t>()[0], 30);
  EXPECT_EQ(pictures->dataset.images.as<uint8_t>()[4], 10);
}

TEST_F(DataTest, FoldersWithoutPicturesAreNoClassesAndNamed) {
  Write("ants/c.png", Png(2, 30));
  Write("bees/deep/notes.txt", "no picture");
  fs::create_directory(folder_ / "cats");
  PictureOptions options = Options(2);
  std::string note;
  options.note = [&](const std::string& what) { note += what; };
  const auto pictures = ReadPictures(folder_, "", options);
  ASSERT_TRUE(pictures.ok()) << pictures.status();
  EXPECT_THAT(pictures->class_names, ElementsAre("ants"));
  EXPECT_EQ(note, "warning: " + folder_.string() +
                      ": folders without pictures are no classes: bees, cats");
}

TEST_F(DataTest, HiddenPicturesAreLeftOutAndNamed) {
  for (const char* const name :
       {"cats/a.png", "cats/.ipynb_checkpoints/a-checkpoint.png", "cats/._a.png", "dogs/b.png",
        ".thumbnails/cats/a.png", "__MACOSX/cats/a.png"})
    Write(name, Png(2, 10));
  Write(".DS_Store", "no picture");
  fs::create_directory_symlink("..", folder_ / ".thumbnails/circle");
  PictureOptions options = Options(2);
  std::string note;
  options.note = [&](const std::string& what) { note += what; };
  auto pictures = ReadPictures(folder_, "", options);
  ASSERT_TRUE(pictures.ok()) << pictures.status();
  EXPECT_THAT(pictures->files, ElementsAre("cats/a.png", "dogs/b.png"));
  EXPECT_THAT(pictures->class_names, ElementsAre("cats", "dogs"));
  EXPECT_EQ(note, folder_.string() +
                      ": hidden files and folders are left out (4): .thumbnails, __MACOSX, "
                      "cats/._a.png, cats/.ipynb_checkpoints");
  // What has a line is meant.
  Write("metadata.jsonl", R"({"file_name": "cats/._a.png"})");
  EXPECT_THAT(ReadPictures(folder_, "", options)->files,
              ElementsAre("cats/._a.png", "cats/a.png", "dogs/b.png"));
  note.clear();
  Write("metadata.jsonl", R"({"file_name": ".thumbnails/cats/a.png"})");
  EXPECT_THAT(ReadPictures(folder_, "", options)->files,
              ElementsAre(".thumbnails/cats/a.png", "cats/a.png", "dogs/b.png"));
  EXPECT_THAT(note, HasSubstr("(4): .thumbnails, __MACOSX, cats/._a.png, cats/.ipynb_checkpoints; "
                              "pictures there that metadata.jsonl names are read"));
  fs::remove(folder_ / "metadata.jsonl");
  // A hidden folder that is itself asked for.
  fs::remove(folder_ / ".thumbnails/circle");
  EXPECT_THAT(ReadPictures(folder_ / ".thumbnails", "", options)->files, ElementsAre("cats/a.png"));

  note.clear();
  const std::string zip =
      Write("set.zip", Zip({{"00/a.png", Png(2, 5)},
                            {"__MACOSX/00/._a.png", "x"},
                            {".b/c.png", Png(2, 7)},
                            {"dataset.json", R"({"labels": [["00/a.png", 4], [".b/c.png", 0]]})"}},
                           true));
  pictures = ReadPictures(zip, "", options);
  ASSERT_TRUE(pictures.ok()) << pictures.status();
  EXPECT_THAT(pictures->dataset.labels, ElementsAre(0, 4));
  EXPECT_EQ(note, zip + ": hidden files and folders are left out (1): __MACOSX/00/._a.png");
}

TEST_F(DataTest, PicturesDoNotDependOnTheOrderInWhichTheyAreDecoded) {
  for (int i = 0; i < 90; ++i)
    Write(fmt::format("{}/{:02}.png", i % 3, i), Png(2 + i % 5, static_cast<uint8_t>(i)));
  Write("0/03.png", "bad");
  Write("1/50.png", Png(2, 0).substr(0, 40));
  Write("stray.png", Png(2, 9));
  PictureOptions options = Options(2);
  options.skip_bad = true;
  options.parallel_for = OneByOne;
  const auto in_order = ReadPictures(folder_, "", options);
  ASSERT_TRUE(in_order.ok()) << in_order.status();
  EXPECT_EQ(in_order->bad.size(), 3u);
  const ParallelFor backwards = [](int count, const std::function<void(int)>& task) {
    for (int i = count - 1; i >= 0; --i) task(i);
  };
  const ParallelFor at_once = [](int count, const std::function<void(int)>& task) {
    std::vector<std::thread> threads;
    threads.reserve(count);
    for (int i = 0; i < count; ++i) threads.emplace_back(task, i);
    for (std::thread& thread : threads) thread.join();
  };
  for (const auto& [parallel_for, memory] : std::initializer_list<std::pair<ParallelFor, int64_t>>{
           {backwards, 1 << 29},
           {at_once, 1 << 29},
           {at_once, 1},  // one waits for the other
           {PictureOptions().parallel_for, 1 << 29}}) {
    options.skip_bad = true;
    options.parallel_for = parallel_for;
    options.decoding_memory = memory;
    const auto pictures = ReadPictures(folder_, "", options);
    ASSERT_TRUE(pictures.ok()) << pictures.status();
    EXPECT_EQ(pictures->bad, in_order->bad);
    EXPECT_EQ(pictures->files, in_order->files);
    EXPECT_EQ(pictures->dataset.labels, in_order->dataset.labels);
    const Tensor &images = pictures->dataset.images, &expected = in_order->dataset.images;
    ASSERT_EQ(images.shape(), expected.shape());
    EXPECT_EQ(std::memcmp(images.data(), expected.data(), images.bytes()), 0);
    // The first bad one in order is named, whichever was met first.
    options.skip_bad = false;
    const auto refused = ReadPictures(folder_, "", options);
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("0/03.png: the image is"));
  }
}

TEST_F(DataTest, FoldersThatAreNumbersAreInTheOrderOfNumbers) {
  for (const char* const name : {"0", "1", "02", "9", "10"})
    Write(name + std::string("/a.png"), Png(2, 10));
  const auto pictures = ReadPictures(folder_, "", Options(2));
  ASSERT_TRUE(pictures.ok()) << pictures.status();
  EXPECT_THAT(pictures->class_names, ElementsAre("0", "1", "02", "9", "10"));
  // Pictures are in the order of their paths: 0, 02, 1, 10, 9.
  EXPECT_THAT(pictures->dataset.labels, ElementsAre(0, 2, 1, 4, 3));
}

TEST_F(DataTest, ClassesFollowTheNamesOfFoldersNotWholePaths) {
  // '-' comes before '/'.
  Write("cat/a.png", Png(2, 10));
  Write("cat-small/a.png", Png(2, 20));
  Write("cat/b.png", Png(2, 30));
  const auto pictures = ReadPictures(folder_, "", Options(2));
  ASSERT_TRUE(pictures.ok()) << pictures.status();
  EXPECT_THAT(pictures->class_names, ElementsAre("cat", "cat-small"));
  ASSERT_THAT(pictures->files, ElementsAre("cat-small/a.png", "cat/a.png", "cat/b.png"));
  EXPECT_THAT(pictures->dataset.labels, ElementsAre(1, 0, 0));
}

TEST(Lines, HaveNoWhiteSpaceAtTheirEnds) {
  EXPECT_THAT(LinesOf("a b \t\r\n\t\n\n c"), ElementsAre("a b", "", "", " c"));
  EXPECT_THAT(LinesOf("a\n"), ElementsAre("a"));
  EXPECT_THAT(LinesOf(""), ElementsAre());
}

TEST(Lines, HaveNoByteOrderMark) {
  const std::string mark = "\xEF\xBB\xBF";
  EXPECT_THAT(LinesOf(mark + "a dog\r\nb"), ElementsAre("a dog", "b"));
  EXPECT_THAT(LinesOf(mark), ElementsAre());
}

TEST_F(DataTest, WeightsOfMetadata) {
  for (const char* const name : {"a.png", "b.png", "c.png"}) Write(name, Png(2, 10));
  PictureOptions options = Options(2);
  options.wants_labels = false;
  const auto read = [&](const std::string& weight) {
    Write("metadata.jsonl", R"({"file_name": "a.png", "text": "a cat"})"
                            "\n"
                            R"({"file_name": "b.png", "weight": )" +
                                weight + "}\n");
    return ReadPictures(folder_, "", options);
  };
  EXPECT_THAT(read("0.25")->dataset.weights, ElementsAre(1, 0.25, 1));
  EXPECT_TRUE(read("1")->dataset.weights.empty());  // as if nothing was said
  for (const char* const bad : {"-1", "\"2\"", "null", "1e999"}) {
    const auto refused = read(bad);
    ASSERT_FALSE(refused.ok()) << bad;
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("metadata.jsonl, line 2"));
  }
}

TEST_F(DataTest, MetadataThatContradictsItselfIsRefused) {
  for (const char* const name : {"a.png", "b.png"}) Write(name, Png(2, 10));
  const auto refused = [&](const std::string& first, const std::string& second,
                           const std::string& what) {
    Write("metadata.jsonl", R"({"file_name": "a.png", )" + first +
                                "}\n"
                                R"({"file_name": "b.png", "label": "dog"})"
                                "\n"
                                R"({"file_name": "./a.png", )" +
                                second + "}\n");
    ExpectRefused(folder_, "", what);
  };
  refused(
      R"("label": "cat")", R"("label": "dog")",
      R"(metadata.jsonl, line 3: the label of a.png is "dog", but line 1 has another; remove one)");
  refused(R"("label": "cat", "weight": 2)", R"("label": "cat", "weight": 3)",
          "metadata.jsonl, line 3: the weight of a.png is 3, but line 1 has another; remove one");
  for (const std::string name : {"/a.png", "../a.png", "x/../../a.png", ".."}) {
    Write("metadata.jsonl", "{\"file_name\": \"" + name + "\", \"label\": \"cat\"}\n");
    ExpectRefused(folder_, "", "is not below the folder of metadata.jsonl; use a path in it");
  }
  Write("metadata.jsonl", R"({"file_name": "a.png", "label": "cat", "text": "one"})"
                          "\n"
                          R"({"file_name": "b.png", "label": "dog"})"
                          "\n"
                          R"({"file_name": "a.png", "label": "cat", "text": "two"})");
  const auto pictures = ReadPictures(folder_, "", Options(2));
  ASSERT_TRUE(pictures.ok()) << pictures.status();
  EXPECT_THAT(pictures->dataset.labels, ElementsAre(0, 1));

  const auto zip = [&](const std::string& label) {
    return Write("set.zip",
                 Zip({{"a.png", Png(2, 7)},
                      {"dataset.json", R"({"labels": [["a.png", 4], ["a.png", )" + label + "]]}"}},
                     true));
  };
  ExpectRefused(zip("5"), "",
                R"(set.zip/dataset.json: ["a.png",5]: the file has another label before)");
  EXPECT_TRUE(ReadPictures(zip("4"), "", Options(2)).ok());
}

TEST_F(DataTest, UnknownFieldsOfMetadataAreNamedOnce) {
  for (const char* const name : {"cats/a.png", "dogs/b.png"}) Write(name, Png(2, 10));
  Write("metadata.jsonl", R"({"file_name": "cats/a.png", "lable": 3, "wieght": 2, "text": "a"})"
                          "\n"
                          R"({"file_name": "dogs/b.png", "lable": 4, "weight": 2})");
  PictureOptions options = Options(2);
  std::vector<std::string> notes;
  options.note = [&](const std::string& what) { notes.push_back(what); };
  ASSERT_TRUE(ReadPictures(folder_, "", options).ok());
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_THAT(notes[0],
              HasSubstr(R"(metadata.jsonl: unknown fields are ignored: "lable" (lines: 2), )"
                        R"("wieght" (lines: 1); use file_name, label, text or weight)"));
}

TEST_F(DataTest, FoldersNameClassesWhereMetadataHasNoLabel) {
  for (const char* const name : {"ants/b.png", "cats/a.png"}) Write(name, Png(2, 10));
  Write("metadata.jsonl", R"({"file_name": "cats/a.png", "weight": 2})");
  PictureOptions options = Options(2);
  const auto pictures = ReadPictures(folder_, "", options);
  ASSERT_TRUE(pictures.ok()) << pictures.status();
  EXPECT_THAT(pictures->class_names, ElementsAre("ants", "cats"));
  EXPECT_THAT(pictures->dataset.labels, ElementsAre(0, 1));
  EXPECT_THAT(pictures->dataset.weights, ElementsAre(1, 2));
  // A network without classes has trained without these labels, and its runs can be resumed.
  options.wants_labels = false;
  EXPECT_TRUE(ReadPictures(folder_, "", options)->dataset.labels.empty());
  Write("stray.png", Png(2, 10));
  ExpectRefused(folder_, "",
                "stray.png: it has no label in metadata.jsonl, and is in no folder of a class");
  Write("metadata.jsonl", R"({"file_name": "cats/a.png", "label": "cat"})");
  ExpectRefused(folder_, "", "ants/b.png: it has no label in metadata.jsonl\n");
}

TEST_F(DataTest, ClassVectorsOfMetadataZipAndArrays) {
  PictureOptions options = Options(2);
  options.wants_labels = false;
  options.wants_vectors = true;
  const auto expect = [&](const std::string& path, const std::string& labels) {
    const auto pictures = ReadPictures(path, labels, options);
    ASSERT_TRUE(pictures.ok()) << pictures.status();
    EXPECT_TRUE(pictures->dataset.labels.empty());
    ASSERT_EQ(pictures->dataset.vectors.shape(), Shape({2, 3}));
    EXPECT_THAT(pictures->dataset.vectors.ToFloats(), ElementsAre(0.5f, -1, 2, 3, 4, 5));
  };
  const auto refused = [&](const std::string& path, const std::string& labels,
                           const std::string& what) {
    const auto pictures = ReadPictures(path, labels, options);
    ASSERT_FALSE(pictures.ok()) << what;
    EXPECT_THAT(std::string(pictures.status().message()), HasSubstr(what));
  };
  const std::string folder = folder_ / "pictures";
  Write("pictures/b.png", Png(2, 10));
  Write("pictures/x/a.png", Png(2, 20));
  refused(folder, "", "has no metadata.jsonl");
  const std::string first = R"({"file_name": "b.png", "label": [0.5, -1, 2]})";
  const auto write = [&](const std::string& second) {
    Write("pictures/metadata.jsonl",
          first + "\n" + R"({"file_name": "x/a.png", "label": )" + second + "}\n");
  };
  write("[3, 4, 5]");
  expect(folder, "");
  write("[3, 4]");
  refused(folder, "", "x/a.png: its label has 2 numbers, and those of others 3");
  options.skip_bad = true;
  EXPECT_EQ(ReadPictures(folder, "", options)->dataset.vectors.dim(0), 1);
  options.skip_bad = false;
  for (const char* const bad : {"\"cat\"", "[]", "[1, \"2\", 3]", "[1, 1e99, 3]", "{}", "null"}) {
    write(bad);
    refused(folder, "", "line 2");
  }
  Write("pictures/metadata.jsonl", first);
  refused(folder, "", "x/a.png: it has no label");
  const auto twice = [&](const std::string& one, const std::string& other) {
    const std::string line = R"({"file_name": "b.png", "label": )";
    Write("pictures/metadata.jsonl", line + one + "}\n" + line + other + "}\n");
  };
  twice("[1, 2]", "[1, 3]");
  refused(folder, "", "line 2: the label of b.png is [1,3], but line 1 has another; remove one");
  twice("7", "[7.0]");  // the same vector
  refused(folder, "", "x/a.png: it has no label");

  const auto zip = [&](const std::string& labels) {
    return Write("data.zip", Zip({{"a.png", Png(2, 10)},
                                  {"b.png", Png(2, 20)},
                                  {"dataset.json", "{\"labels\": [" + labels + "]}"}},
                                 true));
  };
  expect(zip(R"(["a.png", [0.5, -1, 2]], ["b.png", [3, 4, 5]])"), "");
  refused(zip(R"(["a.png", [0.5, -1, 2]], ["b.png", [3, null, 5]])"), "", "dataset.json");

  const std::string images = Write("x.npy", Npy("|u1", "(2, 2, 2)", std::string(8, '\0')));
  const auto floats = [](const std::vector<float>& values) {
    return std::string(reinterpret_cast<const char*>(values.data()), 4 * values.size());
  };
  expect(images, Write("y.npy", Npy("<f4", "(2, 3)", floats({0.5, -1, 2, 3, 4, 5}))));
  const std::vector<double> doubles = {0.5, -1, 2, 3, 4, 5};
  expect(images,
         Write("y.npy", Npy("<f8", "(2, 3)", {reinterpret_cast<const char*>(doubles.data()), 48})));
  refused(images, Write("y.npy", Npy("<f4", "(2, 3)", floats({0.5, NAN, 2, 3, 4, 5}))),
          "finite numbers");
  refused(images, Write("y.npy", Npy("<f4", "(3, 2)", floats({0.5, -1, 2, 3, 4, 5}))),
          "2 pictures, but class vectors [3, 2]");
  refused(images, "", "--labels");
  // One number is a vector of one.
  const auto single =
      ReadPictures(images, Write("y.npy", Npy("|u1", "(2)", std::string("\x07\x09"))), options);
  ASSERT_TRUE(single.ok()) << single.status();
  EXPECT_THAT(single->dataset.vectors.ToFloats(), ElementsAre(7, 9));
  // Floats are neither classes nor pictures.
  ExpectRefused(images, Write("y.npy", Npy("<f4", "(2)", floats({1, 2}))),
                "y.npy: labels must be whole numbers");
  ExpectRefused(Write("z.npy", Npy("<f4", "(1, 2, 2)", floats({1, 2, 3, 4}))), images, "uint8");
}

TEST_F(DataTest, WhatDoesNotFitIsKeptInAFileWithoutAName) {
  Write("pictures/cats/b.png", Png(2, 10));
  Write("pictures/dogs/a.png", Png(2, 20));
  PictureOptions options = Options(64);
  const auto resident = ReadPictures(folder_ / "pictures", "", options);
  ASSERT_TRUE(resident.ok()) << resident.status();
  EXPECT_FALSE(resident->dataset.on_disk);
  options.memory = 2 * 64 * 64 - 1;
  options.scratch = folder_ / "scratch";
  const auto on_disk = ReadPictures(folder_ / "pictures", "", options);
  ASSERT_TRUE(on_disk.ok()) << on_disk.status();
  EXPECT_TRUE(on_disk->dataset.on_disk);
  EXPECT_TRUE(fs::is_empty(folder_ / "scratch"));
  EXPECT_THAT(on_disk->dataset.labels, ElementsAre(0, 1));
  EXPECT_EQ(
      std::memcmp(on_disk->dataset.images.data(), resident->dataset.images.data(), 2 * 64 * 64), 0);
  ++options.memory;
  EXPECT_FALSE(ReadPictures(folder_ / "pictures", "", options)->dataset.on_disk);
  // A folder that cannot be written.
  options.memory = 1;
  options.scratch = folder_ / "pictures/cats/b.png";
  const auto refused = ReadPictures(folder_ / "pictures", "", options);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("--data-memory"));
}

TEST_F(DataTest, JpegAndWebpAreRead) {
  Pixels pixels{16, 16, 3, std::vector<uint8_t>(16 * 16 * 3, 200)};
  Write("x/a.jpg", *EncodeJpeg(pixels, 95));
  Write("x/b.webp", *EncodeWebp(pixels, 95));
  PictureOptions options = Options(8);
  options.channels = 3;
  const auto pictures = ReadPictures(folder_, "", options);
  ASSERT_TRUE(pictures.ok()) << pictures.status();
  for (const uint8_t value : pictures->dataset.images.span<uint8_t>()) EXPECT_NEAR(value, 200, 3);
}

TEST_F(DataTest, EveryNameOfJpegIsReadAndOtherFormatsAreCounted) {
  const std::string jpeg = *EncodeJpeg({16, 16, 1, std::vector<uint8_t>(16 * 16, 200)}, 95);
  for (const char* const name : {"a.jpg", "b.jpeg", "c.jpe", "d.JFIF"})
    Write(std::string("x/") + name, jpeg);
  for (const char* const name : {"a.bmp", "b.BMP", "c.gif", "d.avif", ".e.gif", "notes.txt"})
    Write(std::string("x/") + name, "?");
  PictureOptions options = Options(8);
  std::string note;
  options.note = [&](const std::string& what) { note += what; };
  auto pictures = ReadPictures(folder_ / "x", "", options);
  EXPECT_THAT(std::string(pictures.status().message()), HasSubstr("in no folder of a class"));
  options.wants_labels = false;
  note.clear();
  pictures = ReadPictures(folder_ / "x", "", options);
  ASSERT_TRUE(pictures.ok()) << pictures.status();
  EXPECT_THAT(pictures->files, ElementsAre("a.jpg", "b.jpeg", "c.jpe", "d.JFIF"));
  const std::string expected =
      "pictures of other formats are left out: .avif (1), .bmp (2), .gif (1); convert them to PNG, "
      "JPEG or WebP";
  EXPECT_EQ(note, "warning: " + (folder_ / "x").string() + ": " + expected);
  // Also where there is nothing else.
  note.clear();
  ExpectRefused(Write("none.zip", Zip({{"a.bmp", "x"}}, false)), "", "no PNG, JPEG or WebP");
  EXPECT_FALSE(ReadPictures(folder_ / "none.zip", "", options).ok());
  EXPECT_THAT(note, HasSubstr("none.zip: pictures of other formats are left out: .bmp (1)"));
}

TEST_F(DataTest, PicturesThatBecomeGreyOrRgbAreCounted) {
  std::string note;
  PictureOptions options = Options(2);
  options.wants_labels = false;
  options.note = [&](const std::string& what) { note += what + "\n"; };
  const auto expect = [&](const std::string& path, int channels, const std::string& said) {
    SCOPED_TRACE(path);
    note.clear();
    options.channels = channels;
    ASSERT_TRUE(ReadPictures(path, "", options).ok());
    EXPECT_EQ(note, said);
  };
  const Pixels red{2, 2, 3, {9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 8, 9}};  // in its last pixel
  const Pixels grey_in_rgb{2, 2, 3, std::vector<uint8_t>(12, 9)};
  const std::string folder = folder_ / "pictures";
  Write("pictures/a.png", *EncodePng(red, {}));
  Write("pictures/b.png", *EncodePng(grey_in_rgb, {}));
  Write("pictures/c.png", Png(2, 9));
  Write("pictures/d.png", Png(2, 9));
  expect(
      folder, 1,
      "1 of 4 pictures have colour; the model has one channel (in_channels), so they are read as "
      "grey\n");
  expect(
      folder, 3,
      "2 of 4 pictures are grey; the model has three channels (in_channels), so they are read as "
      "RGB\n");
  // What is skipped does not count.
  Write("pictures/b.png", "not a picture");
  options.skip_bad = true;
  expect(
      folder, 3,
      "2 of 3 pictures are grey; the model has three channels (in_channels), so they are read as "
      "RGB\n");
  fs::remove(folder_ / "pictures/b.png");
  fs::remove(folder_ / "pictures/a.png");
  expect(folder, 1, "");
  // Arrays.
  const std::string colours(red.samples.begin(), red.samples.end());
  const std::string rgb = Write("rgb.npy", Npy("|u1", "(2, 2, 2, 3)", colours + colours));
  const std::string grey = Write("grey.npy", Npy("|u1", "(3, 2, 2)", std::string(12, '\x9')));
  expect(
      rgb, 1,
      "2 of 2 pictures have colour; the model has one channel (in_channels), so they are read as "
      "grey\n");
  expect(rgb, 3, "");
  expect(grey, 1, "");
  expect(
      grey, 3,
      "3 of 3 pictures are grey; the model has three channels (in_channels), so they are read as "
      "RGB\n");
}

TEST_F(DataTest, PicturesAreScaledCroppedOrPadded) {
  // 4 wide, 2 high: black, white, white, black columns.
  Pixels wide{4, 2, 1, {0, 255, 255, 0, 0, 255, 255, 0}};
  Write("x/a.png", *EncodePng(wide, {}));
  auto pictures = ReadPictures(folder_, "", Options(2));
  ASSERT_TRUE(pictures.ok()) << pictures.status();
  EXPECT_THAT(pictures->dataset.images.span<uint8_t>(), ElementsAre(255, 255, 255, 255));
  PictureOptions padded = Options(6);
  padded.pad = true;
  pictures = ReadPictures(folder_, "", padded);
  ASSERT_TRUE(pictures.ok());
  const auto pixel = [&](int y, int x) {
    return pictures->dataset.images.as<uint8_t>()[y * 6 + x];
  };
  EXPECT_EQ(pixel(2, 2), 255);
  EXPECT_EQ(pixel(3, 3), 255);
  EXPECT_EQ(pixel(2, 1), 0);
  EXPECT_EQ(pixel(1, 2), 0);
  EXPECT_EQ(pixel(4, 3), 0);
}

TEST_F(DataTest, ThinPicturesTakeNoMoreMemoryThanOthers) {
  // Scaled to cover, they would be 64 × 3,840,000 pixels and reverse; in the middle, white begins.
  constexpr int kLong = 60'000;
  for (const bool tall : {true, false}) {
    Pixels thin{tall ? 1 : kLong, tall ? kLong : 1, 1, std::vector<uint8_t>(kLong)};
    std::fill_n(thin.samples.begin() + kLong / 2, kLong / 2, uint8_t{255});
    Write("x/a.png", *EncodePng(thin, {}));
    PictureOptions options = Options(64);
    options.parallel_for = OneByOne;  // without the memory of threads
    absl::StatusOr<Pictures> pictures;
    const int64_t grown = PeakGrowth([&] { pictures = ReadPictures(folder_, "", options); });
    ASSERT_TRUE(pictures.ok()) << pictures.status();
    EXPECT_LT(grown, 16 << 20);  // 983 MB when the whole was scaled
    const auto* const bytes = pictures->dataset.images.as<uint8_t>();
    const auto at = [&](int along) { return bytes[tall ? along * 64 : along]; };
    EXPECT_LT(at(0), 5);  // the middles of a black and a white pixel
    EXPECT_NEAR(at(31), 127, 3);
    EXPECT_NEAR(at(32), 128, 3);
    EXPECT_GT(at(63), 250);
    EXPECT_EQ(at(20), bytes[tall ? 20 * 64 + 63 : 63 * 64 + 20]);
  }
}

TEST_F(DataTest, ZipStoredAndDeflated) {
  for (const bool packed : {false, true}) {
    const std::string path = Write(
        "set.zip", Zip({{"00/b.png", Png(2, 7)},
                        {"00/a.png", Png(2, 5)},
                        {"dataset.json", R"({"labels": [["00/a.png", 4], ["00/b.png", 0]]})"}},
                       packed));
    const auto pictures = ReadPictures(path, "", Options(2));
    ASSERT_TRUE(pictures.ok()) << pictures.status();
    EXPECT_THAT(pictures->dataset.labels, ElementsAre(4, 0));
    EXPECT_EQ(pictures->dataset.images.as<uint8_t>()[0], 5);
  }
}

TEST_F(DataTest, ZipRefusals) {
  const std::string whole = Zip({{"a.png", Png(2, 7)}}, true);
  ExpectRefused(Write("cut.zip", whole.substr(0, whole.size() - 10)), "", "was it cut off");
  std::string broken = whole;
  broken[60] ^= 0x55;
  ExpectRefused(Write("broken.zip", broken), "", "a.png");
  // Its path stands there once.
  std::string damaged =
      Zip({{"a.png", Png(2, 7)}, {"dataset.json", R"({"labels": [["a.png", 0]]})"}}, true);
  damaged[60] ^= 0x55;
  const std::string path = Write("damaged.zip", damaged);
  const auto refused = ReadPictures(path, "", Options(2));
  EXPECT_EQ(refused.status().message().rfind(path), 0u) << refused.status();
  ExpectRefused(Write("none.zip", Zip({{"a.txt", "x"}}, false)), "", "no PNG, JPEG or WebP");
  ExpectRefused(Write("unlabelled.zip", whole), "", "no label");
  ExpectRefused(
      Write("labels.zip",
            Zip({{"a.png", Png(2, 7)}, {"dataset.json", R"({"labels": [["a.png", -1]]})"}}, false)),
      "", "is not [file, label]");
  ExpectRefused(
      Write("lost.zip", Zip({{"a.png", Png(2, 7)},
                             {"dataset.json", R"({"labels": [["a.png", 0], ["lost.png", 1]]})"}},
                            false)),
      "", "lost.zip/dataset.json: there is no picture \"lost.png\"");
  ExpectRefused(
      Write("twice.zip",
            Zip({{"a.png", Png(2, 7)},
                 {"dataset.json", R"({"labels": [["a.png", 0]], "labels": [["a.png", 1]]})"}},
                false)),
      "", "twice.zip/dataset.json: has \"labels\" twice; give it once");
  ExpectRefused(
      Write("files.zip",
            Zip({{"a.png", Png(2, 7)}, {"b.png", Png(2, 8)}, {"a.png", Png(2, 9)}}, false)),
      "", "files.zip: has two files of the name a.png; pack it anew");
  // What is meant for a folder would be missed without a word.
  PictureOptions noted = Options(2);
  noted.wants_labels = false;
  std::string note;
  noted.note = [&](const std::string& what) { note += what + "\n"; };
  const std::string packed =
      Write("packed.zip",
            Zip({{"data/a.png", Png(2, 7)}, {"data/dataset.json", "{}"}, {"metadata.jsonl", "{}"}},
                false));
  ASSERT_TRUE(ReadPictures(packed, "", noted).ok());
  EXPECT_THAT(note, HasSubstr("packed.zip: data/dataset.json is not read; put it beside"));
  EXPECT_THAT(note, HasSubstr("packed.zip: metadata.jsonl is not read; unpack the ZIP"));
  // An entry that says it unpacks to less than it does.
  std::string liar =
      Zip({{"a.png", std::string(100000, 'x')}, {"dataset.json", R"({"labels": [["a.png", 0]]})"}},
          true);
  const size_t at = liar.find("PK\x01\x02");
  liar.replace(at + 24, 4, Little(10, 4));
  ExpectRefused(Write("liar.zip", liar), "", "unpacks to more than 10 bytes");
}

TEST_F(DataTest, IdxPlainAndPacked) {
  const std::string images = std::string("\0\0\x08\x03\0\0\0\x02\0\0\0\x02\0\0\0\x02", 16) +
                             "\x01\x02\x03\x04\x05\x06\x07\x08";
  const std::string labels = std::string("\0\0\x08\x01\0\0\0\x02\x09\x03", 10);
  const auto pictures =
      ReadPictures(Write("images.gz", Deflate(images, 31)), Write("labels", labels), Options(2));
  ASSERT_TRUE(pictures.ok()) << pictures.status();
  EXPECT_THAT(pictures->dataset.labels, ElementsAre(9, 3));
  EXPECT_THAT(pictures->dataset.images.span<uint8_t>(), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
  const std::string packed = Deflate(images, 31);
  ExpectRefused(Write("cut.gz", packed.substr(0, packed.size() - 12)), "", "cut off");
  ExpectRefused(Write("short", images.substr(0, 20)), "", "promises 8 bytes of data");
  ExpectRefused(Write("images", images), "", "images: has no labels, but the network has classes");
  ExpectRefused(Write("images", images), Write("one", labels.substr(0, 7) + "\x01\x03"),
                "one: there are 2 pictures, but 1 labels");
}

TEST_F(DataTest, NumpyArrays) {
  const std::string images = Npy("|u1", "(2, 2, 2)", "\x01\x02\x03\x04\x05\x06\x07\x08");
  const std::string labels = Npy("<i8", "(2,)", Little(3, 8) + Little(300, 8));
  auto pictures = ReadPictures(Write("x.npy", images), Write("y.npy", labels), Options(2));
  ASSERT_TRUE(pictures.ok()) << pictures.status();
  EXPECT_THAT(pictures->dataset.labels, ElementsAre(3, 300));
  pictures = ReadPictures(
      Write("xy.npz", Zip({{"images.npy", images}, {"labels.npy", labels}}, true)), "", Options(2));
  ASSERT_TRUE(pictures.ok()) << pictures.status();
  EXPECT_THAT(pictures->dataset.labels, ElementsAre(3, 300));
  ExpectRefused(Write("f.npy", Npy("|u1", "(2, 2, 2)", "12345678", "True")), "", "Fortran");
  ExpectRefused(Write("d.npy", Npy("<c8", "(1,)", "12345678")), "", "astype('uint8')");
  ExpectRefused(Write("s.npy", Npy("|u1", "(9999999999, 9999999999)", "")), "",
                "beyond all bounds");
  ExpectRefused(Write("r.npy", Npy("|u1", "(8,)", "12345678")), Write("y.npy", labels),
                "[M, H, W]");
  ExpectRefused(Write("i.npy", Npy("|i1", "(2, 2, 2)", "12345678")), Write("y.npy", labels),
                "pictures must be uint8; use numbers from 0 to 255, and save x.astype('uint8')");
  ExpectRefused(Write("w.npy", Npy("|u1", "(1, 1, 65537)", std::string(65537, 'x'))),
                Write("y.npy", labels), "65537 × 1 are too large; use edges of at most 65536");
  ExpectRefused(Write("z.npz", Zip({{"x.npy", images}}, false)), "", "no array \"images\"");
  ExpectRefused(Write("n.npz", Zip({{"images.npy", images}}, false)), "",
                "n.npz: has no array \"labels\", but the network has classes; save with");
}

TEST_F(DataTest, SignedAndBigEndianNumbers) {
  const auto array = ParseNpy(Npy(">i2", "(2,)", std::string("\xff\xfe\x01\x02", 4)), "x");
  ASSERT_TRUE(array.ok());
  EXPECT_EQ(array->At(0), -2);
  EXPECT_EQ(array->At(1), 258);
}

TEST_F(DataTest, SkippedFilesAreNamedAndCounted) {
  Write("x/a.png", Png(2, 1));
  Write("x/b.png", "no picture at all");
  Write("x/c.png", Png(2, 3).substr(0, 50));
  PictureOptions options = Options(2);
  ExpectRefused(folder_, "",
                "2 of 3 pictures cannot be used. Correct or remove them, or pass --skip-bad-files");
  ExpectRefused(folder_, "", "b.png");
  ExpectRefused(folder_, "", "c.png");
  options.skip_bad = true;
  const auto pictures = ReadPictures(folder_, "", options);
  ASSERT_TRUE(pictures.ok()) << pictures.status();
  EXPECT_EQ(pictures->dataset.images.dim(0), 1);
  ASSERT_EQ(pictures->bad.size(), 2u);
  EXPECT_THAT(pictures->bad[0], HasSubstr("b.png"));
  fs::remove(folder_ / "x/a.png");
  const auto none = ReadPictures(folder_, "", options);
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("none of its 2 pictures"));
}

TEST_F(DataTest, MessagesDoNotSpeakOfRequests) {
  // The decoders are the server's, too.
  const std::string jpeg = *EncodeJpeg({2, 2, 1, std::vector<uint8_t>(4)}, 90);
  for (const std::string& bytes :
       {std::string(), std::string("x"), Png(2, 3).substr(0, 50), jpeg.substr(0, 40),
        jpeg.substr(0, jpeg.size() - 2), std::string("RIFF\x08\0\0\0WEBPVP8 ", 16)}) {
    Write("x/a.png", bytes);
    const std::string said(ReadPictures(folder_, "", Options(2)).status().message());
    EXPECT_THAT(said, testing::MatchesRegex(
                          ".*a.png: .*; (use|convert) .*\\. Correct or remove it, or pass "
                          "--skip-bad-files"));
    EXPECT_THAT(said, testing::Not(HasSubstr("send")));
  }
}

TEST_F(DataTest, TheFirstBadFilesAreNamedAndAllCounted) {
  Write("x/a.png", Png(2, 1));
  for (int i = 10; i < 32; ++i) Write(fmt::format("x/b{}.png", i), "no picture at all");
  const auto pictures = ReadPictures(folder_, "", Options(2));
  ASSERT_TRUE(absl::IsInvalidArgument(pictures.status())) << pictures.status();
  const std::string said(pictures.status().message());
  EXPECT_THAT(said, HasSubstr("22 of 23 pictures cannot be used"));
  EXPECT_THAT(said, HasSubstr("b10.png"));
  EXPECT_THAT(said, HasSubstr("b29.png"));
  EXPECT_THAT(said, testing::Not(HasSubstr("b30.png")));
  EXPECT_THAT(said, HasSubstr("and 2 more"));
}

TEST_F(DataTest, ReadingEndsWhenItIsTold) {
  Write("x/a.png", Png(2, 1));
  const std::atomic<bool> stop = true;
  PictureOptions options = Options(2);
  options.stop = &stop;
  EXPECT_TRUE(absl::IsCancelled(ReadPictures(folder_, "", options).status()));
}

}  // namespace
}  // namespace denoised::trainer
