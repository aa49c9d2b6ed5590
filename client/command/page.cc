// SPDX-License-Identifier: Apache-2.0
#include "command/page.h"

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "denoised/target.h"

namespace denoised::command {
namespace {

constexpr int kDefaultPort = 8080;  // of the server's --http-listen

bool IsSet(const char* variable) {
  const char* value = std::getenv(variable);  // NOLINT(concurrency-mt-unsafe): before any thread
  return value != nullptr && *value != '\0';
}

/// xdg-open finds the user's browser. Without a display and without $BROWSER it would start one in
/// the terminal, or fail.
bool ShowInBrowser(const std::string& address) {
  if (!IsSet("DISPLAY") && !IsSet("WAYLAND_DISPLAY") && !IsSet("BROWSER")) return false;
  const pid_t child = fork();
  if (child == 0) {
    if (std::freopen("/dev/null", "w", stdout) == nullptr) _exit(127);
    if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(127);
    execlp("xdg-open", "xdg-open", address.c_str(), nullptr);
    _exit(127);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
         WEXITSTATUS(status) == 0;
}

}  // namespace

absl::Status CheckPage(const std::string& address) {
  const auto refuse = [&](const char* why) {
    return absl::InvalidArgumentError(fmt::format(
        "--page \"{}\" {}; use an address as in https://studio.example:8080/", address, why));
  };
  std::string_view rest = address;
  if (rest.starts_with("https://")) {
    rest.remove_prefix(8);
  } else if (rest.starts_with("http://")) {
    rest.remove_prefix(7);
  } else {
    return refuse("begins with neither http:// nor https://");
  }
  for (const char c : address) {
    if (c <= ' ' || c == '"' || c == '\x7f') return refuse("holds a character that needs escaping");
  }
  const std::string_view authority = rest.substr(0, rest.find_first_of("/?#"));
  if (authority.find('@') != std::string_view::npos) return refuse("holds a user or a password");
  const size_t colon = authority.find(':', authority.starts_with('[') ? authority.find(']') : 0);
  if (authority.empty() || colon == 0) return refuse("names no host");
  if (colon == std::string_view::npos) return absl::OkStatus();
  const std::string_view port = authority.substr(colon + 1);
  int number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  if (error != std::errc() || end != port.data() + port.size() || number < 1 || number > 65535) {
    return refuse("has a port that is not 1 to 65535");
  }
  return absl::OkStatus();
}

ExitCode OpenPage(const std::string& page, const std::string& server, bool tls) {
  std::string address = page;
  if (address.empty()) {
    if (const auto target = client::ParseTarget(server); !target.ok()) {
      return Report(target.status(), /*json=*/false);
    }
    if (server.find_first_of(",/") != std::string::npos || server.rfind(':') == std::string::npos) {
      return Report(
          absl::InvalidArgumentError(fmt::format(
              "the page's address does not follow from --server {}; name it with --page", server)),
          /*json=*/false);
    }
    address = fmt::format("{}://{}:{}/", tls ? "https" : "http",
                          server.substr(0, server.rfind(':')), kDefaultPort);
  }
  if (const absl::Status status = CheckPage(address); !status.ok()) return Report(status, false);
  std::puts(address.c_str());
  std::fflush(stdout);
  if (!ShowInBrowser(address))
    std::fputs("no browser was found; open the address in one\n", stderr);
  return kOk;
}

}  // namespace denoised::command
