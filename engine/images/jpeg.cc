// SPDX-License-Identifier: Apache-2.0
#include "engine/images/jpeg.h"

#include <turbojpeg.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <utility>
#include <vector>

#include "engine/images/exif.h"

namespace denoised {
namespace {

using Codec = std::unique_ptr<void, int (*)(tjhandle)>;

Codec Own(tjhandle codec) { return {codec, tjDestroy}; }

absl::Status Damaged(const Codec& codec) {
  return InvalidArgument(
      "the JPEG cannot be read: {}; use an intact RGB or grey file, saved as 4:2:0 or 4:4:4",
      tjGetErrorStr2(codec.get()));
}

constexpr int kMaxEdge = 65500;  // libjpeg's JPEG_MAX_DIMENSION

/// A progressive file may hold any number of scans, each over all pixels. Encoders write about ten.
constexpr int kMaxScans = 64;

unsigned Byte(std::string_view text, size_t at) { return static_cast<unsigned char>(text[at]); }

constexpr unsigned kSof0 = 0xc0, kSof1 = 0xc1, kEoi = 0xd9, kSos = 0xda, kDri = 0xdd, kApp0 = 0xe0,
                   kApp1 = 0xe1;
constexpr size_t kSegmentHeader = 4;

/// Calls visit(marker, segment) for the segments of a file. Goes by their lengths, as a thumbnail
/// in one of them is a JPEG too. What follows the end of the image is not read by libjpeg either.
template <class Visit>
void EachSegment(std::string_view file, const Visit& visit) {
  size_t at = 0;
  while ((at = file.find('\xff', at)) != std::string_view::npos && at + 3 < file.size()) {
    const unsigned marker = Byte(file, at + 1);
    if (marker == kEoi) break;
    if (marker == 0xff) {
      ++at;  // padding before a marker
    } else if (marker <= 0x01 || (marker >= 0xd0 && marker <= 0xd8)) {
      at += 2;  // data of a scan, or a marker without a segment
    } else {
      const size_t size = 2 + size_t{Byte(file, at + 2)} * 256 + Byte(file, at + 3);
      const std::string_view segment = file.substr(at, std::max(kSegmentHeader, size));
      visit(marker, segment);
      at += segment.size();
    }
  }
}

struct Segments {
  int scans = 0;
  int orientation = 1;
};

Segments ReadSegments(std::string_view file) {
  Segments segments;
  EachSegment(file, [&](unsigned marker, std::string_view segment) {
    const std::string_view content = segment.substr(kSegmentHeader);
    if (marker == kSos) ++segments.scans;
    if (marker == kApp1 && content.starts_with(kExifPrefix) && segments.orientation == 1) {
      segments.orientation = ReadOrientation(content);
    }
  });
  return segments;
}

/// The bytes between the last scan and the end that libjpeg's warning `text` says it has not read;
/// 0 if that is another warning.
size_t UnreadAtEnd(std::string_view text) {
  constexpr std::string_view kBefore = "Corrupt JPEG data: ",
                             kAfter = " extraneous bytes before marker 0xd9";
  const size_t before = text.find(kBefore);
  if (before == std::string_view::npos || !text.ends_with(kAfter)) return 0;
  text.remove_prefix(before + kBefore.size());
  text.remove_suffix(kAfter.size());
  size_t bytes = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bytes);
  return error == std::errc() && end == text.data() + text.size() ? bytes : 0;
}

/// What follows a file's last segment, without the last `unread` bytes before the marker of its end
/// if they are padding: zeros, as some cameras leave. Others may be the rest of a damaged scan,
/// whose codes came to an end too early. Zeros that are read belong to the scan.
std::string WithoutPadding(std::string_view rest, size_t unread) {
  const size_t marker = rest.find("\xff\xd9");
  if (marker == std::string_view::npos || unread > marker) return std::string(rest);
  const size_t end = rest.substr(0, marker).find_last_not_of('\xff') + 1;  // fill bytes
  if (unread > end ||
      rest.substr(end - unread, unread).find_first_not_of('\0') != std::string_view::npos)
    return std::string(rest);
  return std::string(rest.substr(0, end - unread)).append(rest.substr(end));
}

/// The file without what libjpeg warns of, and ignores: a version of JFIF that it does not know,
/// bytes between segments, a sequential file's scan that is said to hold some coefficients, and
/// padding of `unread` bytes before the end.
std::string WithoutOddities(std::string_view file, size_t unread) {
  constexpr std::string_view kJfif("JFIF\0", 5), kAllCoefficients("\0\x3f\0", 3);
  std::string cleaned;
  size_t copied = 0;
  bool sequential = false, in_scan = false;
  EachSegment(file, [&](unsigned marker, std::string_view segment) {
    const auto at = static_cast<size_t>(segment.data() - file.data());
    std::string_view between = file.substr(copied, at - copied);
    if (!in_scan && copied > 0 && between.find('\xff') == std::string_view::npos) between = {};
    cleaned.append(between).append(segment);
    copied = at + segment.size();
    const size_t content = cleaned.size() - segment.size() + kSegmentHeader;
    sequential = sequential || marker == kSof0 || marker == kSof1;
    in_scan = marker == kSos;
    if (marker == kApp0 && segment.size() > kSegmentHeader + kJfif.size() &&
        segment.substr(kSegmentHeader).starts_with(kJfif)) {
      cleaned.replace(content + kJfif.size(), 1, "\x01");
    } else if (in_scan && sequential && segment.size() >= kSegmentHeader + 3) {
      cleaned.replace(cleaned.size() - 3, 3, kAllCoefficients);
    }
  });
  return cleaned.append(WithoutPadding(file.substr(copied), unread));
}

/// A file in TurboJPEG's memory.
struct Encoded {
  std::unique_ptr<unsigned char, void (*)(unsigned char*)> bytes{nullptr, tjFree};
  unsigned long size = 0;

