// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/trace_context.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace denoised {
namespace {

using ::testing::MatchesRegex;

// Examples of the specification, https://www.w3.org/TR/trace-context/#traceparent-header.
constexpr char kTrace[] = "4bf92f3577b34da6a3ce929d0e0e4736";
constexpr char kParent[] = "00f067aa0ba902b7";

std::string Header(const std::string& version = "00", const std::string& trace = kTrace,
                   const std::string& parent = kParent, const std::string& flags = "01") {
  return version + "-" + trace + "-" + parent + "-" + flags;
}

TEST(TraceContextTest, ContinuesTheCallersTrace) {
  const TraceContext context = TraceContext::Continue(Header());
  EXPECT_EQ(context.trace_id, kTrace);
  EXPECT_EQ(context.parent_id, kParent);
  EXPECT_THAT(context.span_id, MatchesRegex("[0-9a-f]{16}"));
  EXPECT_NE(context.span_id, kParent);
  EXPECT_EQ(context.traceparent(), Header("00", kTrace, context.span_id));
}

TEST(TraceContextTest, KeepsTheSampledFlagAndNoOther) {
  for (const auto& [given, kept] :
       {std::pair{"00", "00"}, {"01", "01"}, {"03", "01"}, {"fe", "00"}, {"ff", "01"}}) {
    EXPECT_EQ(TraceContext::Continue(Header("00", kTrace, kParent, given)).flags, kept) << given;
  }
}

TEST(TraceContextTest, LaterVersionsMayAppendFields) {
  EXPECT_EQ(TraceContext::Continue(Header("01")).trace_id, kTrace);
  EXPECT_EQ(TraceContext::Continue(Header("cc") + "-what-the-future-will-be-like").trace_id,
            kTrace);
}

TEST(TraceContextTest, BeginsATraceWhereNoneIsSaid) {
  const std::string zero32(32, '0'), zero16(16, '0');
  std::string upper = kTrace;
  upper[1] = 'B';
  for (const std::string& header :
       {std::string(), std::string("00"), std::string(10'000, 'a'), Header() + "-more",
        Header() + "x", Header("cc") + "x", Header("ff"), Header("0x"), Header("00", zero32),
        Header("00", kTrace, zero16), Header("00", upper), Header("00", kTrace, kParent, "0g"),
        Header("00", std::string(kTrace).substr(1)), "0" + Header(), " " + Header(),
        Header().replace(2, 1, "_"), std::string(55, '\0'), std::string(55, '-')}) {
    const TraceContext context = TraceContext::Continue(header);
    EXPECT_NE(context.trace_id, kTrace) << header;
    EXPECT_EQ(context.parent_id, "") << header;
    EXPECT_THAT(context.traceparent(), MatchesRegex("00-[0-9a-f]{32}-[0-9a-f]{16}-00"));
  }
  EXPECT_NE(TraceContext::Continue("").trace_id, TraceContext::Continue("").trace_id);
}

}  // namespace
}  // namespace denoised
