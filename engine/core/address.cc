// SPDX-License-Identifier: Apache-2.0
#include "engine/core/address.h"

#include <algorithm>
#include <cctype>

namespace denoised {

absl::Status CheckAddress(const std::string& flag, const std::string& address, int example) {
  const size_t colon = address.rfind(':');
  const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  const bool digits =
      !port.empty() && port.size() <= 5 &&
      std::all_of(port.begin(), port.end(), [](unsigned char c) { return std::isdigit(c); });
  if (colon == 0 || !digits || std::stoi(port) > 65535) {
    return InvalidArgument(
        "{}: \"{}\" is not host:port with a port of 0 to 65535; use for example "
        "127.0.0.1:{}, 0.0.0.0:{} or [::1]:{}",
        flag, address, example, example, example);
  }
  return absl::OkStatus();
}

}  // namespace denoised
