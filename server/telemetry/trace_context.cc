// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/trace_context.h"

#include <algorithm>
#include <random>

namespace denoised {
namespace {

bool IsHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsZero(std::string_view text) { return text.find_first_not_of('0') == std::string_view::npos; }

}  // namespace

std::string RandomHex(int digits) {
  thread_local std::mt19937_64 random{(uint64_t{std::random_device{}()} << 32) ^
                                      std::random_device{}()};
  std::string text(digits, '0');
  for (char& digit : text) digit = "0123456789abcdef"[random() >> 60];
  return text;
}

TraceContext TraceContext::Continue(std::string_view traceparent) {
  TraceContext context{.span_id = RandomHex(16)};
  // version-trace-parent-flags; later versions may append fields after another dash.
  constexpr size_t kLength = 2 + 1 + 32 + 1 + 16 + 1 + 2;
  const bool shaped = traceparent.size() >= kLength && traceparent[2] == '-' &&
                      traceparent[35] == '-' && traceparent[52] == '-' &&
                      (traceparent.size() == kLength || traceparent[kLength] == '-');
  if (shaped) {
    const std::string_view version = traceparent.substr(0, 2), trace = traceparent.substr(3, 32),
                           parent = traceparent.substr(36, 16), flags = traceparent.substr(53, 2);
    const bool known =
        IsHex(version) && version != "ff" && (version != "00" || traceparent.size() == kLength);
    if (known && IsHex(trace) && !IsZero(trace) && IsHex(parent) && !IsZero(parent) &&
        IsHex(flags)) {
      context.trace_id = trace;
      context.parent_id = parent;
      // In version 00, only the flag "sampled" has a meaning.
      context.flags = (flags[1] - (flags[1] >= 'a' ? 'a' - 10 : '0')) & 1 ? "01" : "00";
      return context;
    }
  }
  context.trace_id = RandomHex(32);
  context.flags = "00";
  return context;
}

}  // namespace denoised
