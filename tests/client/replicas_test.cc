// SPDX-License-Identifier: Apache-2.0
// A connection to several servers, on the fake service.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "denoised/client.h"
#include "denoised/target.h"
#include "tests/client/fake_service.h"
#include "tests/eventually.h"
#include "tests/io/temporary_directory.h"
#include "tests/tls/certificates.h"

namespace denoised::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing::HasSubstr;

TEST(TargetTest, OneServerOrReplicas) {
  const auto parsed = [](const char* text) { return ParseTarget(text).value(); };
  EXPECT_EQ(parsed("images:50051").uri, "images:50051");
  EXPECT_FALSE(parsed("images:50051").replicas || parsed("images:50051").direct);
  EXPECT_TRUE(parsed("dns:///images:50051").replicas);
  EXPECT_FALSE(parsed("dns:///images:50051").direct);
  EXPECT_FALSE(parsed("ipv4:127.0.0.1:1").replicas) << "as Queued::server has it";
  for (const char* loopback : {"127.0.0.1:1", "localhost:1", "[::1]:1", "dns:///localhost:1",
                               "ipv4:127.0.0.1:1", "ipv6:%5B::1%5D:1", "unix:/tmp/socket"}) {
    EXPECT_TRUE(parsed(loopback).direct) << loopback;
  }
}

