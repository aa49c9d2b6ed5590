// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "server/security/clients.h"
#include "server/telemetry/trace_context.h"

namespace {

using namespace denoised;  // NOLINT: a program of one file

constexpr absl::string_view kScheme = "Bearer ";
constexpr absl::string_view kToken = "open-sesame";

void Require(bool holds) {
  if (!holds) std::abort();
}

/// One client, who has kToken and the certificate "studio.example.org".
std::unique_ptr<Clients> MakeClients() {
  std::string file =
      (std::filesystem::temp_directory_path() / "denoised-metadata-fuzz-XXXXXX").string();
  Require(::mkstemp(file.data()) >= 0);
  std::ofstream(file) << R"({"studio": {"certificates": ["studio.example.org"], "token_sha256":
      ["d7ecdf25eaf3deba0f2628771dbdd22d4138ab6cf38f91ed02a2ca0dec7c8ab7"]}})";
  auto clients = Clients::Open(file, std::chrono::hours(24));
  std::filesystem::remove(file);
  Require(clients.ok());
  return *std::move(clients);
}

bool IsHex(std::string_view text, size_t size) {
  return text.size() == size && text.find_first_not_of("0123456789abcdef") == text.npos;
}

void CheckTrace(std::string_view header) {
  const TraceContext trace = TraceContext::Continue(header);
  Require(IsHex(trace.trace_id, 32) && IsHex(trace.span_id, 16));
  Require(trace.trace_id != std::string(32, '0'));
  Require(trace.flags == "00" || trace.flags == "01");
  Require(trace.parent_id.empty() ||
          (IsHex(trace.parent_id, 16) && header.find(trace.parent_id) != header.npos &&
           header.find(trace.trace_id) != header.npos));
  // What we send on is what we would take.
  const TraceContext next = TraceContext::Continue(trace.traceparent());
  Require(next.trace_id == trace.trace_id && next.parent_id == trace.span_id);
}

}  // namespace

/// Any bytes in the headers that we read begin a trace or continue it, and are somebody's
/// credentials or nobody's.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::unique_ptr<Clients> clients = MakeClients();
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  CheckTrace(text);

  const auto by_token = clients->Identify({.authorization = text});
  // The scheme has any case: RFC 9110, section 11.1.
  const absl::string_view header(text.data(), text.size());
  const bool right = header.size() == kScheme.size() + kToken.size() &&
                     absl::StartsWithIgnoreCase(header, kScheme) && absl::EndsWith(header, kToken);
  Require(by_token.ok() == right);
  Require(right || by_token.status().code() == absl::StatusCode::kUnauthenticated);
  const auto by_certificate = clients->Identify({.certificate = {text, text.substr(0, size / 2)}});
  Require(by_certificate.ok() ==
          (text == "studio.example.org" || text.substr(0, size / 2) == "studio.example.org"));
  return 0;
}
