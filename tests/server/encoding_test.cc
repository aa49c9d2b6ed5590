// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spng.h>
#include <webp/decode.h>
#include <webp/encode.h>
#include <zlib.h>

#include <barrier>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "absl/strings/escaping.h"
#include "engine/images/exif.h"
#include "engine/images/formats.h"
#include "engine/images/jpeg.h"
#include "engine/images/webp.h"
#include "tests/server/peak_memory.h"

namespace denoised {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::Ge;
using ::testing::Gt;
using ::testing::HasSubstr;
using ::testing::Le;
using ::testing::Lt;
using ::testing::Not;

constexpr int64_t kPlenty = 1 << 20;

Tensor Gradient(int height, int width, int channels) {
  Tensor image = Tensor::Host({height, width, channels}, DType::kF32);
  float* out = image.as<float>();
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      for (int c = 0; c < channels; ++c) {
        *out++ = -1.0f + 2.0f * (x + (c == 1 ? y : 0)) / (width + height);
      }
    }
  }
  return image;
}

double LargestDifference(const Tensor& a, const Tensor& b) {
  double largest = 0;
  for (int64_t i = 0; i < a.elements(); ++i) {
    largest = std::max<double>(largest, std::abs(a.as<float>()[i] - b.as<float>()[i]));
  }
  return largest;
}

TEST(PixelsTest, QuantisesRoundedAndClipped) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> values;
  std::vector<uint8_t> expected;
  for (int i = 0; i < 25; ++i) {  // enough for the widest vectors, and a rest
    values.insert(values.end(),
                  {-1, 1, 0, -7, 7, kNan, kInfinity, -kInfinity, -1 + 2 * 100.6f / 255});
    expected.insert(expected.end(), {0, 255, 128, 0, 255, 0, 255, 0, 101});
  }
  EXPECT_EQ(ToBytes(Tensor::HostF32({1, 225, 1}, values)), expected);
}

TEST(PixelsTest, ConvertsBetweenGreyAndRgb) {
  const Pixels rgb{1, 1, 3, {255, 0, 0}};
  EXPECT_NEAR(FromPixels(rgb, 1).as<float>()[0], 0.299 * 2 - 1, 1e-6);
  const Tensor repeated = FromPixels({1, 1, 1, {51}}, 3);
  for (int c = 0; c < 3; ++c) EXPECT_NEAR(repeated.as<float>()[c], -0.6, 1e-6);
}

TEST(PixelsTest, ResizeKeepsConstantsAndMeans) {
  Tensor constant = Tensor::Host({7, 5, 3}, DType::kF32);
  for (float& value : constant.span<float>()) value = 0.25f;
  for (const auto& [height, width] : {std::pair{3, 2}, {14, 11}, {1, 1}}) {
    const Tensor resized = Resize(constant, height, width);
    ASSERT_EQ(resized.shape(), (Shape{height, width, 3}));
    for (const float value : resized.span<float>()) EXPECT_NEAR(value, 0.25, 1e-6);
  }
  const Tensor image = Gradient(16, 16, 1);
  double mean = 0;
  for (const float value : image.span<float>()) mean += value / image.elements();
  // The filter is symmetric about the middle, so of a gradient it is the mean but for rounding.
  EXPECT_NEAR(Resize(image, 1, 1).as<float>()[0], mean, 1e-6);
}

TEST(PixelsTest, ResizeByTwoIsTheKnownFilter) {
  // Half a pixel's offset each side: 1/8, 3/8, 3/8, 1/8, and 3/7, 3/7, 1/7 at the border.
  const float row[] = {0, 8, 16, 24};
  const Tensor half = Resize(Tensor::HostF32({1, 4, 1}, row), 1, 2);
  EXPECT_NEAR(half.as<float>()[0], (3 * 0 + 3 * 8 + 1 * 16) / 7.0, 1e-5);
  EXPECT_NEAR(half.as<float>()[1], (1 * 8 + 3 * 16 + 3 * 24) / 7.0, 1e-5);
}

// Numbers from Pillow 13.0:
//   grey = lambda x, y: (x * x * 31 + 17 * x * y + 7 * y * y) % 256
//   image = Image.new("L", (11, 6))
//   image.putdata([grey(x, y) for y in range(6) for x in range(11)])
//   list(image.resize((width, height), Image.LANCZOS).getdata())
TEST(PixelsTest, LanczosIsPillows) {
  Pixels image{11, 6, 1, {}};
  for (int y = 0; y < image.height; ++y)
    for (int x = 0; x < image.width; ++x)
      image.samples.push_back(static_cast<uint8_t>(x * x * 31 + 17 * x * y + 7 * y * y));
  struct Case {
    int height, width;
    std::vector<int> expected;
  };
  for (const auto& [height, width, expected] :
       {Case{3, 4, {59, 105, 142, 143, 105, 163, 159, 140, 137, 161, 109, 94}},
        Case{9, 14, {0,   7,   94,  93,  24,  245, 118, 0,   118, 252, 219, 231, 146, 0,   1,   14,
                     101, 116, 45,  145, 76,  67,  174, 166, 127, 156, 161, 108, 8,   28,  135, 180,
                     89,  44,  87,  167, 183, 120, 93,  65,  128, 226, 23,  48,  174, 227, 131, 106,
                     196, 156, 84,  227, 235, 85,  46,  171, 40,  90,  117, 143, 226, 230, 170, 107,
                     145, 229, 226, 166, 106, 108, 60,  152, 90,  45,  227, 236, 114, 116, 212, 120,
                     111, 209, 189, 72,  90,  196, 177, 69,  96,  106, 171, 185, 110, 47,  65,  164,
                     148, 49,  154, 122, 151, 175, 128, 160, 186, 100, 48,  151, 62,  89,  112, 29,
                     193, 50,  90,  239, 213, 255, 169, 2,   48,  255, 73,  55,  107, 20}},
        Case{5, 10, {0,   57,  86,  101, 131, 37,  199, 173, 197, 73,  9,   95,  192,
                     66,  105, 160, 150, 134, 66,  184, 50,  111, 145, 221, 185, 111,
                     194, 222, 134, 106, 112, 181, 70,  138, 152, 162, 95,  72,  193,
                     77,  153, 89,  204, 182, 195, 28,  151, 83,  95,  44}},
        Case{7, 14, {0,   8,   95,  95,  26,  235, 114, 0,   123, 244, 211, 224, 148, 8,
                     4,   21,  110, 136, 63,  89,  63,  117, 196, 125, 87,  111, 160, 172,
                     18,  40,  170, 225, 116, 75,  171, 168, 105, 197, 198, 69,  60,  197,
                     40,  90,  117, 143, 226, 230, 170, 107, 145, 229, 226, 166, 106, 108,
                     66,  172, 112, 37,  191, 201, 124, 139, 195, 87,  91,  206, 187, 64,
                     125, 162, 179, 131, 90,  111, 189, 153, 60,  92,  60,  117, 120, 38,
                     190, 57,  96,  233, 205, 253, 171, 11,  48,  249, 71,  58,  108, 21}},
        Case{8, 5, {23,  113, 88,  204, 134, 41,  94, 102, 141, 141, 75,  127, 127, 136,
                    124, 84,  190, 149, 201, 113, 74, 184, 168, 174, 150, 136, 116, 159,
                    103, 133, 149, 144, 132, 87,  84, 107, 220, 120, 115, 66}}}) {
    const Tensor resized = Resize(FromPixels(image, 1), height, width, ResizeFilter::kLanczos);
    ASSERT_EQ(resized.shape(), (Shape{height, width, 1}));
    double largest = 0;
    for (size_t i = 0; i < expected.size(); ++i)
      largest = std::max(largest, std::abs((resized.as<float>()[i] + 1) * 127.5 - expected[i]));
    // Pillow rounds to bytes after each direction. The second one's weights make up to 1.57 times
    // as much of the first rounding: 0.5 × 1.57 + 0.5.
    EXPECT_LT(largest, 1.3) << height << "×" << width;
  }
}

