// SPDX-License-Identifier: Apache-2.0
#include "server/api/request_preparer.h"

#include <algorithm>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/api/translate.h"
#include "server/security/clients.h"
#include "server/status/model_name.h"
#include "server/status/status_details.h"

namespace denoised {
namespace {

/// Whether `field` is `whole` or a part of it: "params.mask.encoded" of "params.mask".
bool IsIn(std::string_view field, std::string_view whole) {
  return field.substr(0, whole.size()) == whole &&
         (field.size() == whole.size() || field[whole.size()] == '.' || field[whole.size()] == '[');
}

/// Names the fields as the caller does, who may have one field for two of ours, such as `size`.
void Rename(const JobRequest& request, std::vector<FieldViolation>* violations) {
  std::set<std::pair<std::string, std::string>> told;
  std::erase_if(*violations, [&](FieldViolation& violation) {
    violation.field = request.FieldName(violation.field);
    return !told.insert({violation.field, violation.description}).second;
  });
}

}  // namespace

void MergeViolations(const std::vector<FieldViolation>& engine, const v1::GenerationParams& params,
                     const JobSpec& spec, std::vector<FieldViolation>* all) {
  const std::vector<FieldViolation> server = *all;
  std::set<std::string> fields;
  for (const FieldViolation& violation : engine) {
    std::string field = ProtoField(violation.field);
    const bool refused =
        (field == "params.init_image" && params.has_init_image() && !spec.init_image) ||
        (field == "params.mask" && params.has_mask() && !spec.mask);
    // The numbers of all conditions are one list in the engine.
    const std::string whole = violation.field == "class_values" ? "params.conditions" : field;
    const bool told = std::any_of(server.begin(), server.end(),
                                  [&](const FieldViolation& of) { return IsIn(of.field, whole); });
    if (refused || told || !fields.insert(field).second) continue;
    all->push_back({std::move(field), violation.description});
  }
}

bool Takes(const ModelInfo& model, const v1::GenerationParams& params) {
  if (params.conditions().empty()) return true;
  const v1::Condition& condition = params.conditions(0);
  const bool vector =
      model.condition == ClassCondition::kValue || model.condition == ClassCondition::kVector;
  return (!condition.has_text() || model.text) &&
         (!condition.has_class_label() || model.condition == ClassCondition::kLabel) &&
         (condition.class_vector().empty() || vector);
}

grpc::Status RequestPreparer::Prepare(const JobRequest& request, const std::string& request_id,
                                      PreparedJob* prepared) {
  *prepared = {};
  grpc::Status refusal;
  const auto model = catalog_->Select(
      request.params.model(), request.FieldName("params.model"), request_id, &refusal,
      [&](const ModelInfo& info) { return Takes(info, request.params); });
  if (!model) return refusal;
  prepared->model = EngineName(model->name, model->version);
  refusal = CheckReady(ShownTo(request.caller.admin, *model), request_id);
  if (!refusal.ok()) return refusal;

  std::vector<FieldViolation> violations;
  Translation translation =
      Translate(request.params, request.preview, request.together, request_id, *model->info,
                Within(request.caller.limits, limits_), decoding_, &violations);
  const bool survives = request.params.disconnect_policy() == v1::DISCONNECT_POLICY_CONTINUE;
  JobSpec& spec = translation.spec;
  if (!request.caller.anonymous()) spec.client = request.caller.name;
  spec.client_weight = request.caller.weight;
  if (!survives) spec.deadline = request.deadline;
  std::vector<FieldViolation> engine_violations;
  auto job = engine_->Resolve(spec, &engine_violations);
  MergeViolations(engine_violations, request.params, spec, &violations);
  if (!violations.empty()) {
    Rename(request, &violations);
    return InvalidFields(violations, request_id);
  }
  if (!translation.memory_status.ok()) {
    return ToGrpcStatus(
        Annotate(translation.memory_status, request.FieldName(translation.memory_field)),
        reason::kDecodingMemory, request_id, queue_wait_->RetryDelay());
  }
  if (!job.ok()) {
    prepared->replaced = true;  // it was ready a moment ago
    return ToGrpcStatus(job.status(), reason::kModelUnloading, request_id);
  }
  prepared->job = *std::move(job);
  prepared->params = ToProto(prepared->job, translation.image);
  prepared->params.set_include_timings(request.params.include_timings());
  prepared->params.set_disconnect_policy(survives ? v1::DISCONNECT_POLICY_CONTINUE
                                                  : v1::DISCONNECT_POLICY_CANCEL);
  prepared->run = RunOf(prepared->job);
  prepared->image = translation.image;
  prepared->preview = translation.preview;
  prepared->memory = std::move(translation.memory);
  return grpc::Status::OK;
}

}  // namespace denoised
