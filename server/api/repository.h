// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "inference/open_inference.pb.h"
#include "server/models/catalog.h"
#include "server/status/status_details.h"
#include "server/telemetry/request_totals.h"

/// Triton's extensions of the Open Inference Protocol: model configuration, statistics and the
/// index of the model repository.

namespace denoised {

/// `model` must be ready.
void DescribeConfig(const CatalogModel& model, inference::ModelConfig* config);

/// `evaluations` is the engine's count.
void DescribeStatistics(const CatalogModel& model, const RequestTotals::Totals& totals,
                        uint64_t evaluations, inference::ModelStatistics* statistics);

void DescribeIndex(const std::vector<CatalogModel>& models, bool only_ready,
                   inference::RepositoryIndexResponse* index);

/// Checks these fields of a request; `known` is the one parameter that it may have, or null.
std::vector<FieldViolation> CheckRepositoryName(const std::string& repository_name);
std::vector<FieldViolation> CheckRepositoryChange(
    const std::string& repository_name, const std::string& model_name,
    const google::protobuf::Map<std::string, inference::ModelRepositoryParameter>& parameters,
    const char* known);

}  // namespace denoised
