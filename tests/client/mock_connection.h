#pragma once

#include <gmock/gmock.h>

#include "denoised/connection.h"

namespace denoised::client {

/// A server of which nothing is expected until a test says so.
class MockConnection : public Connection {
 public:
  MOCK_METHOD(absl::StatusOr<GenerationResult>, Generate, (const Generation&, const CallOptions&),
              (override));
  MOCK_METHOD(std::unique_ptr<StreamCall>, StreamGenerate,
              (const Generation&, const std::optional<PreviewOptions>&, StreamListener,
               const CallOptions&),
              (override));
  MOCK_METHOD(std::unique_ptr<StreamCall>, WatchJob,
              (const std::string&, uint64_t, StreamListener, const CallOptions&), (override));
  MOCK_METHOD(absl::StatusOr<Job>, GetJob, (const std::string&, const CallOptions&), (override));
  MOCK_METHOD(absl::StatusOr<std::vector<Job>>, ListJobs, (const JobQuery&, const CallOptions&),
              (override));
  MOCK_METHOD(absl::StatusOr<Job>, CancelJob, (const std::string&, const CallOptions&), (override));
  MOCK_METHOD(absl::StatusOr<ServerInfo>, GetServerInfo, (const CallOptions&), (override));
  MOCK_METHOD(absl::StatusOr<Model>, LoadModel, (const ModelLoad&, const CallOptions&), (override));
  MOCK_METHOD(absl::Status, UnloadModel, (const std::string&, const CallOptions&), (override));
  MOCK_METHOD(absl::StatusOr<Model>, SetAlias,
              (const std::string&, const std::string&, const CallOptions&), (override));
  MOCK_METHOD(absl::Status, DeleteAlias, (const std::string&, const CallOptions&), (override));
  MOCK_METHOD(absl::StatusOr<std::vector<Model>>, ListModels, (const CallOptions&), (override));
  MOCK_METHOD(absl::StatusOr<Model>, GetModel, (const std::string&, const CallOptions&),
              (override));
  MOCK_METHOD(absl::StatusOr<ServingStatus>, CheckHealth, (const std::string&, const CallOptions&),
              (override));
};

}  // namespace denoised::client
