// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <webp/demux.h>
#include <webp/encode.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "command/codec.h"
#include "command/codec_files.h"
#include "command/completion.h"
#include "command/files.h"
#include "command/generate_request.h"
#include "command/interrupt.h"
#include "command/json.h"
#include "command/live_view.h"
#include "command/npy.h"
#include "command/progress.h"
#include "command/report.h"
#include "command/table.h"
#include "command/terminal.h"
#include "command/timeline.h"
#include "denoised/rpc_status.h"
#include "flags/printable.h"
#include "tests/client/fake_service.h"
#include "tests/io/temporary_directory.h"

namespace denoised::command {
namespace {

using std::chrono::duration;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

Pixels Filled(int width, int height, uint8_t value) {
  Pixels image = Blank(width, height, 1);
  std::fill(image.data.begin(), image.data.end(), value);
  return image;
}

client::Image Encoded(std::string file, std::string mime_type) {
  client::Image image;
  image.mime_type = std::move(mime_type);
  image.content = std::move(file);
  return image;
}

// --- signals

TEST(InterruptTest, LeavesSignalsAsTheyWere) {
  sigset_t before, after;
  ASSERT_EQ(pthread_sigmask(SIG_BLOCK, nullptr, &before), 0);
  {
    const Interrupt interrupt;
    raise(SIGINT);  // of this thread, so that the waiter does not get it
  }
  ASSERT_EQ(pthread_sigmask(SIG_BLOCK, nullptr, &after), 0);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP}) {
    EXPECT_EQ(sigismember(&after, signal), sigismember(&before, signal)) << signal;
  }
}

TEST(LiveViewTest, ATerminalThatNobodyReadsDoesNotDelayTheEnd) {
  int master = -1, terminal = -1;
  ASSERT_EQ(openpty(&master, &terminal, nullptr, nullptr, nullptr), 0);
  std::FILE* const file = fdopen(terminal, "w");
  {
    const LiveView view(file, TerminalColours::kGreys);
    ASSERT_EQ(fcntl(terminal, F_SETFL, O_WRONLY | O_NONBLOCK), 0);
    const std::string text(4096, 'x');
    while (write(terminal, text.data(), text.size()) > 0) continue;
    ASSERT_EQ(fcntl(terminal, F_SETFL, O_WRONLY), 0);
    WithCursorShown([] {});  // returns
    close(master);           // what is written now is an error
  }
  std::fclose(file);
}

// --- pixels

TEST(PixelsTest, ShrinkingAveragesAndGrowingRepeats) {
  const Pixels image = {4, 2, 1, {0, 10, 100, 110, 20, 30, 120, 130}};
  EXPECT_THAT(Resized(image, 2, 1).data, ElementsAre(15, 115));
  const Pixels row = {2, 1, 1, {7, 9}};
  EXPECT_THAT(Resized(row, 4, 2).data, ElementsAre(7, 7, 9, 9, 7, 7, 9, 9));
  EXPECT_EQ(Resized(image, 3, 2).data.size(), 6u);  // no whole ratio
  const Pixels rgb = {1, 2, 3, {0, 100, 200, 10, 110, 210}};
  EXPECT_THAT(Resized(rgb, 1, 1).data, ElementsAre(5, 105, 205));
}

TEST(ContactSheetTest, PutsImagesInRowsWithLinesBetween) {
  const std::vector<Pixels> images = {Filled(2, 1, 1), Filled(2, 1, 2), Filled(2, 1, 3)};
  const Pixels sheet = ContactSheet(images, 2);
  EXPECT_EQ(sheet.width, 5);
  EXPECT_EQ(sheet.height, 3);
  // 64 is the line; the fourth cell is empty.
  EXPECT_THAT(sheet.data, ElementsAre(1, 1, 64, 2, 2, 64, 64, 64, 64, 64, 3, 3, 64, 0, 0));
}

TEST(ContactSheetTest, IsRgbWhenOneImageIs) {
  const std::vector<Pixels> images = {Filled(1, 1, 9), Pixels{1, 1, 3, {1, 2, 3}}};
  EXPECT_THAT(ContactSheet(images, 2).data, ElementsAre(9, 9, 9, 64, 64, 64, 1, 2, 3));
}

// --- codecs

TEST(CodecTest, PngRoundTrips) {
  const Pixels rgb = {2, 2, 3, {1, 2, 3, 4, 5, 6, 7, 8, 9, 250, 251, 252}};
  for (const Pixels& image : {rgb, Filled(3, 5, 77)}) {
    const auto file = EncodePng(image, {{"seed", "42"}});
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_THAT(*file, HasSubstr(std::string("tEXtseed\0"
                                             "42",
                                             11)));
    const auto decoded = Decode(Encoded(*file, "image/png"));
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(decoded->channels, image.channels);
    EXPECT_EQ(decoded->data, image.data);
  }
}

