// SPDX-License-Identifier: Apache-2.0
// How far a model's images in bf16 and fp8 are from those in fp32, on one device.
//
//   precision-errors --model=DIR --calibrations=DIR [--images=N] [--prompts=FILE] [--layers]
//                    [--scales] [--save=DIR] [--device=cpu|cuda]
//
// Calibrates the model on the CPU into --calibrations, which must exist, draws N images with seeds
// that the calibration did not use on --device (default: cpu), and prints a JSON object: ‖image −
// fp32's‖ / ‖fp32's‖ over all images by precision. --prompts has a prompt in each line, which the
// images take in turn, for models that read text. --layers also gives the error with each layer
// alone in e4m3, --scales that with other scales than the calibration's, from an eighth of them to
// sixteen times. --save writes the images as bytes, one .npy for each precision, and labels.npy,
// for tests/reference/classify.py and judge_emoji.py.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "engine/core/config_reader.h"
#include "engine/engine.h"
#include "engine/io/calibration.h"
#include "tests/bench/draw_images.h"

namespace denoised {
namespace {

struct Options {
  std::string model, calibrations, save, device = "cpu";
  int images = 16;
  std::vector<std::string> prompts = {
      "a green tree",       "a smiling face",   "a yellow car", "two cats",
      "a house by the sea", "a slice of pizza", "a rocket",     "rain"};
  bool layers = false, scales = false;
};

constexpr uint64_t kSeed = 100000;

struct Drawn {
  std::vector<float> pixels;
  int height = 0, width = 0, channels = 0;
  std::vector<int> labels;
};

/// `dtype`: of what stays wide. A CPU has fp8 with fp32 alone, a GPU with bf16 alone.
absl::StatusOr<Drawn> Draw(const Options& options, DType dtype, Precision precision,
                           const std::string& calibrations) {
  DENOISED_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                            Engine::Create({.device = options.device,
                                            .cpu_dtype = dtype,
                                            .fp32 = dtype == DType::kF32,
                                            .calibrations = calibrations,
                                            .max_count = options.images,
                                            .max_queued_images = options.images,
                                            .watchdog_seconds = 0}));
  DENOISED_RETURN_IF_ERROR(engine->Open("model", options.model, precision));
  const auto model = engine->Find("model");
  Drawn drawn{.height = model->height, .width = model->width, .channels = model->channels};
  JobSpec spec{.model = "model", .seed = kSeed, .count = options.images};
  for (int i = 0; i < spec.count; ++i) {
    if (model->num_classes > 0) drawn.labels.push_back(i % model->num_classes);
    if (model->text) spec.prompts.push_back({.text = options.prompts[i % options.prompts.size()]});
  }
  spec.class_labels = drawn.labels;
  if (model->images.required) {
    spec.init_image = Tensor::Host({model->height, model->width, model->channels}, DType::kF32);
    const auto values = spec.init_image.span<float>();
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(std::sin(0.05 * static_cast<double>(i)));
  }
  if (model->images.mask_required) {
    spec.mask = Tensor::Host({model->height, model->width}, DType::kF32);
    for (float& value : spec.mask.span<float>()) value = 1;
  }
  DENOISED_ASSIGN_OR_RETURN(drawn.pixels, DrawImages(*engine, spec));
  return drawn;
}

double Error(const Drawn& drawn, const Drawn& reference) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < reference.pixels.size(); ++i) {
    difference += std::pow(double{drawn.pixels[i]} - reference.pixels[i], 2);
    norm += std::pow(double{reference.pixels[i]}, 2);
  }
  return std::sqrt(difference / norm);
}

/// NumPy's format, version 1.0.
void WriteNpy(const std::string& path, const char* type, const std::string& shape, const void* data,
              size_t bytes) {
  std::string header =
      fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}", type, shape);
  header.append(63 - (10 + header.size()) % 64, ' ');
  header += '\n';
  std::ofstream file(path, std::ios::binary);
  file.write("\x93NUMPY\x01\x00", 8);
  const auto length = static_cast<uint16_t>(header.size());
  file.write(reinterpret_cast<const char*>(&length), 2);
  file << header;
  file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
}

void Save(const std::string& directory, const std::string& name, const Drawn& drawn) {
  std::vector<uint8_t> bytes;
  for (const float value : drawn.pixels)
    bytes.push_back(
        static_cast<uint8_t>(std::lround((std::min(1.0f, std::max(-1.0f, value)) + 1) * 127.5f)));
  const size_t pixels = static_cast<size_t>(drawn.height) * drawn.width * drawn.channels;
  const std::string rest =
      drawn.channels == 1 ? fmt::format("{}, {}", drawn.height, drawn.width)
                          : fmt::format("{}, {}, {}", drawn.height, drawn.width, drawn.channels);
  WriteNpy(directory + "/" + name + ".npy", "|u1",
           fmt::format("{}, {}", bytes.size() / pixels, rest), bytes.data(), bytes.size());
  WriteNpy(directory + "/labels.npy", "<i4", fmt::format("{},", drawn.labels.size()),
           drawn.labels.data(), drawn.labels.size() * sizeof(int));
}

