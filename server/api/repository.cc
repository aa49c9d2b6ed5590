// SPDX-License-Identifier: Apache-2.0
#include "server/api/repository.h"

#include <fmt/format.h>

#include <chrono>

#include "server/api/inference.h"
#include "server/status/name.h"
#include "server/status/quote.h"

namespace denoised {
namespace {

/// Datatypes of metadata in a model configuration: "BYTES" → TYPE_STRING, "INT32" → TYPE_INT32.
inference::DataType ConfigType(const std::string& datatype) {
  if (datatype == "BYTES") return inference::TYPE_STRING;
  inference::DataType type = inference::TYPE_INVALID;
  inference::DataType_Parse("TYPE_" + datatype, &type);
  return type;
}

void Set(uint64_t count, std::chrono::nanoseconds time, inference::StatisticDuration* duration) {
  duration->set_count(count);
  duration->set_ns(static_cast<uint64_t>(time.count()));
}

const char* StateName(ModelState state) {
  switch (state) {
    case ModelState::kReady:
      return "READY";
    case ModelState::kLoading:
      return "LOADING";
    case ModelState::kUnloading:
      return "UNLOADING";
    case ModelState::kFailed:
      return "UNAVAILABLE";
  }
  return "UNAVAILABLE";
}

}  // namespace

void DescribeConfig(const CatalogModel& model, inference::ModelConfig* config) {
  inference::ModelMetadataResponse metadata;
  DescribeTensors(*model.info, &metadata);
  config->set_name(model.name);
  config->set_platform("denoised_diffusers");
  config->set_backend("denoised");
  for (const auto& tensor : metadata.inputs()) {
    inference::ModelInput& input = *config->add_input();
    input.set_name(tensor.name());
    input.set_data_type(ConfigType(tensor.datatype()));
    *input.mutable_dims() = tensor.shape();
    input.set_optional(!IsRequired(tensor.name(), *model.info));
  }
  for (const auto& tensor : metadata.outputs()) {
    inference::ModelOutput& output = *config->add_output();
    output.set_name(tensor.name());
    output.set_data_type(ConfigType(tensor.datatype()));
    *output.mutable_dims() = tensor.shape();
  }
}

void DescribeStatistics(const CatalogModel& model, const RequestTotals::Totals& totals,
                        uint64_t evaluations, inference::ModelStatistics* statistics) {
  statistics->set_name(model.name);
  statistics->set_version(model.version);
  const auto last =
      std::chrono::duration_cast<std::chrono::milliseconds>(totals.last.time_since_epoch());
  statistics->set_last_inference(static_cast<uint64_t>(last.count()));
  statistics->set_inference_count(totals.images);
  statistics->set_execution_count(evaluations);
  inference::InferStatistics& requests = *statistics->mutable_inference_stats();
  constexpr std::chrono::nanoseconds kNone{0};
  Set(totals.succeeded, totals.succeeded_time, requests.mutable_success());
  Set(totals.failed, totals.failed_time, requests.mutable_fail());
  Set(totals.succeeded, totals.queued_time, requests.mutable_queue());
  Set(totals.succeeded, kNone, requests.mutable_compute_input());
  Set(totals.succeeded, totals.succeeded_time - totals.queued_time,
      requests.mutable_compute_infer());
  Set(totals.succeeded, kNone, requests.mutable_compute_output());
}

void DescribeIndex(const std::vector<CatalogModel>& models, bool only_ready,
                   inference::RepositoryIndexResponse* index) {
  for (const CatalogModel& model : models) {
    if (only_ready && model.info->state != ModelState::kReady) continue;
    auto& entry = *index->add_models();
    entry.set_name(model.name);
    entry.set_version(model.version);
    entry.set_state(StateName(model.info->state));
    entry.set_reason(std::string(model.info->error.message()));
  }
}

std::vector<FieldViolation> CheckRepositoryName(const std::string& repository_name) {
  if (repository_name.empty()) return {};
  return {
      {"repository_name", fmt::format("is {}, but repositories have no names here; leave it out",
                                      Quote(repository_name))}};
}

std::vector<FieldViolation> CheckRepositoryChange(
    const std::string& repository_name, const std::string& model_name,
    const google::protobuf::Map<std::string, inference::ModelRepositoryParameter>& parameters,
    const char* known) {
  std::vector<FieldViolation> violations = CheckRepositoryName(repository_name);
  if (!IsName(model_name)) {
    violations.push_back({"model_name", fmt::format("is {}; {}", Quote(model_name), kNameRule)});
  }
  for (const auto& [name, value] : parameters) {
    if (known != nullptr && name == known) continue;
    violations.push_back({"parameters", fmt::format("has {}, which this server does not know; "
                                                    "leave it out",
                                                    Quote(name))});
    break;  // there may be millions
  }
  return violations;
}

}  // namespace denoised
