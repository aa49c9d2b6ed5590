// SPDX-License-Identifier: Apache-2.0
#include "trainer/data/pictures.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <new>
#include <optional>
#include <set>
#include <sstream>

#include "engine/core/condition_variable.h"
#include "engine/core/config_reader.h"
#include "engine/core/mutex.h"
#include "engine/images/formats.h"
#include "trainer/data/archive.h"
#include "trainer/data/arrays.h"

namespace denoised::trainer {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxPixels = int64_t{1} << 28;
constexpr int32_t kMaxLabel = 1 << 24;
constexpr size_t kMaxVector = 1 << 16;
/// Files or fields that a message names.
constexpr size_t kMaxNamed = 20;

/// What a file says of a picture's class: a number, or a list of them.
struct Label {
  int32_t number = -1;
  std::vector<float> vector;
  bool operator==(const Label&) const = default;
};
using Labels = std::map<std::string, Label>;

/// One picture that may yet be read.
struct Candidate {
  std::string name;  // for messages
  std::string file;  // below a folder; else empty
  std::optional<Label> label;
  double weight = 1;                                  // see Dataset::weights
  std::function<absl::StatusOr<std::string>()> read;  // errors name the picture
  uint64_t bytes = 0;                                 // of the file, if it is in an archive
};

/// PictureOptions::decoding_memory: what would take too much waits.
class DecodingMemory {
 public:
  explicit DecodingMemory(int64_t all) : all_(all) {}
  int64_t all() const { return all_; }
  void Take(int64_t bytes) {
    MutexLock lock(&mutex_);
    while (used_ > 0 && used_ + bytes > all_) released_.Wait(&mutex_);
    used_ += bytes;
  }
  void Release(int64_t bytes) {
    MutexLock lock(&mutex_);
    used_ -= bytes;
    released_.NotifyAll();
  }

