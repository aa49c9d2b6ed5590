// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "denoised/v1/image_generation.grpc.pb.h"

namespace denoised::client {

/// A server on 127.0.0.1, port 0, that draws gradients instead of running models: the wire contract
/// without an engine. It holds one model, "digits": 16 x 16 grey, ten classes named zero to nine.
class FakeServer : public v1::ImageGeneration::Service {
 public:
  explicit FakeServer(
      std::shared_ptr<grpc::ServerCredentials> credentials = grpc::InsecureServerCredentials());
  ~FakeServer() override;

  std::string address() const;
  void SetServing(bool serving);
  /// Ends all calls and connections at once, for good.
  void Stop();

  /// The next `count` generations fail with `status`, before any event.
  void FailNext(int count, const grpc::Status& status);
  /// The next `count` streams fail with `status` after so many events.
  void BreakNext(int count, uint64_t events, const grpc::Status& status);
  /// Pause between the evaluations of a stream.
  void SetEvaluationTime(std::chrono::milliseconds time) { evaluation_time_ = time; }
  /// Streams tell these numbers of images ahead, one after the other, before they start.
  void SetPlaces(const std::vector<int>& places) {
    std::lock_guard lock(mutex_);
    places_ = places;
  }
  /// Streams have no previews of later evaluations.
  void EndPreviewsAfter(int evaluation) { last_preview_ = evaluation; }
  /// Unary replies carry images of so many bytes of noise instead of pictures.
  void SetImageBytes(size_t bytes) { image_bytes_ = bytes; }
  /// Streams tell that the model does not read this end of the prompt.
  void SetCutOff(const std::string& text) { cut_off_ = text; }
  /// The model has another label.
  void AddLabel(const std::string& label) { label_ = label; }
  /// The error of every job, and what the server says of its device.
  void SetText(const std::string& text) { text_ = text; }
  /// The next `count` answers about models say that it is loading, and no more of it.
  void LoadFor(int count) { loading_ = count; }
  /// Beside the model there is another one, "cats", that is loading for ever.
  void LoadAnother() { another_loads_ = true; }
  /// A call must name the model, as if there were several.
  void HoldSeveral() { several_ = true; }
  /// Streams end with OK but without their last event.
  void OmitCompleted() { omit_completed_ = true; }

  int generations() const { return generations_; }     // attempts that arrived
  int cancelled() const { return cancelled_; }         // streams that ended because of a cancel
  std::vector<v1::GenerationParams> requests() const;  // of all attempts
  v1::StreamGenerateRequest streamed() const;          // the latest
  /// The metadata of the latest ListModels, Generate or StreamGenerate.
  std::multimap<std::string, std::string> metadata() const;
  std::string authorization() const;    // among it; empty when there was none
  v1::WatchJobRequest watched() const;  // the latest

  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                        v1::GenerateResponse* response) override;
  grpc::Status StreamGenerate(grpc::ServerContext* context,
                              const v1::StreamGenerateRequest* request,
                              grpc::ServerWriter<v1::StreamGenerateResponse>* writer) override;
  /// The last event of the job.
  grpc::Status WatchJob(grpc::ServerContext* context, const v1::WatchJobRequest* request,
                        grpc::ServerWriter<v1::StreamGenerateResponse>* writer) override;
  /// The jobs "249" to "0", in pages of at most a hundred; with all_clients those of "somebody".
  grpc::Status ListJobs(grpc::ServerContext* context, const v1::ListJobsRequest* request,
                        v1::ListJobsResponse* response) override;
  /// A job of three images, WebP.
  grpc::Status GetJob(grpc::ServerContext* context, const v1::GetJobRequest* request,
                      v1::GetJobResponse* response) override;
  grpc::Status GetServerInfo(grpc::ServerContext* context, const v1::GetServerInfoRequest* request,
                             v1::GetServerInfoResponse* response) override;
  grpc::Status ListModels(grpc::ServerContext* context, const v1::ListModelsRequest* request,
                          v1::ListModelsResponse* response) override;
  grpc::Status GetModel(grpc::ServerContext* context, const v1::GetModelRequest* request,
                        v1::GetModelResponse* response) override;

 private:
  grpc::Status Admit(const grpc::ServerContext& context, const v1::GenerationParams& params);
  void KeepMetadata(const grpc::ServerContext& context);

  std::atomic<std::chrono::milliseconds> evaluation_time_{std::chrono::milliseconds(0)};
  std::atomic<size_t> image_bytes_{0};
  std::atomic<int> last_preview_{INT_MAX};
  std::atomic<bool> omit_completed_{false};
  std::atomic<bool> several_{false};
  std::atomic<int> loading_{0};
  std::atomic<bool> another_loads_{false};
  std::string label_, text_, cut_off_;  // set before the calls
  std::atomic<int> generations_{0};
  std::atomic<int> cancelled_{0};
  mutable std::mutex mutex_;
  int failures_ = 0;
  grpc::Status failure_;
  std::vector<int> places_ = {3};
  int breaks_ = 0;
  uint64_t break_after_ = 0;  // events
  grpc::Status break_;
  std::vector<v1::GenerationParams> requests_;
  v1::StreamGenerateRequest streamed_;
  std::multimap<std::string, std::string> metadata_;
  v1::WatchJobRequest watched_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;  // last: it stops before what its handlers use
};

/// An error as the server sends it: with google.rpc details.
grpc::Status InvalidFields(const std::vector<std::pair<std::string, std::string>>& violations);
grpc::Status QueueFull(std::chrono::milliseconds retry_after);
grpc::Status Loading(std::chrono::milliseconds retry_after);
grpc::Status Draining();

}  // namespace denoised::client
