// SPDX-License-Identifier: Apache-2.0
// The HTTP port with a handler that knows nothing of gRPC, so that ThreadSanitizer can judge it.

#include "server/http/http_port.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "server/jobs/worker_pool.h"
#include "server/telemetry/metrics.h"
#include "tests/eventually.h"
#include "tests/server/http_client.h"

namespace denoised {
namespace {

using namespace std::chrono_literals;

struct Upload {
  std::string body;
  MemoryBudget::Lease memory;
};

/// Replies on threads of its own, as the server does.
class Handler final : public HttpHandler {
 public:
  std::optional<HttpReply> Admit(HttpRequest* head) override {
    if (head->path == "/refused") return HttpReply{.code = 403};
    if (head->path == "/late") head->deadline = std::chrono::steady_clock::now() + 5ms;
    return std::nullopt;
  }
  void Serve(std::shared_ptr<Exchange> exchange) override {
    workers_.Post(Priority::kNormal, "", [this, exchange] { Work(exchange); });
  }
  HttpReply Malformed(int code, const std::string& problem) override {
    return {.code = code, .body = problem};
  }

  /// Of requests to /keep. They are kept until a test clears them.
  std::vector<Upload> kept() {
    MutexLock lock(&mutex_);
    return std::exchange(kept_, {});
  }
  int stopped() const { return stopped_; }

 private:
  void Work(const std::shared_ptr<Exchange>& exchange) {
    const std::string& path = exchange->request().path;
    if (path == "/late") {
      return exchange->OnStop([this, weak = std::weak_ptr(exchange)] {
        ++stopped_;
        if (const auto late = weak.lock(); late && late->late()) late->Reply({.code = 504});
      });
    }
    if (path == "/parts") {
      exchange->OnStop([this] { ++stopped_; });
      exchange->Begin({.headers = {{"Content-Type", "text/event-stream"}}}, ":\n\n");
      return Part(exchange, 20);
    }
    Upload upload;
    upload.body = exchange->TakeBody(&upload.memory);
    HttpReply reply;
    if (path == "/keep") {
      MutexLock lock(&mutex_);
      kept_.push_back(std::move(upload));
    } else {
      reply.body = std::move(upload.body);
    }
    exchange->Reply(std::move(reply));
  }
  void Part(const std::shared_ptr<Exchange>& exchange, int left) {
    if (left == 0) return exchange->End({});
    exchange->Write("event: part\ndata: " + std::string(1000, 'x') + "\n\n",
                    [this, exchange, left](bool ok) {
                      if (!ok) return;
                      workers_.Post(Priority::kInteractive, "",
                                    [this, exchange, left] { Part(exchange, left - 1); });
                    });
  }

  std::atomic<int> stopped_{0};
  Mutex mutex_;
  std::vector<Upload> kept_ ABSL_GUARDED_BY(mutex_);
  WorkerPool workers_{3};
};

class HttpPortTest : public ::testing::Test {
 protected:
  void Start(int64_t budget = 64 << 20) {
    bodies_ = std::make_unique<MemoryBudget>(budget);
    auto port = HttpPort::Listen({.address = "127.0.0.1:0"}, &handler_, bodies_.get(), &metrics_);
    ASSERT_TRUE(port.ok()) << port.status();
    port_ = *std::move(port);
    port_->Start();
  }
  HttpClient Connect() const { return HttpClient(port_->port()); }
  /// A request whose body is still to come.
  HttpClient Begin(const std::string& path, const std::string& header) const {
    HttpClient client = Connect();
    client.Send("POST " + path + " HTTP/1.1\r\nHost: localhost\r\n" + header + "\r\n\r\n");
    return client;
  }
  static std::string Chunk(size_t bytes) {
    return fmt::format("{:x}\r\n{}\r\n", bytes, std::string(bytes, 'c'));
  }

