// SPDX-License-Identifier: Apache-2.0
#include "server/api/generation_call.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "server/jobs/worker_pool.h"
#include "server/status/status_details.h"

namespace denoised {

grpc::Status GenerationCall::Admit() {
  if (stream_) return grpc::Status::OK;
  stream_.emplace();
  return AdmitStream(context_, record_.caller(), record_.peer(), &*stream_);
}

void GenerationCall::Post(Priority priority, Beginning begin) {
  // At once: what waits for a worker takes memory.
  if (const grpc::Status refusal = Admit(); !refusal.ok()) return Refuse(refusal);
  self_ = shared_from_this();
  context_.workers->Post(priority, ClientKey(record_.caller(), record_.peer()),
                         [self = self_, begin = std::move(begin)] {
                           grpc::Status refusal;
                           const auto generation = begin(self, &refusal);
                           self->Begun(generation, refusal);
                         });
}

void GenerationCall::Refuse(const grpc::Status& status) {
  self_ = shared_from_this();
  Begun(nullptr, status);
}

void GenerationCall::Begun(const std::shared_ptr<Generation>& generation,
                           const grpc::Status& refusal) {
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
    record_.gone = true;
    generation = generation_;
  }
  if (generation) generation->Leave(this);
  Advance();
}

std::optional<grpc::Status> GenerationCall::EndWithoutGeneration() const {
  if (generation_ == nullptr) return refusal_;
  if (!broken_) return std::nullopt;
  return IsLate() ? grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "the call's deadline passed")
                  : grpc::Status(grpc::StatusCode::CANCELLED, "the client has gone");
}

void GenerationCall::End() {
  if (generation_) {
    generation_->Leave(this);
    record_.Describe(*generation_);
  }
  // As the client saw it: a reply that could not be delivered was cancelled.
  const bool lost = status_.ok() && IsLost();
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
  status_ = *end;
  if (!end->ok()) return Answer(*end, nullptr);
  v1::GenerateResponse images;
  const grpc::Status status = Collect(&images);
  status_ = status;
  Answer(status, status.ok() ? &images : nullptr);
}

grpc::Status UnaryCall::Collect(v1::GenerateResponse* response) {
  // A job that was to be streamed, and that this call joined by its request_id, may be larger than
  // Translate lets one be that is asked for in one reply. There pixels are counted, and files may
  // be a little larger than their pixels.
  const int64_t most = context_.max_reply_bytes + context_.max_reply_bytes / 16 + (64 << 10);
  int64_t bytes = 0;
  uint64_t sequence = 0;
  while (const auto event = generation_->Next(this, sequence).event) {
    sequence = event->sequence();
    if (event->has_queued()) {
      response->set_traceparent(event->queued().traceparent());
    } else if (event->has_image()) {
      bytes += static_cast<int64_t>(event->image().image().ByteSizeLong());
      if (bytes > most)
        return InvalidFields(
            {{"params.request_id",
              fmt::format(
                  "is of a job with more than {} bytes of images, too many for one reply; use "
                  "WatchJob, which sends one by one",
                  context_.max_reply_bytes)}},
            record().request_id);
      *response->add_images() = event->image().image();
    } else if (event->has_completed()) {
      *response->mutable_params() = event->completed().params();
      *response->mutable_run() = event->completed().run();
      *response->mutable_timing() = event->completed().timing();
      if (event->completed().has_timeline()) {
        *response->mutable_timeline() = event->completed().timeline();
        auto& sent = *response->mutable_timeline()->add_entries();
        sent.set_milestone(v1::TimelineEntry::MILESTONE_SENT);
        sent.set_seconds(generation_->SecondsSinceArrival());
      }
    }
  }
  auto& images = *response->mutable_images();
  std::sort(images.pointer_begin(), images.pointer_end(),
            [](const v1::Image* a, const v1::Image* b) { return a->index() < b->index(); });
  return grpc::Status::OK;
}

void StreamCall::Written(bool ok) {
  if (ok && message_->has_image() && generation_->include_timings()) {
    sent_.AddImage(v1::TimelineEntry::MILESTONE_SENT, generation_->SecondsSinceArrival(),
                   message_->image().image().index());
  }
  {
    MutexLock lock(&mutex_);
    writing_ = false;
  }
  if (!ok) return Break();
  Advance();
}

