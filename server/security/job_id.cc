// SPDX-License-Identifier: Apache-2.0
#include "server/security/job_id.h"

#include <unistd.h>

#include <array>

#include "absl/strings/escaping.h"

namespace denoised {

absl::StatusOr<std::string> MakeJobId() {
  std::array<unsigned char, 16> bits;
  if (getentropy(bits.data(), bits.size()) != 0) {
    return Internal("the system has no random bytes for a request_id; give one, or try again");
  }
  return absl::BytesToHexString({reinterpret_cast<const char*>(bits.data()), bits.size()});
}

}  // namespace denoised
