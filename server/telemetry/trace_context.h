// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace denoised {

/// Where a call stands in a distributed trace, as W3C Trace Context has it
/// (https://www.w3.org/TR/trace-context/): in the caller's trace when its `traceparent` is valid,
/// else at the beginning of a new one. The server records no spans of its own; the ids join its
/// logs and replies with what others recorded.
struct TraceContext {
  std::string trace_id;   // 32 hexadecimal digits, as all of these in lower case
  std::string parent_id;  // 16: the caller's span; empty when the trace begins here
  std::string span_id;    // 16: this call
  std::string flags;      // 2: "01" when the caller records its spans

  /// `traceparent` is what the caller sent, or empty.
  static TraceContext Continue(std::string_view traceparent);

  /// The header for the caller and for further calls, with this call as the parent.
  std::string traceparent() const { return "00-" + trace_id + "-" + span_id + "-" + flags; }
};

/// So many random hexadecimal digits: unique, but no secret.
std::string RandomHex(int digits);

}  // namespace denoised