void StreamCall::Advance() {
  std::optional<grpc::Status> end;
  {
    MutexLock lock(&mutex_);
    if (!begun_ || writing_ || finished_) return;
    end = EndWithoutGeneration();
    if (!end) {
      Generation::News news = generation_->Next(this, sequence_);
      // A stream without its last event reads as one that was cut off.
      if (news.end && news.end->ok() && !written_ && sequence_ > 0) {
        news = generation_->Next(this, sequence_ - 1);
      }
      if (news.event != nullptr) {
        writing_ = written_ = true;
        sequence_ = news.event->sequence();
        message_ = Completed(std::move(news.event));
      } else if (news.end) {
        end = std::move(news.end);
      } else {
        return;
      }
    }
    finished_ = end.has_value();
  }
  if (!end) return Write(*message_);
  status_ = *end;
  EndStream(*end);
}

std::shared_ptr<const EventLog::Event> StreamCall::Completed(
    std::shared_ptr<const EventLog::Event> event) {
  if (!event->completed().has_timeline()) return event;
  auto completed = std::make_shared<EventLog::Event>(*event);
  v1::Timeline& timeline = *completed->mutable_completed()->mutable_timeline();
  timeline.MergeFrom(sent_.ToProto());
  std::stable_sort(timeline.mutable_entries()->pointer_begin(),
                   timeline.mutable_entries()->pointer_end(),
                   [](const v1::TimelineEntry* a, const v1::TimelineEntry* b) {
                     return a->seconds() < b->seconds();
                   });
  return completed;
}

grpc::Status AdmitStream(const GenerationCallContext& context, const Caller& caller,
                         const std::string& peer, ClientLoad::Lease* stream) {
  auto admitted = context.client_load->Admit(ClientLoad::kStream, caller, peer);
  if (!admitted.ok()) {
    return ToGrpcStatus(admitted.status(), reason::kClientLimit, "",
                        context.queue_wait->RetryDelay());
  }
  *stream = *std::move(admitted);
  return grpc::Status::OK;
}

std::shared_ptr<Generation> BeginWatch(const GenerationCallContext& context,
                                       const CallRecord& record, const std::string& request_id,
                                       WatchStart start,
                                       const std::shared_ptr<GenerationWatcher>& watcher,
                                       grpc::Status* refusal) {
  auto generation = context.jobs->Find(record.caller().name, request_id, refusal);
  if (!generation) return nullptr;
  if (const uint64_t last = generation->last_sequence(); start.sequence > last) {
    *refusal = InvalidFields(
        {{start.field, fmt::format("is {}, but the job's last event is {}; use the number "
                                   "of an event of this job, or 0 for all",
                                   start.sequence, last)}},
        request_id);
    return nullptr;
  }
  generation->Watch(watcher);
  return generation;
}

std::shared_ptr<Generation> BeginJob(const GenerationCallContext& context, const CallRecord& record,
                                     const JobRequest& request,
                                     const std::shared_ptr<GenerationWatcher>& watcher,
                                     grpc::Status* refusal) {
  if (request.params.disconnect_policy() != v1::DISCONNECT_POLICY_CONTINUE) {
    const std::string& named = request.params.request_id();
    const std::string id = IsRequestId(named) ? named : "";
    if (request.deadline && *request.deadline <= std::chrono::steady_clock::now()) {
      *refusal =
          JobStatus(DeadlineExceeded("the deadline had passed before the request was queued"), id);
      return nullptr;
    }
    if (record.gone) {
      *refusal = JobStatus(Cancelled("the client has gone"), id);
      return nullptr;
    }
  }
  return context.jobs->Begin(request, watcher, refusal);
}

JobRequest MakeJobRequest(const CallRecord& record,
                          std::optional<std::chrono::steady_clock::time_point> deadline,
                          const v1::GenerationParams& params, const v1::PreviewOptions* preview,
                          bool together) {
  return {.params = params,
          .preview = preview,
          .together = together,
          .caller = record.caller(),
          .peer = record.peer(),
          .traceparent = record.trace().traceparent(),
          .arrival = record.arrival(),
          .deadline = deadline};
}

}  // namespace denoised
