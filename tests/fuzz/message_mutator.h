// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <google/protobuf/message.h>

#include <cstddef>
#include <cstdint>
#include <random>

namespace denoised {

/// Changes one field of `message`, at any depth: sets it, clears it, adds or drops an element.
/// Where libFuzzer's own mutations mostly break the wire format, the result of this always parses.
/// Numbers are those that programs trip over as often as ordinary ones.
void MutateMessage(google::protobuf::Message* message, std::minstd_rand* random);

/// LLVMFuzzerCustomMutator for what is a serialized message of the type of `message`, an empty one.
/// Bytes that do not parse, one in eight that do and what would not fit are libFuzzer's own affair.
size_t MutateSerialized(google::protobuf::Message* message, uint8_t* data, size_t size,
                        size_t max_size, unsigned int seed);

}  // namespace denoised
