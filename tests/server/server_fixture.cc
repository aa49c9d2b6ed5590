// SPDX-License-Identifier: Apache-2.0
#include "tests/server/server_fixture.h"

#include <grpcpp/generic/generic_stub.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace denoised {

using namespace std::chrono_literals;

ServerFixture::ServerFixture() {
  config_.listen = "127.0.0.1:0";
  config_.http_listen = "";
  config_.metrics_listen = "";
  config_.models = {{"digits", "models/digits"}};
  config_.model_roots = {testing::TempDir()};
  log::Configure(log::Format::kText, log::Level::kError);
}

void ServerFixture::Start(const FakeEngineOptions& options) {
  ASSERT_NO_FATAL_FAILURE(StartLoading(options));
  const auto loaded = server_->Loaded(1min);
  ASSERT_TRUE(loaded && loaded->ok());
}

void ServerFixture::StartLoading(const FakeEngineOptions& options) {
  auto engine = std::make_unique<FakeEngine>(options);
  engine_ = engine.get();
  auto server = Server::Start(config_, std::move(engine));
  ASSERT_TRUE(server.ok()) << server.status().message();
  server_ = *std::move(server);
  channel_ = Connect(grpc::InsecureChannelCredentials());
  stub_ = v1::ImageGeneration::NewStub(channel_);
}

std::shared_ptr<grpc::Channel> ServerFixture::Connect(
    const std::shared_ptr<grpc::ChannelCredentials>& credentials,
    grpc::ChannelArguments arguments) const {
  arguments.SetMaxReceiveMessageSize(-1);
  return grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(server_->port()), credentials,
                                   arguments);
}

grpc::Status ServerFixture::Generate(const v1::GenerateRequest& request,
                                     v1::GenerateResponse* response) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + 1min);
  return stub_->Generate(&context, request, response);
}
grpc::Status ServerFixture::Generate(const v1::GenerateRequest& request) {
  v1::GenerateResponse response;
  return Generate(request, &response);
}

int ServerFixture::ConnectToMetrics() const {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  const timeval patience{.tv_sec = 60};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(server_->metrics_port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return fd;
  close(fd);
  return -1;
}

std::string ServerFixture::Get(const std::string& path) const {
  const int fd = ConnectToMetrics();
  if (fd < 0) return "";
  std::string text;
  const std::string get = "GET " + path + " HTTP/1.0\r\n\r\n";
  if (write(fd, get.data(), get.size()) == static_cast<ssize_t>(get.size())) {
    char buffer[65536];
    for (ssize_t n; (n = read(fd, buffer, sizeof(buffer))) > 0;) text.append(buffer, n);
  }
  close(fd);
  return text;
}

grpc::Status CallByName(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext* context,
                        const std::string& path, const std::string& request,
                        std::string* response) {
  const grpc::Slice slice(request);
  return CallByName(channel, context, path, grpc::ByteBuffer(&slice, 1), response);
}

grpc::Status CallByName(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext* context,
                        const std::string& path, const grpc::ByteBuffer& request,
                        std::string* response) {
  grpc::ByteBuffer receive;
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  auto call = stub.PrepareUnaryCall(context, path, request, &queue);
  call->StartCall();
  grpc::Status status;
  call->Finish(&receive, &status, nullptr);
  void* tag;
  bool ok;
  queue.Next(&tag, &ok);
  std::vector<grpc::Slice> slices;
  if (response && status.ok() && receive.Dump(&slices).ok()) {
    for (const grpc::Slice& part : slices) response->append(part.begin(), part.end());
  }
  return status;
}

std::vector<std::string> Violated(const grpc::Status& status) {
  const auto bad = Find<google::rpc::BadRequest>(status);
  std::vector<std::string> fields;
  for (const auto& violation : bad.field_violations()) fields.push_back(violation.field());
  return fields;
}

}  // namespace denoised