TEST(PixelsTest, LanczosStaysInTheRangeOfItsImage) {
  const auto resized = [](float low, float high) {
    const Tensor edge = Tensor::HostF32({1, 4, 1}, std::vector<float>{low, low, high, high});
    const Tensor wide = Resize(edge, 1, 16, ResizeFilter::kLanczos);
    return std::vector<float>(wide.span<float>().begin(), wide.span<float>().end());
  };
  EXPECT_THAT(resized(-1, 1), Each(AllOf(Ge(-1), Le(1))));
  EXPECT_THAT(resized(-2, 3), Each(AllOf(Ge(-3), Le(3))));
  EXPECT_THAT(resized(-2, 3), Contains(Lt(-2.1)));
  EXPECT_THAT(resized(0, 0.5), Contains(Gt(0.51)));
}

TEST(PixelsTest, ResizeOfALongLineTakesNoMemoryForItsWeights) {
  Tensor line = Tensor::Host({1, 1 << 24, 1}, DType::kF32);
  for (float& value : line.span<float>()) value = 0.25f;
  Tensor resized;
  EXPECT_LT(PeakGrowth([&] { resized = Resize(line, 1, 32); }), 16 << 20);
  for (const float value : resized.span<float>()) EXPECT_NEAR(value, 0.25, 1e-3);
}

TEST(PixelsTest, APartOfAResizedImageHasTheBitsOfTheWhole) {
  Tensor image = Tensor::Host({23, 9, 3}, DType::kF32);
  std::mt19937 random(7);
  for (float& value : image.span<float>())
    value = std::uniform_real_distribution<float>(-1, 1)(random);
  for (const auto& [full_height, full_width] :
       {std::pair{46, 18}, {11, 4}, {30, 5}, {10, 20}, {23, 9}, {23, 4}}) {
    const Tensor whole = Resize(image, full_height, full_width);
    for (const auto& [top, left, height, width] :
         {std::tuple{0, 0, full_height, full_width}, {3, 1, 5, 2}, {full_height - 1, 0, 1, 3}}) {
      const Tensor part = ResizePart(image, full_height, full_width, top, left, height, width);
      ASSERT_EQ(part.shape(), (Shape{height, width, 3}));
      for (int y = 0; y < height; ++y) {
        const float* const expected =
            whole.as<float>() + ((top + y) * full_width + left) * int64_t{3};
        EXPECT_EQ(
            std::memcmp(part.as<float>() + y * width * 3, expected, width * 3 * sizeof(float)), 0)
            << full_height << "×" << full_width << ", row " << top + y;
      }
    }
  }
}

// Each task computes the weights of a line anew.
TEST(PixelsTest, ATaskHasSeveralLinesHoweverLongTheyAre) {
  const Tensor image = Tensor::Host({64, 100, 3}, DType::kF32);
  int tasks = 0;
  ResizePart(image, 64, 10000, 0, 0, 64, 10000,
             [&](int count, const std::function<void(int)>& task) {
               tasks = count;
               OneByOne(count, task);
             });
  EXPECT_EQ(tasks, 4);
}

TEST(PixelsTest, TasksDoNotChangeTheBitsOfAScaledImage) {
  for (const auto& [height, width, channels] :
       {std::tuple{700, 500, 3}, {500, 700, 1}, {200, 4000, 3}, {600, 600, 2}}) {
    const Tensor image = Gradient(height, width, channels);
    int tasks = 0;
    const ParallelFor backwards = [&](int count, const std::function<void(int)>& task) {
      tasks = std::max(tasks, count);
      while (--count >= 0) task(count);
    };
    const Tensor scaled = FitWithin(image, 300, backwards), expected = FitWithin(image, 300);
    EXPECT_GT(tasks, 1) << height << "×" << width;
    ASSERT_EQ(scaled.shape(), expected.shape());
    EXPECT_EQ(std::memcmp(scaled.data(), expected.data(), expected.bytes()), 0)
        << height << "×" << width << "×" << channels;
  }
}

TEST(PixelsTest, FitWithinKeepsAspect) {
  EXPECT_EQ(FitWithin(Gradient(100, 50, 1), 20).shape(), (Shape{20, 10, 1}));
  EXPECT_EQ(FitWithin(Gradient(10, 5, 1), 20).shape(), (Shape{10, 5, 1}));
  EXPECT_EQ(FitWithin(Gradient(1, 1000, 1), 10).shape(), (Shape{1, 10, 1}));
}

class FormatTest : public ::testing::TestWithParam<std::tuple<FileFormat, int>> {};

TEST_P(FormatTest, RoundTrip) {
  const auto [format, channels] = GetParam();
  const Tensor image = Gradient(24, 40, channels);
  const auto file = EncodeFile(image, format, 95, {});
  ASSERT_TRUE(file.ok()) << file.status().message();
  const auto pixels = DecodeFile(*file, kPlenty);
  ASSERT_TRUE(pixels.ok()) << pixels.status().message();
  EXPECT_EQ(pixels->height, 24);
  EXPECT_EQ(pixels->width, 40);
  // Half a quantum is all that PNG loses; the lossy ones at quality 95 stay within a few percent.
  EXPECT_LE(LargestDifference(FromPixels(*pixels, channels), image),
            format == FileFormat::kPng ? 1.001 / 255 : 0.12);
}

TEST_P(FormatTest, EveryTruncationIsAnErrorNotACrash) {
  const auto [format, channels] = GetParam();
  const auto file = EncodeFile(Gradient(24, 40, channels), format, 90, {});
  ASSERT_TRUE(file.ok());
  for (size_t size = 0; size + 12 < file->size(); ++size) {
    EXPECT_FALSE(DecodeFile(file->substr(0, size), kPlenty).ok()) << size;
  }
}