TEST(CodecTest, WebpDecodes) {
  const Pixels image = {1, 2, 3, {1, 2, 3, 200, 100, 50}};
  uint8_t* bytes = nullptr;
  const size_t size = WebPEncodeLosslessRGB(image.data.data(), 1, 2, 3, &bytes);
  const std::string file(reinterpret_cast<char*>(bytes), size);
  WebPFree(bytes);
  const auto decoded = Decode(Encoded(file, "image/webp"));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->data, image.data);
}

TEST(CodecTest, JpegDecodes) {
  // 8 x 8 pixels of grey 128, which JPEG codes as zeros: the smallest baseline file, by hand.
  std::string file("\xff\xd8\xff\xdb\x00\x43\x00", 7);
  file += std::string(64, '\x01');
  file += std::string("\xff\xc0\x00\x0b\x08\x00\x08\x00\x08\x01\x01\x11\x00", 13);
  // One code of one bit each for DC and AC: category 0, and end of block.
  for (const char table : {'\x00', '\x10'}) {
    file += std::string("\xff\xc4\x00\x14", 4) + table + '\x01' + std::string(15, '\0') + '\0';
  }
  file += std::string("\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00\x3f\xff\xd9", 13);
  const auto decoded = Decode(Encoded(file, "image/jpeg"));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->width, 8);
  EXPECT_EQ(decoded->channels, 1);
  EXPECT_EQ(decoded->data, std::vector<uint8_t>(64, 128));
  file.resize(file.size() - 2);
  EXPECT_EQ(Decode(Encoded(file, "image/jpeg")).status().code(), absl::StatusCode::kDataLoss)
      << "without its end";
}

TEST(CodecTest, DamagedFilesAreErrors) {
  const std::string png = *EncodePng(Filled(40, 40, 1), {});
  for (const char* type : {"image/png", "image/jpeg", "image/webp"}) {
    EXPECT_EQ(Decode(Encoded("", type)).status().code(), absl::StatusCode::kDataLoss) << type;
    EXPECT_EQ(Decode(Encoded("garbage", type)).status().code(), absl::StatusCode::kDataLoss);
  }
  for (const size_t lost : {size_t{12}, size_t{13}, png.size() / 2}) {
    EXPECT_EQ(DecodePng(png.substr(0, png.size() - lost)).status().code(),
              absl::StatusCode::kDataLoss)
        << lost;
  }
  EXPECT_FALSE(Decode(Encoded("", "image/tiff")).ok());
}

TEST(CodecTest, FloatTensorsAreClipped) {
  const float values[] = {-1, 0, 1, 7, -3, std::numeric_limits<float>::quiet_NaN()};
  client::Image image;
  client::Tensor tensor = {client::Tensor::Type::kFloat32, {2, 3, 1}, {}};
  tensor.data.assign(reinterpret_cast<const char*>(values), sizeof values);
  image.content = tensor;
  const auto decoded = Decode(image);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->width, 3);
  EXPECT_THAT(decoded->data, ElementsAre(0, 128, 255, 255, 0, 0));
  tensor.data.pop_back();
  image.content = tensor;
  EXPECT_FALSE(Decode(image).ok());
  tensor.shape = {-1, 3, 1};
  image.content = tensor;
  EXPECT_FALSE(Decode(image).ok());
}

TEST(AnimationTest, KeepsFramesAndTimes) {
  const auto file =
      EncodeAnimation({Filled(8, 8, 0), Filled(8, 8, 99), Filled(8, 8, 200)}, 80, 2000);
  ASSERT_TRUE(file.ok()) << file.status();
  const WebPData data = {reinterpret_cast<const uint8_t*>(file->data()), file->size()};
  WebPAnimDecoder* decoder = WebPAnimDecoderNew(&data, nullptr);
  ASSERT_NE(decoder, nullptr);
  std::vector<int> greys, ends;
  uint8_t* pixels = nullptr;
  for (int end = 0; WebPAnimDecoderHasMoreFrames(decoder);) {
    ASSERT_TRUE(WebPAnimDecoderGetNext(decoder, &pixels, &end));
    greys.push_back(pixels[0]);
    ends.push_back(end);
  }
  WebPAnimDecoderDelete(decoder);
  EXPECT_THAT(greys, ElementsAre(0, 99, 200));
  EXPECT_THAT(ends, ElementsAre(80, 160, 2160));
}

