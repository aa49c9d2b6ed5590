// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "denoised/connection.h"
#include "denoised/stream_call.h"

// The calls of a Connection that a class for tests does not override.

namespace denoised::client {
namespace {

absl::Status Unimplemented(const char* call) {
  return absl::UnimplementedError(
      fmt::format("this Connection does not implement {}; override it", call));
}

}  // namespace

absl::StatusOr<GenerationResult> Connection::Generate(const Generation&, const CallOptions&) {
  return Unimplemented("Generate");
}
// NOLINTBEGIN(performance-unnecessary-value-param): other connections keep the listener
std::unique_ptr<StreamCall> Connection::StreamGenerate(const Generation&,
                                                       const std::optional<PreviewOptions>&,
                                                       StreamListener listener,
                                                       const CallOptions&) {
  return FailedStreamCall(Unimplemented("StreamGenerate"), listener);
}
std::unique_ptr<StreamCall> Connection::WatchJob(const std::string&, uint64_t,
                                                 StreamListener listener, const CallOptions&) {
  return FailedStreamCall(Unimplemented("WatchJob"), listener);
}
// NOLINTEND(performance-unnecessary-value-param)
absl::StatusOr<Job> Connection::GetJob(const std::string&, const CallOptions&) {
  return Unimplemented("GetJob");
}
absl::StatusOr<std::vector<Job>> Connection::ListJobs(const JobQuery&, const CallOptions&) {
  return Unimplemented("ListJobs");
}
absl::StatusOr<Job> Connection::CancelJob(const std::string&, const CallOptions&) {
  return Unimplemented("CancelJob");
}
absl::StatusOr<ServerInfo> Connection::GetServerInfo(const CallOptions&) {
  return Unimplemented("GetServerInfo");
}
absl::StatusOr<Model> Connection::LoadModel(const ModelLoad&, const CallOptions&) {
  return Unimplemented("LoadModel");
}
absl::Status Connection::UnloadModel(const std::string&, const CallOptions&) {
  return Unimplemented("UnloadModel");
}
absl::StatusOr<Model> Connection::SetAlias(const std::string&, const std::string&,
                                           const CallOptions&) {
  return Unimplemented("SetAlias");
}
absl::Status Connection::DeleteAlias(const std::string&, const CallOptions&) {
  return Unimplemented("DeleteAlias");
}
absl::StatusOr<std::vector<Model>> Connection::ListModels(const CallOptions&) {
  return Unimplemented("ListModels");
}
absl::StatusOr<Model> Connection::GetModel(const std::string&, const CallOptions&) {
  return Unimplemented("GetModel");
}
absl::StatusOr<ServingStatus> Connection::CheckHealth(const std::string&, const CallOptions&) {
  return Unimplemented("CheckHealth");
}

}  // namespace denoised::client