absl::Status Run(const Options& options) {
  EngineOptions calibrate;
  calibrate.device = "cpu";
  calibrate.calibrations = options.calibrations;
  DENOISED_ASSIGN_OR_RETURN(const std::string path, Calibrate(options.model, calibrate));
  DENOISED_ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonFile(path));
  DENOISED_ASSIGN_OR_RETURN(const Calibration calibration, Calibration::Parse(json, path));

  nlohmann::ordered_json result = {
      {"model", options.model}, {"device", options.device}, {"images", options.images}};
  const DType wide = options.device == "cpu" ? DType::kF32 : DType::kBF16;
  DENOISED_ASSIGN_OR_RETURN(const Drawn exact,
                            Draw(options, DType::kF32, Precision::kDefault, options.calibrations));
  const auto compare = [&](const char* name, DType dtype, Precision precision) -> absl::Status {
    const auto drawn = Draw(options, dtype, precision, options.calibrations);
    const bool lacks_bf16 = options.device == "cpu" && dtype == DType::kBF16;
    if (lacks_bf16 && absl::IsFailedPrecondition(drawn.status())) return absl::OkStatus();
    DENOISED_RETURN_IF_ERROR(drawn.status());
    result["relative_error"][name] = Error(*drawn, exact);
    if (!options.save.empty()) Save(options.save, name, *drawn);
    return absl::OkStatus();
  };
  if (!options.save.empty()) Save(options.save, "fp32", exact);
  DENOISED_RETURN_IF_ERROR(compare("bf16", DType::kBF16, Precision::kDefault));
  DENOISED_RETURN_IF_ERROR(compare("fp8", wide, Precision::kFp8));
  const std::string directory = options.calibrations + "/changed";
  std::filesystem::create_directories(directory);
  const auto with = [&](const Calibration& changed) -> absl::StatusOr<double> {
    std::ofstream(Calibration::Path(options.model, directory, changed.weights)) << changed.ToJson();
    DENOISED_ASSIGN_OR_RETURN(const Drawn drawn, Draw(options, wide, Precision::kFp8, directory));
    return Error(drawn, exact);
  };
  for (const float factor : {0.125f, 0.25f, 0.5f, 2.0f, 4.0f, 8.0f, 16.0f}) {
    if (!options.scales) break;
    Calibration changed = calibration;
    for (auto& [layer, scale] : changed.input_scales) scale *= factor;
    DENOISED_ASSIGN_OR_RETURN(result["scales"][fmt::format("{}", factor)], with(changed));
  }
  for (const auto& [layer, scale] : calibration.input_scales) {
    if (!options.layers) break;
    Calibration alone = calibration;
    for (auto& [name, its] : alone.input_scales) its = name == layer ? scale : 0;
    DENOISED_ASSIGN_OR_RETURN(result["layers"][layer], with(alone));
  }
  std::puts(result.dump(1).c_str());
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&](const char* name, std::string* to) {
      if (flag.rfind(name, 0) != 0) return false;
      *to = flag.substr(std::strlen(name));
      return true;
    };
    std::string images, prompts;
    if (value("--model=", &options.model) || value("--calibrations=", &options.calibrations) ||
        value("--save=", &options.save) || value("--device=", &options.device))
      continue;
    if (value("--images=", &images)) {
      options.images = std::atoi(images.c_str());
    } else if (value("--prompts=", &prompts)) {
      std::ifstream lines(prompts);
      options.prompts.clear();
      for (std::string line; std::getline(lines, line);) options.prompts.push_back(line);
    } else if (flag == "--layers") {
      options.layers = true;
    } else if (flag == "--scales") {
      options.scales = true;
    } else {
      std::fprintf(stderr, "unknown flag %s; see the top of precision_errors.cc\n", argv[i]);
      return 2;
    }
  }
  if (options.model.empty() || options.calibrations.empty() || options.images < 1 ||
      options.prompts.empty()) {
    std::fprintf(stderr,
                 "--model and --calibrations are needed, --images of at least 1, and a line in the "
                 "file of --prompts\n");
    return 2;
  }
  const absl::Status status = Run(options);
  if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace denoised

int main(int argc, char** argv) { return denoised::Main(argc, argv); }