TEST(TimelineTest, FramesShowEachImageAsItWasThen) {
  Timeline timeline(2, 2, 1, 1);
  timeline.Add(0, 1, Filled(1, 1, 10), true);
  timeline.Add(1, 2, Filled(1, 1, 20), true);
  timeline.Add(0, 3, Filled(2, 2, 30), true);  // another size
  timeline.Add(7, 9, Filled(1, 1, 99), true);  // no such image
  const std::vector<Pixels> frames = timeline.Frames();
  ASSERT_EQ(frames.size(), 3u);
  EXPECT_THAT(frames[0].data, ElementsAre(10, 64, 0));
  EXPECT_THAT(frames[1].data, ElementsAre(10, 64, 20));
  EXPECT_THAT(frames[2].data, ElementsAre(30, 64, 20));
  EXPECT_EQ(timeline.Latest().data, frames[2].data);
}

// --- arrays and paths

TEST(NpyTest, RoundTrips) {
  const client::Tensor tensor = {client::Tensor::Type::kFloat32, {2, 3}, std::string(24, 'a')};
  const std::string file = WriteNpy(tensor);
  EXPECT_EQ((file.size() - 24) % 64, 0u);
  const auto read = ReadNpy(file);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_THAT(read->shape, ElementsAre(2, 3));
  EXPECT_EQ(read->data, tensor.data);
  EXPECT_THAT(WriteNpy({client::Tensor::Type::kUint8, {5}, "12345"}), HasSubstr("'shape': (5,)"));
}

TEST(NpyTest, RefusesWhatItCannotRead) {
  const std::string file = WriteNpy({client::Tensor::Type::kFloat32, {2, 3}, std::string(24, 'a')});
  const auto edited = [&file](const std::string& from, const std::string& to) {
    std::string copy = file;
    copy.replace(copy.find(from), from.size(), to);
    return ReadNpy(copy).status();
  };
  EXPECT_THAT(std::string(edited("<f4", "<f8").message()), HasSubstr("neither float32 nor uint8"));
  EXPECT_THAT(std::string(edited("False", "True ").message()), HasSubstr("C order"));
  EXPECT_THAT(std::string(edited("(2, 3)", "(2, 4)").message()), HasSubstr("does not fit"));
  EXPECT_FALSE(edited("(2, 3), }", "(999999999, 999999999, 999999999)}").ok());
  EXPECT_FALSE(ReadNpy("").ok());
  for (size_t size = 0; size < file.size(); ++size)
    EXPECT_FALSE(ReadNpy(file.substr(0, size)).ok());
}

