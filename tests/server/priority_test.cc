// SPDX-License-Identifier: Apache-2.0
// Requests are checked at their own priority: one that somebody waits for does not wait for the
// images of batch jobs to be encoded.

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "inference/open_inference.grpc.pb.h"
#include "tests/eventually.h"
#include "tests/server/server_fixture.h"

namespace denoised {
namespace {

constexpr int kBatchImages = 32;
/// A batch image has its turn now and then; the request that holds the worker has an image as well.
constexpr int kMayBeEncoded = 4;

class PriorityTest : public ServerFixture {
 protected:
  PriorityTest() {
    config_.worker_threads = 1;
    config_.metrics_listen = "127.0.0.1:0";
  }

  static v1::GenerationParams Params(const std::string& request_id, v1::Priority priority) {
    v1::GenerationParams params;
    params.set_request_id(request_id);
    params.set_priority(priority);
    return params;
  }

  /// The sum of the metrics whose lines begin with `name` and contain `label`.
  double Metric(const std::string& name, const std::string& label) const {
    double sum = 0;
    std::istringstream text(Scrape());
    for (std::string line; std::getline(text, line);) {
      if (line.rfind(name + '{', 0) == 0 && line.find(label) != std::string::npos)
        sum += std::stod(line.substr(line.rfind(' ')));
    }
    return sum;
  }

