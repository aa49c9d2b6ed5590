// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/error_details.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "denoised/v1/image_generation.grpc.pb.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/server.h"
#include "tests/server/fake_engine.h"

namespace denoised {

/// A whole Server in this process, over loopback, on a FakeEngine with one model, "digits". What a
/// test sets in config_ before Start is what the server is started with.
class ServerFixture : public ::testing::Test {
 protected:
  ServerFixture();

  /// Returns when all models are loaded or have failed.
  void Start(const FakeEngineOptions& options = {});
  /// Returns at once.
  void StartLoading(const FakeEngineOptions& options = {});

  std::shared_ptr<grpc::Channel> Connect(
      const std::shared_ptr<grpc::ChannelCredentials>& credentials,
      grpc::ChannelArguments arguments = {}) const;

  grpc::Status Generate(const v1::GenerateRequest& request, v1::GenerateResponse* response);
  grpc::Status Generate(const v1::GenerateRequest& request = {});

  /// A socket, to be closed by the caller; −1 when nobody listens.
  int ConnectToMetrics() const;
  /// What the metrics port answers to GET, headers included; empty when nobody does.
  std::string Get(const std::string& path) const;
  std::string Scrape() const { return Get("/metrics"); }

  Config config_;
  FakeEngine* engine_ = nullptr;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;  // without TLS
  std::unique_ptr<v1::ImageGeneration::Stub> stub_;
};

/// A unary call of any method whose message is `request`, whatever these bytes are.
grpc::Status CallByName(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext* context,
                        const std::string& path, const std::string& request = "",
                        std::string* response = nullptr);

/// The same with a message that is not copied.
grpc::Status CallByName(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext* context,
                        const std::string& path, const grpc::ByteBuffer& request,
                        std::string* response = nullptr);

/// The detail of this type that a status carries; a test fails without one.
template <typename Detail>
Detail Find(const grpc::Status& status) {
  google::rpc::Status rpc;
  EXPECT_TRUE(grpc::ExtractErrorDetails(status, &rpc).ok());
  Detail detail;
  for (const auto& any : rpc.details()) {
    if (any.UnpackTo(&detail)) return detail;
  }
  ADD_FAILURE() << "no " << detail.GetTypeName() << " in " << rpc.ShortDebugString();
  return detail;
}
/// The fields that a BadRequest names.
std::vector<std::string> Violated(const grpc::Status& status);

}  // namespace denoised