TEST_P(FormatTest, FlippedBytesNeverCrash) {
  const auto [format, channels] = GetParam();
  const auto file = EncodeFile(Gradient(24, 40, channels), format, 90, {});
  ASSERT_TRUE(file.ok());
  int refused = 0;
  for (size_t i = 0; i < file->size(); ++i) {
    std::string damaged = *file;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x55);
    const auto pixels = DecodeFile(damaged, kPlenty);
    if (!pixels.ok()) {
      ++refused;
    } else {
      EXPECT_EQ(pixels->samples.size(), size_t(pixels->width) * pixels->height * pixels->channels);
    }
  }
  EXPECT_GT(refused, 10);
}

TEST_P(FormatTest, RefusesMorePixelsThanAllowed) {
  const auto [format, channels] = GetParam();
  const auto file = EncodeFile(Gradient(24, 40, channels), format, 90, {});
  ASSERT_TRUE(file.ok());
  EXPECT_TRUE(DecodeFile(*file, 24 * 40).ok());
  const auto refused = DecodeFile(*file, 24 * 40 - 1);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("40×24"));
}

INSTANTIATE_TEST_SUITE_P(All, FormatTest,
                         ::testing::Combine(::testing::Values(FileFormat::kPng, FileFormat::kJpeg,
                                                              FileFormat::kWebp),
                                            ::testing::Values(1, 3)));

TEST(PngTest, CarriesTexts) {
  const TextEntries texts = {{"seed", "18446744073709551615"},
                             {"model", "digits"},
                             {"prompt", "ein grüner 🍏"},
                             {"odd", "\t\x01"},
                             {"negative", ""}};
  const auto file = EncodePng(ToPixels(Gradient(8, 8, 1)), texts);
  ASSERT_TRUE(file.ok());
  EXPECT_THAT(*file, HasSubstr(std::string("tEXtseed\0", 9) + "18446744073709551615"));
  EXPECT_THAT(*file, HasSubstr(std::string("tEXtmodel\0", 10) + "digits"));
  // UTF-8, not compressed, without a language: a plain chunk would be read as Latin-1.
  EXPECT_THAT(*file, HasSubstr(std::string("iTXtprompt\0\0\0\0\0", 15) + "ein grüner 🍏"));
  EXPECT_THAT(*file, HasSubstr(std::string("iTXtodd\0\0\0\0\0", 12) + "\t\x01"));
  EXPECT_THAT(*file, Not(HasSubstr("negative")));  // an empty text says nothing
  EXPECT_TRUE(DecodePng(*file, kPlenty).ok());     // it compares all checksums
  // Before the picture, or programs would have to read all of it.
  EXPECT_LT(file->find("iTXtodd"), file->find("IDAT"));
}

TEST(PngTest, ShrinksWhatItCanAndStoresTheRest) {
  std::mt19937 random(1);
  for (const int width : {1, 7, 400}) {  // of one block of zlib, and of several
    Pixels noise{width, 300, 3, std::vector<uint8_t>(width * 300 * 3)};
    for (uint8_t& sample : noise.samples) sample = static_cast<uint8_t>(random());
    const Pixels flat{width, 300, 3, std::vector<uint8_t>(width * 300 * 3, 77)};
    for (const Pixels& pixels : {noise, flat}) {
      const auto file = EncodePng(pixels, {});
      ASSERT_TRUE(file.ok()) << file.status().message();
      EXPECT_EQ(*file, *EncodePng(pixels, {}));
      const auto decoded = DecodePng(*file, kPlenty);
      ASSERT_TRUE(decoded.ok()) << decoded.status().message();
      EXPECT_EQ(decoded->samples, pixels.samples);
      const size_t raw = pixels.samples.size() + 300;  // and a filter a row
      EXPECT_LE(file->size(),
                pixels.samples == flat.samples ? raw / 20 + 100 : raw + raw / 1000 + 100);
    }
  }
}

/// Stored blocks then fill the room to the byte.
TEST(PngTest, BandsOfAlmostTwoStoredBlocks) {
  std::mt19937 random(1);
  for (int width = 43'580; width < 43'700; width += 7) {  // about 131,000 bytes with the filter
    Pixels noise{width, 2, 3, std::vector<uint8_t>(width * 2 * 3)};
    for (uint8_t& sample : noise.samples) sample = static_cast<uint8_t>(random());
    const auto file = EncodePng(noise, {});
    ASSERT_TRUE(file.ok()) << file.status().message();
    const auto decoded = DecodePng(*file, kPlenty);
    ASSERT_TRUE(decoded.ok()) << width << ": " << decoded.status().message();
    EXPECT_EQ(decoded->samples, noise.samples);
  }
}

/// Leaves `value` wherever the next call may find its variables.
[[gnu::noinline]] void FillStack(uint16_t value) {
  volatile uint16_t filled[1 << 17];
  for (volatile uint16_t& each : filled) each = value;
}

TEST(PngTest, GivesTheSameBytesWhateverWasInMemory) {
  // Rows come again after 20 rows of noise, which only a window of more than 1 KiB reaches.
  std::mt19937 random(1);
  Pixels pixels{96, 96, 1, std::vector<uint8_t>(96 * 96)};
  for (size_t i = 0; i < pixels.samples.size(); ++i) {
    const size_t back = 20 * 96;
    pixels.samples[i] = i < back ? static_cast<uint8_t>(random()) : pixels.samples[i - back];
  }
  FillStack(0);
  const std::string expected = EncodePng(pixels, {}).value();
  for (uint16_t value = 1; value < 20; ++value) {
    FillStack(value);
    EXPECT_TRUE(EncodePng(pixels, {}).value() == expected) << value;
  }
}

/// ISA-L hashes the address of its variables when a stream has no history, and then finds a match
/// of byte 2 only if that falls on the right one of 2,048 places.
TEST(PngTest, GivesTheSameBytesOnEveryThread) {
  constexpr int kSize = 32, kPictures = 500, kThreads = 32;
  const auto draw_all = [] {
    std::string files;
    for (int picture = 0; picture < kPictures; ++picture) {
      // The first sample is 0, so the next line, filtered, is the first from its byte 2 on.
      Pixels waves{kSize, kSize, 1, std::vector<uint8_t>(kSize * kSize)};
      for (int i = 0; i < kSize * kSize; ++i) {
        const double along = (0.2 + 0.001 * picture) * (i % kSize + i / kSize);
        waves.samples[i] = static_cast<uint8_t>(127.5 - 127.5 * std::cos(along));
      }
      files += EncodePng(waves, {}).value();
    }
    return files;
  };
  std::barrier all_have_stacks(kThreads);
  std::vector<std::string> drawn(kThreads);
  {
    std::vector<std::jthread> threads;
    for (std::string& files : drawn) {
      threads.emplace_back([&] {
        all_have_stacks.arrive_and_wait();
        files = draw_all();
      });
    }
  }
  for (const std::string& files : drawn) EXPECT_TRUE(files == drawn[0]);
}

