// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/support/status.h>

#include "denoised/v1/image_generation.pb.h"
#include "server/api/call_record.h"
#include "server/api/server_info.h"
#include "server/jobs/jobs.h"
#include "server/models/catalog.h"
#include "server/security/limits.h"

namespace denoised {

/// The methods of denoised.v1.ImageGeneration that wait for nothing, whatever carries the call:
/// each fills in the reply and says in the record what was asked for. Thread-safe; what is pointed
/// to must outlive it.
class Methods {
 public:
  Methods(Jobs* jobs, const Catalog* catalog, const ServerInfo* info, const RequestLimits& limits)
      : jobs_(jobs), catalog_(catalog), info_(info), limits_(limits) {}

  grpc::Status GetJob(const v1::GetJobRequest& request, CallRecord* record,
                      v1::GetJobResponse* response) const;
  /// There may be many to look through: on a worker.
  grpc::Status ListJobs(const v1::ListJobsRequest& request, CallRecord* record,
                        v1::ListJobsResponse* response) const;
  grpc::Status CancelJob(const v1::CancelJobRequest& request, CallRecord* record,
                         v1::CancelJobResponse* response) const;
  grpc::Status GetServerInfo(const v1::GetServerInfoRequest& request, CallRecord* record,
                             v1::GetServerInfoResponse* response) const;
  grpc::Status ListModels(const v1::ListModelsRequest& request, CallRecord* record,
                          v1::ListModelsResponse* response) const;
  grpc::Status GetModel(const v1::GetModelRequest& request, CallRecord* record,
                        v1::GetModelResponse* response) const;

 private:
  Jobs* const jobs_;
  const Catalog* const catalog_;
  const ServerInfo* const info_;
  const RequestLimits limits_;
};

}  // namespace denoised
