// SPDX-License-Identifier: Apache-2.0
// Many at once, over loopback, on a FakeEngine: streams and cancels. It prints what it measured;
// run it by itself to read the times. That engine draws no image by another's state, so what is
// tested of images is that each comes whole to the stream that asked for it. That neighbours and
// cancels change no bit of an image is tested on the real engine:
// AStormOfCancelsLeavesNothingBehind in tests/engine/engine_test.cc.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <set>

#include "tests/eventually.h"
#include "tests/server/server_fixture.h"

namespace denoised {
namespace {

using namespace std::chrono_literals;
using Event = v1::StreamGenerateResponse;
using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// How many streams are under way; lets the caller wait for room.
class Crowd {
 public:
  void Enter(int limit) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return inside_ < limit; });
    most_ = std::max(most_, ++inside_);
  }
  void Leave() {
    std::lock_guard lock(mutex_);
    --inside_;
    changed_.notify_all();
  }
  void Queued() {
    std::lock_guard lock(mutex_);
    ++queued_;
    changed_.notify_all();
  }
  bool WaitForQueued(int count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, 60s, [&] { return queued_ >= count; });
  }
  bool WaitForNone() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, 120s, [&] { return inside_ == 0; });
  }
  int most() {
    std::lock_guard lock(mutex_);
    return most_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int inside_ = 0, most_ = 0, queued_ = 0;
};

/// One stream: keeps its images, and cancels itself after so many events, if it is told to.
class Stream final : public grpc::ClientReadReactor<Event> {
 public:
  Stream(v1::ImageGeneration::Stub* stub, Crowd* crowd, const v1::GenerationParams& params,
         int cancel_after = -1)
      : crowd_(crowd), cancel_after_(cancel_after) {
    *request_.mutable_params() = params;
    stub->async()->StreamGenerate(&context_, &request_, this);
    StartRead(&event_);
    StartCall();
    if (cancel_after_ == 0) context_.TryCancel();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (event_.has_queued()) crowd_->Queued();
    if (event_.has_image()) {
      images_[event_.image().image().index()] = event_.image().image().encoded();
    }
    completed_ |= event_.has_completed();
    if (++events_ == cancel_after_) context_.TryCancel();
    StartRead(&event_);
  }
  void OnDone(const grpc::Status& status) override {
    status_ = status;
    crowd_->Leave();
  }

  const v1::GenerationParams& params() const { return request_.params(); }
  const grpc::Status& status() const { return status_; }
  bool completed() const { return completed_ && status_.ok(); }
  const std::map<int, std::string>& images() const { return images_; }

 private:
  Crowd* const crowd_;
  const int cancel_after_;
  v1::StreamGenerateRequest request_;
  grpc::ClientContext context_;
  Event event_;
  int events_ = 0;
  bool completed_ = false;
  std::map<int, std::string> images_;
  grpc::Status status_;
};

class StormTest : public ServerFixture {
 protected:
  StormTest() {
    config_.metrics_listen = "127.0.0.1:0";
    config_.connections.max_streams = 100'000;
    config_.connections.max_streams_per_client = 100'000;
  }

  static v1::GenerationParams Params(uint64_t seed, int steps, int count = 1) {
    v1::GenerationParams params;
    params.set_seed(seed);
    params.set_steps(steps);
    params.set_count(count);
    params.add_conditions()->set_class_label(static_cast<int>(seed % 10));
    return params;
  }

  bool Idle() {
    for (const EngineStats& stats : engine_->Stats()) {
      if (stats.queued_images != 0 || stats.active_images != 0) return false;
    }
    return true;
  }
};

TEST_F(StormTest, AThousandStreamsAtOnce) {
  constexpr int kStreams = 1000;
  Start({.evaluation_cost = 500us, .max_rows = 64, .max_slots = 64});
  engine_->Pause(true);
  Crowd crowd;
  std::vector<std::unique_ptr<Stream>> streams;
  const auto begin = Clock::now();
  for (int i = 0; i < kStreams; ++i) {
    crowd.Enter(kStreams);
    streams.push_back(
        std::make_unique<Stream>(stub_.get(), &crowd, Params(i, 4 + i % 47, 1 + i % 3)));
  }
  ASSERT_TRUE(crowd.WaitForQueued(kStreams));
  const double accepted = SecondsSince(begin);
  EXPECT_EQ(crowd.most(), kStreams);
  engine_->Pause(false);
  ASSERT_TRUE(crowd.WaitForNone());
  for (const auto& stream : streams) {
    EXPECT_TRUE(stream->completed()) << stream->status().error_message();
    EXPECT_EQ(int(stream->images().size()), stream->params().count());
  }
  EXPECT_TRUE(Eventually([&] { return Idle(); }));
  fmt::print("{} streams at once: accepted in {:.2f} s, all done after {:.2f} s\n", kStreams,
             accepted, SecondsSince(begin));
}

TEST_F(StormTest, TenThousandCancelsLeaveNothingAndEveryImageGoesToItsStream) {
  constexpr int kRequests = 10'000, kHeld = kRequests / 4, kAtOnce = 200;
  Start({.evaluation_cost = 50us, .max_rows = 64, .max_slots = 64});
  std::mt19937 random(1);
  Crowd crowd;
  std::vector<std::unique_ptr<Stream>> streams;
  const auto begin = Clock::now();
  engine_->Pause(true);
  for (int i = 0; i < kRequests; ++i) {
    if (i == kHeld) {
      ASSERT_TRUE(crowd.WaitForNone());
      engine_->Pause(false);
    }
    crowd.Enter(kAtOnce);
    // Those of the held engine all go before the first event or after it, since only a cancel ends
    // them. Of the rest every tenth stays; the others go then or later, and some end before.
    const int cancel_after = i < kHeld            ? static_cast<int>(random() % 2)
                             : random() % 10 == 0 ? -1
                                                  : static_cast<int>(random() % 12);
    const uint64_t seed = random() % 50;
    const int steps = 1 + static_cast<int>(random() % 30), count = 1 + random() % 4;
    streams.push_back(
        std::make_unique<Stream>(stub_.get(), &crowd, Params(seed, steps, count), cancel_after));
  }
  ASSERT_TRUE(crowd.WaitForNone());
  const double seconds = SecondsSince(begin);
  EXPECT_TRUE(Eventually([&] { return Idle(); })) << "a slot is leaked";
  EXPECT_TRUE(Eventually([&] {
    const std::string text = Scrape();
    return text.find("denoised_jobs{model=\"digits\",state=\"queued\"} 0") != std::string::npos &&
           text.find("denoised_jobs{model=\"digits\",state=\"running\"} 0") != std::string::npos;
  })) << "a job is leaked";

  // The idle server draws what the survivors got.
  int survivors = 0, cancelled = 0;
  for (const auto& stream : streams) {
    if (!stream->completed()) {
      EXPECT_EQ(stream->status().error_code(), grpc::StatusCode::CANCELLED)
          << stream->status().error_message();
      ++cancelled;
      continue;
    }
    if (++survivors > 300) continue;
    Crowd alone;
    alone.Enter(1);
    Stream reference(stub_.get(), &alone, stream->params());
    ASSERT_TRUE(alone.WaitForNone());
    EXPECT_EQ(reference.images(), stream->images());
  }
  EXPECT_GT(survivors, 300);
  EXPECT_GE(cancelled, kHeld);  // how many more depends on the machine
  fmt::print("{} requests, {} cancelled, {} survivors, in {:.2f} s\n", kRequests, cancelled,
             survivors, seconds);
}

}  // namespace
}  // namespace denoised
