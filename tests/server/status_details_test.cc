// SPDX-License-Identifier: Apache-2.0
#include "server/status/status_details.h"

#include <gmock/gmock.h>
#include <grpcpp/support/error_details.h>
#include <gtest/gtest.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/status/quote.h"

namespace denoised {
namespace {

using ::testing::HasSubstr;

template <typename Detail>
std::optional<Detail> Find(const grpc::Status& status) {
  google::rpc::Status rpc;
  EXPECT_TRUE(grpc::ExtractErrorDetails(status, &rpc).ok());
  EXPECT_EQ(rpc.code(), static_cast<int>(status.error_code()));
  for (const auto& any : rpc.details()) {
    Detail detail;
    if (any.UnpackTo(&detail)) return detail;
  }
  return std::nullopt;
}

TEST(StatusDetailsTest, CarriesReasonAndRetry) {
  const grpc::Status status = ToGrpcStatus(ResourceExhausted("full"), reason::kQueueFull, "id-1",
                                           std::chrono::milliseconds(2500));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(status.error_message(), "full");
  const auto info = Find<google::rpc::ErrorInfo>(status);
  ASSERT_TRUE(info);
  EXPECT_EQ(info->reason(), "QUEUE_FULL");
  EXPECT_EQ(info->domain(), "denoised");
  EXPECT_EQ(info->metadata().at("request_id"), "id-1");
  const auto retry = Find<google::rpc::RetryInfo>(status);
  ASSERT_TRUE(retry);
  EXPECT_EQ(retry->retry_delay().seconds(), 2);
  EXPECT_EQ(retry->retry_delay().nanos(), 500'000'000);
}

TEST(StatusDetailsTest, TellsEveryField) {
  const grpc::Status status = InvalidFields(
      {{"params.steps", "is 0; use at least 1"}, {"params.eta", "is 2; use 0 to 1"}}, "id");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(),
            "params.steps: is 0; use at least 1; params.eta: is 2; use 0 to 1");
  const auto bad = Find<google::rpc::BadRequest>(status);
  ASSERT_TRUE(bad);
  ASSERT_EQ(bad->field_violations_size(), 2);
  EXPECT_EQ(bad->field_violations(1).field(), "params.eta");
  EXPECT_EQ(bad->field_violations(1).description(), "is 2; use 0 to 1");
}

TEST(StatusDetailsTest, StaysWithinTheTrailersLimit) {
  std::vector<FieldViolation> violations;
  for (int i = 0; i < 10000; ++i) {
    violations.push_back(
        {fmt::format("params.conditions[{}].class_label", i), "is −1; use 0 to 9"});
  }
  const grpc::Status status = InvalidFields(violations, "id");
  EXPECT_LT(status.error_details().size() + status.error_message().size(), 7000u);
  const auto bad = Find<google::rpc::BadRequest>(status);
  ASSERT_TRUE(bad);
  EXPECT_GT(bad->field_violations_size(), 20);
  const auto& last = bad->field_violations(bad->field_violations_size() - 1);
  EXPECT_EQ(last.description(), fmt::format("this and {} more fields are invalid",
                                            10000 - bad->field_violations_size()));
}

TEST(StatusDetailsTest, CutsBetweenCharacters) {
  std::string text(1023, 'x');
  for (int i = 0; i < 10; ++i) text += "×";
  const grpc::Status status = ToGrpcStatus(Internal("{}", text), reason::kServerError, "");
  google::rpc::Status rpc;
  ASSERT_TRUE(grpc::ExtractErrorDetails(status, &rpc).ok());
  EXPECT_EQ(rpc.message(), std::string(1023, 'x') + "...");
}

TEST(StatusDetailsTest, NamesOfFieldsAreCutBetweenCharacters) {
  for (const auto& [field, told] : {std::pair<std::string, std::string>{
                                        std::string(127, 'x') + "×", std::string(127, 'x') + "..."},
                                    {"a\xff", "\"a?\""}}) {
    const grpc::Status status = InvalidFields({{field, "is no field"}}, "");
    EXPECT_EQ(ReasonOf(status), "INVALID_FIELDS");
    EXPECT_EQ(status.error_message(), told + ": is no field");
    EXPECT_EQ(Find<google::rpc::BadRequest>(status)->field_violations(0).field(), told);
  }
}

TEST(StatusDetailsTest, WhatIsNoUtf8KeepsItsDetails) {
  const grpc::Status status = InvalidFields({{"body", "last read: '\"pr\xfe'"}}, "");
  EXPECT_EQ(ReasonOf(status), reason::kInvalidFields);
  EXPECT_EQ(status.error_message(), "body: last read: '\"pr?'");
}

TEST(StatusDetailsTest, NamesTheEndOfAJob) {
  const auto reason = [](const absl::Status& status) {
    return Find<google::rpc::ErrorInfo>(JobStatus(status, ""))->reason();
  };
  EXPECT_EQ(reason(Cancelled("")), "CANCELLED");
  EXPECT_EQ(reason(DeadlineExceeded("")), "DEADLINE_EXCEEDED");
  EXPECT_EQ(reason(Unavailable("")), "DRAINING");
  EXPECT_EQ(reason(ResourceExhausted("")), "DEVICE_MEMORY");
  EXPECT_EQ(reason(DataLoss("")), "NONFINITE_IMAGE");
  EXPECT_EQ(reason(Internal("")), "SERVER_ERROR");
  EXPECT_TRUE(JobStatus(absl::OkStatus(), "").ok());
}

TEST(QuoteTest, IsSafeToRepeat) {
  EXPECT_EQ(Quote("a\n\x80z"), "\"a??z\"");
  EXPECT_EQ(Quote(std::string(65, 'a')), "\"" + std::string(64, 'a') + "...\"");
}

}  // namespace
}  // namespace denoised
