// SPDX-License-Identifier: Apache-2.0
// installed_client_test SERVER: the installed library against a server, then its mock.
#include <denoised/client.h>
#include <denoised/mock_connection.h>

#include <iostream>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpc_service.pb.h"
#include "health.pb.h"

namespace client = denoised::client;

namespace {

int failures = 0;

void Expect(bool holds, const char* what) {
  if (holds) return;
  std::cerr << "failed: " << what << "\n";
  ++failures;
}

// The program's own messages, and the details of the library's errors, which have the same names.
void TestNeighbours(const client::Client& server) {
  google::rpc::DebugInfo debug;
  debug.set_detail("ours");
  google::rpc::Status status;
  status.add_details()->PackFrom(debug);
  Expect(status.details(0).type_url() == "type.googleapis.com/google.rpc.DebugInfo",
         "the program's google.rpc works");
  Expect(inference::ServerLiveResponse::descriptor()->file()->name() == "grpc_service.proto",
         "the program's inference works");
  Expect(grpc::health::v1::HealthCheckRequest::descriptor()->file()->name() == "health.proto",
         "the program's grpc.health works");

  const auto result = server.Generate({.steps = 0});
  const client::ErrorDetails details = client::Details(result.status());
  Expect(details.reason == "INVALID_FIELDS" && details.field_violations.size() == 1,
         "the library decodes google.rpc details");
  const auto health = server.CheckHealth("");
  Expect(health.ok() && *health == client::ServingStatus::kServing, "the library asks for health");
}

void TestMock() {
  const auto mock = std::make_shared<client::MockConnection>();
  EXPECT_CALL(*mock, GetModel("digits", testing::_))
      .WillOnce(testing::Return(client::Model{.name = "digits", .version = "3"}));
  const client::Client client(mock);
  Expect(client.GetModel("digits")->version == "3", "the mock answers what it was told to");
  Expect(absl::IsUnimplemented(client.StreamGenerate({}, {}, {})->Wait()),
         "a stream that no test expects is an error");
  Expect(absl::IsUnimplemented(client.UnloadModel("digits")),
         "a call that no test expects is an error");
}

// A fake that implements one call; those that later versions add need no change here.
class OnlyModels : public client::Connection {
 public:
  absl::StatusOr<std::vector<client::Model>> ListModels(const client::CallOptions&) override {
    return std::vector<client::Model>{{.name = "digits"}};
  }
};

void TestFake() {
  const client::Client client(std::make_shared<OnlyModels>());
  Expect(client.ListModels()->size() == 1, "the fake lists its model");
  Expect(absl::IsUnimplemented(client.GetServerInfo().status()), "what it lacks is an error");
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  const auto connection = client::Connect(argv[1]);
  if (!connection.ok()) {
    std::cerr << connection.status() << "\n";
    return 1;
  }
  TestNeighbours(client::Client(*connection));
  TestMock();
  TestFake();
  return failures + testing::UnitTest::GetInstance()->ad_hoc_test_result().total_part_count();
}
