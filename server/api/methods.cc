// SPDX-License-Identifier: Apache-2.0
#include "server/api/methods.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "server/api/translate.h"
#include "server/security/clients.h"
#include "server/status/model_name.h"
#include "server/status/quote.h"
#include "server/status/status_details.h"

namespace denoised {
namespace {

/// Whether the caller may ask for it; `before` is what the token says.
grpc::Status CheckListJobs(const v1::ListJobsRequest& request, const Caller& caller,
                           uint64_t* before) {
  if (caller.anonymous() && !caller.admin) {
    return ToGrpcStatus(
        absl::PermissionDeniedError(
            "callers without a name may not list jobs, as the ids of all of them would be told; "
            "ask for a job by its request_id, or ask the server's operator for a token"),
        reason::kNotAdmin, "");
  }
  if (request.all_clients() && !caller.admin) {
    return FieldStatus(
        absl::StatusCode::kPermissionDenied,
        {"all_clients",
         fmt::format("client \"{}\" sees its own jobs alone; leave all_clients out, or give it "
                     "\"admin\": true in the file of clients",
                     caller.name)},
        reason::kNotAdmin, "");
  }
  std::vector<FieldViolation> violations;
  if (request.page_size() < 0) {
    violations.push_back(
        {"page_size", fmt::format("is {}; use 1 to 1000, or 0 for 100", request.page_size())});
  }
  const std::string& token = request.page_token();
  if (!token.empty()) {
    const auto [end, error] = std::from_chars(token.data(), token.data() + token.size(), *before);
    if (error != std::errc() || end != token.data() + token.size()) {
      violations.push_back({"page_token", fmt::format("is {}; use next_page_token of the reply "
                                                      "before, or none for the first page",
                                                      Quote(token))});
    }
  }
  return violations.empty() ? grpc::Status::OK : InvalidFields(violations, "");
}

}  // namespace

grpc::Status Methods::GetJob(const v1::GetJobRequest& request, CallRecord* record,
                             v1::GetJobResponse* response) const {
  grpc::Status status;
  if (const auto generation = jobs_->Find(record->caller().name, request.request_id(), &status)) {
    record->Describe(*generation);
    *response->mutable_job() = jobs_->Describe(*generation);
  }
  return status;
}

grpc::Status Methods::ListJobs(const v1::ListJobsRequest& request, CallRecord* record,
                               v1::ListJobsResponse* response) const {
  constexpr int kPageSize = 100, kMaxPageSize = 1000;
  uint64_t before = std::numeric_limits<uint64_t>::max();
  grpc::Status status = CheckListJobs(request, record->caller(), &before);
  if (status.ok()) {
    std::optional<std::string> client;
    if (!request.all_clients()) client = record->caller().name;
    const int size = request.page_size() == 0 ? kPageSize : request.page_size();
    *response = jobs_->List(client, std::min(size, kMaxPageSize), before, limits_.max_reply_bytes);
  }
  return status;
}

grpc::Status Methods::CancelJob(const v1::CancelJobRequest& request, CallRecord* record,
                                v1::CancelJobResponse* response) const {
  grpc::Status status;
  if (const auto generation = jobs_->Find(record->caller().name, request.request_id(), &status)) {
    record->Describe(*generation);
    *response->mutable_job() = jobs_->Describe(*generation);
    generation->Cancel(EndReason::kCancelled);
  }
  return status;
}

grpc::Status Methods::GetServerInfo(const v1::GetServerInfoRequest&, CallRecord* record,
                                    v1::GetServerInfoResponse* response) const {
  *response = info_->Describe(record->caller());
  return grpc::Status::OK;
}

grpc::Status Methods::ListModels(const v1::ListModelsRequest&, CallRecord* record,
                                 v1::ListModelsResponse* response) const {
  const RequestLimits limits = Within(record->caller().limits, limits_);
  for (CatalogModel& model : catalog_->All()) {
    *response->add_models() =
        ToProto(ShownTo(record->caller().admin, std::move(model)), info_->DeviceNames(), limits);
  }
  return grpc::Status::OK;
}

grpc::Status Methods::GetModel(const v1::GetModelRequest& request, CallRecord* record,
                               v1::GetModelResponse* response) const {
  grpc::Status status;
  if (const auto model = catalog_->Select(request.name(), "name", "", &status)) {
    record->model = EngineName(model->name, model->version);
    *response->mutable_model() =
        ToProto(ShownTo(record->caller().admin, *model), info_->DeviceNames(),
                Within(record->caller().limits, limits_));
  }
  return status;
}

}  // namespace denoised
