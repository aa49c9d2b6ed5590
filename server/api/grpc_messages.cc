// SPDX-License-Identifier: Apache-2.0
#include "server/api/grpc_messages.h"

#include <fmt/format.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include "server/status/status_details.h"

namespace denoised {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;

/// As many as values in JSON. More than a request of 65,536 images has.
constexpr int64_t kMaxFields = 1'000'000;
/// A field of two bytes may be an empty message in a list: the largest, a tensor of ModelInfer, has
/// 192 bytes, the allocator's header and a place in a list that grows by doubling.
constexpr int64_t kFieldBytes = 224;
/// What takes no more counts as part of its call, so that jobs can be cancelled when all the memory
/// for messages is taken.
constexpr int64_t kSmallBytes = 16 << 10;
/// A number of a packed list, which grows by doubling, may have one byte on the wire.
constexpr int64_t kNumberBytes = 16;
/// protobuf reserves so much for a string at most; a longer one grows by doubling
/// (parse_context.h).
constexpr int kReservedString = 50'000'000;

/// Walks over a message without making it.
class Measure {
 public:
  explicit Measure(google::protobuf::io::ZeroCopyInputStream* stream) : input_(stream) {}

  /// False if it ends early, is malformed or has too many fields. No message of ours contains
  /// itself, so `type` bounds the depth.
  bool Walk(const Descriptor* type) {
    while (const uint32_t tag = input_.ReadTag()) {
      if (++fields_ > kMaxFields || !Value(tag, type)) return false;
    }
    return input_.ConsumedEntireMessage();
  }

  bool too_many() const { return fields_ > kMaxFields; }
  /// What the message takes besides its own bytes.
  int64_t bytes() const { return fields_ * kFieldBytes + packed_; }

 private:
  bool Value(uint32_t tag, const Descriptor* type) {
    uint64_t number = 0;
    switch (WireFormatLite::GetTagWireType(tag)) {
      case WireFormatLite::WIRETYPE_VARINT:
        return input_.ReadVarint64(&number);
      case WireFormatLite::WIRETYPE_FIXED64:
        return input_.Skip(8);
      case WireFormatLite::WIRETYPE_FIXED32:
        return input_.Skip(4);
      case WireFormatLite::WIRETYPE_LENGTH_DELIMITED:
        return Lengthy(type->FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag)));
      default:
        return false;  // groups: proto3 has none
    }
  }

  /// `field` is null if it is unknown.
  bool Lengthy(const FieldDescriptor* field) {
    uint32_t size = 0;
    if (!input_.ReadVarint32(&size) || size > INT32_MAX) return false;
    const int length = static_cast<int>(size);
    if (field != nullptr && field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      const auto outer = input_.PushLimit(length);
      const bool whole = Walk(field->message_type()) && input_.BytesUntilLimit() == 0;
      input_.PopLimit(outer);
      return whole;
    }
    if (field != nullptr && field->is_packable()) {
      const auto type = static_cast<WireFormatLite::FieldType>(field->type());
      const bool varints =
          WireFormatLite::WireTypeForFieldType(type) == WireFormatLite::WIRETYPE_VARINT;
      packed_ += varints ? length * kNumberBytes : length;
    }
    if (length > kReservedString) packed_ += length;
    return input_.Skip(length);
  }

  google::protobuf::io::CodedInputStream input_;
  int64_t fields_ = 0, packed_ = 0;
};

}  // namespace

grpc::ByteBuffer Take(const grpc::ByteBuffer* bytes) {
  grpc::ByteBuffer taken;
  taken.Swap(const_cast<grpc::ByteBuffer*>(bytes));
  return taken;
}

grpc::Status Parse(grpc::ByteBuffer bytes, MemoryBudget* memory, std::chrono::milliseconds retry,
                   google::protobuf::Message* message, MemoryBudget::Lease* lease) {
  const Descriptor& type = *message->GetDescriptor();
  grpc::Status malformed = ToGrpcStatus(InvalidArgument("the message is no {}", type.full_name()),
                                        reason::kInvalidFields, "");
  grpc::ProtoBufferReader measured(&bytes);
  if (!measured.status().ok()) return malformed;
  Measure measure(&measured);
  const bool whole = measure.Walk(&type);
  if (measure.too_many()) {
    return ToGrpcStatus(
        InvalidArgument("the message has more than {} fields; send fewer", kMaxFields),
        reason::kInvalidFields, "");
  }
  if (!whole) return malformed;
  const int64_t taken = static_cast<int64_t>(bytes.Length()) + measure.bytes();
  const absl::Status reserved =
      taken > kSmallBytes ? memory->Reserve(taken, lease) : absl::OkStatus();
  if (absl::IsInvalidArgument(reserved)) {
    return ToGrpcStatus(Annotate(reserved, "the message"), reason::kInvalidFields, "");
  }
  if (!reserved.ok()) {
    return ToGrpcStatus(Annotate(reserved, "the message"), reason::kDecodingMemory, "", retry);
  }
  grpc::ProtoBufferReader reader(&bytes);
  return message->ParseFromZeroCopyStream(&reader) ? grpc::Status::OK : malformed;
}

grpc::Status Serialize(const google::protobuf::Message& message, grpc::ByteBuffer* bytes) {
  bytes->Clear();  // gRPC's writer takes an empty buffer alone
  bool own = false;
  return grpc::SerializationTraits<google::protobuf::Message>::Serialize(message, bytes, &own);
}

}  // namespace denoised