  std::string_view view() const { return {reinterpret_cast<const char*>(bytes.get()), size}; }
};

/// A file of some rows of the picture.
absl::StatusOr<Encoded> EncodeRows(const Pixels& pixels, int first, int rows, int quality) {
  const Codec codec = Own(tjInitCompress());
  const bool grey = pixels.channels == 1;
  const unsigned char* const from =
      pixels.samples.data() + int64_t{first} * pixels.width * pixels.channels;
  unsigned char* data = nullptr;
  Encoded file;
  const bool written = codec != nullptr && tjCompress2(codec.get(), from, pixels.width, /*pitch=*/0,
                                                       rows, grey ? TJPF_GRAY : TJPF_RGB, &data,
                                                       &file.size, grey ? TJSAMP_GRAY : TJSAMP_420,
                                                       quality, TJFLAG_ACCURATEDCT) == 0;
  file.bytes.reset(data);
  if (!written) {
    return Internal("cannot encode {}×{} pixels as JPEG: {}", pixels.width, rows,
                    tjGetErrorStr2(codec.get()));
  }
  return file;
}

/// About as many bytes of a picture are one band. An encoder takes about 50 µs to start, 9 % of the
/// time of such a band.
constexpr int64_t kBandBytes = 2 * kTaskBytes;

std::string BigEndian16(int value) {
  return {static_cast<char>(value >> 8), static_cast<char>(value & 0xff)};
}

/// The files of a picture's bands as one file of `height` rows, whose scan restarts after every
/// `interval` MCUs (ITU-T T.81, B.2.1 and E.1.4). At a restart, as at the start of a scan, nothing
/// depends on what came before. Tables follow from the quality, so all bands have the same, unless
/// the environment has TurboJPEG choose others.
absl::StatusOr<std::string> Join(const std::vector<absl::StatusOr<Encoded>>& files, int height,
                                 int interval) {
  constexpr size_t kEoiBytes = 2;
  size_t bytes = 0;
  for (const auto& file : files) bytes += file->size;
  std::string joined, header;
  joined.reserve(bytes);  // the headers that are left out are longer than restarts
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string_view file = files[i]->view();
    size_t at = 2, frame = 0;  // after SOI; the frame's header, where the height is
    bool restarts = false;
    for (; Byte(file, at + 1) != kSos; at += 2 + Byte(file, at + 2) * 256 + Byte(file, at + 3)) {
      if (Byte(file, at + 1) == kSof0) frame = at;
      restarts = restarts || Byte(file, at + 1) == kDri;
    }
    const size_t scan = at + 2 + Byte(file, at + 2) * 256 + Byte(file, at + 3);
    std::string of_band(file.substr(0, scan));
    of_band.replace(frame + 5, 2, BigEndian16(height));
    if (frame == 0 || restarts || (i > 0 && of_band != header)) {
      return Internal(
          "cannot encode a JPEG in bands, because the environment changes what TurboJPEG writes; "
          "unset TJ_ARITHMETIC, TJ_OPTIMIZE, TJ_PROGRESSIVE and TJ_RESTART");
    }
    if (i == 0) {
      header = std::move(of_band);
      joined.append(header, 0, at).append("\xff\xdd").append(BigEndian16(4));
      joined.append(BigEndian16(interval)).append(header, at);
    } else {
      joined += '\xff';
      joined += static_cast<char>(0xd0 + (i - 1) % 8);
    }
    joined.append(file, scan, file.size() - kEoiBytes - scan);
  }
  joined.append("\xff\xd9");
  return joined;
}

}  // namespace

