// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace denoised {

/// The place of a call in a distributed trace (W3C Trace Context,
/// https://www.w3.org/TR/trace-context/): in the caller's trace if its `traceparent` is valid, else
/// at the start of a new trace. The server records no spans; the ids connect its logs and replies
/// with the spans of others.
struct TraceContext {
  std::string trace_id;   // 32 hexadecimal digits, like all of these in lower case
  std::string parent_id;  // 16: the caller's span; empty if the trace starts here
  std::string span_id;    // 16: this call
  std::string flags;      // 2: "01" when the caller records its spans

  /// `traceparent` is the caller's header, or empty.
  static TraceContext Continue(std::string_view traceparent);

  /// The header for the caller and for further calls, with this call as the parent.
  std::string traceparent() const { return "00-" + trace_id + "-" + span_id + "-" + flags; }
};

/// Random hexadecimal digits. Unique, but predictable: not for secrets.
std::string RandomHex(int digits);

}  // namespace denoised
