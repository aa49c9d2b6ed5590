// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gmock/gmock.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "denoised/connection.h"

namespace denoised::client {

/// GoogleMock's classes for tests of programs that use denoised::client. Link GTest::gmock:
///
///   auto connection = std::make_shared<denoised::client::MockConnection>();
///   EXPECT_CALL(*connection, GetModel("digits", testing::_))
///       .WillOnce(testing::Return(Model{.name = "digits"}));
///   TestedCode(Client(connection));

/// A streaming call that a test controls.
class MockStreamCall : public StreamCall {
 public:
  MOCK_METHOD(void, Cancel, (), (override));
  MOCK_METHOD(absl::Status, Wait, (), (override));
};

/// A server that answers what a test expects. A call that no test expects does what Connection
/// does: it returns UNIMPLEMENTED, or a stream that ends with it.
class MockConnection : public Connection {
 public:
  MockConnection() {
#define DENOISED_MOCK_DEFAULT(call)                                           \
  ON_CALL(*this, call).WillByDefault([this](auto&&... arguments) {            \
    return Connection::call(std::forward<decltype(arguments)>(arguments)...); \
  })
    DENOISED_MOCK_DEFAULT(Generate);
    DENOISED_MOCK_DEFAULT(StreamGenerate);
    DENOISED_MOCK_DEFAULT(WatchJob);
    DENOISED_MOCK_DEFAULT(GetJob);
    DENOISED_MOCK_DEFAULT(ListJobs);
    DENOISED_MOCK_DEFAULT(CancelJob);
    DENOISED_MOCK_DEFAULT(GetServerInfo);
    DENOISED_MOCK_DEFAULT(LoadModel);
    DENOISED_MOCK_DEFAULT(UnloadModel);
    DENOISED_MOCK_DEFAULT(SetAlias);
    DENOISED_MOCK_DEFAULT(DeleteAlias);
    DENOISED_MOCK_DEFAULT(ListModels);
    DENOISED_MOCK_DEFAULT(GetModel);
    DENOISED_MOCK_DEFAULT(CheckHealth);
#undef DENOISED_MOCK_DEFAULT
  }

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