TEST(ReadFileTest, HasALimit) {
  const TemporaryDirectory folder;
  const std::string path = folder / "file";
  ASSERT_TRUE(WriteFile(path, std::string(100'000, 'x')).ok());
  EXPECT_EQ(ReadFile(path, 100'000)->size(), 100'000u);
  const absl::Status status = ReadFile(path, 99'999).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "cannot read " + path + ": it has more than 99999 bytes; use a smaller file");
}

class WriteFileTest : public testing::Test {
 protected:
  /// The names in the folder.
  std::set<std::string> Names() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      names.insert(entry.path().filename());
    }
    return names;
  }
  mode_t ModeOf(const std::string& path) const {
    struct stat information = {};
    EXPECT_EQ(stat(path.c_str(), &information), 0);
    return information.st_mode & 0777;
  }

  const TemporaryDirectory folder_;
  const std::string path_ = folder_ / "file";
};

TEST_F(WriteFileTest, KeepsModesAndLinks) {
  ASSERT_TRUE(WriteFile(path_, "secret", 0600).ok());
  EXPECT_EQ(ModeOf(path_), 0600u);
  const std::string link = folder_ / "link";
  std::filesystem::create_symlink("file", link);
  ASSERT_TRUE(WriteFile(link, "new").ok());
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(ReadFile(path_).value_or(""), "new");
  EXPECT_EQ(ModeOf(path_), 0600u);
  ASSERT_TRUE(WriteFile(folder_ / "open", "x").ok());
  const mode_t mask = umask(0);
  umask(mask);
  EXPECT_EQ(ModeOf(folder_ / "open"), 0666u & ~mask);
  EXPECT_TRUE(WriteFile("/dev/null", "x").ok()) << "a device is no file to replace";
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
  EXPECT_EQ(Names(), (std::set<std::string>{"file", "link", "open"}));
}

TEST_F(WriteFileTest, KeepsALinkWhoseTargetIsNew) {
  std::filesystem::create_symlink("new", folder_ / "link");
  ASSERT_TRUE(WriteFile(folder_ / "link", "x").ok());
  EXPECT_TRUE(std::filesystem::is_symlink(folder_ / "link"));
  EXPECT_EQ(ReadFile(folder_ / "new").value_or(""), "x");
}

TEST_F(WriteFileTest, WritesInPlaceWhatCannotBeReplaced) {
  // A regular file in a folder that takes no others: the name of this thread.
  const std::string path = "/proc/thread-self/comm";
  const std::string before = ReadFile(path).value_or("");
  EXPECT_EQ(WriteFile(path, "in place"), absl::OkStatus());
  EXPECT_EQ(ReadFile(path).value_or(""), "in place\n");
  EXPECT_TRUE(WriteFile(path, before.substr(0, before.find('\n'))).ok());
}

/// Runs `what` as a user other than root, who may write everything. False if that cannot be.
bool RunAsNobody(const std::function<void()>& what) {
  if (getuid() != 0) {
    what();
    return true;
  }
  bool done = false;
  std::jthread([&] {  // the system call is of this thread alone
    constexpr int kNobody = 65534;
    if (syscall(SYS_setresuid, kNobody, kNobody, kNobody) != 0) return;
    what();
    done = true;
  })
      .join();
  return done;
}

TEST_F(WriteFileTest, WhatExistsNeedsNoFolderThatTakesNewFiles) {
  ASSERT_TRUE(WriteFile(path_, "old").ok());
  ASSERT_EQ(chmod(path_.c_str(), 0666), 0);
  ASSERT_EQ(chmod(folder_.path().c_str(), 0555), 0);
  const bool done = RunAsNobody([this] {
    EXPECT_EQ(CheckWritable("/dev/null"), absl::OkStatus());
    EXPECT_EQ(WriteFile("/dev/null", "x"), absl::OkStatus());
    EXPECT_EQ(CheckWritable(path_), absl::OkStatus());
    EXPECT_EQ(WriteFile(path_, "new"), absl::OkStatus());
    EXPECT_FALSE(CheckWritable(folder_ / "another").ok());
  });
  ASSERT_EQ(chmod(folder_.path().c_str(), 0700), 0);
  if (!done) GTEST_SKIP() << "root cannot become another user here";
  EXPECT_EQ(ReadFile(path_).value_or(""), "new");
}

TEST_F(WriteFileTest, AReadOnlyFileIsRefusedBeforehandInAFolderThatTakesNewFiles) {
  ASSERT_TRUE(WriteFile(path_, "old").ok());
  ASSERT_EQ(chmod(path_.c_str(), 0444), 0);
  ASSERT_EQ(chmod(folder_.path().c_str(), 0777), 0);
  const bool done = RunAsNobody([this] {
    EXPECT_EQ(CheckWritable(path_),
              absl::InvalidArgumentError("cannot write " + path_ + ": Permission denied"));
    EXPECT_FALSE(WriteFile(path_, "new").ok());
    EXPECT_EQ(CheckWritable(folder_ / "another"), absl::OkStatus());
  });
  if (!done) GTEST_SKIP() << "root cannot become another user here";
  EXPECT_EQ(ReadFile(path_).value_or(""), "old");
}

TEST_F(WriteFileTest, LeavesTheOldFileWhenTheDiskIsFull) {
  ASSERT_TRUE(WriteFile(path_, "old").ok());
  // The limit of a process stands for the disk's.
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small = {.rlim_cur = 4096, .rlim_max = limit.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status = WriteFile(path_, std::string(5000, 'x'));
  setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cannot write " + path_ + ": File too"));
  EXPECT_EQ(ReadFile(path_).value_or(""), "old");
  EXPECT_EQ(Names(), std::set<std::string>{"file"});
  EXPECT_EQ(ExitCodeOf(status), kError) << "the command line was right";
}

TEST(FillPathTest, FillsPlaceholders) {
  const PathFields fields = {.index = 3, .count = 12, .seed = 45, .label = "7", .model = "digits"};
  EXPECT_EQ(*FillPath("a/{model}-{label}-{seed}-{index}.png", fields), "a/digits-7-45-03.png");
  EXPECT_EQ(*FillPath("a.b/x.png", fields), "a.b/x-03.png");
  PathFields repeated = fields;
  repeated.repeats = {.seeds = true, .labels = true};
  EXPECT_EQ(*FillPath("{label}.png", fields), "7.png");
  EXPECT_EQ(*FillPath("{label}.png", repeated), "7-03.png");
  EXPECT_EQ(*FillPath("{seed}.png", fields), "45.png");
  EXPECT_EQ(*FillPath("{seed}.png", repeated), "45-03.png");
  EXPECT_EQ(*FillPath("{seed}-{index}.png", repeated), "45-03.png");
  EXPECT_EQ(*FillPath("x", {}), "x");
  EXPECT_EQ(*FillPath("x{", {}), "x{");
  EXPECT_THAT(std::string(FillPath("{sed}.png", fields).status().message()), HasSubstr("{seed}"));
}

TEST(FillPathTest, AServerChoosesNoFolder) {
  for (const char* model : {"../../x", "/tmp/x", "a/b", "..", ".hidden"}) {
    EXPECT_FALSE(FillPath("out/{model}.png", {.model = model}).ok()) << model;
    EXPECT_EQ(*FillPath("out/x.png", {.model = model}), "out/x.png");
  }
  EXPECT_EQ(*FillPath("out/{model}.png", {.model = "digits-1.5@2"}), "out/digits-1.5@2.png");
}

TEST(LabelsTest, NamesIndicesAndRepetition) {
  const std::vector<std::string> names = {"cat", "dog"};
  EXPECT_THAT(*ResolveLabels({"dog", "0"}, names, 5), ElementsAre(1, 0, 1, 0, 1));
  EXPECT_THAT(*ResolveLabels({"7"}, {}, 16), ElementsAre(7));
  EXPECT_THAT(std::string(ResolveLabels({"bird"}, names, 1).status().message()),
              HasSubstr("use one of cat, dog"));
  EXPECT_THAT(std::string(ResolveLabels({"0", "1"}, names, 1).status().message()),
              HasSubstr("--count"));
}

TEST(ParseExtentsTest, TwoPositiveNumbers) {
  EXPECT_EQ(*ParseExtents("--grid", "4x3"), std::pair(4, 3));
  for (const char* text : {"4", "x", "4x", "0x4", "4x-1", "4x3x2", "4 x3", "99999999999x1"}) {
    EXPECT_FALSE(ParseExtents("--grid", text).ok()) << text;
  }
}

// --- terminal

TEST(TerminalTest, ColoursFollowTheEnvironment) {
  EXPECT_EQ(ColoursOf("truecolor", "xterm", nullptr, "C.UTF-8"), TerminalColours::kTruecolour);
  EXPECT_EQ(ColoursOf(nullptr, "xterm-256color", nullptr, "en_US.utf8"), TerminalColours::k256);
  EXPECT_EQ(ColoursOf(nullptr, "vt100", nullptr, "C.UTF-8"), TerminalColours::kGreys);
  EXPECT_EQ(ColoursOf("truecolor", "xterm", "1", "C.UTF-8"), TerminalColours::kGreys);
  EXPECT_EQ(ColoursOf("truecolor", "xterm", nullptr, "C"), TerminalColours::kGreys);
  EXPECT_EQ(ColoursOf("truecolor", "dumb", nullptr, "C.UTF-8"), TerminalColours::kGreys);
}

TEST(TerminalTest, HalfBlocksCarryTwoPixels) {
  const Pixels image = {1, 2, 3, {1, 2, 3, 4, 5, 6}};
  EXPECT_EQ(Render(image, TerminalColours::kTruecolour),
            "\x1b[38;2;1;2;3m\x1b[48;2;4;5;6m▀\x1b[0m\n");
  // Repeated colours are not repeated in the text.
  EXPECT_EQ(Render(Filled(3, 2, 255), TerminalColours::k256),
            "\x1b[38;5;231m\x1b[48;5;231m▀▀▀\x1b[0m\n");
  EXPECT_EQ(Render(Filled(1, 2, 128), TerminalColours::k256),
            "\x1b[38;5;244m\x1b[48;5;244m▀\x1b[0m\n");
}

TEST(TerminalTest, GreysHoldNoEscape) {
  const Pixels image = {3, 2, 1, {0, 128, 255, 0, 128, 255}};
  EXPECT_EQ(Render(image, TerminalColours::kGreys), " =@\n");
  // Below an odd last row is black.
  EXPECT_EQ(Render(Filled(1, 1, 255), TerminalColours::kGreys), "=\n");
}

TEST(TerminalTest, FitsPicturesWithSquarePixels) {
  const Pixels small = FitTo(Filled(16, 16, 1), 80, 21);
  EXPECT_EQ(small.width, 32);  // twice, since 3 * 16 rows of pixels are more than 42
  EXPECT_EQ(small.height, 32);
  const Pixels large = FitTo(Filled(1000, 500, 1), 80, 21);
  EXPECT_EQ(large.width, 80);
  EXPECT_EQ(large.height, 40);
  EXPECT_EQ(FitTo(Filled(5000, 1, 1), 1, 1).height, 1);
}

TEST(LiveViewTest, ALineDoesNotWrap) {
  std::FILE* const file = std::tmpfile();  // 80 columns, as no terminal says otherwise
  ASSERT_NE(file, nullptr);
  {
    LiveView view(file, TerminalColours::kGreys);
    view.Draw(nullptr, std::string(100, 'x'));
    view.DrawLine(std::string(100, 'y'));
  }
  std::rewind(file);
  char buffer[1024];
  const std::string text(buffer, std::fread(buffer, 1, sizeof buffer, file));
  std::fclose(file);
  EXPECT_EQ(std::count(text.begin(), text.end(), 'x'), 79);
  EXPECT_EQ(std::count(text.begin(), text.end(), 'y'), 79);
}

TEST(ProgressTest, ShowsShareAndTimeLeft) {
  EXPECT_EQ(ProgressBar(5, 10, duration<double>(2), 60),
            "[===========>          ]  50 %  5/10 evaluations  2.0 s left");
  EXPECT_THAT(ProgressBar(10, 10, duration<double>(2), 60), Not(HasSubstr("left")));
  EXPECT_LE(ProgressBar(5, 10, duration<double>(2), 20).size(), 20u);
  EXPECT_NO_FATAL_FAILURE(ProgressBar(0, 0, duration<double>(0), 0));
}

TEST(ProgressTest, HumanDurations) {
  EXPECT_EQ(HumanDuration(duration<double>(1.44)), "1.4 s");
  EXPECT_EQ(HumanDuration(duration<double>(125)), "2 min 05 s");
  EXPECT_EQ(HumanDuration(duration<double>(3725)), "1 h 02 min");
}

// --- JSON

TEST(JsonTest, NamesWhatTheSamplerHas) {
  client::EffectiveParams params;
  params.s_tmin = 0.5;
  params.s_tmax = 3;
  params.s_noise = 1.25;
  params.solver_order = 2;
  params.class_vectors = {{0.5f, -1}};
  const nlohmann::json json = nlohmann::json::parse(ToJson(params).dump());
  EXPECT_EQ(json["s_tmin"], 0.5);
  EXPECT_EQ(json["s_tmax"], 3);
  EXPECT_EQ(json["s_noise"], 1.25);
  EXPECT_EQ(json["solver_order"], 2);
  EXPECT_EQ(json["class_vectors"], nlohmann::json::array({{0.5, -1}}));
}

TEST(JsonTest, SeedsAreStringsBecauseDoublesLoseDigits) {
  constexpr uint64_t kSeed = 144335953636456054;  // jq 1.6 reads 144335953636456060
  client::EffectiveParams params;
  params.seed = kSeed;
  EXPECT_FALSE(ToJson(params).contains("seeds"));
  params.seeds = {kSeed, UINT64_MAX};
  const nlohmann::json json = ToJson(params);
  EXPECT_EQ(json["seed"], "144335953636456054");
  EXPECT_EQ(json["seeds"], nlohmann::json::array({"144335953636456054", "18446744073709551615"}));
  client::Image image;
  image.seed = kSeed;
  EXPECT_EQ(ToJson(image)["seed"], "144335953636456054");
}

TEST(JsonTest, LeavesOutWhatItHasNotAndInfinity) {
  client::EffectiveParams params;
  params.s_tmax = std::numeric_limits<double>::infinity();
  const nlohmann::json json = ToJson(params);
  for (const char* key : {"s_tmin", "s_tmax", "s_noise", "solver_order", "strength"}) {
    EXPECT_FALSE(json.contains(key)) << key;
  }
  params.request.init_image = {.source = "", .strength = 0.5};
  EXPECT_EQ(ToJson(params)["strength"], 0.5);
  EXPECT_TRUE(json["class_vectors"].empty());
}

// --- errors

TEST(ReportTest, OneLineForEachFieldUnderItsFlag) {
  const absl::Status status = client::FromGrpc(
      client::InvalidFields({{"params.guidance_scale", "is -1; use 0 to 100"},
                             {"params.conditions[3].class_label", "is 12; use 0 to 9"},
                             {"params.conditions[0].negative_text", "has a NUL"},
                             {"params.text_options.clip_skip", "is 99; use 0 to 10"},
                             {"params.initial_noise.shape", "is [2]; use [1, 8, 8, 1]"},
                             {"params.steps", "is 0; use 1 to 100"},
                             {"preview.max_edge", "is 0; use 1 or more"}}));
  EXPECT_EQ(Describe(status),
            "error: --guidance is -1; use 0 to 100\n"
            "error: --labels[3] is 12; use 0 to 9\n"
            "error: --negative[0] has a NUL\n"
            "error: --clip-skip is 99; use 0 to 10\n"
            "error: --noise.shape is [2]; use [1, 8, 8, 1]\n"
            "error: --steps is 0; use 1 to 100\n"
            "error: preview.max_edge is 0; use 1 or more\n");
  EXPECT_EQ(ExitCodeOf(status), kUsage);
}

TEST(ReportTest, MessagesNameFlagsInsteadOfFields) {
  const auto violation = [](const std::string& field, const std::string& description) {
    return Describe(client::FromGrpc(client::InvalidFields({{field, description}})));
  };
  EXPECT_EQ(violation("params.conditions[0].text",
                      "is not for model 'mnist-32', which reads no text; use class_label"),
            "error: PROMPT[0] is not for model 'mnist-32', which reads no text; use --labels\n");
  EXPECT_EQ(violation("params.conditions[1].class_vector[2]", "is 1e9; use -10000 to 10000"),
            "error: --class-vectors[1][2] is 1e9; use -10000 to 10000\n");
  EXPECT_EQ(violation("params.conditions", "has 601 entries; send at most 600"),
            "error: PROMPT, --labels or --class-vectors has 601 entries; send at most 600\n");
  EXPECT_EQ(violation("params.init_image.encoded",
                      "is a picture, but the model has 4 channels; use params.init_image.tensor"),
            "error: --init-image is a picture, but the model has 4 channels; use --init-image "
            "FILE.npy\n");
  EXPECT_EQ(violation("params.mask", "is wrong; use params.mask.tensor"),
            "error: --mask is wrong; use --mask FILE.npy\n");
  EXPECT_EQ(violation("params.init_image.tensor.shape", "is [2]; use [height, width, 4]"),
            "error: --init-image.shape is [2]; use [height, width, 4]\n");
  EXPECT_EQ(violation("params.guidance_start", "is 0.5, not below guidance_stop, 0.5"),
            "error: --guidance-start is 0.5, not below --guidance-stop, 0.5\n");
  EXPECT_EQ(violation("params.seeds[1]", "is \"seeds of s_churn\"; of model's steps"),
            "error: --seed[1] is \"seeds of s_churn\"; of model's steps\n");
  EXPECT_EQ(
      Describe(absl::NotFoundError("params.model: there is no model \"params.model\\\"\"; x.y")),
      "error: --model: there is no model \"params.model\\\"\"; x.y\n");
  EXPECT_EQ(Describe(absl::InvalidArgumentError("prompts[1].negative is not UTF-8")),
            "error: --negative[1] is not UTF-8\n");
  // Names of files, which this side writes without quotes.
  for (const std::string message :
       {"cannot read prompts.text: No such file", "--init-image: cannot read params.seed.png: no",
        "--noise params.steps: is no array", "params.seed"})
    EXPECT_EQ(Describe(absl::InvalidArgumentError(message)), "error: " + message + "\n");
  // A server quotes them.
  const std::string details = client::Draining().error_details();
  EXPECT_EQ(
      Describe(client::FromGrpc(
          {grpc::StatusCode::ALREADY_EXISTS,
           "params.request_id: \"preview.kind\" is another's (modified: params.steps: 4 -> 5)",
           details})),
      "error: --request-id: \"preview.kind\" is another's (modified: --steps: 4 -> 5)\n");
  // Of a job, not of --request-id.
  EXPECT_EQ(Describe(absl::NotFoundError("request_id: there is no job")),
            "error: request_id: there is no job\n");
}

void AddFields(const google::protobuf::Descriptor& message, const std::string& path,
               std::vector<std::string>* fields) {
  for (int i = 0; i < message.field_count(); ++i) {
    const google::protobuf::FieldDescriptor& field = *message.field(i);
    const std::string name = path + "." + std::string(field.name());
    const bool leaf =
        field.message_type() == nullptr || field.message_type() == v1::Tensor::descriptor();
    if (leaf) fields->push_back(name);
    if (!leaf) AddFields(*field.message_type(), name, fields);
  }
}

TEST(ReportTest, EveryFieldThatTheCommandSetsHasItsFlag) {
  std::vector<std::string> fields, without;
  AddFields(*v1::GenerationParams::descriptor(), "params", &fields);
  AddFields(*v1::PreviewOptions::descriptor(), "preview", &fields);
  EXPECT_GT(fields.size(), 40u);
  for (const std::string& field : fields) {
    const std::string said =
        Describe(client::FromGrpc(client::InvalidFields({{field, "is wrong"}})));
    if (said == "error: " + field + " is wrong\n") without.push_back(field);
  }
  EXPECT_THAT(
      without,
      testing::UnorderedElementsAre(
          "params.output.embed_metadata", "params.size_conditions.original_size.height",
          "params.size_conditions.original_size.width", "params.size_conditions.crop.top",
          "params.size_conditions.crop.left", "params.size_conditions.target_size.height",
          "params.size_conditions.target_size.width", "preview.max_edge", "preview.format"));
}

TEST(ReportTest, AFlagThatSetsTwoFieldsIsNamedOnce) {
  const absl::Status status = client::FromGrpc(client::InvalidFields(
      {{"params.width", "is 33; use 32"}, {"params.height", "is 33; use 32"}}));
  EXPECT_EQ(Describe(status), "error: --size is 33; use 32\n");
  EXPECT_EQ(nlohmann::json::parse(DescribeAsJson(status))["fields"].size(), 2u);
  EXPECT_EQ(Describe(client::FromGrpc(client::InvalidFields(
                {{"params.width", "is 33; use 32"}, {"params.height", "is 34; use 32"}}))),
            "error: --size is 33; use 32\n"
            "error: --size is 34; use 32\n");
}

TEST(ReportTest, TellsWhenToComeBack) {
  const absl::Status status = client::FromGrpc(client::QueueFull(std::chrono::milliseconds(2500)));
  EXPECT_EQ(Describe(status), "error: the queue is full\n  try again in 2.5 s\n");
  EXPECT_EQ(ExitCodeOf(status), kUnavailable);
  const auto json = nlohmann::json::parse(DescribeAsJson(status));
  EXPECT_EQ(json["code"], "RESOURCE_EXHAUSTED");
  EXPECT_EQ(json["reason"], "QUEUE_FULL");
  EXPECT_EQ(json["retry_after_seconds"], 2.5);
}

/// As the server sends it, with details.
absl::Status FromServer(grpc::StatusCode code, const std::string& message) {
  return client::FromGrpc(grpc::Status(code, message, client::Draining().error_details()));
}

TEST(ReportTest, TheServersReasonWhyItIsTooLateIsTold) {
  const std::string remedy = "  if you gave --timeout, give more, or ask for less\n";
  EXPECT_EQ(Describe(FromServer(grpc::StatusCode::DEADLINE_EXCEEDED, "it would take 301 s")),
            "error: it would take 301 s\n" + remedy);
  EXPECT_EQ(Describe(absl::DeadlineExceededError("Deadline Exceeded")),
            "error: the server did not answer in time\n" + remedy);
}

TEST(ReportTest, WhatAnotherOneCancelledWasNotInterrupted) {
  const absl::Status cancelled = FromServer(grpc::StatusCode::CANCELLED, "it was cancelled");
  EXPECT_EQ(Describe(cancelled), "error: it was cancelled\n");
  EXPECT_EQ(ExitCodeOf(cancelled), kError);
  EXPECT_EQ(ExitCodeOf(absl::CancelledError("")), kInterrupted);
}

TEST(ReportTest, AServerCannotCommandTheTerminal) {
  EXPECT_EQ(Describe(absl::InternalError("a\x1b[2J\nb")), "error: a\\x1b[2J\\x0ab\n");
  EXPECT_EQ(
      Describe(client::FromGrpc(client::InvalidFields({{"x\x1b[2J", "is \x1b]0;title\x07"}}))),
      "error: x\\x1b[2J is \\x1b]0;title\\x07\n");
}

TEST(ReportTest, EverythingATerminalObeysIsEscaped) {
  // U+0085, U+202A to U+202E, and the neighbours of what is escaped.
  EXPECT_EQ(Printable("\u0085\u202a\u202e\u2066|\u00a0\u2027\u202f\u2065\u206a\xe2\x80"),
            "\\x85\\u202a\\u202e\\u2066|\u00a0\u2027\u202f\u2065\u206a\xe2\x80");
  EXPECT_EQ(PrintableJson({{"\u009b", "\u2029\x7f"}}), R"({"\u009b":"\u2029\u007f"})");
  const nlohmann::json text = "\x01\u009b\u2028\u202e\u2069 M\u00e4dchen";
  EXPECT_EQ(nlohmann::json::parse(PrintableJson(text)), text);  // programs read what was sent
  EXPECT_EQ(PrintableJson({{"a", 1}}, 2), "{\n  \"a\": 1\n}");
}

TEST(ReportTest, LongTextIsShortenedBetweenCharacters) {
  EXPECT_EQ(Shortened("M\u00e4dchen", 8), "M\u00e4dchen");
  EXPECT_EQ(Shortened("M\u00e4dchen", 3), "M\u00e4…");
  EXPECT_EQ(Shortened("M\u00e4dchen", 2), "M…");
  EXPECT_EQ(Shortened("a\x1b[2J", 2), "a\\x1b…");
  EXPECT_EQ(Shortened("\x80\x80\x80\x80\x80\x80", 5).size(), 2 + std::string("…").size())
      << "no UTF-8";
}

TEST(CompletionTest, AServerCannotCommandTheTerminal) {
  // Nor end the line, for a shell would read another candidate.
  EXPECT_EQ(
      ToText({.candidates = {{"a\x1b[2J\n:files\tb", "c"}, {"digits", "d\u009b"}}, .files = {}}),
      "digits\td\\x9b\n");
}

TEST(ReportTest, JsonSurvivesBytesThatAreNoText) {
  EXPECT_NO_THROW(DescribeAsJson(absl::InternalError("\xff\xfe")));
}

}  // namespace
}  // namespace denoised::command