 private:
  const int64_t all_;
  Mutex mutex_;
  ConditionVariable released_;
  int64_t used_ ABSL_GUARDED_BY(mutex_) = 0;
};

/// ".png" of "a.PNG".
std::string Extension(const std::string& name) {
  std::string extension = fs::path(name).extension();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return extension;
}

bool IsPicture(const std::string& name) {
  static const std::set<std::string> kRead = {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp"};
  return kRead.count(Extension(name)) > 0;
}

/// A picture in a format that is not read.
bool IsOtherPicture(const std::string& name) {
  static const std::set<std::string> kOther = {".avif", ".bmp", ".gif", ".heic", ".heif",
                                               ".jp2",  ".jxl", ".pbm", ".pgm",  ".pnm",
                                               ".ppm",  ".tga", ".tif", ".tiff"};
  return kOther.count(Extension(name)) > 0;
}

/// `image` F32 [H, W, C] of any size as uint8 [height, width, C] at `to`.
void Fit(Tensor image, const PictureOptions& options, uint8_t* to) {
  const int64_t h = image.dim(0), w = image.dim(1), channels = image.dim(2);
  const bool inside = options.pad && h <= options.height && w <= options.width;
  if (!inside && (h != options.height || w != options.width)) {
    // Scaled until it covers, so that only one direction is cropped. Of a thin picture, what is
    // cropped may be millions of times as large as what is left.
    const double scale = std::max(static_cast<double>(options.height) / static_cast<double>(h),
                                  static_cast<double>(options.width) / static_cast<double>(w));
    const auto scaled = [&](int64_t extent, int least) {
      return std::max<int64_t>(least, std::llround(static_cast<double>(extent) * scale));
    };
    const int64_t height = scaled(h, options.height), width = scaled(w, options.width);
    image = ResizePart(image, height, width, (height - options.height) / 2,
                       (width - options.width) / 2, options.height, options.width);
  }
  const std::vector<uint8_t> bytes = ToBytes(image);
  const int64_t from_height = image.dim(0), from_width = image.dim(1);
  std::memset(to, 0, static_cast<size_t>(options.height) * options.width * channels);
  // Negative: the picture begins inside the border.
  const int64_t top = (from_height - options.height) / 2, left = (from_width - options.width) / 2;
  for (int64_t y = 0; y < options.height; ++y) {
    const int64_t from_y = y + top;
    if (from_y < 0 || from_y >= from_height) continue;
    const int64_t first = std::max<int64_t>(0, -left),
                  last = std::min<int64_t>(options.width, from_width - left);
    std::memcpy(to + (y * options.width + first) * channels,
                bytes.data() + (from_y * from_width + first + left) * channels,
                static_cast<size_t>((last - first) * channels));
  }
}

/// Sets Pictures::dataset.images.
absl::Status AllocateImages(int64_t count, const PictureOptions& options, Pictures* pictures) {
  const Shape shape{count, options.height, options.width, options.channels};
  const auto bytes = static_cast<size_t>(shape.elements());
  pictures->dataset.on_disk = bytes > options.memory;
  if (pictures->dataset.on_disk) {
    if (options.note)
      options.note(
          fmt::format("{} pictures of {} × {} × {} take {} MiB; they are kept in a file in {}, "
                      "because at most {} "
                      "MiB stay in memory (--data-memory)",
                      count, options.width, options.height, options.channels, bytes >> 20,
                      options.scratch, options.memory >> 20));
    DENOISED_ASSIGN_OR_RETURN(const std::shared_ptr<void> file, MapScratch(options.scratch, bytes));
    pictures->dataset.images = Tensor(file.get(), shape, DType::kU8, Device::kCpu, file);
    return absl::OkStatus();
  }
  try {
    pictures->dataset.images = Tensor::Host(shape, DType::kU8);
    return absl::OkStatus();
  } catch (const std::bad_alloc&) {
    return ResourceExhausted(
        "{} pictures of {} × {} × {} do not fit the memory; use fewer, or a lower --data-memory",
        count, options.width, options.height, options.channels);
  }
}

/// Whether a network of so many channels reads another picture than the file has. RGB without a
/// colour is grey.
bool IsConverted(const Pixels& pixels, int channels) {
  if (channels == 3) return pixels.channels == 1;
  const std::vector<uint8_t>& samples = pixels.samples;
  for (size_t i = 0; pixels.channels == 3 && i < samples.size(); i += 3)
    if (samples[i] != samples[i + 1] || samples[i] != samples[i + 2]) return true;
  return false;
}

/// Says how many of the pictures are.
void NoteConverted(int64_t converted, int64_t count, const PictureOptions& options) {
  if (converted == 0 || !options.note) return;
  const bool grey = options.channels == 1;
  options.note(
      fmt::format("{} of {} pictures {}; the model has {} (in_channels), so they are read as {}",
                  converted, count, grey ? "have colour" : "are grey",
                  grey ? "one channel" : "three channels", grey ? "grey" : "RGB"));
}

/// Decodes `candidate` to `to`. Returns whether it IsConverted(); an error is what is wrong with
/// it.
absl::StatusOr<bool> DecodeOne(const Candidate& candidate, const PictureOptions& options,
                               DecodingMemory* memory, uint8_t* to) {
  constexpr uint64_t kLargeFile = 1 << 24;  // such a file is read alone, too
  std::error_code ignored;
  const uint64_t file_bytes =
      candidate.file.empty() ? candidate.bytes : fs::file_size(candidate.name, ignored);
  struct Share {
    ~Share() {
      if (bytes > 0) memory->Release(bytes);
    }
    void Take(int64_t of) {
      // Once, or two could wait for each other.
      if (bytes > 0) return;
      memory->Take(of);
      bytes = of;
    }
    DecodingMemory* memory;
    int64_t bytes = 0;
  } share{memory};
  if (!ignored && file_bytes > kLargeFile) share.Take(memory->all());
  DENOISED_ASSIGN_OR_RETURN(const std::string file, candidate.read());
  const absl::StatusOr<Pixels> pixels = DecodeFile(file, kMaxPixels, [&](int64_t needed) {
    share.Take(needed);
    return absl::OkStatus();
  });
  if (!pixels.ok())
    return InvalidArgument("{}: {}", candidate.name, std::string(pixels.status().message()));
  Fit(FromPixels(*pixels, options.channels), options, to);
  return IsConverted(*pixels, options.channels);
}

/// Joins the first of them, and counts the rest.
std::string Listed(const std::vector<std::string>& texts, const std::string& between) {
  const size_t named = std::min(texts.size(), kMaxNamed);
  std::string list = fmt::format(
      "{}", fmt::join(texts.begin(), texts.begin() + static_cast<std::ptrdiff_t>(named), between));
  if (named < texts.size()) list += fmt::format("{}and {} more", between, texts.size() - named);
  return list;
}

/// Calls PictureOptions::check. Decode() names pictures that have no label, or a vector of another
/// size.
absl::Status CheckBeforeDecoding(const std::vector<Candidate>& candidates,
                                 const std::vector<std::string>& class_names,
                                 const PictureOptions& options) {
  training::Dataset dataset;
  std::vector<float> vectors;
  int64_t count = 0, size = 0;
  for (const Candidate& candidate : candidates) {
    dataset.weights.push_back(candidate.weight);
    if (!candidate.label) {
      if (options.wants_labels || options.wants_vectors) return absl::OkStatus();
      continue;
    }
    const std::vector<float>& vector = candidate.label->vector;
    if (options.wants_vectors) {
      if (count == 0) size = static_cast<int64_t>(vector.size());
      if (static_cast<int64_t>(vector.size()) != size) return absl::OkStatus();
      vectors.insert(vectors.end(), vector.begin(), vector.end());
    } else {
      dataset.labels.push_back(candidate.label->number);
    }
    ++count;
  }
  if (!vectors.empty()) dataset.vectors = Tensor::HostF32({count, size}, vectors);
  return options.check(dataset, class_names);
}

/// Decodes all candidates. `no_label` is what is wrong with one that has none.
absl::StatusOr<Pictures> Decode(const std::string& path, const std::vector<Candidate>& candidates,
                                const std::string& no_label,
                                const std::vector<std::string>& class_names,
                                const PictureOptions& options) {
  if (candidates.empty())
    return NotFound("{}: has no PNG, JPEG or WebP pictures; check the path", path);
  if (options.check)
    DENOISED_RETURN_IF_ERROR(CheckBeforeDecoding(candidates, class_names, options));
  Pictures pictures;
  DENOISED_RETURN_IF_ERROR(
      AllocateImages(static_cast<int64_t>(candidates.size()), options, &pictures));
  const Tensor images = pictures.dataset.images;
  const int64_t each = images.elements() / images.dim(0);
  int64_t count = 0, converted = 0;
  std::vector<float> vectors;
  size_t vector_size = 0;
  const auto refuse = [&](const Candidate& candidate) {
    return options.refuse && !candidate.file.empty() ? options.refuse(candidate.file) : "";
  };
  const auto stopped = [&] { return options.stop != nullptr && *options.stop; };
  // In blocks, so that a signal ends reading soon. A picture is decoded to the place that it has if
  // all before it are good, and moved down if not.
  DecodingMemory memory(options.decoding_memory);
  constexpr size_t kBlock = 1024;
  std::vector<absl::StatusOr<bool>> decoded;  // of a block
  for (size_t i = 0; i < candidates.size(); ++i) {
    const bool labels = options.wants_labels || options.wants_vectors;
    if (i % kBlock == 0) {
      decoded.assign(std::min(kBlock, candidates.size() - i), false);
      options.parallel_for(static_cast<int>(decoded.size()), [&](int j) {
        const Candidate& candidate = candidates[i + j];
        if (stopped() || (labels && !candidate.label)) return;
        decoded[j] = DecodeOne(candidate, options, &memory,
                               images.as<uint8_t>() + static_cast<int64_t>(i + j) * each);
      });
    }
    if (stopped()) return Cancelled("stopped while pictures were read");
    const Candidate& candidate = candidates[i];
    const absl::StatusOr<bool>& is_converted = decoded[i % kBlock];
    // Not the picture's fault: it would be missing from the data set.
    if (absl::IsUnavailable(is_converted.status()) ||
        absl::IsResourceExhausted(is_converted.status()))
      return is_converted.status();
    std::string what;  // is wrong with it
    if (labels && !candidate.label) {
      what = fmt::format("{}: {}", candidate.name, no_label);
    } else if (options.wants_vectors && count > 0 &&
               candidate.label->vector.size() != vector_size) {
      what = fmt::format("{}: its label has {} numbers, and those of others {}", candidate.name,
                         candidate.label->vector.size(), vector_size);
    } else if (const std::string why = refuse(candidate); !why.empty()) {
      what = fmt::format("{}: {}", candidate.name, why);
    } else if (!is_converted.ok()) {
      what = std::string(is_converted.status().message());
    } else {
      if (count != static_cast<int64_t>(i))
        std::memcpy(images.as<uint8_t>() + count * each,
                    images.as<uint8_t>() + static_cast<int64_t>(i) * each,
                    static_cast<size_t>(each));
      if (options.wants_vectors) {
        vector_size = candidate.label->vector.size();
        vectors.insert(vectors.end(), candidate.label->vector.begin(),
                       candidate.label->vector.end());
      } else if (candidate.label) {
        pictures.dataset.labels.push_back(candidate.label->number);
      }
      pictures.files.push_back(candidate.file);
      pictures.dataset.weights.push_back(candidate.weight);
      converted += *is_converted;
      ++count;
    }
    if (!what.empty()) pictures.bad.push_back(what);
  }
  const std::vector<std::string>& bad = pictures.bad;
  if (!bad.empty() && !options.skip_bad) {
    if (bad.size() == 1)
      return InvalidArgument("{}. Correct or remove it, or pass --skip-bad-files", bad.front());
    return InvalidArgument(
        "{}: {} of {} pictures cannot be used. Correct or remove them, or pass --skip-bad-files:\n "
        " {}",
        path, bad.size(), candidates.size(), Listed(bad, "\n  "));
  }
  if (count == 0)
    return InvalidArgument("{}: none of its {} pictures can be read; the first: {}", path,
                           candidates.size(), pictures.bad.front());
  NoteConverted(converted, count, options);
  pictures.dataset.images = images.Slice(0, count);
  if (static_cast<int64_t>(pictures.dataset.labels.size()) != count)
    pictures.dataset.labels.clear();
  if (!pictures.dataset.labels.empty()) pictures.class_names = class_names;
  std::vector<double>& weights = pictures.dataset.weights;
  if (std::all_of(weights.begin(), weights.end(), [](double weight) { return weight == 1; }))
    weights.clear();
  if (options.wants_vectors)
    pictures.dataset.vectors = Tensor::HostF32({count, static_cast<int64_t>(vector_size)}, vectors);
  return pictures;
}

/// A label of a JSON file.
std::optional<Label> LabelOf(const nlohmann::json& json, bool vector) {
  if (!vector) {
    if (!json.is_number_integer() || json < 0 || json > kMaxLabel) return std::nullopt;
    return Label{.number = json.get<int32_t>(), .vector = {}};
  }
  Label label;
  for (const nlohmann::json& number : json.is_array() ? json : nlohmann::json::array({json})) {
    if (!number.is_number() || !std::isfinite(number.get<float>())) return std::nullopt;
    label.vector.push_back(number.get<float>());
  }
  if (label.vector.empty() || label.vector.size() > kMaxVector) return std::nullopt;
  return label;
}

std::string LabelKind(bool vector) {
  return vector ? fmt::format("a list of 1 to {} finite numbers", kMaxVector)
                : fmt::format("a name or a number from 0 to {}", kMaxLabel);
}

/// Numbers classes in the order of their names. If all are whole numbers, 10 comes after 9: of
/// folders 0 to 11, each then has its own number.
void Number(const std::map<std::string, std::vector<std::string>>& files_of_name,
            std::vector<std::string>* names, Labels* labels) {
  for (const auto& [name, files] : files_of_name) names->push_back(name);
  if (std::all_of(names->begin(), names->end(), [](const std::string& name) {
        return name.find_first_not_of("0123456789") == std::string::npos;
      }))
    std::stable_sort(names->begin(), names->end(), [](const auto& a, const auto& b) {
      const auto digits = [](const std::string& name) {
        return name.substr(std::min(name.size(), name.find_first_not_of('0')));
      };
      const std::string x = digits(a), y = digits(b);
      return x.size() != y.size() ? x.size() < y.size() : x < y;
    });
  for (size_t number = 0; number < names->size(); ++number)
    for (const std::string& file : files_of_name.at((*names)[number]))
      (*labels)[file].number = static_cast<int32_t>(number);
}

/// What metadata.jsonl says.
struct Metadata {
  Labels labels;
  std::vector<std::string> names;  // of classes
  std::set<std::string> files;     // all that have a line
  std::map<std::string, double> weights;
};

absl::StatusOr<Metadata> ReadMetadata(const fs::path& file, const PictureOptions& options) {
  DENOISED_ASSIGN_OR_RETURN(const std::string text, ReadFile(file));
  const bool vectors = options.wants_vectors;
  Metadata metadata;
  Labels& labels = metadata.labels;
  std::map<std::string, std::string> class_of_file;
  std::map<std::string, int> unknown;                              // fields, and in how many lines
  std::map<std::pair<std::string, std::string>, int> first_lines;  // by file and field
  int line_number = 0;
  // Keeps what this line says of a file, unless an earlier line says something else.
  const auto keep = [&](const std::string& name, const char* field, const nlohmann::json& said,
                        auto value, auto* values) -> absl::Status {
    const int first_line = first_lines.try_emplace({name, field}, line_number).first->second;
    if (values->try_emplace(name, value).first->second == value) return absl::OkStatus();
    return InvalidArgument("{}, line {}: the {} of {} is {}, but line {} has another; remove one",
                           file.string(), line_number, field, name, said.dump(), first_line);
  };
  for (const std::string& line : LinesOf(text)) {
    ++line_number;
    if (line.empty()) continue;
    DENOISED_ASSIGN_OR_RETURN(const nlohmann::json json,
                              ParseMetadataLine(line, file.string(), line_number));
    const std::string name = PictureName(json["file_name"]);
    metadata.files.insert(name);
    for (const auto& item : json.items()) {
      const std::string& field = item.key();
      if (field != "file_name" && field != "text" && field != "label" && field != "weight")
        ++unknown[field];
    }
    if (json.contains("weight")) {
      const nlohmann::json& weight = json["weight"];
      if (!weight.is_number() || !(weight >= 0) || !std::isfinite(weight.get<double>()))
        return InvalidArgument("{}, line {}: weight {} is not a finite number of at least 0",
                               file.string(), line_number, weight.dump());
      DENOISED_RETURN_IF_ERROR(
          keep(name, "weight", weight, weight.get<double>(), &metadata.weights));
    }
    if (!json.contains("label")) continue;
    const nlohmann::json& said = json["label"];
    if (said.is_string() && !vectors) {
      DENOISED_RETURN_IF_ERROR(keep(name, "label", said, said.get<std::string>(), &class_of_file));
    } else if (const auto label = LabelOf(said, vectors)) {
      DENOISED_RETURN_IF_ERROR(keep(name, "label", said, *label, &labels));
    } else {
      return InvalidArgument("{}, line {}: label {} is not {}", file.string(), line_number,
                             said.dump(), LabelKind(vectors));
    }
  }
  std::vector<std::string> fields;
  fields.reserve(unknown.size());
  for (const auto& [field, lines] : unknown)
    fields.push_back(fmt::format("\"{}\" (lines: {})", field, lines));
  if (options.note && !fields.empty())
    options.note(fmt::format(
        "warning: {}: unknown fields are ignored: {}; use file_name, label, text or weight",
        file.string(), Listed(fields, ", ")));
  if (!labels.empty() && !class_of_file.empty())
    return InvalidArgument("{}: some labels are names and some are numbers; use one kind",
                           file.string());
  std::map<std::string, std::vector<std::string>> files_of_name;
  for (const auto& [picture, name] : class_of_file) files_of_name[name].push_back(picture);
  Number(files_of_name, &metadata.names, &labels);
  return metadata;
}

/// Files that are no pictures for the trainer, though they may be some.
struct LeftOut {
  std::set<std::string> hidden;       // by name
  bool read_below = false;            // a picture of a hidden folder is read
  std::map<std::string, int> others;  // by extension

  void Note(const std::string& path, const PictureOptions& options) const {
    if (!options.note) return;
    if (!hidden.empty())
      options.note(
          fmt::format("{}: hidden files and folders are left out ({}): {}{}", path, hidden.size(),
                      Listed({hidden.begin(), hidden.end()}, ", "),
                      read_below ? "; pictures there that metadata.jsonl names are read" : ""));
    std::vector<std::string> formats;
    for (const auto& [extension, count] : others)
      formats.push_back(fmt::format("{} ({})", extension, count));
    if (!formats.empty())
      options.note(
          fmt::format("warning: {}: pictures of other formats are left out: {}; convert "
                      "them to PNG, JPEG or WebP",
                      path, fmt::join(formats, ", ")));
  }
};

absl::StatusOr<Pictures> ReadFolder(const std::string& path, const PictureOptions& options) {
  std::set<std::string> files, folders;  // relative; those directly below `path`
  LeftOut left_out;
  std::error_code error;
  fs::recursive_directory_iterator walk(path, fs::directory_options::follow_directory_symlink,
                                        error);
  fs::path at = path;  // after an error the iterator does not say where it was
  for (; !error && walk != fs::recursive_directory_iterator(); walk.increment(error)) {
    at = walk->path();
    const std::string file = at.lexically_relative(path).generic_string();
    const std::string name = at.filename();
    if (IsHidden(name)) {
      walk.disable_recursion_pending();
      std::error_code ignored;
      if (IsPicture(name) || walk->is_directory(ignored)) left_out.hidden.insert(file);
      continue;
    }
    // A link to a file that is gone is a picture that cannot be read; links in a circle have no
    // end.
    const fs::file_type type = walk->status(error).type();
    if (type == fs::file_type::none) break;
    if (type == fs::file_type::directory && walk.depth() == 0) folders.insert(name);
    if (type != fs::file_type::regular && type != fs::file_type::not_found) continue;
    if (IsPicture(name)) files.insert(file);
    if (IsOtherPicture(name)) ++left_out.others[Extension(name)];
  }
  if (error) return NotFound("{}: cannot be read: {}", at.string(), error.message());

  Metadata metadata;
  const fs::path lines = fs::path(path) / "metadata.jsonl";
  const bool has_lines = fs::exists(lines, error);
  if (error) return NotFound("{}: cannot be read: {}", lines.string(), error.message());
  if (has_lines) {
    DENOISED_ASSIGN_OR_RETURN(metadata, ReadMetadata(lines, options));
    // A file that has a line and is not there cannot be read.
    files.insert(metadata.files.begin(), metadata.files.end());
  } else if (options.wants_vectors) {
    return InvalidArgument(
        "{}: has no metadata.jsonl: the network reads class vectors, so each picture needs a line "
        "{{\"file_name\": …, \"label\": [numbers]}}",
        path);
  }
  for (const std::string& file : metadata.files) left_out.hidden.erase(file);
  for (const std::string& hidden : left_out.hidden) {
    const auto below = metadata.files.lower_bound(hidden + "/");
    left_out.read_below |= below != metadata.files.end() && below->starts_with(hidden + "/");
  }
  left_out.Note(path, options);
  std::string no_label = "it has no label in metadata.jsonl";
  if (!has_lines || (metadata.labels.empty() && options.wants_labels)) {
    // Not in the order of whole paths, in which "cat-small/a.png" comes before "cat/a.png".
    std::map<std::string, std::vector<std::string>> files_of_folder;
    for (const std::string& file : files)
      if (const size_t slash = file.find('/'); slash != std::string::npos)
        files_of_folder[file.substr(0, slash)].push_back(file);
    Number(files_of_folder, &metadata.names, &metadata.labels);
    std::erase_if(folders, [&](const auto& folder) { return files_of_folder.contains(folder); });
    if (options.wants_labels && options.note && !folders.empty())
      options.note(fmt::format("warning: {}: folders without pictures are no classes: {}", path,
                               Listed({folders.begin(), folders.end()}, ", ")));
    no_label = has_lines ? "it has no label in metadata.jsonl, and is in no folder of a class"
                         : "it has no label: it is in no folder of a class";
  }
  std::vector<Candidate> candidates;
  for (const std::string& file : files) {
    const std::string whole = fs::path(path) / file;
    Candidate candidate{.name = whole,
                        .file = file,
                        .label = {},
                        .read = [whole] { return ReadFile(whole); },
                        .bytes = 0};
    if (const auto found = metadata.labels.find(file); found != metadata.labels.end())
      candidate.label = found->second;
    if (const auto found = metadata.weights.find(file); found != metadata.weights.end())
      candidate.weight = found->second;
    candidates.push_back(std::move(candidate));
  }
  return Decode(path, candidates, no_label, metadata.names, options);
}

absl::StatusOr<Pictures> ReadZip(const std::string& path, const PictureOptions& options) {
  DENOISED_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  DENOISED_ASSIGN_OR_RETURN(const ZipArchive archive, ZipArchive::Parse(file.bytes(), path));
  Labels labels;
  if (const ZipArchive::Entry* entry = archive.Find("dataset.json")) {
    DENOISED_ASSIGN_OR_RETURN(const std::string text, archive.Read(*entry));
    DENOISED_ASSIGN_OR_RETURN(const nlohmann::json json,
                              ParseJsonObject(text, path + "/dataset.json"));
    const nlohmann::json list = json.value("labels", nlohmann::json());
    if (!list.is_null() && !list.is_array())
      return InvalidArgument("{}/dataset.json: \"labels\" is not a list", path);
    for (const nlohmann::json& pair : list) {
      const auto label = pair.is_array() && pair.size() == 2 && pair[0].is_string()
                             ? LabelOf(pair[1], options.wants_vectors)
                             : std::nullopt;
      if (!label)
        return InvalidArgument("{}/dataset.json: {} is not [file, label], the label {}", path,
                               pair.dump(), LabelKind(options.wants_vectors));
      if (!(labels.try_emplace(pair[0], *label).first->second == *label))
        return InvalidArgument("{}/dataset.json: {}: the file has another label before; remove one",
                               path, pair.dump());
    }
  }
  std::vector<const ZipArchive::Entry*> entries;
  LeftOut left_out;
  for (const ZipArchive::Entry& entry : archive.entries()) {
    const fs::path name(entry.name);
    const bool lines = name.filename() == "metadata.jsonl";
    if (options.note && (lines || (name.filename() == "dataset.json" && name != "dataset.json")))
      options.note(fmt::format("warning: {}: {} is not read; {}", path, entry.name,
                               lines ? "unpack the ZIP, or put labels into dataset.json"
                                     : "put it beside the pictures' folders, at the top"));
    const bool hidden =
        labels.count(entry.name) == 0 &&
        std::any_of(name.begin(), name.end(), [](const fs::path& part) { return IsHidden(part); });
    if (IsPicture(entry.name) && hidden) left_out.hidden.insert(entry.name);
    if (IsPicture(entry.name) && !hidden) entries.push_back(&entry);
    if (IsOtherPicture(entry.name) && !hidden) ++left_out.others[Extension(entry.name)];
  }
  left_out.Note(path, options);
  std::sort(entries.begin(), entries.end(),
            [](const auto* a, const auto* b) { return a->name < b->name; });
  const auto twice =
      std::ranges::adjacent_find(entries, {}, [](const auto* entry) { return entry->name; });
  if (twice != entries.end())
    return InvalidArgument("{}: has two files of the name {}; pack it anew", path, (*twice)->name);
  std::vector<Candidate> candidates;
  for (const ZipArchive::Entry* entry : entries) {
    Candidate candidate{
        .name = path + "/" + entry->name,
        .file = {},
        .label = {},
        .read = [&archive, entry] { return archive.Read(*entry, uint64_t{1} << 30); },
        .bytes = entry->unpacked};
    if (const auto found = labels.find(entry->name); found != labels.end())
      candidate.label = found->second;
    labels.erase(entry->name);
    candidates.push_back(std::move(candidate));
  }
  for (const auto& [name, label] : labels)
    candidates.push_back({.name = name,
                          .file = {},
                          .label = label,
                          .read =
                              [&path, &name = name] {
                                return NotFound("{}/dataset.json: there is no picture \"{}\"", path,
                                                name);
                              },
                          .bytes = 0});
  return Decode(path, candidates, "it has no label in dataset.json", {}, options);
}

/// Sets labels, or with wants_vectors vectors.
absl::Status TakeLabels(const Array& labels, int64_t count, const std::string& path,
                        const PictureOptions& options, training::Dataset* dataset) {
  if (options.wants_vectors) {
    const int64_t size = labels.shape.size() == 2 ? labels.shape[1] : 1;
    if (labels.shape.empty() || labels.shape.size() > 2 || labels.shape[0] != count || size < 1 ||
        size > static_cast<int64_t>(kMaxVector))
      return InvalidArgument(
          "{}: there are {} pictures, but class vectors [{}]; give [M, D] numbers", path, count,
          fmt::join(labels.shape, ", "));
    std::vector<float> vectors(static_cast<size_t>(count * size));
    for (size_t i = 0; i < vectors.size(); ++i) {
      vectors[i] = static_cast<float>(labels.NumberAt(static_cast<int64_t>(i)));
      if (!std::isfinite(vectors[i]))
        return InvalidArgument("{}: the class vector of picture {} holds {}; use finite numbers",
                               path, static_cast<int64_t>(i) / size, vectors[i]);
    }
    dataset->vectors = Tensor::HostF32({count, size}, vectors);
    return absl::OkStatus();
  }
  if (labels.is_float)
    return InvalidArgument("{}: labels must be whole numbers; save y.astype('int64')", path);
  if (labels.shape.empty() || labels.elements() != count)
    return InvalidArgument("{}: there are {} pictures, but {} labels", path, count,
                           labels.elements());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t label = labels.At(i);
    if (label < 0 || label > kMaxLabel)
      return InvalidArgument("{}: label {} of picture {} is not from 0 to {}", path, label, i,
                             kMaxLabel);
    dataset->labels.push_back(static_cast<int32_t>(label));
  }
  return absl::OkStatus();
}

absl::StatusOr<Pictures> FromArrays(const Array& images, const Array* labels,
                                    const std::string& path, const std::string& labels_path,
                                    const PictureOptions& options) {
  if (images.element != 1 || images.is_signed || images.is_float)
    return InvalidArgument(
        "{}: pictures must be uint8; use numbers from 0 to 255, and save x.astype('uint8')", path);
  const size_t rank = images.shape.size();
  const int64_t channels = rank == 4 ? images.shape[3] : 1;
  if ((rank != 3 && rank != 4) || (channels != 1 && channels != 3) || images.elements() == 0)
    return InvalidArgument("{}: pictures must be [M, H, W] or [M, H, W, 1 or 3]; this is [{}]",
                           path, fmt::join(images.shape, ", "));
  const int64_t count = images.shape[0], h = images.shape[1], w = images.shape[2];
  if (h > 65536 || w > 65536)
    return InvalidArgument("{}: pictures of {} × {} are too large; use edges of at most 65536",
                           path, w, h);
  Pictures pictures;
  if (labels != nullptr)
    DENOISED_RETURN_IF_ERROR(TakeLabels(*labels, count, labels_path, options, &pictures.dataset));
  if (options.check) DENOISED_RETURN_IF_ERROR(options.check(pictures.dataset, {}));
  DENOISED_RETURN_IF_ERROR(AllocateImages(count, options, &pictures));
  const int64_t each = pictures.dataset.images.elements() / count;
  int64_t converted = 0;
  const auto* from = reinterpret_cast<const uint8_t*>(images.data.data());
  for (int64_t i = 0; i < count; ++i) {
    uint8_t* to = pictures.dataset.images.as<uint8_t>() + i * each;
    const uint8_t* picture = from + i * h * w * channels;
    if (h == options.height && w == options.width && channels == options.channels) {
      std::memcpy(to, picture, static_cast<size_t>(each));
      continue;
    }
    const Pixels pixels{static_cast<int>(w),
                        static_cast<int>(h),
                        static_cast<int>(channels),
                        {picture, picture + h * w * channels}};
    converted += IsConverted(pixels, options.channels);
    Fit(FromPixels(pixels, options.channels), options, to);
  }
  NoteConverted(converted, count, options);
  return pictures;
}

absl::StatusOr<Array> ReadArray(const std::string& path) {
  DENOISED_ASSIGN_OR_RETURN(const std::string bytes, ReadFile(path));
  if (bytes.compare(0, 6, "\x93NUMPY") == 0) return ParseNpy(bytes, path);
  return ParseIdx(bytes, path);
}

absl::StatusOr<Pictures> ReadNpz(const std::string& path, const PictureOptions& options) {
  DENOISED_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  DENOISED_ASSIGN_OR_RETURN(const ZipArchive archive, ZipArchive::Parse(file.bytes(), path));
  const ZipArchive::Entry* const images = archive.Find("images.npy");
  const ZipArchive::Entry* const labels = archive.Find("labels.npy");
  if (images == nullptr)
    return InvalidArgument(
        "{}: has no array \"images\"; save with numpy.savez(file, images=x, labels=y)", path);
  const auto read = [&](const ZipArchive::Entry& entry) -> absl::StatusOr<Array> {
    DENOISED_ASSIGN_OR_RETURN(const std::string array, archive.Read(entry));
    return ParseNpy(array, path + "/" + entry.name);
  };
  DENOISED_ASSIGN_OR_RETURN(const Array pictures, read(*images));
  if (labels == nullptr && (options.wants_labels || options.wants_vectors))
    return InvalidArgument(
        "{}: has no array \"labels\", but the network has classes; save with "
        "numpy.savez(file, images=x, labels=y)",
        path);
  if (labels == nullptr) return FromArrays(pictures, nullptr, path, "", options);
  DENOISED_ASSIGN_OR_RETURN(const Array classes, read(*labels));
  return FromArrays(pictures, &classes, path, path + "/labels.npy", options);
}

bool EndsWith(const std::string& text, std::string_view ending) {
  return text.size() >= ending.size() &&
         text.compare(text.size() - ending.size(), ending.size(), ending) == 0;
}

}  // namespace

