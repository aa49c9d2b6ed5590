// The way of requests through workers and engine, without gRPC between: this is what
// ThreadSanitizer can see whole.

#include "server/generation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <random>
#include <thread>

#include "server/catalog.h"
#include "server/client_load.h"
#include "server/clients.h"
#include "server/metrics.h"
#include "server/worker_pool.h"
#include "tests/server/fake_engine.h"

namespace denoised {
namespace {

using namespace std::chrono_literals;

/// Holds the contract of GenerationSink against what it hears.
class StrictSink : public GenerationSink {
 public:
  void OnQueued(const v1::EffectiveParams& params, int) override {
    Enter();
    EXPECT_EQ(state_, State::kNew);
    state_ = State::kQueued;
    count_ = params.count();
    Leave();
  }
  void OnStarted(double) override {
    Enter();
    EXPECT_EQ(state_, State::kQueued);
    state_ = State::kStarted;
    Leave();
  }
  void OnProgress(int done, int total) override {
    Enter();
    EXPECT_EQ(state_, State::kStarted);
    EXPECT_GT(done, progress_);
    EXPECT_LE(done, total);
    progress_ = done;
    Leave();
  }
  void OnPreview(int, int, v1::Image image) override {
    Enter();
    EXPECT_EQ(state_, State::kStarted);
    EXPECT_EQ(images_.count(image.index()), 0u) << "a preview after its image";
    ++previews_;
    Leave();
  }
  void OnImage(v1::Image image) override {
    Enter();
    EXPECT_EQ(state_, State::kStarted);
    EXPECT_TRUE(images_.insert(image.index()).second);
    Leave();
  }
  void OnEnd(const grpc::Status& status, const v1::Timing&) override {
    Enter();
    if (status.ok()) {
      EXPECT_EQ(images_.size(), size_t(count_));
    }
    // Notified under the lock: whoever waits destroys this.
    std::lock_guard lock(mutex_);
    EXPECT_FALSE(status_);
    status_ = status;
    ended_.notify_all();
  }

  grpc::Status Wait() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(ended_.wait_for(lock, 30s, [this] { return status_.has_value(); }));
    return status_.value_or(grpc::Status::CANCELLED);
  }
  int previews() const { return previews_; }

 private:
  enum class State { kNew, kQueued, kStarted };

  void Enter() { EXPECT_FALSE(inside_.exchange(true)) << "two calls at a time"; }
  void Leave() { inside_ = false; }

  std::atomic<bool> inside_{false};
  State state_ = State::kNew;
  int count_ = 0, progress_ = 0, previews_ = 0;
  std::set<int> images_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::optional<grpc::Status> status_;
};

class GenerationTest : public ::testing::Test {
 protected:
  GenerationTest() : catalog_({{"digits", "models/digits"}}, &engine_), workers_(4) {
    EXPECT_TRUE(engine_.Open("digits", "models/digits").ok());
    engine_.SetObserver(&metrics_);
    serving_.engine = &engine_;
    serving_.catalog = &catalog_;
    serving_.workers = &workers_;
    serving_.metrics = &metrics_;
    serving_.clients = clients_.get();
    serving_.client_load = &client_load_;
  }
  // The engine posts to the workers until its jobs have ended.
  ~GenerationTest() override { engine_.Drain(std::chrono::steady_clock::now()); }

  struct Request {
    v1::GenerationParams params;
    v1::PreviewOptions preview;
    StrictSink sink;
    grpc::CallbackServerContext context;
    std::optional<CallRecord> record;
    std::shared_ptr<Generation> generation;
  };

  std::unique_ptr<Request> Post(const v1::GenerationParams& params,
                                std::optional<std::chrono::milliseconds> limit = {}) {
    auto request = std::make_unique<Request>();
    request->params = params;
    request->record.emplace(serving_, &active_, kMethod, &request->context);
    std::optional<std::chrono::steady_clock::time_point> deadline;
    if (limit) deadline = std::chrono::steady_clock::now() + *limit;
    request->generation =
        std::make_shared<Generation>(&serving_, request->params, &request->preview, false, deadline,
                                     &*request->record, &request->sink);
    workers_.Post([generation = request->generation] { generation->Start(); });
    return request;
  }

  static constexpr char kMethod[] = "denoised.v1.ImageGeneration.StreamGenerate";

  Metrics metrics_;
  const std::unique_ptr<Clients> clients_ = *Clients::Open("", 1s);
  ClientLoad client_load_{0, 0};
  FakeEngine engine_;
  Catalog catalog_;
  Serving serving_;
  ActiveCalls active_;
  WorkerPool workers_;
};

TEST_F(GenerationTest, DeliversInOrder) {
  engine_.set_evaluation_cost(2ms);
  v1::GenerationParams params;
  params.set_count(5);
  auto request = Post(params);
  const grpc::Status status = request->sink.Wait();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_GT(request->sink.previews(), 0);
}

TEST_F(GenerationTest, CancelBeforeStartReachesTheEngine) {
  engine_.Pause(true);
  v1::GenerationParams params;
  Request request;
  request.record.emplace(serving_, &active_, kMethod, &request.context);
  request.generation = std::make_shared<Generation>(&serving_, request.params, nullptr, false,
                                                    std::nullopt, &*request.record, &request.sink);
  request.generation->Cancel();
  request.generation->Start();
  EXPECT_EQ(request.sink.Wait().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(engine_.cancels(), 1);
}

TEST_F(GenerationTest, ACancelAfterTheDeadlineIsTheDeadline) {
  engine_.Pause(true);
  auto request = Post({}, 1ms);
  std::this_thread::sleep_for(2ms);
  request->generation->Cancel();
  EXPECT_EQ(request->sink.Wait().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
}

TEST_F(GenerationTest, ManyAtOnceWithRandomCancels) {
  engine_.set_evaluation_cost(100us);
  std::vector<std::thread> clients;
  std::atomic<int> ok{0}, cancelled{0};
  for (int client = 0; client < 4; ++client) {
    clients.emplace_back([&, client] {
      std::mt19937 random(client);
      for (int round = 0; round < 40; ++round) {
        v1::GenerationParams params;
        params.set_count(1 + random() % 4);
        params.set_steps(1 + random() % 20);
        auto request = Post(params);
        if (random() % 2 == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
          request->generation->Cancel();
        }
        const grpc::Status status = request->sink.Wait();
        if (status.ok()) ++ok;
        if (status.error_code() == grpc::StatusCode::CANCELLED) ++cancelled;
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(ok + cancelled, 160);
  EXPECT_GT(ok, 0);
  EXPECT_GT(cancelled, 0);
}

}  // namespace
}  // namespace denoised
