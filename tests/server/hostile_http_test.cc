// SPDX-License-Identifier: Apache-2.0
// hostile_test.cc for the HTTP port: each must be refused by name or dropped, and the server must
// go on serving others. And what many clients at a time cost.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <map>
#include <random>
#include <thread>

#include "engine/images/png.h"
#include "tests/eventually.h"
#include "tests/server/http_client.h"
#include "tests/server/png_bomb.h"
#include "tests/server/server_fixture.h"

namespace denoised {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

#ifdef DENOISED_SANITIZED
constexpr int64_t kMargin = 3;  // of the sanitizer around each allocation
#else
constexpr int64_t kMargin = 1;
#endif

class HostileHttpTest : public ServerFixture {
 protected:
  HostileHttpTest() { config_.http_listen = "127.0.0.1:0"; }

  HttpClient Connect(int receive_buffer = 0) const {
    return HttpClient(server_->http_port(), std::nullopt, receive_buffer);
  }
  HttpAnswer Ask(const std::string& method, const std::string& target, const std::string& body = "",
                 const HttpHeaders& headers = {}) const {
    return denoised::Ask(server_->http_port(), method, target, body, headers);
  }
  void ExpectServing() const {
    // A machine that is busy for as long as a handshake may take is given another.
    EXPECT_TRUE(Eventually([&] { return Ask("POST", "/v1/generate", "{}").code == 200; }))
        << "others are served";
  }
};

constexpr char kPost[] =
    "POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";

TEST_F(HostileHttpTest, WhatIsNoHttpIsRefused) {
  config_.connections.handshake = 1s;
  Start();
  for (const std::string& bytes :
       {std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), std::string(100'000, 'A'),
        std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11), std::string(100, '\0'),
        std::string("GET /healthz\r\n\r\n"),
        std::string("GET /healthz HTTP/1.1\r\nno colon\r\n\r\n"),
        std::string("GET /healthz HTTP/1.1\r\nA\r\n: b\r\n\r\n"),
        std::string("GET /healthz HTTP/9.9\r\n\r\n"),
        // Two lengths, by which a proxy and a server could disagree on where a request ends.
        kPost + std::string("Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}"),
        kPost + std::string("Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
        kPost + std::string("Content-Length: -2\r\n\r\n{}"),
        kPost + std::string("Content-Length: 99999999999999999999\r\n\r\n{}"),
        kPost + std::string("Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}")}) {
    HttpClient client = Connect();
    client.Send(bytes);
    const HttpAnswer answer = client.Read();
    EXPECT_THAT(answer.code, ::testing::AnyOf(0, 400, 413, 431))
        << testing::PrintToString(bytes.substr(0, 60));
    if (answer.code != 0) {
      EXPECT_EQ(answer.Error("type"), "invalid_request_error");
    }
    EXPECT_TRUE(client.IsClosedWithin(1min)) << testing::PrintToString(bytes.substr(0, 60));
  }
  EXPECT_EQ(engine_->evaluations(), 0);
  ExpectServing();
}

TEST_F(HostileHttpTest, HalfSentRequestsAreClosed) {
  config_.connections.handshake = 500ms;
  config_.connections.max_idle = 700ms;
  Start();
  HttpClient silent = Connect(), half = Connect(), slow = Connect(), body = Connect();
  half.Send("GET /healthz HTTP/1.1\r\nHost: lo");
  body.Send(kPost + std::string("Content-Length: 1000\r\n\r\n{"));
  const std::string head = "GET /healthz HTTP/1.1\r\nX-Slow: " + std::string(1000, 'x');
  size_t sent = 0;
  const auto end = std::chrono::steady_clock::now() + 1min;
  // A byte now and then (slow-loris).
  while (std::chrono::steady_clock::now() < end && !slow.IsClosedWithin(100ms)) {
    slow.Send(head.substr(sent++, 1));
  }
  EXPECT_LT(std::chrono::steady_clock::now(), end) << "the slow one is still there";
  for (HttpClient* client : {&silent, &half, &body}) EXPECT_TRUE(client->IsClosedWithin(1min));
  HttpClient idle = Connect();
  EXPECT_TRUE(Eventually([&] {
    if (idle.Ask("GET", "/healthz").code == 200) return true;
    idle = Connect();
    return false;
  }));
  EXPECT_TRUE(idle.IsClosedWithin(1min));
  ExpectServing();
}

/// So much of a body must come in the time of the handshake: HttpPort::kPieceBytes.
TEST_F(HostileHttpTest, SlowWritersAreCutOff) {
  config_.connections.handshake = 500ms;
  Start();
  HttpClient slow = Connect();
  slow.Send(kPost + std::string("Content-Length: 1000000\r\n\r\n"));
  const auto end = std::chrono::steady_clock::now() + 1min;
  while (std::chrono::steady_clock::now() < end && !slow.IsClosedWithin(100ms)) {
    slow.Send(std::string(200, ' '));
  }
  EXPECT_LT(std::chrono::steady_clock::now(), end) << "the slow one is still there";
  ExpectServing();
}

TEST_F(HostileHttpTest, HeadersAndBodiesAreBounded) {
  config_.limits.max_request_bytes = 1 << 20;
  Start();
  const HttpAnswer headers = Ask("GET", "/healthz", "", {{"X-Large", std::string(20'000, 'a')}});
  EXPECT_EQ(headers.code, 431);
  EXPECT_THAT(headers.Error(), HasSubstr("16 KiB"));
  EXPECT_EQ(Ask("GET", "/" + std::string(20'000, 'a')).code, 431);
  HttpHeaders many;
  for (int i = 0; i < 5000; ++i) many.emplace_back("X-" + std::to_string(i), "y");
  EXPECT_EQ(Ask("GET", "/healthz", "", many).code, 431);

  const HttpAnswer body = Ask("POST", "/v1/generate", std::string(3 << 20, ' '));
  EXPECT_EQ(body.code, 413);
  EXPECT_THAT(body.Error(), HasSubstr("--max-request-bytes"));
  // Within what base64 may take, but the message is too large.
  const std::string upload =
      R"({"params": {"init_image": {"encoded": ")" + std::string(1'400'000, 'A') + "\"}}}";
  const HttpAnswer large = Ask("POST", "/v1/generate", upload);
  EXPECT_EQ(large.code, 413) << "proxies send 429 again";
  EXPECT_EQ(large.Header("x-should-retry"), "false") << "it can never succeed";
  HttpClient chunked = Connect();
  chunked.Send(kPost + std::string("Transfer-Encoding: chunked\r\n\r\n"));
  const std::string chunk = "10000\r\n" + std::string(0x10000, ' ') + "\r\n";
  for (int i = 0; i < 40; ++i) chunked.Send(chunk);
  EXPECT_EQ(chunked.Read().code, 413);
  ExpectServing();
}

TEST_F(HostileHttpTest, PicturesAreMeasuredBeforeTheyAreUnpacked) {
  config_.limits.max_init_pixels = 1 << 20;
  Start();
  ExpectServing();
  // The size is not the picture's, which the model would not draw.
  const auto ask = [&](const std::string& file) {
    return Ask("POST", "/v1/generate",
               R"({"params": {"width": 32, "height": 32, "init_image": {"encoded": ")" +
                   Encode64(file) + "\"}}}");
  };
  const auto edit = [&](const std::string& file) {
    return Ask("POST", "/v1/images/edits",
               "--b\r\nContent-Disposition: form-data; name=\"size\"\r\n\r\n32x32\r\n"
               "--b\r\nContent-Disposition: form-data; name=\"image\"\r\n\r\n" +
                   file + "\r\n--b--\r\n",
               {{"Content-Type", "multipart/form-data; boundary=b"}});
  };
  const int64_t before = ResidentBytes();
  // 100 million pixels in 100 KB; two billion in none.
  for (const std::string& file :
       {PngBomb(10'000, 10'000, 10'000), PngBomb(46'341, 46'341, 0),
        PngBomb(0x7fffffff, 0x7fffffff, 0), PngBomb(1, 1'000'000'000, 0)}) {
    for (int i = 0; i < 10; ++i) {
      const HttpAnswer ours = ask(file), openai = edit(file);
      EXPECT_EQ(ours.code, 400);
      EXPECT_EQ(ours.Error("param"), "params.init_image.encoded");
      EXPECT_EQ(openai.code, 400);
      EXPECT_EQ(openai.Error("param"), "image");
    }
  }
  // Within the bound on pixels, but one line of them.
  for (const std::string& file : {PngBomb(1, 1'000'000, 1'000'000), PngBomb(1 << 19, 2, 2)}) {
    EXPECT_EQ(ask(file).code, 200);
    EXPECT_EQ(edit(file).code, 200);
  }
  EXPECT_LT(ResidentBytes() - before, kMargin * 100 << 20);
}

TEST_F(HostileHttpTest, WhoMayNotChangeModelsHasNothingParsed) {
  Start();
  for (const auto& [method, path] : {std::pair{"POST", "/v1/models"}, {"PUT", "/v1/aliases/a"}}) {
    // A proxy passed it on: the caller is no admin.
    EXPECT_EQ(Ask(method, path, "{no JSON", {{"X-Forwarded-For", "192.0.2.1"}}).code, 403);
    EXPECT_EQ(Ask(method, path, "{no JSON").code, 400);
    EXPECT_EQ(Ask(method, path, std::string(64 << 10, ' ')).code, 400);
    EXPECT_EQ(Ask(method, path, std::string((64 << 10) + 1, ' ')).code, 413);
    HttpClient chunked = Connect();
    chunked.Send(std::string(method) + " " + path +
                 " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                 "Transfer-Encoding: chunked\r\n\r\n10001\r\n" +
                 std::string(0x10001, ' ') + "\r\n");
    EXPECT_EQ(chunked.Read().code, 413);
  }
  ExpectServing();
}

TEST_F(HostileHttpTest, WhoMayNotCallSendsNoBody) {
  config_.http_origins = {};
  Start();
  HttpClient client = Connect();
  client.Send(kPost + std::string("Origin: https://evil.example.org\r\nContent-Length: 50000000\r\n"
                                  "Expect: 100-continue\r\n\r\n"));
  EXPECT_EQ(client.Read().code, 403) << "and not 100";
  EXPECT_TRUE(client.IsClosedWithin(1min));
}

TEST_F(HostileHttpTest, NamesAreNoPaths) {
  Start();
  for (const char* name : {"..%2Fdigits", "models%2Fdigits", "%2F", "..", ".", "~", "%00"}) {
    EXPECT_EQ(Ask("GET", std::string("/v1/models/") + name).code, 404) << name;
  }
  for (const char* path : {"/../etc/passwd", "/%2e%2e/etc/passwd", "/index.html",
                           "/page/index.html", "/v1/images/files/../../etc/passwd"}) {
    EXPECT_EQ(Ask("GET", path).code, 404) << path;
  }
}

/// What a client sends comes back in no header and in no page.
TEST_F(HostileHttpTest, RepliesRepeatNothingRaw) {
  Start();
  const HttpAnswer answer = Ask("GET", "/%0d%0aX-Injected:%201<script>");
  EXPECT_EQ(answer.code, 404);
  EXPECT_EQ(answer.Header("x-injected"), "");
  EXPECT_EQ(answer.Header("content-type"), "application/json");
  const HttpAnswer id =
      Ask("POST", "/v1/generate", R"({"params": {"request_id": "a\r\nX-Injected: 1"}})");
  EXPECT_EQ(id.code, 400) << "an id is printable ASCII";
  EXPECT_EQ(id.Header("x-injected"), "");
}

int64_t AllowFiles(rlim_t count) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = std::max(limit.rlim_cur, std::min(limit.rlim_max, count));
  setrlimit(RLIMIT_NOFILE, &limit);
  return static_cast<int64_t>(limit.rlim_cur);
}

/// DENOISED_TEST_IDLE=10000 for a test of patience.
int Many() {
  const char* many = std::getenv("DENOISED_TEST_IDLE");
  return many == nullptr ? 2000 : std::atoi(many);
}

TEST_F(HostileHttpTest, ThousandsOfSilentConnectionsHinderNobody) {
  const int many =
      static_cast<int>(std::min<int64_t>(Many(), (AllowFiles(2 * Many() + 500) - 500) / 2));
  ASSERT_GE(many, 100) << "too few open files are allowed: raise `ulimit -n` to 1000 or more";
  config_.connections.handshake = 3s;
  config_.connections.max_connections = 3 * many;
  Start();
  ExpectServing();
  const int64_t before = ResidentBytes();
  std::vector<HttpClient> clients;
  for (int i = 0; i < many; ++i) {
    clients.push_back(Connect());
    ASSERT_TRUE(clients.back().connected()) << i;
  }
  ExpectServing();
  const int64_t each = (ResidentBytes() - before) / many;
  EXPECT_LT(each, kMargin * 32 << 10);
  RecordProperty("bytes_of_each_connection", static_cast<int>(each));
  for (HttpClient& client : clients) ASSERT_TRUE(client.IsClosedWithin(1min));
  ExpectServing();
}

TEST_F(HostileHttpTest, TooManyConnectionsAreClosedAndTheRestServed) {
  config_.connections.max_connections = 100;
  Start();
  {
    std::vector<HttpClient> clients;
    for (int i = 0; i < 400; ++i) clients.push_back(Connect());
    EXPECT_TRUE(clients.back().IsClosedWithin(1min));
  }
  EXPECT_TRUE(Eventually([&] { return Ask("POST", "/v1/generate", "{}").code == 200; }));
}

/// A reply with links would repeat it.
TEST_F(HostileHttpTest, AHostThatIsNoNameIsRefused) {
  Start();
  HttpClient client = Connect();
  client.Send("GET /healthz HTTP/1.1\r\nHost: [\xff]\r\n\r\n");
  EXPECT_EQ(client.ReadHead().code, 400);
  ExpectServing();
}

/// The parser keeps both until they end, beside what it counts as the body.
TEST_F(HostileHttpTest, EndlessExtensionsAndTrailersAreRefused) {
  Start();
  for (const char* begin : {"1;", "0\r\nx: "}) {
    HttpClient client = Connect();
    client.Send(kPost + std::string("Transfer-Encoding: chunked\r\n\r\n") + begin +
                std::string(1 << 20, 'a'));
    EXPECT_EQ(client.ReadHead().code, 400) << begin;
  }
  ExpectServing();
}

TEST_F(HostileHttpTest, NoBodyIsReadForWhatTakesNone) {
  Start();
  for (const char* length : {"Content-Length: 85000000", "Transfer-Encoding: chunked"}) {
    HttpClient client = Connect();
    client.Send(std::string("GET /healthz HTTP/1.1\r\nHost: localhost\r\n") + length + "\r\n\r\n");
    EXPECT_EQ(client.ReadHead().code, 413) << length;
  }
  ExpectServing();
}

/// 503 would have it sent again and again.
TEST_F(HostileHttpTest, ABodyThatCanNeverFitIsTooLarge) {
  config_.connections.max_buffered_bytes = 1 << 20;
  Start();
  for (const char* length : {"Content-Length: 2000000", "Transfer-Encoding: chunked"}) {
    HttpClient client = Connect();
    client.Send(std::string(kPost) + length + "\r\n\r\n");
    for (int i = 0; i < 16; ++i) client.Send("1ffe0\r\n" + std::string(0x1ffe0, ' ') + "\r\n");
    const auto reply = client.ReadHead();
    EXPECT_EQ(reply.code, 413) << length;
    EXPECT_EQ(reply.headers.count("retry-after"), 0u) << length;
  }
  ExpectServing();
}

/// A hundred uploads that stop before their end would hold 3 GB.
TEST_F(HostileHttpTest, HalfSentBodiesHoldNoMoreThanTheBound) {
  config_.connections.max_buffered_bytes = 32 << 20;
  Start();
  ExpectServing();
  const int64_t before = ResidentBytes();
  std::vector<HttpClient> clients;
  const std::string piece(1 << 20, ' ');
  for (int i = 0; i < 100; ++i) {
    clients.push_back(Connect());
    clients.back().Send(kPost + std::string("Content-Length: 30000000\r\n\r\n") + piece);
  }
  EXPECT_TRUE(Eventually([&] {
    return std::any_of(clients.begin(), clients.end(),
                       [](HttpClient& client) { return client.IsClosedWithin(10ms); });
  })) << "none is refused";
  std::this_thread::sleep_for(500ms);
  EXPECT_LT(ResidentBytes() - before, kMargin * 128 << 20);
  clients.clear();
  EXPECT_TRUE(Eventually([&] { return Ask("POST", "/v1/generate", "{}").code == 200; }))
      << "what they held is free again";
}

/// Requests that wait for the device have been read: they hold none of the memory for uploads.
TEST_F(HostileHttpTest, WaitingRequestsLeaveRoomForUploads) {
  config_.connections.max_buffered_bytes = 1 << 20;
  Start();
  engine_->Pause(true);
  std::vector<HttpClient> clients;
  for (const size_t size : {2, 700'000}) {
    for (int i = 0; i < 4; ++i) {
      clients.push_back(Connect());
      clients.back().Send(HttpClient::Request("POST", "/v1/generate?stream=true",
                                              "{" + std::string(size - 2, ' ') + "}"));
      ASSERT_EQ(clients.back().ReadHead().code, 200) << size << " bytes, request " << i;
    }
  }
  engine_->Pause(false);
}

/// What a request that waits for the device keeps of an edit is the picture as the model takes it,
/// and not the file. (With a sanitizer there is no such count, and this shows nothing.)
TEST_F(HostileHttpTest, WaitingEditsKeepNoFiles) {
  constexpr int kEdits = 16, kFileBytes = 4 << 20;
  Start();
  ExpectServing();
  engine_->Pause(true);
  const auto file = EncodePng({.width = 1, .height = 1, .channels = 1, .samples = {0}},
                              {{"Comment", std::string(kFileBytes, 'a')}});
  ASSERT_TRUE(file.ok());
  const auto heap = [] {
    const auto information = mallinfo2();
    return static_cast<int64_t>(information.uordblks + information.hblkhd);
  };
  const int64_t before = heap();
  std::vector<HttpClient> clients;
  for (int i = 0; i < kEdits; ++i) {
    std::string body = "--b\r\nContent-Disposition: form-data; name=\"image\"\r\n\r\n" + *file;
    if (i % 2 == 0) {
      body += "\r\n--b\r\nContent-Disposition: form-data; name=\"stream\"\r\n\r\ntrue";
    }
    clients.push_back(Connect());
    clients.back().Send(HttpClient::Request("POST", "/v1/images/edits", body + "\r\n--b--\r\n",
                                            {{"Content-Type", "multipart/form-data; boundary=b"}}));
  }
  EXPECT_TRUE(Eventually([&] {
    int queued = 0;
    for (const EngineStats& stats : engine_->Stats()) queued += stats.queued_images;
    return queued == kEdits;
  }));
  EXPECT_TRUE(Eventually([&] { return heap() - before < 2 * kFileBytes; }))
      << (heap() - before) / kEdits << " bytes of each";
  engine_->Pause(false);
  for (HttpClient& client : clients) EXPECT_EQ(client.ReadHead().code, 200);
}

/// Each value of a list costs a parser more than its text. A shutdown waits for what is parsed.
TEST_F(HostileHttpTest, BodiesOfManyValuesAreRefused) {
  Start();
  std::string many;
  for (int i = 0; i < 3 << 20; ++i) many += "1,";
  for (const std::string& body :
       {R"({"params": {"seeds": [)" + many + "1]}}", "{'params': {'seeds': [" + many + "1]}}"}) {
    const HttpAnswer answer = Ask("POST", "/v1/generate", body);
    EXPECT_EQ(answer.code, 400);
    EXPECT_THAT(answer.Error(),
                ::testing::StartsWith(body[1] == '"' ? "body: has more than" : "body: is no JSON"));
  }
  ExpectServing();
}

TEST_F(HostileHttpTest, AStalledReaderIsCutOff) {
  config_.write_timeout = 500ms;
  config_.metrics_listen = "127.0.0.1:0";
  Start({.evaluation_cost = 200us, .size = 512});
  for (const bool stream : {true, false}) {
    HttpClient stalled = Connect(4096);
    stalled.Send(HttpClient::Request(
        "POST", stream ? "/v1/generate?stream=true" : "/v1/generate",
        R"({"params": {"count": 64, "output": {"format": "IMAGE_FORMAT_RAW_FLOAT32"}}})"));
    EXPECT_TRUE(Eventually([&] {
      return Scrape().find("denoised_stalled_readers_total " + std::string(stream ? "1" : "2")) !=
             std::string::npos;
    })) << stream;
  }
  ExpectServing();
}

TEST_F(HostileHttpTest, AClientHasOnlySoManyStreams) {
  config_.connections.max_streams_per_client = 5;
  Start();
  engine_->Pause(true);
  std::vector<HttpClient> clients;
  for (int i = 0; i < 5; ++i) {
    clients.push_back(Connect());
    clients.back().Send(HttpClient::Request("POST", "/v1/generate?stream=true", "{}"));
    ASSERT_EQ(clients.back().ReadHead().code, 200);
  }
  const HttpAnswer sixth = Ask("POST", "/v1/generate", "{}");
  EXPECT_EQ(sixth.code, 429);
  EXPECT_EQ(sixth.Error("code"), "client_limit");
  const HttpAnswer unread = Ask("POST", "/v1/images/generations", "{no JSON");
  EXPECT_EQ(unread.code, 429) << "its body is not parsed";
  EXPECT_EQ(unread.Error("code"), "client_limit");
  // The same count as on gRPC's port.
  EXPECT_EQ(Generate().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  engine_->Pause(false);
}

/// 500 streams with previews, half of whose readers have small buffers. process_test.py does the
/// same with a server of its own, whose memory can be measured.
TEST_F(HostileHttpTest, FiveHundredStreamsWithPreviews) {
  constexpr int kStreams = 500, kReaders = 10;
  ASSERT_GE(AllowFiles(2 * kStreams + 500), 2 * kStreams + 500);
  Start({.evaluation_cost = 1ms, .max_rows = 64, .max_slots = 64, .size = 64, .channels = 3});
  ExpectServing();
  std::atomic<int> completed{0};
  std::vector<HttpClient> clients;
  for (int i = 0; i < kStreams; ++i) {
    clients.push_back(Connect(i % 2 == 0 ? 4096 : 0));
    clients.back().Send(HttpClient::Request("POST", "/v1/generate?stream=true",
                                            R"({"params": {"steps": 20}, "preview": {}})"));
  }
  std::vector<std::thread> readers;
  for (int reader = 0; reader < kReaders; ++reader) {
    readers.emplace_back([&, reader] {
      for (int i = reader; i < kStreams; i += kReaders) {
        HttpClient& client = clients[i];
        EXPECT_EQ(client.ReadHead().code, 200);
        std::string last;
        while (const auto event = client.ReadEvent()) {
          last = event->name;
        }
        EXPECT_EQ(last, "completed");
        completed += client.ended() ? 1 : 0;
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(completed, kStreams);
  EXPECT_EQ(engine_->cancels(), 0);
}

/// Streams whose clients go at any moment. Every tenth stays. Of images this tests that they come
/// whole to whom they belong, as the fake engine draws none by the state of another.
TEST_F(HostileHttpTest, ThousandsOfCancelsLeaveNothingAndEveryImageGoesToItsStream) {
  constexpr int kThreads = 16, kRequests = 150;
  config_.metrics_listen = "127.0.0.1:0";
  config_.connections.max_streams_per_client = 1000;
  Start({.evaluation_cost = 50us, .max_rows = 64, .max_slots = 64});
  struct Drawn {
    std::string request;
    std::map<int, std::string> images;
  };
  // The images of a stream that is read to its end, or of its first `events`.
  const auto draw = [&](const std::string& request, int events) {
    HttpClient client = Connect();
    client.Send(HttpClient::Request("POST", "/v1/generate?stream=true", request));
    std::map<int, std::string> images;
    if (events > 0) client.ReadHead();
    for (int i = 0; i < events; ++i) {
      const auto event = client.ReadEvent();
      if (!event) break;
      if (event->name != "image") continue;
      const nlohmann::json image = event->Json()["image"]["image"];
      images[image["index"].get<int>()] = image["encoded"].get<std::string>();
    }
    return images;
  };
  constexpr int kAll = 1 << 20;
  std::vector<std::vector<Drawn>> drawn(kThreads);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 random(thread);
      for (int i = 0; i < kRequests; ++i) {
        const nlohmann::json params = {{"seed", random() % 50},
                                       {"steps", 1 + random() % 30},
                                       {"count", 1 + random() % 4},
                                       {"conditions", {{{"class_label", random() % 10}}}}};
        const std::string request = nlohmann::json({{"params", params}}).dump();
        if (random() % 10 == 0) {
          drawn[thread].push_back({request, draw(request, kAll)});
        } else {
          draw(request, static_cast<int>(random() % 12));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(Eventually([&] {
    for (const EngineStats& stats : engine_->Stats()) {
      if (stats.queued_images != 0 || stats.active_images != 0) return false;
    }
    return true;
  })) << "a slot is leaked";
  EXPECT_TRUE(Eventually([&] {
    const std::string text = Scrape();
    return text.find("denoised_jobs{model=\"digits\",state=\"queued\"} 0") != std::string::npos &&
           text.find("denoised_jobs{model=\"digits\",state=\"running\"} 0") != std::string::npos;
  })) << "a job is leaked";
  EXPECT_GT(engine_->cancels(), 0);
  // The idle server draws what those that stayed got.
  int survivors = 0;
  for (const std::vector<Drawn>& each : drawn) {
    for (const Drawn& one : each) {
      EXPECT_FALSE(one.images.empty());
      EXPECT_EQ(one.images, draw(one.request, kAll)) << one.request;
      ++survivors;
    }
  }
  EXPECT_GT(survivors, kThreads * kRequests / 20);
}

}  // namespace
}  // namespace denoised
