// SPDX-License-Identifier: Apache-2.0
#include "server/api/request_preparer.h"

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/api/translate.h"
#include "server/security/clients.h"
#include "server/status/model_name.h"
#include "server/status/status_details.h"

namespace denoised {
namespace {

/// Appends the engine's violations to the server's; each field once.
void Merge(const std::vector<FieldViolation>& engine, std::vector<FieldViolation>* all) {
  std::set<std::string> fields;
  for (const FieldViolation& violation : *all) fields.insert(violation.field);
  for (const FieldViolation& violation : engine) {
    std::string field = ProtoField(violation.field);
    if (fields.insert(field).second) all->push_back({std::move(field), violation.description});
  }
}

/// Whether `model` reads what the first condition holds.
bool Takes(const ModelInfo& model, const v1::GenerationParams& params) {
  if (params.conditions().empty()) return true;
  const v1::Condition& condition = params.conditions(0);
  const bool vector =
      model.condition == ClassCondition::kValue || model.condition == ClassCondition::kVector;
  return (!condition.has_text() || model.text) &&
         (!condition.has_class_label() || model.condition == ClassCondition::kLabel) &&
         (condition.class_vector().empty() || vector);
}

}  // namespace

std::string ModelNameFor(const v1::GenerationParams& params,
                         const std::vector<CatalogModel>& models) {
  std::string only;
  for (const CatalogModel& model : models) {
    if (!model.current) continue;
    if (model.info->state == ModelState::kLoading) return "";
    if (!Takes(*model.info, params)) continue;
    if (!only.empty()) return "";
    only = model.name;
  }
  return only;
}

grpc::Status RequestPreparer::Prepare(const JobRequest& request, const std::string& request_id,
                                      PreparedJob* prepared) {
  *prepared = {};
  grpc::Status refusal;
  const std::string& asked = request.params.model();
  const std::string name = asked.empty() ? ModelNameFor(request.params, catalog_->All()) : asked;
  const auto model =
      catalog_->Select(name, request.FieldName("params.model"), request_id, &refusal);
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
  Merge(engine_violations, &violations);
  if (!violations.empty()) {
    for (FieldViolation& violation : violations) {
      violation.field = request.FieldName(violation.field);
    }
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
