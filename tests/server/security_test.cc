// SPDX-License-Identifier: Apache-2.0
// Who may call, over TLS on loopback, with a FakeEngine behind.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>
#include <set>
#include <thread>

#include "denoised/v1/model_admin.grpc.pb.h"
#include "inference/open_inference.grpc.pb.h"
#include "server/security/clients.h"
#include "tests/eventually.h"
#include "tests/io/temporary_directory.h"
#include "tests/server/server_fixture.h"
#include "tests/tls/certificates.h"

namespace denoised {
namespace {

using namespace std::chrono_literals;
using grpc::StatusCode;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kLocal[] = "DNS:localhost,IP:127.0.0.1";

/// Token and digest of a new client.
struct Token {
  explicit Token(const std::string& name) {
    const std::string text = *MakeToken(name);
    std::smatch match;
    if (std::regex_search(text, match, std::regex("(denoised_\\w+)\n"))) value = match[1];
    if (std::regex_search(text, match, std::regex("\"(\\w{64})\""))) digest = match[1];
  }
  std::string value, digest;
};

class SecurityTest : public ServerFixture {
 protected:
  SecurityTest() { config_.security.refresh = 1s; }

  void WriteKeyPair(const KeyPair& pair) {
    config_.security.tls_cert = directory_.Write("server.crt", pair.certificate);
    config_.security.tls_key = directory_.Write("server.key", pair.key);
  }

  void Start() {
    if (!config_.security.tls()) WriteKeyPair(authority_.Issue("server", kLocal));
    ServerFixture::Start();
  }

  std::string StartError() {
    const auto server = Server::Start(config_, std::make_unique<FakeEngine>());
    return server.ok() ? "started" : std::string(server.status().message());
  }

  /// A connection that trusts `ca` and shows `own`.
  std::shared_ptr<grpc::Channel> Connect(const std::string& ca, const KeyPair& own = {}) const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    return ServerFixture::Connect(
        grpc::SslCredentials(
            {.pem_root_certs = ca, .pem_private_key = own.key, .pem_cert_chain = own.certificate}),
        arguments);
  }
  std::shared_ptr<grpc::Channel> Connect() const { return Connect(authority_.certificate()); }

  using Metadata = std::vector<std::pair<std::string, std::string>>;
  static void Prepare(grpc::ClientContext* context, const Metadata& metadata) {
    for (const auto& [key, value] : metadata) context->AddMetadata(key, value);
    context->set_deadline(std::chrono::system_clock::now() + 1min);
  }
  static Metadata Bearer(const std::string& token) {
    return {{"authorization", "Bearer " + token}};
  }

  static grpc::Status Generate(const std::shared_ptr<grpc::Channel>& channel,
                               const Metadata& metadata = {},
                               const v1::GenerateRequest& request = {}) {
    grpc::ClientContext context;
    Prepare(&context, metadata);
    v1::GenerateResponse response;
    return v1::ImageGeneration::NewStub(channel)->Generate(&context, request, &response);
  }

  static StatusCode CallByName(const std::shared_ptr<grpc::Channel>& channel,
                               const std::string& path, const Metadata& metadata = {}) {
    grpc::ClientContext context;
    Prepare(&context, metadata);
    return denoised::CallByName(channel, &context, path).error_code();
  }

