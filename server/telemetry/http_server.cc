// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/http_server.h"

#include <CivetServer.h>

#include <utility>
#include <vector>

namespace denoised {

class HttpServer::Page : public CivetHandler {
 public:
  Page(std::string path, std::function<PageReply()> make)
      : path_(std::move(path)), make_(std::move(make)) {}

  bool handleGet(CivetServer*, mg_connection* connection) override {
    return Answer(connection, /*with_body=*/true);
  }
  bool handleHead(CivetServer*, mg_connection* connection) override {
    return Answer(connection, /*with_body=*/false);
  }

 private:
  bool Answer(mg_connection* connection, bool with_body) const {
    // civetweb asks for every path that begins so.
    if (path_ != mg_get_request_info(connection)->local_uri) return false;
    const PageReply reply = make_();
    mg_response_header_start(connection, reply.code);
    mg_response_header_add(connection, "Content-Type", "text/plain; charset=utf-8", -1);
    mg_response_header_add(connection, "Content-Length", std::to_string(reply.body.size()).c_str(),
                           -1);
    mg_response_header_send(connection);
    if (with_body) mg_write(connection, reply.body.data(), reply.body.size());
    return true;
  }

  const std::string path_;
  const std::function<PageReply()> make_;
};

HttpServer::HttpServer() = default;
HttpServer::~HttpServer() = default;

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Listen(const std::string& address,
                                                               const Pages& pages) {
  // An idle connection occupies a thread until it times out. Prometheus, probes and a few browsers
  // need more than two.
  const std::vector<std::string> options = {"listening_ports",    address, "num_threads", "16",
                                            "request_timeout_ms", "3000"};
  std::unique_ptr<HttpServer> server(new HttpServer);
  // civetweb reports a port in use by an exception.
  try {
    server->server_ = std::make_unique<CivetServer>(options);
  } catch (const CivetException& error) {
    return Unavailable(
        "--metrics-listen {}: {}; choose a free port, in IPv4 where civetweb is built without IPv6 "
        "as Debian's is, or \"\" for none",
        address, error.what());
  }
  server->port_ = server->server_->getListeningPorts().front();
  for (const auto& [path, make] : pages) {
    const auto page = server->pages_.emplace(path, std::make_unique<Page>(path, make)).first;
    server->server_->addHandler(path, page->second.get());
  }
  return server;
}

}  // namespace denoised
