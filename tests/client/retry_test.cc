// SPDX-License-Identifier: Apache-2.0
#include "denoised/retry.h"

#include <gtest/gtest.h>

#include <climits>

#include "denoised/backoff.h"
#include "denoised/error.h"
#include "denoised/rpc_status.h"
#include "tests/client/fake_service.h"

namespace denoised::client {
namespace {

using std::chrono::milliseconds;

const RetryPolicy kPolicy = {.max_attempts = 4,
                             .initial_backoff = milliseconds(100),
                             .max_backoff = milliseconds(300),
                             .multiplier = 2};

TEST(RetryPolicyTest, BackoffDoublesUpToItsLimit) {
  const absl::Status status = absl::UnavailableError("down");
  // random = 0 is the least wait, half the backoff; random near 1 the whole.
  EXPECT_EQ(kPolicy.NextDelay(status, 1, 0, {}), milliseconds(50));
  EXPECT_EQ(kPolicy.NextDelay(status, 2, 0, {}), milliseconds(100));
  EXPECT_EQ(kPolicy.NextDelay(status, 3, 0, {}), milliseconds(150));
  EXPECT_EQ(kPolicy.NextDelay(status, 1, 0.5, {}), milliseconds(75));
}

TEST(RetryPolicyTest, StopsAfterTheLastAttempt) {
  EXPECT_FALSE(kPolicy.NextDelay(absl::UnavailableError("down"), 4, 0, {}));
}

TEST(RetryPolicyTest, RetriesOnlyWhatDidNothing) {
  for (const absl::Status& status :
       {absl::OkStatus(), absl::InvalidArgumentError(""), absl::DeadlineExceededError(""),
        absl::CancelledError(""), absl::InternalError(""), absl::FailedPreconditionError(""),
        absl::ResourceExhaustedError("the reply is too large")}) {
    EXPECT_FALSE(kPolicy.NextDelay(status, 1, 0, {})) << status;
  }
}

TEST(RetryPolicyTest, WaitsAtLeastAsLongAsTheServerAsked) {
  const absl::Status status = FromGrpc(QueueFull(milliseconds(2500)));
  EXPECT_EQ(kPolicy.NextDelay(status, 1, 0, {}), milliseconds(2550));
}

TEST(RetryPolicyTest, BeginsNoWaitThatOutlastsTheDeadline) {
  const absl::Status status = absl::UnavailableError("down");
  EXPECT_FALSE(kPolicy.NextDelay(status, 1, 0, milliseconds(50)));
  EXPECT_TRUE(kPolicy.NextDelay(status, 1, 0, milliseconds(51)));
}

TEST(BackoffTest, TimesThatGrpcCannotHoldAreItsLongest) {
  EXPECT_EQ(GrpcMilliseconds(milliseconds(20'000)), 20'000);
  EXPECT_EQ(GrpcMilliseconds(std::chrono::hours(24 * 30)), INT_MAX);
  EXPECT_EQ(GrpcMilliseconds(milliseconds(4'294'967'301)), INT_MAX);
  EXPECT_EQ(GrpcMilliseconds(milliseconds::max()), INT_MAX);
}

TEST(BackoffTest, DeadlinesStayWithinTheClock) {
  using Time = std::chrono::system_clock::time_point;
  using std::chrono::nanoseconds;
  const Time now(std::chrono::hours(24 * 365 * 56));
  EXPECT_EQ(DeadlineAfter(milliseconds(5), now), now + milliseconds(5));
  EXPECT_EQ(DeadlineAfter(nanoseconds::max(), now), Time::max());
  for (const nanoseconds over : {nanoseconds(0), nanoseconds(-1), nanoseconds::min()}) {
    EXPECT_LT(DeadlineAfter(over, now), now);
    EXPECT_GT(DeadlineAfter(over, now), Time()) << "gRPC takes times before 1970 for no deadline";
  }
}

TEST(ErrorDetailsTest, AreDecoded) {
  const absl::Status status = FromGrpc(
      InvalidFields({{"params.steps", "is 0; use 1 to 100"}, {"params.count", "is -1; use 1"}}));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "the request has invalid fields");
  const ErrorDetails details = Details(status);
  ASSERT_EQ(details.field_violations.size(), 2u);
  EXPECT_EQ(details.field_violations[1].field, "params.count");
  EXPECT_EQ(details.field_violations[1].description, "is -1; use 1");
  EXPECT_EQ(details.reason, "INVALID_FIELDS");
  EXPECT_EQ(details.domain, "denoised");
  EXPECT_FALSE(details.retry_after);
}

TEST(ErrorDetailsTest, RetryDelayKeepsItsFraction) {
  EXPECT_EQ(Details(FromGrpc(QueueFull(milliseconds(1250)))).retry_after, milliseconds(1250));
}

TEST(ErrorDetailsTest, GarbageIsNoDetail) {
  const absl::Status status =
      FromGrpc(grpc::Status(grpc::StatusCode::INTERNAL, "broken", "\xff\xff not a Status"));
  EXPECT_EQ(status.message(), "broken");
  EXPECT_TRUE(Details(status).field_violations.empty());
  EXPECT_TRUE(Details(absl::OkStatus()).reason.empty());
}

TEST(RpcStatusTest, ExplainsThatARequestIsTooLarge) {
  const auto explained = [](const std::string& message, size_t bytes) {
    return ExplainTooLarge({grpc::StatusCode::RESOURCE_EXHAUSTED, message}, bytes);
  };
  const grpc::Status server =
      explained("Received message larger than max (104857649 vs. 67108864)", 104857649);
  EXPECT_EQ(server.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(server.error_message(),
            "the request has 104857649 bytes (100.0 MiB), and the server takes at most 67108864 "
            "(64.0 MiB); make the pictures or the noise in it smaller, or raise the server's "
            "--max-request-bytes");
  const grpc::Status client = explained("CLIENT: Sent message larger than max (9 vs. 8)", 9);
  EXPECT_EQ(client.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(client.error_message(),
            "the request has 9 bytes (0.0 MiB), and this client sends at most 8 (0.0 MiB); make "
            "the pictures or the noise in it smaller");
  // A reply's size, and what has no sizes, stay as they are.
  for (const char* message : {"Received message larger than max (10 vs. 8)", "the queue is full",
                              "Received message larger than max (9", ""}) {
    EXPECT_EQ(explained(message, 9).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << message;
    EXPECT_EQ(explained(message, 9).error_message(), message);
  }
}

}  // namespace
}  // namespace denoised::client
