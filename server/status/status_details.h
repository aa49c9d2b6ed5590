// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/support/status.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "engine/core/status.h"
#include "engine/engine.h"

namespace denoised {

/// google.rpc.ErrorInfo.reason: stable names for programs. The domain is "denoised".
namespace reason {
inline constexpr char kInvalidFields[] = "INVALID_FIELDS";
inline constexpr char kModelNotFound[] = "MODEL_NOT_FOUND";
inline constexpr char kModelLoading[] = "MODEL_LOADING";
inline constexpr char kModelFailed[] = "MODEL_FAILED";
inline constexpr char kModelUnloading[] = "MODEL_UNLOADING";
inline constexpr char kModelExists[] = "MODEL_EXISTS";
inline constexpr char kChangeIncomplete[] = "CHANGE_INCOMPLETE";
inline constexpr char kNotAdmin[] = "NOT_ADMIN";
inline constexpr char kNoAdmins[] = "NO_ADMINS";  // with --admin off
/// Of the HTTP port. What refuses calls of gRPC 1.51 can send a code and a message alone.
inline constexpr char kUnauthenticated[] = "UNAUTHENTICATED";
inline constexpr char kForeignOrigin[] = "FOREIGN_ORIGIN";  // of the HTTP port
inline constexpr char kJobNotFound[] = "JOB_NOT_FOUND";
inline constexpr char kRequestIdTaken[] = "REQUEST_ID_TAKEN";
inline constexpr char kClientLimit[] = "CLIENT_LIMIT";
inline constexpr char kQueueFull[] = "QUEUE_FULL";
inline constexpr char kDecodingMemory[] = "DECODING_MEMORY";
inline constexpr char kDeviceMemory[] = "DEVICE_MEMORY";
inline constexpr char kDraining[] = "DRAINING";
inline constexpr char kDeviceLost[] = "DEVICE_LOST";  // the last one: the server is about to exit
inline constexpr char kCancelled[] = "CANCELLED";
inline constexpr char kDeadlineExceeded[] = "DEADLINE_EXCEEDED";
inline constexpr char kNonfiniteImage[] = "NONFINITE_IMAGE";
inline constexpr char kServerError[] = "SERVER_ERROR";
}  // namespace reason

/// The gRPC status with the same code and message, and with ErrorInfo and, if given, RetryInfo in
/// the trailer. `request_id` may be empty.
grpc::Status ToGrpcStatus(const absl::Status& status, const char* reason,
                          const std::string& request_id,
                          std::optional<std::chrono::milliseconds> retry_delay = {});

/// As ToGrpcStatus, for an error that one field causes: the message begins with its name, which is
/// also ErrorInfo.metadata["field"]. `field` and `description` as in InvalidFields.
grpc::Status FieldStatus(absl::StatusCode code, const FieldViolation& violation, const char* reason,
                         const std::string& request_id);

/// INVALID_ARGUMENT with BadRequest, which lists the violations by paths in the proto. gRPC limits
/// trailers to 8 KiB by default, so a list beyond half of that is cut and ends with a count. So is
/// a long name of a field, between characters; one that is no UTF-8 is quoted.
grpc::Status InvalidFields(const std::vector<FieldViolation>& violations,
                           const std::string& request_id);

/// The reason that ToGrpcStatus or InvalidFields put into a status; empty if there is none.
std::string ReasonOf(const grpc::Status& status);

/// The first field at fault, by InvalidFields or FieldStatus; empty if there is none.
std::string FieldOf(const grpc::Status& status);

/// The status of a job that failed, with the reason for its code.
grpc::Status JobStatus(const absl::Status& status, const std::string& request_id);

}  // namespace denoised
