// SPDX-License-Identifier: Apache-2.0
#include "server/api/grpc_messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <limits>
#include <utility>
#include <vector>

#include "denoised/v1/image_generation.pb.h"
#include "inference/open_inference.pb.h"
#include "server/status/status_details.h"

namespace denoised {
namespace {

using ::testing::HasSubstr;

constexpr std::chrono::milliseconds kRetry{1500};

grpc::ByteBuffer BytesOf(const std::string& text) {
  const grpc::Slice slice(text);
  return {&slice, 1};
}

std::string Repeated(const std::string& field, int count) {
  std::string fields;
  for (int i = 0; i < count; ++i) fields += field;
  return fields;
}

TEST(GrpcMessagesTest, AMessageArrivesAndIsCounted) {
  v1::GenerateRequest request;
  request.mutable_params()->set_model("digits");
  request.mutable_params()->add_seeds(7);
  for (int i = 0; i < 100; ++i) request.mutable_params()->add_conditions();
  MemoryBudget memory(1 << 20);
  Received<v1::GenerateRequest> received;
  ASSERT_TRUE(Parse(BytesOf(request.SerializeAsString()), &memory, kRetry, &received.message,
                    &received.memory)
                  .ok());
  EXPECT_EQ(received.message.SerializeAsString(), request.SerializeAsString());
  EXPECT_GT(memory.reserved(), 0);
  received.memory = {};
  EXPECT_EQ(memory.reserved(), 0);
}

TEST(GrpcMessagesTest, WhatCannotBeIsInvalidAndWhatDoesNotFitNowIsNot) {
  const auto parse = [](int fields, MemoryBudget* memory) {
    MemoryBudget::Lease lease;
    v1::GenerateRequest message;
    return Parse(BytesOf(Repeated(std::string("\x0a\x00", 2), fields)), memory, kRetry, &message,
                 &lease);
  };
  MemoryBudget memory(30'000);
  EXPECT_EQ(parse(200, &memory).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(parse(100, &memory).ok());
  MemoryBudget::Lease others;
  ASSERT_TRUE(memory.Reserve(30'000, &others).ok());
  const grpc::Status later = parse(100, &memory);
  EXPECT_EQ(later.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonOf(later), "DECODING_MEMORY");
  EXPECT_TRUE(parse(3, &memory).ok()) << "as that of CancelJob";
  EXPECT_EQ(memory.reserved(), 30'000);
}

TEST(GrpcMessagesTest, MalformedMessagesAreToldByName) {
  MemoryBudget memory(1 << 20);
  for (const std::string& bytes :
       {std::string("\x0a\x7f"), std::string("\x08"), std::string("\x0b\x0c"),
        std::string("\x0a\x03\x0a\x05x"), std::string("\x00\x01", 2), std::string(64, '\xff')}) {
    MemoryBudget::Lease lease;
    v1::GenerateRequest message;
    const grpc::Status status = Parse(BytesOf(bytes), &memory, kRetry, &message, &lease);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("is no denoised.v1.GenerateRequest"));
  }
}

/// What a message takes once it is parsed is no more than was reserved for it.
TEST(GrpcMessagesTest, NoMessageTakesMoreThanIsReserved) {
  constexpr int kFields = 100'000;
  const auto heap = [] {
    const auto information = mallinfo2();
    return static_cast<int64_t>(information.uordblks + information.hblkhd);
  };
  v1::GenerateRequest conditions, seeds, vectors;
  inference::ModelInferRequest tensors, outputs, raw, parameters, texts, integers;
  auto& contents = *texts.add_inputs()->mutable_contents();
  auto& params = *conditions.mutable_params();
  for (int i = 0; i < kFields; ++i) {
    params.add_conditions();
    seeds.mutable_params()->add_seeds(1);
    vectors.mutable_params()->add_conditions()->add_class_vector(1);
    tensors.add_inputs()->mutable_contents();
    outputs.add_outputs();
    raw.add_raw_input_contents();
    (*parameters.mutable_parameters())[std::to_string(i)].set_int64_param(1);
    contents.add_bytes_contents();
  }
  integers.add_inputs()->mutable_contents()->mutable_int64_contents()->Resize(kFields, 1);
  const std::vector<std::pair<const google::protobuf::Message*, std::string>> kCases = {
      {&conditions, ""}, {&seeds, ""},
      {&vectors, ""},    {&tensors, ""},
      {&outputs, ""},    {&raw, ""},
      {&texts, ""},      {&parameters, ""},
      {&integers, ""},   {&conditions, Repeated(std::string("\x7a\x00", 2), kFields)}};
  for (const auto& [message, unknown] : kCases) {
    const grpc::ByteBuffer bytes = BytesOf(message->SerializeAsString() + unknown);
    MemoryBudget memory(std::numeric_limits<int64_t>::max());
    MemoryBudget::Lease lease;
    const std::unique_ptr<google::protobuf::Message> parsed(message->New());
    const int64_t before = heap();
    const grpc::Status status = Parse(bytes, &memory, kRetry, parsed.get(), &lease);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_LE(heap() - before, memory.reserved())
        << message->GetDescriptor()->full_name() << " of " << bytes.Length() << " bytes";
  }
}

}  // namespace
}  // namespace denoised
