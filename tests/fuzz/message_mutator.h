#pragma once

#include <google/protobuf/message.h>

#include <random>

namespace denoised {

/// Changes one field of `message`, at any depth: sets it, clears it, adds or drops an element.
/// Where libFuzzer's own mutations mostly break the wire format, the result of this always parses.
/// Numbers are those that programs trip over as often as ordinary ones.
void MutateMessage(google::protobuf::Message* message, std::minstd_rand* random);

}  // namespace denoised
