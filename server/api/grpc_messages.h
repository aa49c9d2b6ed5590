// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include <chrono>

#include "server/jobs/memory_budget.h"

/// Messages as gRPC hands them over to a service that takes and gives bytes. Of other services it
/// parses a message as soon as it has come, and counts nothing of what that takes: a field of two
/// bytes may take 224.

namespace denoised {

/// A message that was read. It counts for as long as `memory` lives.
template <typename Message>
struct Received {
  Message message;
  MemoryBudget::Lease memory;
};

/// Moves the message of a call out of gRPC, which would keep it until the call ends: an upload can
/// be large, and its job can wait for long. (gRPC made it, and not as a constant.)
grpc::ByteBuffer Take(const grpc::ByteBuffer* bytes);

/// Parses `bytes`, after it has reserved in `memory` what the message will take, if that is more
/// than 16 KiB. INVALID_ARGUMENT if that is too much for good or they are no such message;
/// RESOURCE_EXHAUSTED, to be tried again after `retry`, if other messages take too much now.
grpc::Status Parse(grpc::ByteBuffer bytes, MemoryBudget* memory, std::chrono::milliseconds retry,
                   google::protobuf::Message* message, MemoryBudget::Lease* lease);

grpc::Status Serialize(const google::protobuf::Message& message, grpc::ByteBuffer* bytes);

}  // namespace denoised