bool IsHidden(const std::string& name) {
  return (name.starts_with('.') && name != "." && name != "..") || name == "__MACOSX";
}

std::vector<std::string> LinesOf(const std::string& text) {
  constexpr std::string_view kMark = "\xEF\xBB\xBF";  // Windows' editors begin UTF-8 files with it
  std::vector<std::string> lines;
  std::istringstream stream(text.starts_with(kMark) ? text.substr(kMark.size()) : text);
  for (std::string line; std::getline(stream, line);) {
    line.resize(line.find_last_not_of(" \t\r") + 1);  // npos + 1 is 0
    lines.push_back(line);
  }
  return lines;
}

absl::StatusOr<nlohmann::json> ParseMetadataLine(const std::string& line, const std::string& file,
                                                 int number) {
  const std::string where = fmt::format("{}, line {}", file, number);
  DENOISED_ASSIGN_OR_RETURN(nlohmann::json json, ParseJsonObject(line, where));
  if (!json.contains("file_name") || !json["file_name"].is_string())
    return InvalidArgument("{}: has no picture; give it, as in {{\"file_name\": \"a.png\"}}",
                           where);
  // Under another name the same picture could have another label.
  const std::string name = PictureName(json["file_name"]);
  if (fs::path(name).is_absolute() || name == ".." || name.starts_with("../"))
    return InvalidArgument(
        "{}: file_name \"{}\" is not below the folder of metadata.jsonl; use a path in it, which "
        "may be a link",
        where, name);
  return json;
}