TEST(TargetTest, Lists) {
  for (const char* text : {"10.0.0.1:1,10.0.0.2:2", "ipv4:10.0.0.1:1,10.0.0.2:2"}) {
    const auto list = ParseTarget(text).value();
    EXPECT_EQ(list.uri, "ipv4:10.0.0.1:1,10.0.0.2:2");
    EXPECT_EQ(list.authority, "10.0.0.1:1");
    EXPECT_TRUE(list.list && list.replicas && list.direct);
  }
  EXPECT_EQ(ParseTarget("[fd00::1]:1,[fd00::2]:65535")->uri,
            "ipv6:%5Bfd00::1%5D:1,%5Bfd00::2%5D:65535");
  for (const char* text :
       {",", "10.0.0.1:1,", ",10.0.0.1:1", "10.0.0.1:1,host:2", "10.0.0.1:1,10.0.0.2",
        "10.0.0.1:1,10.0.0.2:0", "10.0.0.1:1,10.0.0.2:65536", "10.0.0.1:1,10.0.0.2:2x",
        "10.0.0.1:1,10.0.0:2", "10.0.0.1:1, 10.0.0.2:2", "fd00::1:1,fd00::2:1", "[::1]:1,[::2:1",
        "10.0.0.1:1,[::1]:1", "host", "http://host:1", "https://host"}) {
    EXPECT_EQ(ParseTarget(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_THAT(std::string(ParseTarget("10.0.0.1:1,host:2").status().message()),
              HasSubstr("\"host:2\""));
}

class ReplicasTest : public testing::Test {
 protected:
  static ConnectionOptions QuickRetries() {
    ConnectionOptions options;
    options.retry.initial_backoff = milliseconds(10);
    options.retry.max_backoff = milliseconds(40);
    return options;
  }
  Client Connected() const {
    return Client(*Connect(a_.address() + "," + b_.address(), QuickRetries()));
  }
  /// Draws until `done`, at most a minute; every picture must come.
  static void DrawUntil(const Client& client, const std::function<bool()>& done) {
    const auto end = steady_clock::now() + seconds(60);
    while (!done()) {
      ASSERT_LT(steady_clock::now(), end);
      const auto result = client.Generate({});
      ASSERT_TRUE(result.ok()) << result.status();
    }
  }

  FakeServer a_, b_;
};

TEST_F(ReplicasTest, AreAskedInTurn) {
  const Client client = Connected();
  DrawUntil(client, [&] { return a_.generations() > 0 && b_.generations() > 0; });
  const int a = a_.generations(), b = b_.generations();
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(client.Generate({}).ok());
  EXPECT_EQ(a_.generations() - a, 10);
  EXPECT_EQ(b_.generations() - b, 10);
}

TEST_F(ReplicasTest, ThoseThatDoNotServeAreLeftOut) {
  a_.SetServing(false);
  const Client client = Connected();
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(client.Generate({}).ok());
  EXPECT_EQ(a_.generations(), 0);
  a_.SetServing(true);
  DrawUntil(client, [&] { return a_.generations() > 0; });
  b_.SetServing(false);
  // It is told in its own time.
  const auto settled = [&, before = -1, calls = 0]() mutable {
    calls = b_.generations() == before ? calls + 1 : 0;
    before = b_.generations();
    return calls == 20;
  };
  DrawUntil(client, settled);
  a_.SetServing(false);
  const auto end = steady_clock::now() + seconds(60);
  absl::Status status;
  while (status.ok() && steady_clock::now() < end) status = client.Generate({}).status();
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr(a_.address() + "," + b_.address()));
}

TEST_F(ReplicasTest, WhatALostOneHadIsDrawnByAnother) {
  for (FakeServer* server : {&a_, &b_}) server->SetEvaluationTime(milliseconds(100));
  const Client client = Connected();
  DrawUntil(client, [&] { return a_.generations() > 0 && b_.generations() > 0; });
  const int before = a_.generations() + b_.generations();
  constexpr int kStreams = 8;
  struct Heard {
    std::mutex mutex;
    std::string server;
    int queued = 0;
    std::vector<Image> images;
  } heard[kStreams];
  std::vector<std::unique_ptr<StreamCall>> calls;
  for (int i = 0; i < kStreams; ++i) {
    calls.push_back(client.StreamGenerate({.seed = uint64_t(i), .class_labels = {i}}, {},
                                          {.on_event = [h = &heard[i]](const Event& event) {
                                            std::lock_guard lock(h->mutex);
                                            if (const auto* queued = std::get_if<Queued>(&event)) {
                                              ++h->queued;
                                              h->server = queued->server;
                                            } else if (const auto* image =
                                                           std::get_if<Image>(&event)) {
                                              h->images.push_back(*image);
                                            }
                                          }}));
  }
  // A stream that is not queued yet would be queued by the one that is left.
  ASSERT_TRUE(Eventually([&] {
    return std::all_of(std::begin(heard), std::end(heard), [](Heard& each) {
      std::lock_guard lock(each.mutex);
      return each.queued == 1;
    });
  }));
  std::jthread unary([&] { EXPECT_TRUE(client.Generate({}).ok()); });
  ASSERT_TRUE(
      Eventually([&] { return a_.generations() + b_.generations() >= before + kStreams + 1; }));
  a_.Stop();
  int lost = 0;
  for (int i = 0; i < kStreams; ++i) {
    ASSERT_TRUE(calls[i]->Wait().ok()) << calls[i]->Wait();
    EXPECT_EQ(heard[i].queued, 1);
    ASSERT_EQ(heard[i].images.size(), 1u);
    EXPECT_EQ(heard[i].images[0].seed, uint64_t(i));
    lost += heard[i].server == "ipv4:" + a_.address();
  }
  EXPECT_TRUE(0 < lost && lost < kStreams) << "the test is to lose some: " << lost;
}

TEST_F(ReplicasTest, OneServerIsAskedForJobsAndModels) {
  const Client client = Connected();
  const auto refused = [](const absl::Status& status) {
    EXPECT_THAT(std::string(status.message()), HasSubstr("by its own address"));
    return absl::IsInvalidArgument(status);
  };
  EXPECT_TRUE(refused(client.GetJob("id").status()));
  EXPECT_TRUE(refused(client.CancelJob("id").status()));
  EXPECT_TRUE(refused(client.WatchJob("id", 0, {})->Wait()));
  EXPECT_TRUE(refused(client.LoadModel({}).status()));
  EXPECT_TRUE(refused(client.UnloadModel("a")));
  EXPECT_TRUE(refused(client.SetAlias("a", "b").status()));
  EXPECT_TRUE(refused(client.DeleteAlias("a")));
  EXPECT_TRUE(client.ListModels().ok());
  EXPECT_EQ(*client.CheckHealth(""), ServingStatus::kServing);

  std::string server;
  const auto call = client.StreamGenerate({.survives = true}, {}, {.on_event = [&](const auto& e) {
                                            if (const auto* queued = std::get_if<Queued>(&e)) {
                                              server = queued->server;
                                            }
                                          }});
  ASSERT_TRUE(call->Wait().ok());
  EXPECT_TRUE(Client(*Connect(server)).WatchJob("id", 0, {})->Wait().ok());
  EXPECT_EQ((server == "ipv4:" + a_.address() ? a_ : b_).watched().request_id(), "id");
}

TEST_F(ReplicasTest, ANameStandsForItsAddresses) {
  const std::string port = a_.address().substr(a_.address().rfind(':'));
  const Client client(*Connect("dns:///localhost" + port, QuickRetries()));
  EXPECT_TRUE(client.Generate({}).ok());
  a_.SetServing(false);
  const auto end = steady_clock::now() + seconds(60);
  absl::Status status;
  while (status.ok() && steady_clock::now() < end) status = client.Generate({}).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << "its health is watched";
}

TEST(ReplicasTlsTest, AListNeedsTheNameInTheCertificates) {
  const TestAuthority authority;
  const auto credentials = [&] {
    const KeyPair pair = authority.Issue("server", "DNS:images.example.org");
    grpc::SslServerCredentialsOptions options;
    options.pem_key_cert_pairs = {{pair.key, pair.certificate}};
    return grpc::SslServerCredentials(options);
  };
  FakeServer a(credentials()), b(credentials());
  const TemporaryDirectory folder;
  ConnectionOptions options;
  options.tls = {.ca_file = folder.Write("ca", authority.certificate())};
  const std::string target = a.address() + "," + b.address();
  const absl::Status nameless = Connect(target, options).status();
  EXPECT_TRUE(absl::IsInvalidArgument(nameless));
  EXPECT_THAT(std::string(nameless.message()), HasSubstr("tls.server_name"));
  options.tls->server_name = "images.example.org";
  const Client client(*Connect(target, options));
  const auto end = steady_clock::now() + seconds(60);
  while (a.generations() == 0 || b.generations() == 0) {
    ASSERT_LT(steady_clock::now(), end);
    ASSERT_TRUE(client.Generate({}).ok());
  }
}

}  // namespace
}  // namespace denoised::client
