// SPDX-License-Identifier: Apache-2.0
#include "server/api/generation_call.h"

#include <algorithm>
#include <utility>

#include "server/jobs/worker_pool.h"
#include "server/status/status_details.h"

namespace denoised {
namespace {

/// gRPC's deadline, a point of the wall clock, on the steady clock.
std::optional<std::chrono::steady_clock::time_point> Deadline(
    const grpc::CallbackServerContext& context) {
  const auto deadline = context.deadline();
  const auto left = deadline - std::chrono::system_clock::now();
  if (deadline == std::chrono::system_clock::time_point::max() ||
      left > std::chrono::hours(24 * 365)) {
    return std::nullopt;
  }
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(left);
}

}  // namespace

void GenerationCall::Post(Priority priority, Beginning begin) {
  self_ = shared_from_this();
  context_.workers->Post(priority,
                         [self = self_, begin = std::move(begin)] { self->Begin(begin); });
}

void GenerationCall::Begin(const Beginning& begin) {
  grpc::Status refusal;
  std::shared_ptr<Generation> generation;
  auto stream = context_.client_load->Admit(ClientLoad::kStream, record_.caller(), record_.peer());
  if (stream.ok()) {
    stream_ = *std::move(stream);
    generation = begin(shared_from_this(), &refusal);
  } else {
    refusal =
        ToGrpcStatus(stream.status(), reason::kClientLimit, "", context_.queue_wait->RetryDelay());
  }
  bool broken;
  {
    MutexLock lock(&mutex_);
    begun_ = true;
    generation_ = generation;
    refusal_ = refusal;
    broken = broken_;
  }
  if (broken && generation) generation->Leave(this);
  Advance();
}

void GenerationCall::Break() {
  std::shared_ptr<Generation> generation;
  {
    MutexLock lock(&mutex_);
    broken_ = true;
    generation = generation_;
  }
  if (generation) generation->Leave(this);
  Advance();
}

std::optional<grpc::Status> GenerationCall::EndWithoutGeneration() const {
  if (generation_ == nullptr) return refusal_;
  if (!broken_) return std::nullopt;
  const bool late = std::chrono::system_clock::now() >= grpc_context_->deadline();
  return late ? grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "the call's deadline passed")
              : grpc::Status(grpc::StatusCode::CANCELLED, "the client has gone");
}

void GenerationCall::End() {
  if (generation_) {
    generation_->Leave(this);
    record_.Describe(*generation_);
  }
  // As the client saw it: a reply that could not be delivered was cancelled.
  const bool lost = status_.ok() && grpc_context_->IsCancelled();
  record_.End(lost ? grpc::StatusCode::CANCELLED : status_.error_code(), status_.error_message());
  self_.reset();  // the last line of its life
}

void UnaryCall::Advance() {
  std::optional<grpc::Status> end;
  {
    MutexLock lock(&mutex_);
    if (!begun_ || finished_) return;
    end = EndWithoutGeneration();
    if (!end) end = generation_->end();
    if (!end) return;
    finished_ = true;
  }
  if (end->ok()) {
    v1::GenerateResponse images = Collect();
    reply_(&images);
  }
  status_ = *end;
  context_.write_watch->Arm(grpc_context_);
  Finish(*end);  // the call may be deleted now, unless the caller holds it
}

v1::GenerateResponse UnaryCall::Collect() {
  v1::GenerateResponse response;
  uint64_t sequence = 0;
  while (const auto event = generation_->Next(this, sequence).event) {
    sequence = event->sequence();
    if (event->has_queued()) {
      response.set_traceparent(event->queued().traceparent());
    } else if (event->has_image()) {
      *response.add_images() = event->image().image();
    } else if (event->has_completed()) {
      *response.mutable_params() = event->completed().params();
      *response.mutable_timing() = event->completed().timing();
      if (event->completed().has_timeline()) {
        *response.mutable_timeline() = event->completed().timeline();
        auto& sent = *response.mutable_timeline()->add_entries();
        sent.set_milestone(v1::TimelineEntry::MILESTONE_SENT);
        sent.set_seconds(generation_->SecondsSinceArrival());
      }
    }
  }
  auto& images = *response.mutable_images();
  std::sort(images.pointer_begin(), images.pointer_end(),
            [](const v1::Image* a, const v1::Image* b) { return a->index() < b->index(); });
  return response;
}

JobRequest MakeJobRequest(const grpc::CallbackServerContext& context, const CallRecord& record,
                          const v1::GenerationParams& params, const v1::PreviewOptions* preview,
                          bool together) {
  return {.params = params,
          .preview = preview,
          .together = together,
          .caller = record.caller(),
          .peer = record.peer(),
          .traceparent = record.trace().traceparent(),
          .arrival = record.arrival(),
          .deadline = Deadline(context)};
}

}  // namespace denoised