  /// Lets all images of a batch job wait for the only worker, then makes `call`, whose request is
  /// interactive. The number of images that were encoded before the request was checked.
  int EncodedBefore(const std::string& method, int calls, const std::function<bool()>& call) {
    std::promise<void> may_go_on;
    std::atomic<bool> holds{false};
    std::atomic<int> encoded{-1};
    engine_->OnSubmit([&](const JobSpec& spec) {
      if (spec.request_id == "batch") return;
      if (spec.request_id == "holder") {
        holds = true;
        may_go_on.get_future().wait();
      } else {
        encoded = static_cast<int>(Metric("denoised_encoding_seconds_count", ""));
      }
    });
    engine_->Pause(true);
    std::thread batch([&] {
      v1::GenerateRequest request;
      *request.mutable_params() = Params("batch", v1::PRIORITY_BATCH);
      request.mutable_params()->set_count(kBatchImages);
      EXPECT_TRUE(Generate(request).ok());
    });
    EXPECT_TRUE(Eventually([&] { return engine_->QueuedImages("digits@1") == kBatchImages; }));
    std::thread holder([&] {
      v1::GenerateRequest request;
      *request.mutable_params() = Params("holder", v1::PRIORITY_INTERACTIVE);
      EXPECT_TRUE(Generate(request).ok());
    });
    EXPECT_TRUE(Eventually([&] { return holds.load(); }));
    engine_->Pause(false);
    EXPECT_TRUE(Eventually([&] {
      const EngineStats stats = engine_->Stats()[0];
      return stats.queued_images == 0 && stats.active_images == 0;
    }));
    std::thread caller([&] { EXPECT_TRUE(call()); });
    EXPECT_TRUE(Eventually([&] {
      return Metric("grpc_server_started_total", "grpc_method=\"" + method + '"') >= calls;
    }));
    // It is posted by now, even if the process was stopped in one of these.
    for (int i = 0; i < 20; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    may_go_on.set_value();
    caller.join();
    holder.join();
    batch.join();
    engine_->OnSubmit(nullptr);
    return encoded;
  }
};

/// A request whose client left before its turn is not checked, and so its uploads are not unpacked.
TEST_F(PriorityTest, NothingIsCheckedForClientsThatLeft) {
  Start();
  std::promise<void> may_go_on;
  std::atomic<bool> holds{false};
  std::atomic<int> left{0}, continued{0};
  engine_->OnSubmit([&](const JobSpec& spec) {
    if (spec.request_id.starts_with("left")) ++left;
    if (spec.request_id == "continues") ++continued;
    if (spec.request_id != "holder") return;
    holds = true;
    may_go_on.get_future().wait();
  });
  std::thread holder([&] {
    v1::GenerateRequest request;
    *request.mutable_params() = Params("holder", v1::PRIORITY_INTERACTIVE);
    EXPECT_TRUE(Generate(request).ok());
  });
  EXPECT_TRUE(Eventually([&] { return holds.load(); }));

  constexpr int kCalls = 3;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::StreamGenerateResponse>>> readers;
  const auto stream = [&](const v1::GenerationParams& params) {
    v1::StreamGenerateRequest request;
    *request.mutable_params() = params;
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    readers.push_back(stub_->StreamGenerate(contexts.back().get(), request));
  };
  for (int i = 0; i < kCalls; ++i) {
    stream(Params("left" + std::to_string(i), v1::PRIORITY_NORMAL));
  }
  v1::GenerationParams params = Params("continues", v1::PRIORITY_NORMAL);
  params.set_disconnect_policy(v1::DISCONNECT_POLICY_CONTINUE);
  stream(params);
  EXPECT_TRUE(Eventually([&] {
    return Metric("grpc_server_started_total", "grpc_method=\"StreamGenerate\"") == kCalls + 1;
  }));
  for (const auto& context : contexts) context->TryCancel();
  for (const auto& reader : readers) {
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  // On the same connection: the server has read the cancels before this.
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  EXPECT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
  // It acts on them a moment later, and has no way to say so.
  for (int i = 0; i < 30; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  may_go_on.set_value();
  holder.join();
  EXPECT_TRUE(Eventually([&] {
    return Metric("grpc_server_handled_total", "grpc_method=\"StreamGenerate\"") == kCalls + 1;
  }));
  EXPECT_EQ(left, 0);
  EXPECT_EQ(continued, 1) << "its client wants it without being there";
  engine_->OnSubmit(nullptr);
}

TEST_F(PriorityTest, GenerateIsCheckedBeforeBatchImagesAreEncoded) {
  Start();
  const int encoded = EncodedBefore("Generate", 3, [&] {
    v1::GenerateRequest request;
    *request.mutable_params() = Params("interactive", v1::PRIORITY_INTERACTIVE);
    return Generate(request).ok();
  });
  EXPECT_GE(encoded, 0);
  EXPECT_LE(encoded, kMayBeEncoded) << "of " << kBatchImages;
}

TEST_F(PriorityTest, StreamGenerateIsCheckedBeforeBatchImagesAreEncoded) {
  Start();
  const int encoded = EncodedBefore("StreamGenerate", 1, [&] {
    v1::StreamGenerateRequest request;
    *request.mutable_params() = Params("interactive", v1::PRIORITY_INTERACTIVE);
    grpc::ClientContext context;
    const auto reader = stub_->StreamGenerate(&context, request);
    for (v1::StreamGenerateResponse event; reader->Read(&event);) continue;
    return reader->Finish().ok();
  });
  EXPECT_GE(encoded, 0);
  EXPECT_LE(encoded, kMayBeEncoded) << "of " << kBatchImages;
}

TEST_F(PriorityTest, ModelInferIsCheckedBeforeBatchImagesAreEncoded) {
  Start();
  const auto stub = inference::GRPCInferenceService::NewStub(channel_);
  const int encoded = EncodedBefore("ModelInfer", 1, [&] {
    inference::ModelInferRequest request;
    request.set_model_name("digits");
    (*request.mutable_parameters())["priority"].set_int64_param(v1::PRIORITY_INTERACTIVE);
    auto* seed = request.add_inputs();
    seed->set_name("seed");
    seed->set_datatype("UINT64");
    seed->add_shape(1);
    request.add_raw_input_contents(std::string(8, '\1'));
    request.add_outputs()->set_name("encoded");
    grpc::ClientContext context;
    inference::ModelInferResponse response;
    return stub->ModelInfer(&context, request, &response).ok();
  });
  EXPECT_GE(encoded, 0);
  EXPECT_LE(encoded, kMayBeEncoded) << "of " << kBatchImages;
}

}  // namespace
}  // namespace denoised
