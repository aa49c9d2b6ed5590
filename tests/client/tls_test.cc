// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "denoised/client.h"
#include "tests/client/fake_service.h"
#include "tests/io/temporary_directory.h"
#include "tests/tls/certificates.h"

namespace denoised::client {
namespace {

using testing::HasSubstr;

class TlsTest : public testing::Test {
 protected:
  std::shared_ptr<grpc::ServerCredentials> ServerCredentials(const std::string& names,
                                                             bool mutual = false) const {
    const KeyPair pair = authority_.Issue("server", names);
    grpc::SslServerCredentialsOptions options(
        mutual ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
               : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
    options.pem_key_cert_pairs = {{pair.key, pair.certificate}};
    if (mutual) options.pem_root_certs = authority_.certificate();
    return grpc::SslServerCredentials(options);
  }

  static absl::Status Ask(const FakeServer& server, const TlsOptions& tls,
                          const std::string& token_file = "") {
    ConnectionOptions options;
    options.retry.max_attempts = 1;
    options.tls = tls;
    options.token_file = token_file;
    const auto connection = Connect(server.address(), options);
    if (!connection.ok()) return connection.status();
    return Client(*connection).ListModels({.timeout = std::chrono::seconds(60)}).status();
  }

  TestAuthority authority_;
  const TemporaryDirectory folder_;
  const std::string ca_ = folder_.Write("ca", authority_.certificate());
};

TEST_F(TlsTest, TrustsTheAuthorityItIsTold) {
  const FakeServer server(ServerCredentials("DNS:localhost,IP:127.0.0.1"));
  EXPECT_TRUE(Ask(server, {.ca_file = ca_}).ok());
  const TestAuthority stranger;
  EXPECT_TRUE(absl::IsUnavailable(
      Ask(server, {.ca_file = folder_.Write("other", stranger.certificate())})));
  EXPECT_TRUE(absl::IsUnavailable(Ask(server, {}))) << "the system knows nothing of ours";
}

TEST_F(TlsTest, TheNameMustBeInTheCertificate) {
  const FakeServer server(ServerCredentials("DNS:images.example.org"));
  EXPECT_TRUE(absl::IsUnavailable(Ask(server, {.ca_file = ca_})));
  EXPECT_TRUE(Ask(server, {.ca_file = ca_, .server_name = "images.example.org"}).ok());
}

TEST_F(TlsTest, ShowsItsCertificateWhereItIsAskedFor) {
  const FakeServer server(ServerCredentials("IP:127.0.0.1", /*mutual=*/true));
  EXPECT_TRUE(absl::IsUnavailable(Ask(server, {.ca_file = ca_})));
  const KeyPair own = authority_.Issue("alice", "");
  EXPECT_TRUE(Ask(server, {.ca_file = ca_,
                           .cert_file = folder_.Write("own.crt", own.certificate),
                           .key_file = folder_.Write("own.key", own.key)})
                  .ok());
}

TEST_F(TlsTest, TheTokenIsReadForEveryCall) {
  const FakeServer server(ServerCredentials("IP:127.0.0.1"));
  const std::string file = folder_.Write("token", "first\n");
  ConnectionOptions options;
  options.retry.max_attempts = 1;
  options.tls = {.ca_file = ca_};
  options.token_file = file;
  const Client client(*Connect(server.address(), options));
  ASSERT_TRUE(client.ListModels().ok());
  EXPECT_EQ(server.authorization(), "Bearer first");
  folder_.Write("token", "  second");  // not the token alone
  EXPECT_FALSE(client.ListModels().ok());
  folder_.Write("token", "second");
  EXPECT_TRUE(client.ListModels().ok());
  EXPECT_EQ(server.authorization(), "Bearer second");
}

TEST(TokenFileTest, OneThatVanishesEndsTheCallAtOnce) {
  FakeServer server;
  const TemporaryDirectory folder;
  const std::string file = folder.Write("token", "first");
  ConnectionOptions options;
  options.token_file = file;
  options.allow_plaintext_token = true;
  const Client client(*Connect(server.address(), options));
  const auto expect_said = [&file](const absl::Status& status) {
    EXPECT_EQ(status, absl::InvalidArgumentError("token_file: \"" + file +
                                                 "\" cannot be read: No such file or directory"));
  };
  // In the middle of a stream: its second attempt has none.
  server.BreakNext(1, 1, {grpc::StatusCode::UNAVAILABLE, "gone"});
  std::optional<absl::Status> done;
  const StreamListener listener = {
      .on_event = [&file](const Event&) { std::filesystem::remove(file); },
      .on_done = [&done](const absl::Status& status) { done = status; }};
  expect_said(client.StreamGenerate({}, {}, listener)->Wait());
  EXPECT_TRUE(done.has_value());
  // Before the first attempt.
  expect_said(client.StreamGenerate({}, {}, {})->Wait());
  expect_said(client.Generate({}).status());
  expect_said(client.ListModels().status());
  EXPECT_EQ(server.generations(), 1) << "no attempt without the token";
  folder.Write("token", "second");
  EXPECT_TRUE(client.Generate({}).ok());
  EXPECT_EQ(server.authorization(), "Bearer second");
}

TEST_F(TlsTest, SaysWhichFileIsWrong) {
  const FakeServer server(ServerCredentials("IP:127.0.0.1"));
  const auto message = [&](const TlsOptions& tls, const std::string& token_file = "") {
    return std::string(Ask(server, tls, token_file).message());
  };
  EXPECT_THAT(message({.ca_file = "/absent"}), HasSubstr("tls.ca_file: \"/absent\""));
  EXPECT_THAT(message({.cert_file = ca_}), HasSubstr("tls.key_file"));
  EXPECT_THAT(message({.cert_file = ca_, .key_file = "/absent"}), HasSubstr("tls.key_file"));
  EXPECT_THAT(message({.ca_file = ca_}, "/absent"), HasSubstr("token_file: \"/absent\""));
  EXPECT_THAT(message({.ca_file = ca_}, folder_.Write("two", "a b")), HasSubstr("token_file"));
  EXPECT_THAT(message({.ca_file = ca_}, folder_.Write("empty", "")), HasSubstr("token_file"));
  ConnectionOptions options;
  options.token_file = folder_.Write("token", "t");
  EXPECT_THAT(std::string(Connect(server.address(), options).status().message()),
              HasSubstr("token_file needs tls"));
}

TEST_F(TlsTest, FilesThatGrpcCannotUseAreNamedBeforeItConnects) {
  const KeyPair own = authority_.Issue("alice", "");
  const KeyPair other = authority_.Issue("bob", "");
  const std::string certificate = folder_.Write("own.crt", own.certificate);
  const std::string key = folder_.Write("own.key", own.key);
  const std::string other_key = folder_.Write("other.key", other.key);
  const std::string garbage = folder_.Write("garbage", "no PEM\n");
  const std::string damaged =
      folder_.Write("damaged", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
  const auto expect = [](const TlsOptions& tls, const std::string& message) {
    ConnectionOptions options;
    options.tls = tls;
    const absl::Status status = Connect("127.0.0.1:1", options).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  };
  for (const std::string& file : {garbage, key, damaged}) {
    expect({.ca_file = file}, "tls.ca_file: \"" + file + "\" holds no certificate in PEM");
    expect({.cert_file = file, .key_file = key},
           "tls.cert_file: \"" + file + "\" holds no certificate in PEM");
  }
  for (const std::string& file : {garbage, certificate}) {
    expect({.cert_file = certificate, .key_file = file},
           "tls.key_file: \"" + file + "\" holds no private key in PEM");
  }
  expect({.cert_file = certificate, .key_file = other_key},
         "tls.key_file: \"" + other_key + "\" is not the key of the first certificate in \"" +
             certificate + "\"");
  expect({.ca_file = folder_.path()}, "cannot be read: Is a directory");
  expect({.ca_file = folder_.Write("empty", "")}, "is empty");
}

TEST(PlaintextTokenTest, IsSentOnlyWhenItIsAllowed) {
  const FakeServer server;
  const TemporaryDirectory folder;
  ConnectionOptions options;
  options.retry.max_attempts = 1;
  const CallOptions own = {.metadata = {{"Authorization", "Bearer mine"}}};
  const Client refused(*Connect(server.address(), options));
  EXPECT_THAT(std::string(refused.ListModels(own).status().message()),
              HasSubstr("metadata \"authorization\" needs tls"));
  EXPECT_TRUE(refused.ListModels().ok());

  options.token_file = folder.Write("token", "open-sesame");
  const absl::Status status = Connect(server.address(), options).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("allow_plaintext_token"));

  options.allow_plaintext_token = true;
  const Client client(*Connect(server.address(), options));
  EXPECT_TRUE(client.ListModels().ok());
  EXPECT_EQ(server.authorization(), "Bearer open-sesame");
  folder.Write("token", "second");
  EXPECT_TRUE(client.StreamGenerate({}, {}, {})->Wait().ok());
  EXPECT_EQ(server.authorization(), "Bearer second");
  EXPECT_THAT(std::string(client.ListModels(own).status().message()),
              HasSubstr("token_file are both given"));

  options.token_file.clear();
  EXPECT_TRUE(Client(*Connect(server.address(), options)).ListModels(own).ok());
  EXPECT_EQ(server.authorization(), "Bearer mine");
}

}  // namespace
}  // namespace denoised::client