  Metrics metrics_;
  std::unique_ptr<MemoryBudget> bodies_;
  Handler handler_;
  std::unique_ptr<HttpPort> port_;
};

TEST_F(HttpPortTest, ManyClientsComeAndGo) {
  constexpr int kClients = 6, kRequests = 60;
  Start();
  std::atomic<int> wrong{0};
  std::vector<std::thread> clients;
  for (int i = 0; i < kClients; ++i) {
    clients.emplace_back([&, i] {
      std::mt19937 random(i);
      HttpClient client = Connect();
      for (int request = 0; request < kRequests; ++request) {
        const std::string body(random() % 100'000, 'b');
        switch (random() % 6) {
          case 0:
            client.Send(HttpClient::Request("POST", "/parts"));
            for (client.ReadHead(); client.ReadEvent();) {
            }
            wrong += client.ended() ? 0 : 1;
            break;
          case 1:  // goes in the middle of a reply
            client.Send(HttpClient::Request("POST", "/parts"));
            client.ReadHead();
            client = Connect();
            break;
          case 2:  // goes in the middle of a request
            Begin("/echo", "Content-Length: 100000").Send(body.substr(0, body.size() / 2));
            break;
          case 3:
            wrong += client.Ask("GET", "/late").code == 504 ? 0 : 1;
            break;
          case 4:
            wrong += client.Ask("GET", "/refused").code == 403 ? 0 : 1;
            break;
          default:
            wrong += client.Ask("POST", "/echo", body).body == body ? 0 : 1;
        }
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(wrong, 0);
  HttpClient idle = Connect();
  EXPECT_EQ(idle.Ask("GET", "/echo").code, 200);
  port_->Drain();
  EXPECT_TRUE(idle.IsClosedWithin(1min));
  EXPECT_TRUE(port_->WaitForReplies(std::chrono::steady_clock::now() + 1min));
  port_ = nullptr;
  EXPECT_GT(handler_.stopped(), 0);
  EXPECT_EQ(bodies_->reserved(), 0);
}

/// A client that announces much and sends little has little.
TEST_F(HttpPortTest, WhatIsAnnouncedTakesNoMemory) {
  Start();
  const auto heap = [] {  // with a sanitizer always 0
    const auto information = mallinfo2();
    return static_cast<int64_t>(information.uordblks + information.hblkhd);
  };
  const int64_t before = heap();
  HttpClient client = Begin("/keep", "Content-Length: 60000000");
  client.Send(std::string(100'000, 'a'));
  EXPECT_TRUE(Eventually([&] { return bodies_->reserved() >= 100'000; }));
  EXPECT_LE(bodies_->reserved(), 4 * 100'000);
  EXPECT_LT(heap() - before, 10 * 100'000);
  client.Close();
  EXPECT_TRUE(Eventually([&] { return bodies_->reserved() == 0; }));
}

TEST_F(HttpPortTest, ABodyCountsAllItsMemoryForAsLongAsItIsUsed) {
  Start();
  const std::string body(300'000, 'a');
  EXPECT_EQ(Connect().Ask("POST", "/keep", body).code, 200);
  {
    const std::vector<Upload> kept = handler_.kept();
    ASSERT_EQ(kept.size(), 1u);
    EXPECT_TRUE(kept[0].body == body);
    EXPECT_EQ(bodies_->reserved(), int64_t{300'000}) << "its length was known";
  }
  EXPECT_EQ(bodies_->reserved(), 0);

  HttpClient chunked = Begin("/keep", "Transfer-Encoding: chunked");
  for (int i = 0; i < 30; ++i) chunked.Send(Chunk(10'000));
  chunked.Send("0\r\n\r\n");
  EXPECT_EQ(chunked.Read().code, 200);
  {
    const std::vector<Upload> kept = handler_.kept();
    ASSERT_EQ(kept.size(), 1u);
    EXPECT_EQ(kept[0].body, std::string(300'000, 'c'));
    EXPECT_GE(bodies_->reserved(), static_cast<int64_t>(kept[0].body.capacity()));
  }
  EXPECT_EQ(bodies_->reserved(), 0);
}

TEST_F(HttpPortTest, UploadsThatAreUsedLeaveNoRoomForOthers) {
  Start(/*budget=*/1'000'000);
  const std::string body(700'000, 'a');
  EXPECT_EQ(Connect().Ask("POST", "/keep", body).code, 200);
  EXPECT_EQ(Connect().Ask("POST", "/keep", body).code, 503);
  EXPECT_EQ(Connect().Ask("POST", "/keep", std::string(10'000, 'a')).code, 200) << "a small one";
  EXPECT_EQ(handler_.kept().size(), 2u);
  EXPECT_EQ(Connect().Ask("POST", "/keep", body).code, 200);
}

}  // namespace
}  // namespace denoised
