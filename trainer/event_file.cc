// SPDX-License-Identifier: Apache-2.0
#include "trainer/event_file.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <system_error>

namespace denoised::trainer {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// Protocol buffers' wire format, as much of it as an event needs.
class Message {
 public:
  Message& Varint(int field, uint64_t value) { return Key(field, 0).Raw(value); }
  Message& Double(int field, double value) { return Key(field, 1).Bytes(&value, sizeof value); }
  Message& Float(int field, float value) { return Key(field, 5).Bytes(&value, sizeof value); }
  Message& Text(int field, const std::string& text) {
    Key(field, 2).Raw(text.size());
    bytes_ += text;
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  Message& Key(int field, int wire) { return Raw(static_cast<uint64_t>(field) << 3 | wire); }
  Message& Raw(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
    return *this;
  }
  Message& Bytes(const void* data, size_t size) {  // little-endian machines only, as all of ours
    bytes_.append(static_cast<const char*>(data), size);
    return *this;
  }
  std::string bytes_;
};

constexpr std::array<uint32_t, 256> MakeTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    table[i] = crc;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kTable = MakeTable();

std::string Little(uint64_t value, size_t bytes) {
  std::string text;
  for (size_t i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i));
  return text;
}

/// An event in TFRecord framing.
std::string Record(const std::string& event) {
  const std::string length = Little(event.size(), 8);
  return length + Little(MaskedCrc32c(length), 4) + event + Little(MaskedCrc32c(event), 4);
}

Message EventAt(int64_t step) {
  Message event;
  event.Double(1, Now()).Varint(2, static_cast<uint64_t>(step));
  return event;
}

}  // namespace

uint32_t MaskedCrc32c(const std::string& bytes) {
  uint32_t crc = 0xffffffffu;
  for (const char c : bytes) crc = kTable[(crc ^ static_cast<unsigned char>(c)) & 0xff] ^ crc >> 8;
  crc = ~crc;
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

absl::StatusOr<EventFile> EventFile::Create(const std::string& directory, int64_t first_step) {
  char host[256] = "host";
  gethostname(host, sizeof host - 1);
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  const std::string path =
      fmt::format("{}/events.out.tfevents.{:.0f}.{}.{}", directory, Now(), host, getpid());
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  if (file == nullptr)
    return Internal("{}: cannot be created: {}", path, std::generic_category().message(errno));
  // A SessionLog whose status is START.
  const std::string start = EventAt(first_step).Text(7, Message().Varint(1, 1).bytes()).bytes();
  const std::string record =
      Record(Message().Double(1, Now()).Text(3, "brain.Event:2").bytes()) + Record(start);
  std::fwrite(record.data(), 1, record.size(), file);  // the first event flushes it
  return EventFile(path, file);
}

absl::Status EventFile::Write(int64_t step, const std::string& event) {
  if (file_ == nullptr) return absl::OkStatus();
  const std::string record = Record(event);
  errno = 0;
  if (std::fwrite(record.data(), 1, record.size(), file_.get()) == record.size() &&
      std::fflush(file_.get()) == 0)
    return absl::OkStatus();
  const int reason = errno;
  file_.reset();
  return Internal("{}: cannot be written from step {} on: {}", path_, step,
                  std::generic_category().message(reason));
}

absl::Status EventFile::Scalars(int64_t step, const std::map<std::string, double>& values) {
  Message summary;
  for (const auto& [tag, value] : values)
    summary.Text(1, Message().Text(1, tag).Float(2, static_cast<float>(value)).bytes());
  return Write(step, EventAt(step).Text(5, summary.bytes()).bytes());
}

absl::Status EventFile::Image(int64_t step, const std::string& tag, const std::string& png,
                              int width, int height, int channels) {
  const std::string image = Message()
                                .Varint(1, static_cast<uint64_t>(height))
                                .Varint(2, static_cast<uint64_t>(width))
                                .Varint(3, static_cast<uint64_t>(channels))
                                .Text(4, png)
                                .bytes();
  const std::string value = Message().Text(1, tag).Text(4, image).bytes();
  return Write(step, EventAt(step).Text(5, Message().Text(1, value).bytes()).bytes());
}

}  // namespace denoised::trainer