  TestAuthority authority_;
  TemporaryDirectory directory_;
};

TEST_F(SecurityTest, TlsIsSpokenAndNothingElse) {
  Start();
  EXPECT_TRUE(Generate(Connect()).ok());
  const TestAuthority stranger;
  EXPECT_EQ(Generate(Connect(stranger.certificate())).error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(Generate(channel_).error_code(), StatusCode::UNAVAILABLE);
  EXPECT_TRUE(Generate(Connect()).ok());
}

TEST_F(SecurityTest, AnotherCertificateIsUsedWithoutARestart) {
  Start();
  const auto open_before = Connect();
  ASSERT_TRUE(Generate(open_before).ok());
  const TestAuthority next;
  WriteKeyPair(next.Issue("server", kLocal));
  ASSERT_TRUE(Eventually([&] { return Generate(Connect(next.certificate())).ok(); }))
      << "the new certificate was not taken";
  EXPECT_EQ(Generate(Connect()).error_code(), StatusCode::UNAVAILABLE);
  EXPECT_TRUE(Generate(open_before).ok()) << "connections that were there live on";
}

/// Behind a sidecar that encrypts: the same gate before every service, without TLS.
TEST_F(SecurityTest, TokensWithoutTlsOnLoopback) {
  const Token token("studio");
  config_.security.clients = directory_.Write(
      "clients.json", R"({"studio": {"token_sha256": [")" + token.digest + R"("]}})");
  config_.security.plaintext_tokens = true;
  ServerFixture::Start();
  EXPECT_TRUE(Generate(channel_, Bearer(token.value)).ok());
  EXPECT_EQ(Generate(channel_).error_code(), StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(Generate(channel_, Bearer("denoised_other")).error_code(), StatusCode::UNAUTHENTICATED);
  const std::string reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
  EXPECT_EQ(CallByName(channel_, reflection), StatusCode::UNAUTHENTICATED);
  EXPECT_NE(CallByName(channel_, reflection, Bearer(token.value)), StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(CallByName(channel_, "/inference.GRPCInferenceService/ServerReady"),
            StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(CallByName(channel_, "/grpc.health.v1.Health/Check"), StatusCode::OK);
}

TEST_F(SecurityTest, BadFilesAreNamedAtStart) {
  const KeyPair pair = authority_.Issue("server", kLocal);
  const std::string cert = directory_.Write("cert", pair.certificate),
                    key = directory_.Write("key", pair.key),
                    other_key = directory_.Write("other", authority_.Issue("b", "").key),
                    text = directory_.Write("text", "no PEM at all\n");
  SecurityConfig& security = config_.security;
  for (const auto& [certificate, private_key, ca, clients, expected] :
       std::vector<std::array<std::string, 5>>{
           {"/absent", key, "", "", "--tls-cert: \"/absent\""},
           {text, key, "", "", "BEGIN CERTIFICATE"},
           {cert, "/absent", "", "", "--tls-key: \"/absent\""},
           {cert, text, "", "", "--tls-key"},
           {cert, other_key, "", "", "is not the key"},
           {cert, key, "/absent", "", "--tls-client-ca: \"/absent\""},
           {cert, key, text, "", "--tls-client-ca"},
           {cert, key, "", "/absent", "/absent"},
           {cert, key, "", text, "text"},
       }) {
    security.tls_cert = certificate;
    security.tls_key = private_key;
    security.tls_client_ca = ca;
    security.clients = clients;
    EXPECT_THAT(StartError(), HasSubstr(expected));
  }
}

TEST_F(SecurityTest, MutualTlsAsksForACertificateAndNamesItsOwner) {
  config_.metrics_listen = "127.0.0.1:0";
  config_.security.tls_client_ca = directory_.Write("ca", authority_.certificate());
  Start();
  EXPECT_EQ(Generate(Connect()).error_code(), StatusCode::UNAVAILABLE);
  const TestAuthority stranger;
  EXPECT_EQ(Generate(Connect(authority_.certificate(), stranger.Issue("eve", ""))).error_code(),
            StatusCode::UNAVAILABLE);
  EXPECT_TRUE(Generate(Connect(authority_.certificate(), authority_.Issue("alice", ""))).ok());
  EXPECT_TRUE(
      Generate(Connect(authority_.certificate(), authority_.Issue("x", "DNS:studio.example.org")))
          .ok());
  ASSERT_TRUE(Eventually([&] {
    const std::string text = Scrape();
    return text.find("denoised_client_calls_total{client=\"alice\",grpc_code=\"OK\"} 1") !=
               std::string::npos &&
           text.find("denoised_client_calls_total{client=\"studio.example.org\"") !=
               std::string::npos;
  })) << Scrape();
}

TEST_F(SecurityTest, ATokenIsAskedForEachCallButHealth) {
  config_.metrics_listen = "127.0.0.1:0";
  const Token studio("studio"), unknown("studio");
  config_.security.clients = directory_.Write(
      "clients.json", R"({"studio": {"token_sha256": [")" + studio.digest + "\"]}}");
  Start();
  const auto channel = Connect();
  for (const Metadata& metadata :
       {Metadata{}, Bearer(unknown.value), Bearer(""), Bearer(studio.digest),
        Metadata{{"authorization", studio.value}}, Metadata{{"authorization", "Basic c3R1ZGlv"}},
        Metadata{{"token", studio.value}}}) {
    const grpc::Status status = Generate(channel, metadata);
    EXPECT_EQ(status.error_code(), StatusCode::UNAUTHENTICATED);
    EXPECT_THAT(status.error_message(), HasSubstr("token"));
    EXPECT_THAT(status.error_message(), Not(HasSubstr(studio.value)));
  }
  EXPECT_TRUE(Generate(channel, Bearer(studio.value)).ok());
  EXPECT_EQ(engine_->evaluations(), 10) << "only the last one reached the engine";

  EXPECT_EQ(CallByName(channel, "/grpc.health.v1.Health/Check"), StatusCode::OK);
  const std::string reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
  for (const std::string& path :
       {reflection, std::string("/denoised.v1.ImageGeneration/ListModels"),
        std::string("/inference.GRPCInferenceService/ModelInfer"),
        std::string("/denoised.v1.ImageGeneration/NoSuchMethod"), std::string("/x/y"),
        std::string("/grpc.health.v1.Health")}) {
    EXPECT_EQ(CallByName(channel, path), StatusCode::UNAUTHENTICATED) << path;
  }
  EXPECT_EQ(CallByName(channel, "/x/y", Bearer(studio.value)), StatusCode::UNIMPLEMENTED);
  ASSERT_TRUE(Eventually([&] {
    return Scrape().find("denoised_client_calls_total{client=\"studio\",grpc_code=\"OK\"} 1") !=
           std::string::npos;
  }));
  const std::string text = Scrape();
  EXPECT_THAT(text, HasSubstr("grpc_server_handled_total{grpc_code=\"UNAUTHENTICATED\","
                              "grpc_method=\"Generate\",grpc_service=\"denoised.v1.ImageGeneration"
                              "\",grpc_type=\"unary\"} 7"));
  EXPECT_THAT(text, HasSubstr("grpc_method=\"ListModels\""));
  EXPECT_THAT(text, Not(HasSubstr("NoSuchMethod"))) << "clients must not make up labels";
}

/// A proxy sends the calls of many over one connection.
TEST_F(SecurityTest, CallsOfOneConnectionAreToldApart) {
  const Token a("a"), b("b");
  config_.security.clients = directory_.Write("clients.json", R"({"a": {"token_sha256": [")" +
                                                                  a.digest + R"("], "max_count": 2},
                          "b": {"token_sha256": [")" + b.digest + "\"]}}");
  Start();
  const auto channel = Connect();
  v1::GenerateRequest request;
  request.mutable_params()->set_count(3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(Generate(channel, Bearer(b.value), request).ok());
    EXPECT_EQ(Generate(channel, Bearer(a.value), request).error_code(),
              StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(Generate(channel, {}, request).error_code(), StatusCode::UNAUTHENTICATED);
  }
}

TEST_F(SecurityTest, AWithdrawnTokenEndsAtOnce) {
  const Token first("first"), second("second");
  const auto write = [&](const std::string& digest, const char* padding) {
    return directory_.Write("clients.json",
                            R"({"studio": {"token_sha256": [")" + digest + "\"]}}" + padding);
  };
  config_.security.clients = write(first.digest, "");
  Start();
  const auto channel = Connect();
  ASSERT_TRUE(Generate(channel, Bearer(first.value)).ok());
  write(second.digest, "\n");
  EXPECT_TRUE(Eventually([&] { return Generate(channel, Bearer(second.value)).ok(); }));
  EXPECT_EQ(Generate(channel, Bearer(first.value)).error_code(), StatusCode::UNAUTHENTICATED);
}

TEST_F(SecurityTest, LimitsOfAClientAreItsOwn) {
  const Token small("small"), large("large");
  config_.security.clients = directory_.Write(
      "clients.json", R"({"small": {"token_sha256": [")" + small.digest +
                          R"("], "max_streams": 2, "max_count": 3, "max_steps": 20},
                          "large": {"token_sha256": [")" +
                          large.digest + "\"]}}");
  Start();
  const auto channel = Connect();
  const auto stub = v1::ImageGeneration::NewStub(channel);
  {
    grpc::ClientContext context;
    Prepare(&context, Bearer(small.value));
    v1::GetModelResponse response;
    ASSERT_TRUE(stub->GetModel(&context, {}, &response).ok());
    EXPECT_EQ(response.model().limits().max_count(), 3);
    EXPECT_EQ(response.model().limits().max_steps(), 20);
  }
  v1::GenerateRequest many;
  many.mutable_params()->set_count(4);
  many.mutable_params()->set_steps(21);
  for (int i = 0; i < 2; ++i) many.mutable_params()->add_conditions()->set_class_label(i);
  const grpc::Status refused = Generate(channel, Bearer(small.value), many);
  EXPECT_EQ(refused.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(), HasSubstr("params.count: is 4; use 1 to 3"));
  EXPECT_THAT(refused.error_message(), HasSubstr("params.steps: is 21; use 1 to 20"));
  EXPECT_THAT(refused.error_message(), HasSubstr("has 2 labels for 4 images"));
  many.mutable_params()->clear_conditions();
  EXPECT_TRUE(Generate(channel, Bearer(large.value), many).ok());
  {
    grpc::ClientContext context;
    Prepare(&context, Bearer(small.value));
    inference::ModelInferRequest batch;
    auto& seeds = *batch.add_inputs();
    seeds.set_name("seed");
    seeds.set_datatype("UINT64");
    seeds.add_shape(4);
    batch.add_raw_input_contents(std::string(4 * sizeof(uint64_t), '\0'));
    inference::ModelInferResponse response;
    const grpc::Status status =
        inference::GRPCInferenceService::NewStub(channel)->ModelInfer(&context, batch, &response);
    EXPECT_THAT(status.error_message(), HasSubstr("batch size: is 4; use 1 to 3"));
  }

  engine_->Pause(true);
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::StreamGenerateResponse>>> readers;
  for (int i = 0; i < 2; ++i) {
    // A call counts until the server has seen its end, which may be after the client has.
    ASSERT_TRUE(Eventually([&] {
      auto context = std::make_unique<grpc::ClientContext>();
      Prepare(context.get(), Bearer(small.value));
      auto reader = stub->StreamGenerate(context.get(), {});
      v1::StreamGenerateResponse event;
      if (!reader->Read(&event)) {
        reader->Finish();
        return false;
      }
      contexts.push_back(std::move(context));
      readers.push_back(std::move(reader));
      return true;
    }));
  }
  const grpc::Status third = Generate(channel, Bearer(small.value));
  EXPECT_EQ(third.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(third.error_message(),
              HasSubstr("client small has 2 calls under way, and may have 2"));
  EXPECT_EQ(Find<google::rpc::ErrorInfo>(third).reason(), "CLIENT_LIMIT");
  EXPECT_TRUE(Find<google::rpc::RetryInfo>(third).has_retry_delay());
  engine_->Pause(false);
  EXPECT_TRUE(Generate(channel, Bearer(large.value)).ok());
  for (auto& reader : readers) {
    v1::StreamGenerateResponse event;
    while (reader->Read(&event)) {
    }
    EXPECT_TRUE(reader->Finish().ok());
  }
  EXPECT_TRUE(Eventually([&] { return Generate(channel, Bearer(small.value)).ok(); }));
}

TEST_F(SecurityTest, ModelsAreChangedByAdminsAlone) {
  const Token ops("ops"), studio("studio");
  config_.security.clients = directory_.Write(
      "clients.json", R"({"ops": {"token_sha256": [")" + ops.digest + R"("], "admin": true},
                          "studio": {"token_sha256": [")" +
                          studio.digest + "\"]}}");
  Start();
  const auto stub = v1::ModelAdmin::NewStub(Connect());
  const auto alias = [&](const std::string& token) {
    grpc::ClientContext context;
    Prepare(&context, Bearer(token));
    v1::SetAliasRequest request;
    request.set_alias("numbers");
    request.set_target("digits");
    v1::SetAliasResponse response;
    return stub->SetAlias(&context, request, &response);
  };
  const grpc::Status refused = alias(studio.value);
  EXPECT_EQ(refused.error_code(), StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(refused.error_message(), HasSubstr("studio"));
  EXPECT_EQ(alias("nobody").error_code(), StatusCode::UNAUTHENTICATED);
  const grpc::Status done = alias(ops.value);
  EXPECT_TRUE(done.ok()) << done.error_message();
}

TEST_F(SecurityTest, ChangesOfModelsAreLoggedWithCallerAndTarget) {
  const Token ops("ops"), studio("studio");
  config_.security.clients = directory_.Write(
      "clients.json", R"({"ops": {"token_sha256": [")" + ops.digest + R"("], "admin": true},
                          "studio": {"token_sha256": [")" +
                          studio.digest + "\"]}}");
  Start();
  const auto stub = v1::ModelAdmin::NewStub(Connect());
  // The line about a change, from "models" on.
  const auto logged = [&](const std::string& token, const auto& change) {
    grpc::ClientContext context;
    Prepare(&context, Bearer(token));
    log::Configure(log::Format::kText, log::Level::kInfo);
    testing::internal::CaptureStderr();
    change(&context);
    const std::string text = testing::internal::GetCapturedStderr();
    log::Configure(log::Format::kText, log::Level::kError);
    std::smatch line;
    return std::regex_search(text, line, std::regex("models (not )?changed .*")) ? line.str()
                                                                                 : "none: " + text;
  };
  const auto load = [&](grpc::ClientContext* context) {
    v1::LoadModelRequest request;
    request.set_name("faces");
    request.set_version("7");
    request.set_directory(testing::TempDir());
    v1::LoadModelResponse response;
    stub->LoadModel(context, request, &response).ok();
  };
  const auto alias = [&](grpc::ClientContext* context) {
    v1::SetAliasRequest request;
    request.set_alias("numbers");
    request.set_target("digits");
    v1::SetAliasResponse response;
    stub->SetAlias(context, request, &response).ok();
  };
  const auto unload = [&](grpc::ClientContext* context) {
    v1::UnloadModelRequest request;
    request.set_name("faces@7");
    v1::UnloadModelResponse response;
    stub->UnloadModel(context, request, &response).ok();
  };
  EXPECT_THAT(logged(studio.value, load),
              AllOf(StartsWith("models not changed change=load client=studio peer="),
                    HasSubstr(" code=PERMISSION_DENIED model=faces@7 directory=")));
  EXPECT_THAT(logged(ops.value, load),
              AllOf(StartsWith("models changed change=load client=ops peer="),
                    HasSubstr(" code=OK model=faces@7 directory=" + testing::TempDir())));
  EXPECT_THAT(logged(ops.value, alias),
              AllOf(StartsWith("models changed change=alias client=ops peer="),
                    HasSubstr(" code=OK model=digits alias=numbers")));
  EXPECT_THAT(logged(ops.value, unload),
              AllOf(StartsWith("models changed change=unload client=ops peer="),
                    HasSubstr(" code=OK model=faces@7")));
  EXPECT_THAT(logged(ops.value, unload),
              AllOf(StartsWith("models not changed change=unload client=ops peer="),
                    HasSubstr(" code=NOT_FOUND model=faces@7 error=")));
}

TEST_F(SecurityTest, JobsAreSeenByTheirClientAlone) {
  const Token a("a"), b("b"), ops("ops");
  config_.security.clients = directory_.Write("clients.json", R"({"a": {"token_sha256": [")" +
                                                                  a.digest + R"("], "weight": 3},
                          "b": {"token_sha256": [")" + b.digest + R"("]},
                          "ops": {"admin": true, "token_sha256": [")" +
                                                                  ops.digest + "\"]}}");
  Start();
  const auto channel = Connect();
  v1::GenerateRequest request;
  request.mutable_params()->set_request_id("mine");
  ASSERT_TRUE(Generate(channel, Bearer(a.value), request).ok());
  EXPECT_EQ(engine_->last_spec().client, "a");
  EXPECT_EQ(engine_->last_spec().client_weight, 3);
  const auto find = [&](const std::string& token) {
    grpc::ClientContext context;
    Prepare(&context, Bearer(token));
    v1::GetJobRequest get;
    get.set_request_id("mine");
    v1::GetJobResponse response;
    return v1::ImageGeneration::NewStub(channel)->GetJob(&context, get, &response).error_code();
  };
  EXPECT_EQ(find(a.value), StatusCode::OK);
  EXPECT_EQ(find(b.value), StatusCode::NOT_FOUND);

  v1::ListJobsResponse listed;
  const auto list = [&](const std::string& token, bool all_clients) {
    grpc::ClientContext context;
    Prepare(&context, Bearer(token));
    v1::ListJobsRequest request;
    request.set_all_clients(all_clients);
    return v1::ImageGeneration::NewStub(channel)->ListJobs(&context, request, &listed);
  };
  ASSERT_TRUE(list(a.value, false).ok());
  EXPECT_EQ(listed.jobs_size(), 1);
  ASSERT_TRUE(list(b.value, false).ok());
  EXPECT_EQ(listed.jobs_size(), 0);
  const grpc::Status refused = list(b.value, true);
  EXPECT_EQ(refused.error_code(), StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(refused.error_message(), HasSubstr("\"b\""));
  ASSERT_TRUE(list(ops.value, false).ok());
  EXPECT_EQ(listed.jobs_size(), 0);
  ASSERT_TRUE(list(ops.value, true).ok());
  ASSERT_EQ(listed.jobs_size(), 1);
  EXPECT_EQ(listed.jobs(0).request_id(), "mine");
  EXPECT_EQ(listed.jobs(0).client(), "a");
}

/// A certificate says who calls, and only a file of clients says who is an admin.
TEST_F(SecurityTest, ACertificateAloneMakesNoAdmin) {
  config_.security.tls_client_ca = directory_.Write("ca", authority_.certificate());
  Start();
  const auto alice = Connect(authority_.certificate(), authority_.Issue("alice", ""));
  const auto bob = Connect(authority_.certificate(), authority_.Issue("bob", ""));
  v1::GenerateRequest request;
  request.mutable_params()->set_request_id("mine");
  ASSERT_TRUE(Generate(alice, {}, request).ok());
  EXPECT_EQ(CallByName(alice, "/denoised.v1.ModelAdmin/UnloadModel"),
            StatusCode::PERMISSION_DENIED);
  const auto list = [](const std::shared_ptr<grpc::Channel>& channel, bool all_clients) {
    grpc::ClientContext context;
    Prepare(&context, {});
    v1::ListJobsRequest request;
    request.set_all_clients(all_clients);
    v1::ListJobsResponse response;
    const grpc::Status status =
        v1::ImageGeneration::NewStub(channel)->ListJobs(&context, request, &response);
    return status.ok() ? response.jobs_size() : -static_cast<int>(status.error_code());
  };
  EXPECT_EQ(list(alice, true), -StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(list(alice, false), 1);
  EXPECT_EQ(list(bob, false), 0) << "names keep jobs apart";
  const auto nobody = Connect(authority_.certificate(), authority_.Issue("", ""));
  ASSERT_TRUE(Generate(nobody).ok());
  EXPECT_EQ(list(nobody, false), -StatusCode::PERMISSION_DENIED) << "who has no name is anonymous";
}

/// Callers without a name share one: the id of a job is what opens it, and nothing tells ids.
TEST_F(SecurityTest, AnAnonymousCallerFindsAJobByItsIdAlone) {
  config_.admin = false;  // as on every address that is not loopback
  Start();
  const auto stub = v1::ImageGeneration::NewStub(Connect());
  std::set<std::string> ids;
  for (int i = 0; i < 3; ++i) {
    v1::GenerateRequest request;
    request.mutable_params()->set_disconnect_policy(v1::DISCONNECT_POLICY_CONTINUE);
    grpc::ClientContext context;
    Prepare(&context, {});
    v1::GenerateResponse response;
    ASSERT_TRUE(stub->Generate(&context, request, &response).ok());
    EXPECT_THAT(response.params().request_id(), ::testing::MatchesRegex("[0-9a-f]{32}"));
    ids.insert(response.params().request_id());
  }
  EXPECT_EQ(ids.size(), 3u);
  for (const bool all_clients : {false, true}) {
    grpc::ClientContext context;
    Prepare(&context, {});
    v1::ListJobsRequest list;
    list.set_all_clients(all_clients);
    v1::ListJobsResponse listed;
    const grpc::Status refused = stub->ListJobs(&context, list, &listed);
    EXPECT_EQ(refused.error_code(), StatusCode::PERMISSION_DENIED);
    EXPECT_THAT(refused.error_message(), HasSubstr("request_id"));
    EXPECT_EQ(listed.jobs_size(), 0);
  }
  v1::GetJobRequest get;
  get.set_request_id(*ids.begin());
  v1::GetJobResponse got;
  grpc::ClientContext get_context;
  Prepare(&get_context, {});
  EXPECT_TRUE(stub->GetJob(&get_context, get, &got).ok()) << "whoever knows the id";
}

/// A sidecar on a loopback address brings callers from all the network.
TEST_F(SecurityTest, CallersThatAProxyPassesOnAreNoAdmins) {
  Start();
  const auto code = [&](const Metadata& metadata) {
    return CallByName(Connect(), "/denoised.v1.ImageGeneration/ListJobs", metadata);
  };
  EXPECT_EQ(code({}), StatusCode::OK);
  for (const char* header : {"x-forwarded-for", "forwarded", "via"}) {
    EXPECT_EQ(code({{header, "192.0.2.7"}}), StatusCode::PERMISSION_DENIED) << header;
    for (const char* method : {"denoised.v1.ModelAdmin/UnloadModel",
                               "inference.GRPCInferenceService/RepositoryModelUnload"}) {
      EXPECT_EQ(CallByName(Connect(), std::string("/") + method, {{header, "192.0.2.7"}}),
                StatusCode::PERMISSION_DENIED)
          << method;
    }
  }
}

TEST_F(SecurityTest, ReflectionCanBeOff) {
  const std::string path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
  config_.reflection = false;
  Start();
  EXPECT_EQ(CallByName(Connect(), path), StatusCode::UNIMPLEMENTED);
}

TEST_F(SecurityTest, TheTraceIsContinuedAndReturned) {
  Start();
  const auto stub = v1::ImageGeneration::NewStub(Connect());
  const std::string trace = "4bf92f3577b34da6a3ce929d0e0e4736";
  const auto returned = [&](const Metadata& metadata, int steps) {
    grpc::ClientContext context;
    Prepare(&context, metadata);
    v1::GenerateRequest request;
    request.mutable_params()->set_steps(steps);
    v1::GenerateResponse response;
    EXPECT_EQ(stub->Generate(&context, request, &response).ok(), steps > 0);
    const auto& headers = context.GetServerInitialMetadata();
    const auto it = headers.find("traceparent");
    return it == headers.end() ? "none" : std::string(it->second.data(), it->second.size());
  };
  const Metadata mine = {{"traceparent", "00-" + trace + "-00f067aa0ba902b7-01"}};
  for (const int steps : {4, 0}) {  // also when the request is refused
    EXPECT_THAT(returned(mine, steps), ::testing::MatchesRegex("00-" + trace + "-[0-9a-f]{16}-01"));
    EXPECT_THAT(returned({}, steps), ::testing::MatchesRegex("00-[0-9a-f]{32}-[0-9a-f]{16}-00"));
    EXPECT_THAT(returned({{"traceparent", "nonsense"}}, steps),
                ::testing::MatchesRegex("00-[0-9a-f]{32}-[0-9a-f]{16}-00"));
  }
}

}  // namespace
}  // namespace denoised
