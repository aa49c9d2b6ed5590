// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "denoised/v1/image_generation.pb.h"
#include "engine/engine.h"
#include "inference/open_inference.pb.h"
#include "server/jobs/memory_budget.h"
#include "server/security/limits.h"

/// Between the tensors of the Open Inference Protocol and the request that Generate takes.
///
/// Every input is a field of denoised.v1.GenerationParams, of that field's type and meaning, and
/// may be left out. Those that a batch has one of for each image:
///
///   seed            UINT64 [-1]
///   label           INT32 [-1]     models with labels
///   class_vector    FP32 [-1, n]   models that take numbers as condition
///
/// all with the same number of entries, which is the number of images; 1 when none is given. Those
/// that the images share have shape [1]:
///
///   steps, width, height, solver_order                    INT32
///   guidance_scale, eta, s_churn, s_tmin, s_tmax, s_noise FP64
///   sampler, noise_schedule     BYTES, "heun", "karras": values of the enum without their prefix
///   init_image, strength        BYTES, a PNG, JPEG or WebP file; FP64
///   format, quality             BYTES, "png", "jpeg" or "webp"; INT32: of the output `encoded`
///
/// Outputs, of N images:
///
///   image     UINT8 [N, height, width, channels]; FP32 when they are neither grey nor RGB
///   encoded   BYTES [N], files
///   seed      UINT64 [N], which draws the image again
///   label     INT32 [N]

namespace denoised {

/// Inputs and outputs of a model that is ready.
void DescribeTensors(const ModelInfo& model, inference::ModelMetadataResponse* metadata);

/// What a ModelInferRequest asks.
struct Inference {
  v1::GenerationParams params;                       // but for the model
  std::optional<std::chrono::microseconds> timeout;  // from its arrival
  std::vector<std::string> outputs;                  // in the order of the reply
  MemoryBudget::Lease upload;                        // of the file in `params`
  /// ResourceExhausted: other requests hold the memory that the file needs.
  absl::Status memory_status;
};

/// The priority that the parameters ask for; normal when they ask for none, or none that there is.
Priority ReadPriority(const inference::ModelInferRequest& request);

/// Checks names, types, shapes and lengths, all that the protocol adds; what the values may be, the
/// request's way through Generate tells. Whatever is wrong is appended to `violations`, under the
/// name of the input where it is one. Memory for files is reserved in `memory`, which must outlive
/// the result.
Inference ReadInference(const inference::ModelInferRequest& request, const ModelInfo& model,
                        const RequestLimits& limits, MemoryBudget* memory,
                        std::vector<FieldViolation>* violations);

/// The input that a field of denoised.v1 comes from: "params.seeds[2]" is "seed[2]".
std::string InputName(const std::string& field);

/// The reply but for its id. `images` are in the order of their indices. Where files are to be
/// unpacked too, one after another, it waits for the memory of each.
void WriteInference(const v1::GenerateResponse& images, const std::vector<std::string>& outputs,
                    MemoryBudget* memory, inference::ModelInferResponse* response);

}  // namespace denoised