absl::StatusOr<std::string> EncodeJpeg(const Pixels& pixels, int quality,
                                       const ParallelFor& parallel_for) {
  DENOISED_CHECK(pixels.width > 0 && pixels.height > 0, "{}×{} pixels", pixels.width,
                 pixels.height);
  if (pixels.height > kMaxEdge) {  // bands have fewer rows, so TurboJPEG does not see it
    return Internal("cannot encode {}×{} pixels as JPEG: an edge has at most {}", pixels.width,
                    pixels.height, kMaxEdge);
  }
  // The rows of a band are whole rows of MCUs: blocks, or 16×16 pixels that share their colour.
  const int edge = pixels.channels == 1 ? 8 : 16;
  const int64_t row_bytes = int64_t{pixels.width} * pixels.channels;
  const int rows = edge * static_cast<int>(std::max<int64_t>(1, kBandBytes / (row_bytes * edge)));
  const int count = (pixels.height + rows - 1) / rows;
  std::vector<absl::StatusOr<Encoded>> files(count);
  parallel_for(count, [&](int i) {
    const int first = i * rows;
    files[i] = EncodeRows(pixels, first, std::min(rows, pixels.height - first), quality);
  });
  for (const auto& file : files) DENOISED_RETURN_IF_ERROR(file.status());
  if (count == 1) return std::string(files[0]->view());
  return Join(files, pixels.height, rows / edge * ((pixels.width + edge - 1) / edge));
}

absl::StatusOr<Pixels> DecodeJpeg(std::string_view file, int64_t max_pixels,
                                  const ReserveMemory& reserve) {
  const Codec codec = Own(tjInitDecompress());
  if (codec == nullptr) return ResourceExhausted("no memory for a JPEG decoder");
  const auto bytes = [](std::string_view text) {
    return reinterpret_cast<const unsigned char*>(text.data());
  };
  Pixels pixels;
  int sampling = 0, colours = -1;
  // It also fails after a warning, and if the sampling, which is not used, has no name.
  if (tjDecompressHeader3(codec.get(), bytes(file), file.size(), &pixels.width, &pixels.height,
                          &sampling, &colours) != 0 &&
      (pixels.width < 1 || pixels.height < 1 || colours < 0)) {
    return Damaged(codec);
  }
  if (colours == TJCS_CMYK || colours == TJCS_YCCK) {
    return InvalidArgument("the JPEG is CMYK; convert it to RGB or grey");
  }
  const Segments segments = ReadSegments(file);
  if (segments.scans > kMaxScans) {
    return InvalidArgument("the JPEG has {} scans, and {} are allowed; save it as a baseline JPEG",
                           segments.scans, kMaxScans);
  }
  // Samples, and of a progressive file all coefficients, which are gone when samples are turned.
  DENOISED_RETURN_IF_ERROR(
      CheckSize("JPEG", pixels.width, pixels.height, max_pixels, 3 + 6, reserve));
  pixels.channels = colours == TJCS_GRAY ? 1 : 3;
  pixels.samples.resize(size_t(pixels.width) * pixels.height * pixels.channels);
  const auto decompress = [&](std::string_view text) {
    return tjDecompress2(codec.get(), bytes(text), text.size(), pixels.samples.data(), pixels.width,
                         /*pitch=*/0, pixels.height, pixels.channels == 1 ? TJPF_GRAY : TJPF_RGB,
                         TJFLAG_STOPONWARNING | TJFLAG_ACCURATEDCT) == 0;
  };
  // A file that is cut off is only a warning to libjpeg, which fills the rest with grey. So one
  // warning must not hide another: what is read in the end has none. A second round cuts padding
  // that the first warning hid.
  std::string cleaned;
  for (int rounds = 2; !decompress(cleaned.empty() ? file : cleaned); --rounds) {
    if (rounds == 0 || tjGetErrorCode(codec.get()) != TJERR_WARNING) return Damaged(codec);
    const std::string_view odd = cleaned.empty() ? file : cleaned;
    std::string next = WithoutOddities(odd, UnreadAtEnd(tjGetErrorStr2(codec.get())));
    if (next == odd) return Damaged(codec);
    cleaned = std::move(next);
  }
  return Upright(std::move(pixels), segments.orientation);
}

}  // namespace denoised
