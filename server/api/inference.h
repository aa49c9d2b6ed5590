// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/support/status.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "denoised/v1/image_generation.pb.h"
#include "engine/engine.h"
#include "inference/open_inference.pb.h"
#include "server/jobs/memory_budget.h"
#include "server/security/limits.h"

/// Converts tensors of the Open Inference Protocol to a request of Generate, and images to tensors.
///
/// Every input is a field of denoised.v1.GenerationParams, with its type and meaning. All are
/// optional, but for `prompt` of models that read text. Inputs with one entry for each image:
///
///   seed                               UINT64 [-1]
///   label                              INT32 [-1]     models with labels
///   class_vector                       FP32 [-1, n]   models that take numbers as condition
///   prompt, negative_prompt            BYTES [-1]     models that read text; UTF-8
///   prompt_2, negative_prompt_2        BYTES [-1]     models with two text encoders
///
/// These must have the same number of entries, which is the number of images (default: 1). Inputs
/// that the images share have shape [1]:
///
///   steps, width, height, solver_order                    INT32
///   clip_skip, max_chunks                                 INT32: models that read text
///   guidance_scale                                        FP64: models with guidance
///   guidance_start, guidance_stop                         FP64: those of them with a second row
///   image_guidance_scale, guidance_rescale                FP64: models that take them
///   eta, s_churn, s_tmin, s_tmax, s_noise                 FP64
///   sampler, noise_schedule     BYTES, "heun", "karras": values of the enum without their prefix
///   init_image, strength        BYTES, a PNG, JPEG or WebP file; FP64; of models that take them
///   mask                        BYTES, such a file, of models that take one
///   format, quality             BYTES, "png", "jpeg" or "webp"; INT32: of the output `encoded`
///
/// Outputs for N images:
///
///   image     UINT8 [N, height, width, channels]; FP32 unless they are grey or RGB
///   encoded   BYTES [N], files
///   seed      UINT64 [N], the seed of each image
///   label     INT32 [N]

namespace denoised {

/// Lists the inputs and outputs of a model that is ready.
void DescribeTensors(const ModelInfo& model, inference::ModelMetadataResponse* metadata);

/// Whether the model draws nothing without this input.
bool IsRequired(const std::string& input, const ModelInfo& model);

/// What a request asks to be given.
struct InferenceOutputs {
  std::vector<std::string> names;  // in the order of the reply
  int channels = 0;                // of each image
};

/// A ModelInferRequest in our own types.
struct Inference {
  v1::GenerationParams params;                       // without the model
  std::optional<std::chrono::microseconds> timeout;  // from its arrival
  InferenceOutputs outputs;
  MemoryBudget::Lease upload;  // of files and texts in `params`
  /// ResourceExhausted if other requests hold the memory that they need.
  absl::Status memory_status;
};

/// The priority in the parameters; normal if there is none or it is invalid.
Priority ReadPriority(const inference::ModelInferRequest& request);

/// Checks names, types, shapes and lengths; Generate checks the values. Errors are appended to
/// `violations`, under the name of the input if there is one. Memory for files is reserved in
/// `memory`, which must outlive the result.
Inference ReadInference(const inference::ModelInferRequest& request, const ModelInfo& model,
                        const RequestLimits& limits, MemoryBudget* memory,
                        std::vector<FieldViolation>* violations);

/// Maps a field of denoised.v1 to the input that it comes from: "params.seeds[2]" → "seed[2]".
std::string InputName(const std::string& field);

/// The reply but for its id. `images` are in the order of their indices. Where files are to be
/// unpacked too, one after another, it waits for the memory of each. Not OK if they are too large
/// for that or for a reply: an init image can make images larger than ReadInference could know.
grpc::Status WriteInference(const v1::GenerateResponse& images, const InferenceOutputs& outputs,
                            int64_t max_reply_bytes, MemoryBudget* memory,
                            inference::ModelInferResponse* response);

}  // namespace denoised
