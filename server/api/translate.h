#pragma once

#include <string>
#include <vector>

#include "denoised/v1/image_generation.pb.h"
#include "engine/engine.h"
#include "server/config.h"
#include "server/encoding/png.h"
#include "server/models/catalog.h"

/// Between the wire's messages and the engine's types.

namespace denoised {

/// How images leave.
struct Rendering {
  v1::ImageFormat format = v1::IMAGE_FORMAT_PNG;
  int quality = 90;
  bool metadata = true;  // in the text chunks of a PNG
  int max_edge = 0;      // pixels; larger images are scaled down; 0: any size
};

struct Translation {
  JobSpec spec;
  Rendering image;
  Rendering preview;
};

/// Checks all that does not need the engine: presence, finiteness, the ranges that the proto
/// states, shapes and files. Whatever is wrong is appended to `violations` under its path in the
/// proto and left unset in the result, so that Engine::Resolve can go on to check the rest.
/// `preview` is null when none was asked for. `together`: all images leave in one message.
/// `request_id` is used when the request names none.
Translation Translate(const v1::GenerationParams& params, const v1::PreviewOptions* preview,
                      bool together, const std::string& request_id, const ModelInfo& model,
                      const RequestLimits& limits, std::vector<FieldViolation>* violations);

/// Whether `id` may be used as GenerationParams.request_id says.
bool IsRequestId(const std::string& id);

/// The path in the proto of a field of JobSpec: "class_labels[2]" is
/// "params.class_labels.labels[2]".
std::string ProtoField(const std::string& job_field);

v1::EffectiveParams ToProto(const EffectiveJob& job);
v1::Model ToProto(const CatalogModel& model, const std::string& device,
                  const RequestLimits& limits);

/// "edm_euler": the enum value without its prefix.
std::string Label(Sampler sampler);
std::string Label(NoiseSchedule schedule);
std::string Label(Priority priority);

/// What a PNG says of its making.
TextEntries Metadata(const EffectiveJob& job, const ImageResult& image);

/// `image` as a message. Costs milliseconds: for worker threads.
absl::StatusOr<v1::Image> Render(const ImageResult& image, const Rendering& rendering,
                                 const TextEntries& texts);

}  // namespace denoised
