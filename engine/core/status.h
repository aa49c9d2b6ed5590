// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

/// Two families of errors. What a user, a file or a device caused is an absl::Status whose message
/// names the thing, its value and the remedy. What only a bug of ours can cause is a
/// DENOISED_CHECK.

namespace denoised {

/// Formatted statuses: `return InvalidArgument("steps is {}; use 1 to {}", steps, limit);`
#define DENOISED_STATUS_MAKER(Name, Code)                                                          \
  template <typename... Args>                                                                      \
  absl::Status Name(fmt::format_string<Args...> format, Args&&... args) {                          \
    return absl::Status(absl::StatusCode::Code, fmt::format(format, std::forward<Args>(args)...)); \
  }
DENOISED_STATUS_MAKER(InvalidArgument, kInvalidArgument)
DENOISED_STATUS_MAKER(NotFound, kNotFound)
DENOISED_STATUS_MAKER(FailedPrecondition, kFailedPrecondition)
DENOISED_STATUS_MAKER(ResourceExhausted, kResourceExhausted)
DENOISED_STATUS_MAKER(Unimplemented, kUnimplemented)
DENOISED_STATUS_MAKER(Unavailable, kUnavailable)
DENOISED_STATUS_MAKER(Cancelled, kCancelled)
DENOISED_STATUS_MAKER(DeadlineExceeded, kDeadlineExceeded)
DENOISED_STATUS_MAKER(Internal, kInternal)
DENOISED_STATUS_MAKER(DataLoss, kDataLoss)
#undef DENOISED_STATUS_MAKER

/// The same status with "prefix: " before its message; OK stays OK.
inline absl::Status Annotate(const absl::Status& status, const std::string& prefix) {
  if (status.ok()) return status;
  return absl::Status(status.code(), fmt::format("{}: {}", prefix, std::string(status.message())));
}

namespace internal {
[[noreturn]] inline void CheckFailed(const char* file, int line, const char* condition,
                                     const std::string& message) {
  std::fprintf(stderr, "%s:%d: bug in denoised: check failed: %s %s\n", file, line, condition,
               message.c_str());
  std::abort();
}
}  // namespace internal

}  // namespace denoised

#define DENOISED_RETURN_IF_ERROR(expr)                                                        \
  do {                                                                                        \
    if (absl::Status denoised_status = (expr); !denoised_status.ok()) return denoised_status; \
  } while (false)

#define DENOISED_CONCAT_(a, b) a##b
#define DENOISED_CONCAT(a, b) DENOISED_CONCAT_(a, b)
#define DENOISED_ASSIGN_OR_RETURN(lhs, expr) \
  DENOISED_ASSIGN_OR_RETURN_(DENOISED_CONCAT(status_or_, __LINE__), lhs, expr)
#define DENOISED_ASSIGN_OR_RETURN_(tmp, lhs, expr) \
  auto tmp = (expr);                               \
  if (!tmp.ok()) return std::move(tmp).status();   \
  lhs = std::move(tmp).value()

/// For what only a bug of ours can break: DENOISED_CHECK(a == b, "shapes {} and {}", a, b).
#define DENOISED_CHECK(condition, ...)                                  \
  do {                                                                  \
    if (!(condition)) [[unlikely]]                                      \
      ::denoised::internal::CheckFailed(__FILE__, __LINE__, #condition, \
                                        fmt::format("" __VA_ARGS__));   \
  } while (false)
