// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/message_mutator.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <string>

// libFuzzer's own mutation of bytes, for custom mutators.
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace denoised {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr size_t kMaxGrowth = 64;  // bytes that one mutation adds to a string at most

int64_t Integer(std::minstd_rand& random) {
  constexpr int64_t kEdges[] = {std::numeric_limits<int64_t>::min(),
                                std::numeric_limits<int32_t>::min(),
                                -1,
                                0,
                                1,
                                std::numeric_limits<int32_t>::max(),
                                int64_t{std::numeric_limits<uint32_t>::max()} + 1,
                                std::numeric_limits<int64_t>::max()};
  switch (random() % 4) {
    case 0:
      return kEdges[random() % std::size(kEdges)];
    case 1:
      return int64_t{1} << random() % 12;  // sizes
    default:
      return static_cast<int64_t>(random() % 64);
  }
}

double Number(std::minstd_rand& random) {
  using Limits = std::numeric_limits<double>;
  constexpr double kEdges[] = {-Limits::infinity(),
                               -1,
                               -0.0,
                               Limits::denorm_min(),
                               Limits::min(),
                               1e-45,
                               std::numeric_limits<float>::max(),
                               1e39,
                               Limits::max(),
                               Limits::infinity(),
                               Limits::quiet_NaN()};
  switch (random() % 4) {
    case 0:
      return kEdges[random() % std::size(kEdges)];
    case 1:
      return static_cast<double>(random() % 128);
    default:
      return static_cast<double>(random() % 1000) / 999;
  }
}

std::string Mutated(std::string text, bool utf8) {
  const size_t size = text.size();
  text.resize(size + kMaxGrowth);
  text.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(text.data()), size, text.size()));
  if (utf8) {
    for (char& c : text) c &= 0x7f;  // other bytes do not parse as a protobuf string
  }
  return text;
}

/// A new value for a field, or for a new element of it.
void Put(Message* message, const FieldDescriptor* field, std::minstd_rand& random) {
  const Reflection& reflection = *message->GetReflection();
  const auto put = [&](auto set, auto add, auto value) {
    field->is_repeated() ? (reflection.*add)(message, field, value)
                         : (reflection.*set)(message, field, value);
  };
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return put(&Reflection::SetInt32, &Reflection::AddInt32,
                 static_cast<int32_t>(Integer(random)));
    case FieldDescriptor::CPPTYPE_INT64:
      return put(&Reflection::SetInt64, &Reflection::AddInt64, Integer(random));
    case FieldDescriptor::CPPTYPE_UINT32:
      return put(&Reflection::SetUInt32, &Reflection::AddUInt32,
                 static_cast<uint32_t>(Integer(random)));
    case FieldDescriptor::CPPTYPE_UINT64:
      return put(&Reflection::SetUInt64, &Reflection::AddUInt64,
                 static_cast<uint64_t>(Integer(random)));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return put(&Reflection::SetFloat, &Reflection::AddFloat, static_cast<float>(Number(random)));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return put(&Reflection::SetDouble, &Reflection::AddDouble, Number(random));
    case FieldDescriptor::CPPTYPE_BOOL:
      return put(&Reflection::SetBool, &Reflection::AddBool, random() % 2 == 0);
    case FieldDescriptor::CPPTYPE_ENUM:
      // One past the last value is what a later version of the contract may send.
      return put(&Reflection::SetEnumValue, &Reflection::AddEnumValue,
                 static_cast<int>(random() % (field->enum_type()->value_count() + 1)));
    case FieldDescriptor::CPPTYPE_STRING: {
      const bool utf8 = field->type() == FieldDescriptor::TYPE_STRING;
      const std::string old = field->is_repeated() ? "" : reflection.GetString(*message, field);
      return put(&Reflection::SetString, &Reflection::AddString, Mutated(old, utf8));
    }
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return MutateMessage(field->is_repeated() ? reflection.AddMessage(message, field)
                                                : reflection.MutableMessage(message, field),
                           &random);
  }
  std::abort();  // a type that protobuf does not have
}

}  // namespace

void MutateMessage(Message* message, std::minstd_rand* random) {
  const Reflection& reflection = *message->GetReflection();
  const google::protobuf::Descriptor& descriptor = *message->GetDescriptor();
  if (descriptor.field_count() == 0) return;
  const FieldDescriptor* field = descriptor.field((*random)() % descriptor.field_count());
  const bool drop = (*random)() % 8 == 0;
  if (!field->is_repeated()) {
    drop ? reflection.ClearField(message, field) : Put(message, field, *random);
    return;
  }
  if (drop && reflection.FieldSize(*message, field) > 0) {
    reflection.RemoveLast(message, field);
    return;
  }
  Put(message, field, *random);
  const int size = reflection.FieldSize(*message, field);
  reflection.SwapElements(message, field, size - 1, static_cast<int>((*random)() % size));
  // Half of the time the new element takes an old one's place.
  if ((*random)() % 2 == 0) reflection.RemoveLast(message, field);
}

size_t MutateSerialized(google::protobuf::Message* message, uint8_t* data, size_t size,
                        size_t max_size, unsigned int seed) {
  std::minstd_rand random(seed);
  if (random() % 8 == 0 || !message->ParseFromArray(data, static_cast<int>(size))) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  MutateMessage(message, &random);
  const size_t mutated = message->ByteSizeLong();
  if (mutated > max_size) return LLVMFuzzerMutate(data, size, max_size);
  message->SerializeToArray(data, static_cast<int>(mutated));
  return mutated;
}

}  // namespace denoised
