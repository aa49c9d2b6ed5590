// SPDX-License-Identifier: Apache-2.0
#include "server/http/metrics_port.h"

#include <optional>
#include <utility>

#include "server/http/http_port.h"
#include "server/telemetry/metrics.h"

namespace denoised {
namespace {

/// A request with a body is answered before it is read; a larger one is refused by its length.
constexpr size_t kBodyBytes = 64 << 10;

HttpReply PlainText(int code, std::string text) {
  return {.code = code,
          .headers = {{"Content-Type", "text/plain; charset=utf-8"}},
          .body = std::move(text)};
}

/// Answers when it has the headers, as no page has a use for a body.
class PageHandler final : public HttpHandler {
 public:
  explicit PageHandler(MetricsPort::Pages pages) : pages_(std::move(pages)) {}

  std::optional<HttpReply> Admit(HttpRequest* head) override {
    const auto page = pages_.find(head->path);
    if (page == pages_.end()) return PlainText(404, "there is no such page\n");
    if (head->method != "GET" && head->method != "HEAD") {
      HttpReply reply = PlainText(405, "use GET or HEAD\n");
      reply.headers.emplace_back("Allow", "GET, HEAD");
      return reply;
    }
    PageReply reply = page->second();
    return PlainText(reply.code, std::move(reply.body));
  }
  void Serve(std::shared_ptr<Exchange> exchange) override { exchange->Reply(PlainText(500, "")); }
  HttpReply Malformed(int code, const std::string& problem) override {
    return PlainText(code, problem + "\n");
  }

 private:
  const MetricsPort::Pages pages_;
};

}  // namespace

struct MetricsPort::State {
  explicit State(Pages pages) : handler(std::move(pages)) {}

  PageHandler handler;
  MemoryBudget bodies{kBodyBytes};  // none is read
  Metrics metrics;                  // of this port itself: a scrape does not count itself as a call
  std::unique_ptr<HttpPort> port;
};

absl::StatusOr<std::unique_ptr<MetricsPort>> MetricsPort::Listen(const std::string& address,
                                                                 int max_connections, Pages pages) {
  constexpr std::chrono::seconds kPatience{3};
  constexpr int kReserve = 64;  // scrapes and probes get through a flood of clients
  auto state = std::make_unique<State>(std::move(pages));
  const HttpPortOptions options{.address = address,
                                .security = {},
                                .flag = "--metrics-listen",
                                .max_connections = max_connections,
                                .reserve = kReserve,
                                .handshake = kPatience,
                                .idle = kPatience,
                                .write_timeout = kPatience,
                                .max_body_bytes = kBodyBytes};
  DENOISED_ASSIGN_OR_RETURN(
      state->port, HttpPort::Listen(options, &state->handler, &state->bodies, &state->metrics));
  state->port->Start();
  return std::unique_ptr<MetricsPort>(new MetricsPort(std::move(state)));
}

MetricsPort::MetricsPort(std::unique_ptr<State> state) : state_(std::move(state)) {}
MetricsPort::~MetricsPort() = default;

int MetricsPort::port() const { return state_->port->port(); }

}  // namespace denoised