std::string PictureName(const std::string& name) {
  return fs::path(name).lexically_normal().generic_string();
}

absl::Status CheckChannels(int in_channels, const std::string& config_file) {
  if (in_channels == 1 || in_channels == 3) return absl::OkStatus();
  return InvalidArgument(
      "{}: field 'in_channels' is {}, but pictures have 1 or 3 channels; use one of them",
      config_file, in_channels);
}

absl::StatusOr<Pictures> ReadPictures(const std::string& path, const std::string& labels_path,
                                      const PictureOptions& options) {
  DENOISED_CHECK(options.height > 0 && options.width > 0);
  DENOISED_CHECK(options.channels == 1 || options.channels == 3);
  std::error_code error;
  const bool folder = fs::is_directory(path, error);
  const bool own_labels = folder || EndsWith(path, ".zip") || EndsWith(path, ".npz");
  if (own_labels && !labels_path.empty())
    return InvalidArgument("--labels: {} has labels of its own; leave --labels out", path);
  if (folder) return ReadFolder(path, options);
  if (EndsWith(path, ".zip")) return ReadZip(path, options);
  if (EndsWith(path, ".npz")) return ReadNpz(path, options);
  DENOISED_ASSIGN_OR_RETURN(const Array images, ReadArray(path));
  if (labels_path.empty()) {
    if (options.wants_labels || options.wants_vectors)
      return InvalidArgument(
          "{}: has no labels, but the network has classes: give a file of them "
          "with --labels",
          path);
    return FromArrays(images, nullptr, path, "", options);
  }
  DENOISED_ASSIGN_OR_RETURN(const Array labels, ReadArray(labels_path));
  return FromArrays(images, &labels, path, labels_path, options);
}

}  // namespace denoised::trainer
