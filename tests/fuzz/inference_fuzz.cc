// SPDX-License-Identifier: Apache-2.0
#include <google/protobuf/stubs/logging.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "inference/open_inference.pb.h"
#include "server/api/inference.h"
#include "server/api/translate.h"
#include "server/status/status_details.h"
#include "tests/fuzz/message_mutator.h"

namespace {

using namespace denoised;  // NOLINT: a program of one file

constexpr size_t kMaxTrailer = 8192;  // what gRPC's peers accept by default

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

ModelInfo Model(int channels, ClassCondition condition) {
  ModelInfo model{.name = "model@1", .state = ModelState::kReady};
  model.height = model.width = 8;
  model.size_multiple = 4;
  model.max_edge = 32;
  model.channels = channels;
  model.condition = condition;
  model.num_classes = 10;
  model.class_vector_size = 3;
  model.guidance = condition == ClassCondition::kLabel;
  return model;
}

void CheckRefusal(const std::vector<FieldViolation>& violations) {
  for (const FieldViolation& violation : violations) {
    Require(!violation.field.empty() && !violation.description.empty(), "a violation is described");
    Require(violation.field.rfind("params.", 0) != 0, violation.field.c_str());
  }
  const grpc::Status status = InvalidFields(violations, "fuzz");
  Require(status.error_details().size() <= kMaxTrailer, "the details fit into a trailer");
}

void Ask(const inference::ModelInferRequest& request, const ModelInfo& model) {
  static MemoryBudget memory(1 << 20);
  RequestLimits limits;
  limits.max_init_pixels = 4096;
  limits.max_reply_bytes = 1 << 12;
  limits.max_count = 6;
  std::vector<FieldViolation> violations;
  const Inference inference = ReadInference(request, model, limits, &memory, &violations);
  if (!violations.empty()) return CheckRefusal(violations);
  const v1::GenerationParams& params = inference.params;
  const int batch = params.has_count() ? params.count() : 1;
  Require(batch >= 1, "there is an image");
  Require(params.seeds().empty() || params.seeds_size() == batch, "a seed for each image");
  const int conditions = params.conditions_size();
  Require(conditions == 0 || conditions == batch || batch > limits.max_count,
          "a condition for each image");
  for (const v1::Condition& condition : params.conditions()) {
    Require(condition.class_vector().empty() ||
                condition.class_vector_size() == model.class_vector_size,
            "a vector for each image");
  }
  Require(!inference.outputs.names.empty(), "something is wanted");
  // Names of inputs for all that Translate finds wrong.
  Translate(params, nullptr, true, "fuzz", model, limits, &memory, &violations);
  for (FieldViolation& violation : violations) violation.field = InputName(violation.field);
  if (!violations.empty()) CheckRefusal(violations);
}

}  // namespace

/// Any bytes that are a ModelInferRequest are refused by the names of inputs, or become a request
/// whose batch agrees.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<ModelInfo> models = {Model(1, ClassCondition::kLabel),
                                                Model(3, ClassCondition::kNone),
                                                Model(4, ClassCondition::kVector)};
  google::protobuf::SetLogHandler(nullptr);  // it would tell of every message that does not parse
  inference::ModelInferRequest request;
  if (!request.ParseFromArray(data, static_cast<int>(size))) return 0;
  for (const ModelInfo& model : models) Ask(request, model);
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  inference::ModelInferRequest request;
  return MutateSerialized(&request, data, size, max_size, seed);
}
