// SPDX-License-Identifier: Apache-2.0
#include "denoised/target.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <string_view>

#include "absl/strings/str_replace.h"

namespace denoised::client {
namespace {

bool IsPort(std::string_view text) {
  int port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  return error == std::errc() && end == text.data() + text.size() && port >= 1 && port <= 65535;
}

/// AF_INET for "10.0.0.1:50051", AF_INET6 for "[fd00::1]:50051", else 0.
int FamilyOf(std::string_view address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string_view::npos || !IsPort(address.substr(colon + 1))) return 0;
  std::string_view host = address.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  const int family = bracketed ? AF_INET6 : AF_INET;
  unsigned char bytes[sizeof(in6_addr)];
  return inet_pton(family, std::string(host).c_str(), bytes) == 1 ? family : 0;
}

/// A uri holds no bare brackets.
std::string Escaped(const std::string& address) {
  return absl::StrReplaceAll(address, {{"[", "%5B"}, {"]", "%5D"}});
}

absl::StatusOr<Target> ParseList(std::string_view list) {
  constexpr std::string_view kSchemes[] = {"ipv4:", "ipv6:"};
  for (const std::string_view scheme : kSchemes) {
    if (list.starts_with(scheme)) list.remove_prefix(scheme.size());
  }
  Target target = {.list = true, .replicas = true, .direct = true};
  int family = 0;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const std::string_view address = list.substr(begin, end - begin);
    const int kind = FamilyOf(address);
    if (kind == 0) {
      return absl::InvalidArgumentError(fmt::format(
          "\"{}\" in the list of servers is not an IP address with a port; use addresses, as in "
          "10.0.0.1:50051,10.0.0.2:50051, or a name that stands for all of them, as in "
          "dns:///replicas:50051",
          address));
    }
    if (family != 0 && kind != family) {
      return absl::InvalidArgumentError(
          fmt::format("\"{}\" mixes IPv4 and IPv6 in the list of servers; use one kind", address));
    }
    if (family == 0) {
      target.uri = kSchemes[kind == AF_INET6];
      target.authority = address;
    } else {
      target.uri += ',';
    }
    family = kind;
    target.uri += Escaped(std::string(address));
    begin = end + 1;
  }
  return target;
}

/// Whether gRPC reads the part before the first colon as the kind of the address.
bool HasScheme(std::string_view target) {
  for (const std::string_view scheme :
       {"dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:"}) {
    if (target.starts_with(scheme)) return true;
  }
  return false;
}

/// "host:50051", "10.0.0.1:50051", "[fd00::1]:50051".
bool IsHostAndPort(std::string_view address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string_view::npos || !IsPort(address.substr(colon + 1))) return false;
  const std::string_view host = address.substr(0, colon);
  if (host.starts_with('[')) return FamilyOf(address) == AF_INET6;
  return !host.empty() && std::all_of(host.begin(), host.end(), [](unsigned char c) {
    return c > ' ' && c != 0x7f &&
           std::string_view("/:@[]?#").find(static_cast<char>(c)) == std::string_view::npos;
  });
}

bool IsLoopback(std::string_view target) {
  for (const std::string_view scheme : {"dns:///", "ipv4:", "ipv6:"}) {
    if (target.starts_with(scheme)) target.remove_prefix(scheme.size());
  }
  for (const std::string_view prefix : {"127.", "localhost", "[::1]", "%5B::1%5D", "unix:"}) {
    if (target.starts_with(prefix)) return true;
  }
  return false;
}

}  // namespace

absl::StatusOr<Target> ParseTarget(const std::string& text) {
  if (text.empty()) {
    return absl::InvalidArgumentError("the server's address is empty; use host:port");
  }
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (text.starts_with(scheme)) {
      return absl::InvalidArgumentError(fmt::format(
          "the server's address \"{}\" begins with {}; use host:port, and TLS by its own "
          "options",
          text, scheme));
    }
  }
  if (text.find(',') != std::string::npos) return ParseList(text);
  if (text.find_first_of(":/") == std::string::npos) {
    return absl::InvalidArgumentError(
        fmt::format("the server's address \"{}\" has no port; use host:port", text));
  }
  if (!HasScheme(text) && !IsHostAndPort(text)) {
    return absl::InvalidArgumentError(
        fmt::format("the server's address \"{}\" is not host:port with a port from 1 to 65535; "
                    "an IPv6 address stands in brackets, as in [fd00::1]:50051",
                    text));
  }
  return Target{.uri = text, .replicas = text.starts_with("dns:"), .direct = IsLoopback(text)};
}

}  // namespace denoised::client