/// Large pictures are compressed in bands of rows, by any threads: none of it shows.
TEST(PngTest, BandsDoNotShow) {
  std::mt19937 random{5};
  std::normal_distribution<float> noise(0, 0.05f);
  const auto backwards = [](int count, const std::function<void(int)>& task) {
    while (count > 0) task(--count);
  };
  const auto on_threads = [](int count, const std::function<void(int)>& task) {
    std::vector<std::jthread> threads;
    for (int i = 0; i < count; ++i) threads.emplace_back(task, i);
  };
  // Several bands, bands of a row, one more row than a band, and one band.
  for (const Shape& shape :
       {Shape{301, 700, 3}, Shape{3, 70'000, 3}, Shape{kTaskBytes / 1000 + 1, 999, 1},
        Shape{kTaskBytes / 1000, 999, 1}}) {
    Tensor image = Gradient(static_cast<int>(shape[0]), static_cast<int>(shape[1]),
                            static_cast<int>(shape[2]));
    for (int64_t i = 0; i < image.elements(); ++i) image.as<float>()[i] += noise(random);
    const auto file = EncodeFile(image, FileFormat::kPng, 0, {});
    ASSERT_TRUE(file.ok()) << file.status().message();
    EXPECT_EQ(EncodeFile(image, FileFormat::kPng, 0, {}, backwards).value(), *file);
    EXPECT_EQ(EncodeFile(image, FileFormat::kPng, 0, {}, on_threads).value(), *file);
    const auto pixels = DecodeFile(*file, kPlenty);
    ASSERT_TRUE(pixels.ok()) << pixels.status().message();
    EXPECT_EQ(pixels->samples, ToBytes(image)) << shape.ToString();
  }
}

TEST(PngTest, PicksTheFilterOfEachRow) {
  // Stripes under a little noise. One filter leaves the noise alone, a bit or two of each sample.
  std::mt19937 random(1);
  std::vector<int> stripes(200);
  for (int& stripe : stripes) stripe = static_cast<int>(random() % 250);
  for (const bool upright : {true, false}) {
    Pixels pixels{200, 200, 3, {}};
    for (int y = 0; y < 200; ++y) {
      for (int x = 0; x < 200; ++x) {
        for (int c = 0; c < 3; ++c) {
          pixels.samples.push_back(
              static_cast<uint8_t>(stripes[upright ? x : y] + static_cast<int>(random() % 2)));
        }
      }
    }
    const auto file = EncodePng(pixels, {});
    ASSERT_TRUE(file.ok());
    EXPECT_EQ(DecodePng(*file, kPlenty)->samples, pixels.samples);
    EXPECT_LT(file->size(), 35'000) << (upright ? "upright" : "lying");
  }
}

/// A header that promises 2^31−1 pixels an edge, followed by next to nothing.
TEST(PngTest, RefusesABombByItsHeader) {
  auto file = EncodePng(ToPixels(Gradient(8, 8, 1)), {});
  ASSERT_TRUE(file.ok());
  for (const int offset : {16, 20}) file->replace(offset, 4, std::string("\x00\x01\xff\xff", 4));
  // The header's checksum, so that nothing but the size is wrong with it.
  uint32_t crc = 0xffffffff;
  for (int i = 12; i < 29; ++i) {
    crc ^= static_cast<uint8_t>((*file)[i]);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  crc = ~crc;
  for (int i = 0; i < 4; ++i) (*file)[29 + i] = static_cast<char>(crc >> (24 - 8 * i));
  const auto pixels = DecodeFile(*file, kPlenty);
  ASSERT_FALSE(pixels.ok());
  EXPECT_THAT(std::string(pixels.status().message()), HasSubstr("131071×131071"));
}

/// A PNG of one row, of a kind that EncodePng does not write. `samples` as the format has them,
/// 16 bits in the host's order.
std::string WritePng(spng_color_type type, int bits, const std::vector<uint8_t>& samples,
                     const spng_plte* palette = nullptr, const spng_trns* transparency = nullptr) {
  spng_ctx* const context = spng_ctx_new(SPNG_CTX_ENCODER);
  spng_set_option(context, SPNG_ENCODE_TO_BUFFER, 1);
  const int channels = type == SPNG_COLOR_TYPE_TRUECOLOR         ? 3
                       : type == SPNG_COLOR_TYPE_TRUECOLOR_ALPHA ? 4
                       : type == SPNG_COLOR_TYPE_GRAYSCALE_ALPHA ? 2
                                                                 : 1;
  spng_ihdr header{};
  header.width = static_cast<uint32_t>(samples.size() * 8 / bits / channels);
  header.height = 1;
  header.bit_depth = static_cast<uint8_t>(bits);
  header.color_type = type;
  EXPECT_EQ(spng_set_ihdr(context, &header), 0);
  if (palette != nullptr) {
    EXPECT_EQ(spng_set_plte(context, const_cast<spng_plte*>(palette)), 0);
  }
  if (transparency != nullptr) {
    EXPECT_EQ(spng_set_trns(context, const_cast<spng_trns*>(transparency)), 0);
  }
  EXPECT_EQ(spng_encode_image(context, samples.data(), samples.size(), SPNG_FMT_PNG,
                              SPNG_ENCODE_FINALIZE),
            0);
  size_t size = 0;
  int error = 0;
  void* const data = spng_get_png_buffer(context, &size, &error);
  const std::string file(static_cast<char*>(data), size);
  std::free(data);
  spng_ctx_free(context);
  return file;
}

using Samples = std::vector<uint8_t>;

/// What a file unpacks to; grey has one channel.
Samples Unpacked(const std::string& file, int channels) {
  const auto pixels = DecodeFile(file, kPlenty);
  EXPECT_TRUE(pixels.ok()) << pixels.status().message();
  if (!pixels.ok()) return {};
  EXPECT_EQ(pixels->channels, channels);
  return pixels->samples;
}

TEST(PngTest, ShowsTransparencyOverWhite) {
  EXPECT_EQ(Unpacked(WritePng(SPNG_COLOR_TYPE_TRUECOLOR_ALPHA, 8,
                              {10, 20, 30, 0, 10, 20, 30, 255, 0, 0, 0, 128}),
                     3),
            (Samples{255, 255, 255, 10, 20, 30, 127, 127, 127}));
  EXPECT_EQ(Unpacked(WritePng(SPNG_COLOR_TYPE_GRAYSCALE_ALPHA, 8, {10, 0, 10, 255}), 1),
            (Samples{255, 10}));
  spng_trns key{};
  key.gray = 10;
  EXPECT_EQ(Unpacked(WritePng(SPNG_COLOR_TYPE_GRAYSCALE, 8, {10, 20}, nullptr, &key), 1),
            (Samples{255, 20}));
}

/// The colours that the file has, as those of Pillow's convert("RGB").
TEST(FormatsTest, TransparencyMayBeIgnored) {
  const auto colours = [](const std::string& file, int channels) {
    const auto pixels = DecodeFile(file, kPlenty, nullptr, Alpha::kIgnored);
    EXPECT_TRUE(pixels.ok()) << pixels.status();
    if (!pixels.ok()) return Samples();
    EXPECT_EQ(pixels->channels, channels);
    return pixels->samples;
  };
  const Samples rgba = {10, 20, 30, 1, 10, 20, 30, 255, 40, 50, 60, 128};
  const Samples rgb = {10, 20, 30, 10, 20, 30, 40, 50, 60};
  EXPECT_EQ(colours(WritePng(SPNG_COLOR_TYPE_TRUECOLOR_ALPHA, 8, rgba), 3), rgb);
  EXPECT_EQ(colours(WritePng(SPNG_COLOR_TYPE_GRAYSCALE_ALPHA, 8, {10, 0, 20, 255}), 1),
            (Samples{10, 20}));
  EXPECT_EQ(colours(WritePng(SPNG_COLOR_TYPE_GRAYSCALE_ALPHA, 16, {0, 10, 0, 0, 0, 20, 0, 9}), 1),
            (Samples{10, 20}));
  spng_trns key{};
  key.gray = 10;
  EXPECT_EQ(colours(WritePng(SPNG_COLOR_TYPE_GRAYSCALE, 8, {10, 20}, nullptr, &key), 1),
            (Samples{10, 20}));
  spng_plte palette{};
  palette.n_entries = 1;
  palette.entries[0] = {1, 2, 3, 255};
  spng_trns entries{};
  entries.n_type3_entries = 1;
  EXPECT_EQ(colours(WritePng(SPNG_COLOR_TYPE_INDEXED, 8, {0}, &palette, &entries), 3),
            (Samples{1, 2, 3}));

  uint8_t* data = nullptr;
  const size_t size = WebPEncodeLosslessRGBA(rgba.data(), 3, 1, 12, &data);
  const std::string webp(reinterpret_cast<const char*>(data), size);
  WebPFree(data);
  EXPECT_EQ(colours(webp, 3), rgb);
  EXPECT_EQ(Unpacked(webp, 3), (Samples{254, 254, 254, 10, 20, 30, 147, 152, 157}));
}

TEST(PngTest, ReadsTransparencyAlone) {
  const auto transparency = [](const std::string& file) {
    const auto pixels = DecodePngTransparency(file, kPlenty);
    EXPECT_TRUE(pixels.ok()) << pixels.status().message();
    return pixels.ok() ? pixels->samples : Samples();
  };
  EXPECT_EQ(transparency(WritePng(SPNG_COLOR_TYPE_TRUECOLOR_ALPHA, 8,
                                  {10, 20, 30, 0, 10, 20, 30, 255, 0, 0, 0, 128})),
            (Samples{255, 0, 127}));
  EXPECT_EQ(transparency(WritePng(SPNG_COLOR_TYPE_GRAYSCALE_ALPHA, 8, {10, 0, 10, 255})),
            (Samples{255, 0}));
  spng_trns key{};
  key.gray = 10;
  EXPECT_EQ(transparency(WritePng(SPNG_COLOR_TYPE_GRAYSCALE, 8, {10, 20}, nullptr, &key)),
            (Samples{255, 0}));
  const auto message = [](const std::string& file) {
    return std::string(DecodePngTransparency(file, kPlenty).status().message());
  };
  EXPECT_THAT(message(WritePng(SPNG_COLOR_TYPE_TRUECOLOR, 8, {1, 2, 3})),
              HasSubstr("no alpha channel"));
  EXPECT_THAT(message("\xff\xd8\xff JPEG, which has none"), HasSubstr("no PNG"));
  EXPECT_THAT(message(""), HasSubstr("no PNG"));
  EXPECT_THAT(message(WritePng(SPNG_COLOR_TYPE_GRAYSCALE_ALPHA, 8, {10, 0}).substr(0, 50)),
              HasSubstr("cannot be read"));
}

TEST(PngTest, ReadsPalettesAndOtherDepths) {
  spng_plte palette{};
  palette.n_entries = 2;
  palette.entries[0] = {1, 2, 3, 255};
  palette.entries[1] = {4, 5, 6, 255};
  EXPECT_EQ(Unpacked(WritePng(SPNG_COLOR_TYPE_INDEXED, 8, {1, 0}, &palette), 3),
            (Samples{4, 5, 6, 1, 2, 3}));
  EXPECT_EQ(Unpacked(WritePng(SPNG_COLOR_TYPE_GRAYSCALE, 1, {0b10100000}), 1),
            (Samples{255, 0, 255, 0, 0, 0, 0, 0}));
  EXPECT_EQ(Unpacked(WritePng(SPNG_COLOR_TYPE_GRAYSCALE, 16, {0x34, 0x12, 0x78, 0xff}), 1),
            (Samples{0x12, 0xff}));
  EXPECT_EQ(Unpacked(WritePng(SPNG_COLOR_TYPE_TRUECOLOR, 16, {0, 1, 0, 2, 0, 3}), 3),
            (Samples{1, 2, 3}));
}

/// Not used, but unpacked by the library.
TEST(PngTest, RefusesATextThatUnpacksToTooMuch) {
  spng_ctx* const context = spng_ctx_new(SPNG_CTX_ENCODER);
  spng_set_option(context, SPNG_ENCODE_TO_BUFFER, 1);
  spng_ihdr header{.width = 1, .height = 1, .bit_depth = 8};
  ASSERT_EQ(spng_set_ihdr(context, &header), 0);
  std::string text(64 << 20, 'a');
  spng_text chunk{};
  chunk.keyword[0] = 'k';
  chunk.type = SPNG_ZTXT;
  chunk.length = text.size();
  chunk.text = text.data();
  ASSERT_EQ(spng_set_text(context, &chunk, 1), 0);
  const uint8_t sample = 7;
  ASSERT_EQ(spng_encode_image(context, &sample, 1, SPNG_FMT_PNG, SPNG_ENCODE_FINALIZE), 0);
  size_t size = 0;
  int error = 0;
  void* const data = spng_get_png_buffer(context, &size, &error);
  const std::string file(static_cast<char*>(data), size);
  std::free(data);
  spng_ctx_free(context);
  ASSERT_LT(file.size(), 1u << 20);
  const auto pixels = DecodeFile(file, kPlenty);
  ASSERT_FALSE(pixels.ok());
  EXPECT_THAT(std::string(pixels.status().message()), HasSubstr("chunk"));
}

TEST(FormatsTest, TheMemoryOfAFileIsReservedBeforeItIsUnpacked) {
  for (const FileFormat format : {FileFormat::kPng, FileFormat::kJpeg, FileFormat::kWebp}) {
    const auto file = EncodeFile(Gradient(24, 40, 3), format, 90, {});
    ASSERT_TRUE(file.ok());
    int64_t asked = 0;
    // Without its end it could not be unpacked.
    const auto refused =
        DecodeFile(file->substr(0, file->size() - 20), kPlenty, [&](int64_t bytes) {
          asked = bytes;
          return ResourceExhausted("no room");
        });
    EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status().message();
    EXPECT_GE(asked, 24 * 40 * 3);
  }
}

TEST(JpegTest, RefusesMoreScansThanEncodersWrite) {
  const auto file = EncodeFile(Gradient(24, 40, 1), FileFormat::kJpeg, 90, {});
  ASSERT_TRUE(file.ok());
  const size_t scan = file->find("\xff\xda"), end = file->size() - 2;
  const auto with_scans = [&](int scans) {
    std::string text = file->substr(0, end);
    for (int i = 1; i < scans; ++i) text += file->substr(scan, end - scan);
    return DecodeFile(text + "\xff\xd9", kPlenty).status();
  };
  EXPECT_THAT(std::string(with_scans(65).message()), HasSubstr("has 65 scans, and 64 are allowed"));
  EXPECT_THAT(std::string(with_scans(64).message()), Not(HasSubstr("scans,")));

  // A segment of an application that looks like scans, and more of it after the image.
  std::string markers;
  for (int i = 0; i < 100; ++i) markers += "\xff\xda";
  const std::string segment = std::string("\xff\xe1\x00\xca", 4) + markers;
  const auto good = DecodeFile(file->substr(0, 2) + segment + file->substr(2) + markers, kPlenty);
  EXPECT_TRUE(good.ok()) << good.status().message();
}

// By libjpeg: red at the left and black at the right, with three samples of luma to one of colour.
TEST(JpegTest, ReadsSamplingWithoutAName) {
  const std::string file = absl::HexStringToBytes(
      "ffd8ffe000104a46494600010100000100010000ffdb004300080606070605080707070909080a0c140d0c0b"
      "0b0c1912130f141d1a1f1e1d1a1c1c20242e2720222c231c1c2837292c30313434341f27393d38323c2e3334"
      "32ffdb0043010909090c0b0c180d0d1832211c21323232323232323232323232323232323232323232323232"
      "3232323232323232323232323232323232323232323232323232ffc000110800080018030131000211010311"
      "01ffc40014000100000000000000000000000000000006ffc400181001000301000000000000000000000000"
      "00064482c2ffc4001501010100000000000000000000000000000506ffc4001c110001030500000000000000"
      "000000000000050642438182c1c2ffda000c03010002110311003f0016332ea7be4646274adb2e1e7432e4ff"
      "d9");
  const auto pixels = DecodeFile(file, kPlenty);
  ASSERT_TRUE(pixels.ok()) << pixels.status();
  EXPECT_EQ(pixels->width, 24);
  EXPECT_EQ(pixels->height, 8);
  const auto row = pixels->samples.begin() + 4 * 24 * 3;
  EXPECT_EQ(Samples(row, row + 3), (Samples{250, 3, 0}));  // as Pillow
  EXPECT_EQ(Samples(row + 23 * 3, row + 24 * 3), (Samples{3, 0, 2}));
}

// Pillow reads all of these, too.
TEST(JpegTest, ReadsWhatIsOddButWhole) {
  for (const int channels : {1, 3}) {
    const std::string file = EncodeJpeg(ToPixels(Gradient(24, 40, channels)), 90).value();
    const Samples expected = DecodeJpeg(file, kPlenty)->samples;
    const std::string scan("\xff\xda", 2), junk("\0\0\x01", 3), padding(300, '\0');
    const size_t first_table = file.find("\xff\xdb"), scan_begin = file.find(scan);
    const size_t scan_data = scan_begin + 2 + 6 + 2 * channels;
    const size_t end = file.size() - 2;
    const auto with = [](std::string text, size_t at, size_t size, const std::string& by) {
      return text.replace(at, size, by);
    };
    const std::string version = with(file, 11, 1, "\x03");
    const std::string between = with(file, first_table, 0, junk);
    const std::string coefficients = with(file, scan_data - 3, 3, std::string(3, '\0'));
    const std::string tail = with(file, end, 0, padding + "\xff");
    const std::string all =
        with(with(with(with(file, end, 0, padding), scan_data - 3, 3, std::string(3, '\0')),
                  first_table, 0, junk),
             11, 1, "\x03");
    for (const std::string& odd : {version, between, coefficients, tail, all}) {
      const auto pixels = DecodeFile(odd, kPlenty);
      ASSERT_TRUE(pixels.ok()) << pixels.status();
      EXPECT_EQ(pixels->samples, expected);
      // None of it hides that a part is missing, with and without the marker of the end.
      const size_t odd_data = odd.rfind(scan) + scan_data - scan_begin;
      for (size_t size = 0; size < odd.size(); ++size)
        EXPECT_FALSE(DecodeFile(odd.substr(0, size), kPlenty).ok()) << size << odd.size();
      for (size_t size = 0; size + 40 < file.size() - scan_data; ++size) {
        const auto cut = DecodeFile(odd.substr(0, odd_data + size) + "\xff\xd9", kPlenty);
        EXPECT_THAT(std::string(cut.status().message()), HasSubstr("premature end of data segment"))
            << size;
      }
    }
  }
}

// The codes of no colour are zeros, and may end with a byte.
TEST(JpegTest, PaddingIsWhatTheScanDoesNotRead) {
  int zeros = 0;
  for (int level = 0; level < 256; level += 16) {
    const Pixels grey{16, 16, 3, Samples(16 * 16 * 3, static_cast<uint8_t>(level))};
    std::string file = EncodeJpeg(grey, 90).value();
    zeros += file[file.size() - 3] == 0;
    file[11] = 3;  // of JFIF
    const auto whole = DecodeFile(file, kPlenty);
    ASSERT_TRUE(whole.ok()) << level << whole.status();
    file.insert(file.size() - 2, std::string(300, '\0'));
    const auto pixels = DecodeFile(file, kPlenty);
    ASSERT_TRUE(pixels.ok()) << level << pixels.status();
    EXPECT_EQ(pixels->samples, whole->samples);
  }
  EXPECT_GT(zeros, 0);
}

// Codes that are read from the wrong bit may come to an end too early, which leaves bytes unread.
TEST(JpegTest, RefusesUnreadBytesThatAreNoPadding) {
  std::mt19937 random(1);
  Pixels noise{64, 64, 3, Samples(64 * 64 * 3)};
  for (uint8_t& sample : noise.samples) sample = static_cast<uint8_t>(random());
  const std::string file = EncodeJpeg(noise, 50).value();
  const std::string unread = "extraneous bytes before marker 0xd9";
  int found = 0;
  for (size_t at = file.find("\xff\xda") + 14; at < file.size() - 2; ++at) {
    std::string damaged = file;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x55);
    const std::string message(DecodeFile(damaged, kPlenty).status().message());
    found += message.find(unread) != std::string::npos;
  }
  EXPECT_GT(found, 100);

  const auto with_end = [&](const std::string& end) {
    return DecodeFile(file.substr(0, file.size() - 2) + end + "\xff\xd9", kPlenty).status();
  };
  EXPECT_TRUE(with_end(std::string(300, '\0')).ok());
  EXPECT_TRUE(with_end(std::string(300, '\xff')).ok());
  for (const std::string& end : {std::string(300, '\x7f'), std::string(300, '\0') + "\x01",
                                 std::string(20, '\x01') + std::string(300, '\0')})
    EXPECT_THAT(std::string(with_end(end).message()), HasSubstr(unread));
}

std::string BigEndian(uint32_t value, size_t size) {
  std::string bytes;
  for (size_t i = size; i-- > 0;) bytes += static_cast<char>(value >> 8 * i & 0xff);
  return bytes;
}
std::string LittleEndian(uint32_t value, size_t size) {
  const std::string bytes = BigEndian(value, size);
  return {bytes.rbegin(), bytes.rend()};
}

/// EXIF with two tags, the second of which is Orientation, without a prefix.
std::string Exif(uint32_t orientation, bool little_endian = false) {
  const auto number = little_endian ? LittleEndian : BigEndian;
  return (little_endian ? "II" : "MM") + number(42, 2) + number(8, 4) + number(2, 2) +
         number(0x010f, 2) + number(2, 2) + number(4, 4) + "abc" + std::string(1, '\0') +
         number(0x0112, 2) + number(3, 2) + number(1, 4) + number(orientation, 2) + number(0, 2) +
         number(0, 4);
}
std::string PngChunk(const std::string& type, const std::string& data) {
  const std::string summed = type + data;
  const auto sum =
      crc32(0, reinterpret_cast<const Bytef*>(summed.data()), static_cast<uInt>(summed.size()));
  return BigEndian(static_cast<uint32_t>(data.size()), 4) + summed +
         BigEndian(static_cast<uint32_t>(sum), 4);
}
/// A file of EncodeFile with EXIF, as it is.
std::string WithExif(const std::string& file, FileFormat format, const std::string& content) {
  const auto size = static_cast<uint32_t>(content.size());
  if (format == FileFormat::kPng) {
    constexpr size_t kHeader = 8 + 12 + 13;  // signature and IHDR
    return file.substr(0, kHeader) + PngChunk("eXIf", content) + file.substr(kHeader);
  }
  if (format == FileFormat::kJpeg)
    return file.substr(0, 2) + "\xff\xe1" + BigEndian(size + 2, 2) + content + file.substr(2);
  const auto features = [&] {
    WebPBitstreamFeatures found;
    EXPECT_EQ(WebPGetFeatures(reinterpret_cast<const uint8_t*>(file.data()), file.size(), &found),
              VP8_STATUS_OK);
    return found;
  }();
  const std::string chunks = "WEBPVP8X" + LittleEndian(10, 4) + LittleEndian(8, 4) +
                             LittleEndian(static_cast<uint32_t>(features.width - 1), 3) +
                             LittleEndian(static_cast<uint32_t>(features.height - 1), 3) +
                             file.substr(12) + "EXIF" + LittleEndian(size, 4) + content +
                             std::string(size % 2, '\0');
  return "RIFF" + LittleEndian(static_cast<uint32_t>(chunks.size()), 4) + chunks;
}

// Bands of 128 rows, or 384 of a grey picture, are joined by restarts of the scan, which are
// numbered from 0 to 7.
TEST(JpegTest, BandsAreOnePicture) {
  int bands = 0;
  const auto on_threads = [&](int count, const std::function<void(int)>& task) {
    bands = count;
    std::vector<std::thread> threads;
    for (int i = count - 1; i >= 0; --i) threads.emplace_back([&task, i] { task(i); });
    for (std::thread& thread : threads) thread.join();
  };
  for (const int channels : {1, 3}) {
    constexpr int kWidth = 515, kHeight = 1300;
    Pixels picture{kWidth, kHeight, channels, {}};
    std::mt19937 random(7);
    for (int i = 0; i < kWidth * kHeight * channels; ++i) {
      picture.samples.push_back(static_cast<uint8_t>(i / channels / kWidth / 8 + random() % 16));
    }
    const auto file = EncodeJpeg(picture, 95), same = EncodeJpeg(picture, 95, on_threads);
    ASSERT_TRUE(file.ok() && same.ok()) << file.status() << same.status();
    EXPECT_EQ(*file, *same);
    EXPECT_EQ(bands, channels == 1 ? 4 : 11);
    const auto seen = DecodeJpeg(*file, kPlenty);
    ASSERT_TRUE(seen.ok()) << seen.status();
    ASSERT_EQ(seen->samples.size(), picture.samples.size());
    // What is left of the first band alone. Its last rows share colours with the next when decoded.
    const int rows = channels == 1 ? 376 : 120;
    Pixels top{kWidth, channels == 1 ? 384 : 128, channels, picture.samples};
    top.samples.resize(size_t{kWidth} * top.height * channels);
    const auto band = DecodeJpeg(*EncodeJpeg(top, 95), kPlenty);
    ASSERT_TRUE(band.ok()) << band.status();
    const auto end = static_cast<int64_t>(rows) * kWidth * channels;
    EXPECT_TRUE(
        std::equal(seen->samples.begin(), seen->samples.begin() + end, band->samples.begin()));
    double error = 0;
    for (size_t i = 0; i < picture.samples.size(); ++i)
      error += std::pow(picture.samples[i] - seen->samples[i], 2);
    EXPECT_LT(error / static_cast<double>(picture.samples.size()), 25) << channels;  // 19 and 2
  }
}

TEST(JpegTest, OtherFilesOfTheEnvironmentAreNoBands) {
  const Pixels picture{512, 512, 3, std::vector<uint8_t>(size_t{3} * 512 * 512, 77)};
  for (const char* const variable : {"TJ_PROGRESSIVE", "TJ_ARITHMETIC", "TJ_RESTART"}) {
    setenv(variable, "1", /*overwrite=*/1);
    const auto file = EncodeJpeg(picture, 90);
    unsetenv(variable);
    EXPECT_EQ(file.status().code(), absl::StatusCode::kInternal) << variable;
    EXPECT_THAT(std::string(file.status().message()), HasSubstr(variable));
  }
  EXPECT_TRUE(EncodeJpeg(picture, 90).ok());
}

TEST(JpegTest, AnEdgeHas16Bits) {
  // The second in several bands.
  for (const auto& [width, height] : {std::pair{70'000, 1}, std::pair{16, 70'000}}) {
    const auto file = EncodeJpeg(
        {width, height, 1, std::vector<uint8_t>(static_cast<size_t>(width) * height)}, 90);
    EXPECT_EQ(file.status().code(), absl::StatusCode::kInternal) << width << " " << file.status();
  }
}

/// With JPEG's prefix or without. Some programs write it to other formats, too.
class ExifTest : public ::testing::TestWithParam<std::tuple<FileFormat, std::string>> {};

TEST_P(ExifTest, PhotosAreTurnedAsItSays) {
  const auto& [format, prefix] = GetParam();
  // Dark at the left and bright at the right in red, darker at the top than at the bottom in green.
  constexpr int kWidth = 48, kHeight = 32;
  Pixels picture{kWidth, kHeight, 3, {}};
  for (int y = 0; y < kHeight; ++y) {
    for (int x = 0; x < kWidth; ++x) {
      picture.samples.insert(picture.samples.end(),
                             {static_cast<uint8_t>(255 * x / (kWidth - 1)),
                              static_cast<uint8_t>(127 * y / (kHeight - 1)), 0});
    }
  }
  const auto file = EncodeFile(FromPixels(picture, 3), format, 100, {});
  ASSERT_TRUE(file.ok());
  const auto stored = DecodeFile(*file, kPlenty);
  ASSERT_TRUE(stored.ok());
  // Where the corners of the file are seen: those of its first row, left and right, and the left
  // one of its last row. EXIF 2.3, table 6.
  struct Corner {
    bool right, bottom;
  };
  struct Case {
    int orientation;
    Corner first, right, below;
  };
  const auto corner = [](const Pixels& pixels, bool right, bool bottom) {
    const size_t x = right ? pixels.width - 1 : 0, y = bottom ? pixels.height - 1 : 0;
    const auto at = pixels.samples.begin() + static_cast<int64_t>((y * pixels.width + x) * 3);
    return std::vector<uint8_t>(at, at + 3);
  };
  for (const auto& [orientation, first, right, below] :
       {Case{1, {0, 0}, {1, 0}, {0, 1}}, Case{2, {1, 0}, {0, 0}, {1, 1}},
        Case{3, {1, 1}, {0, 1}, {1, 0}}, Case{4, {0, 1}, {1, 1}, {0, 0}},
        Case{5, {0, 0}, {0, 1}, {1, 0}}, Case{6, {1, 0}, {1, 1}, {0, 0}},
        Case{7, {1, 1}, {1, 0}, {0, 1}}, Case{8, {0, 1}, {0, 0}, {1, 1}}}) {
    for (const bool little_endian : {false, true}) {
      const std::string exif = prefix + Exif(orientation, little_endian);
      const auto seen = DecodeFile(WithExif(*file, format, exif), kPlenty);
      ASSERT_TRUE(seen.ok()) << seen.status();
      EXPECT_EQ(seen->width, orientation < 5 ? kWidth : kHeight) << orientation;
      EXPECT_EQ(seen->height, orientation < 5 ? kHeight : kWidth) << orientation;
      EXPECT_EQ(corner(*seen, first.right, first.bottom), corner(*stored, false, false))
          << orientation;
      EXPECT_EQ(corner(*seen, right.right, right.bottom), corner(*stored, true, false))
          << orientation;
      EXPECT_EQ(corner(*seen, below.right, below.bottom), corner(*stored, false, true))
          << orientation;
    }
  }
  // What is no orientation turns nothing.
  const std::string whole = Exif(6);
  std::vector<std::string> others = {Exif(0), Exif(9), "Exif", std::string(60'000, 'a'),
                                     // a directory beyond the end, and one with too many entries
                                     whole.substr(0, 4) + "\xff\xff\xff\xff" + whole.substr(8),
                                     whole.substr(0, 8) + "\xff\xff" + whole.substr(10, 12)};
  for (size_t size = 0; size < 32; ++size) others.push_back(whole.substr(0, size));
  for (const std::string& other : others) {
    const std::string content = prefix + other;
    if (format == FileFormat::kPng && content.empty()) continue;  // spng refuses empty ones
    const auto seen = DecodeFile(WithExif(*file, format, content), kPlenty);
    ASSERT_TRUE(seen.ok()) << seen.status();
    EXPECT_EQ(seen->samples, stored->samples);
  }
}
INSTANTIATE_TEST_SUITE_P(All, ExifTest,
                         ::testing::Combine(::testing::Values(FileFormat::kPng, FileFormat::kWebp),
                                            ::testing::Values(std::string(),
                                                              std::string(kExifPrefix))));
INSTANTIATE_TEST_SUITE_P(Jpeg, ExifTest,
                         ::testing::Combine(::testing::Values(FileFormat::kJpeg),
                                            ::testing::Values(std::string(kExifPrefix))));

TEST(PngTest, TransparencyIsTurnedLikeThePicture) {
  // Two pixels, the left one transparent; with EXIF before the picture and behind it.
  const std::string ihdr = BigEndian(2, 4) + BigEndian(1, 4) + std::string("\x08\x04\0\0\0", 5);
  const std::string row("\0\x40\0\x80\xff", 5);
  const std::string idat =
      std::string("\x78\x01\x01\x05\0\xfa\xff", 7) + row +
      BigEndian(static_cast<uint32_t>(adler32(1, reinterpret_cast<const Bytef*>(row.data()), 5)),
                4);
  const std::string exif = PngChunk("eXIf", Exif(6));
  for (const bool before : {true, false}) {
    const std::string file = "\x89PNG\r\n\x1a\n" + PngChunk("IHDR", ihdr) + (before ? exif : "") +
                             PngChunk("IDAT", idat) + (before ? "" : exif) + PngChunk("IEND", "");
    const auto picture = DecodePng(file, kPlenty),
               transparency = DecodePngTransparency(file, kPlenty);
    ASSERT_TRUE(picture.ok()) << picture.status();
    ASSERT_TRUE(transparency.ok()) << transparency.status();
    for (const Pixels* const pixels : {&*picture, &*transparency}) {
      EXPECT_EQ(pixels->width, 1);
      EXPECT_EQ(pixels->height, 2);
    }
    EXPECT_EQ(picture->samples, (std::vector<uint8_t>{255, 0x80}));
    EXPECT_EQ(transparency->samples, (std::vector<uint8_t>{255, 0}));
  }
}

TEST(WebpTest, ExifThatTheHeaderDoesNotAnnounceIsNone) {
  const auto file = EncodeFile(Gradient(24, 40, 3), FileFormat::kWebp, 90, {});
  ASSERT_TRUE(file.ok());
  std::string turned = WithExif(*file, FileFormat::kWebp, Exif(6));
  EXPECT_EQ(DecodeFile(turned, kPlenty)->width, 24);
  turned[20] = 0;
  EXPECT_EQ(DecodeFile(turned, kPlenty)->width, 40);
}

TEST(FormatsTest, RefusesWhatIsNoImage) {
  EXPECT_THAT(std::string(DecodeFile("", kPlenty).status().message()), HasSubstr("empty"));
  EXPECT_THAT(std::string(DecodeFile("GIF89a....", kPlenty).status().message()),
              HasSubstr("neither PNG"));
}

}  // namespace
}  // namespace denoised
