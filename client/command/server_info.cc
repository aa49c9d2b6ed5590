// SPDX-License-Identifier: Apache-2.0
#include "command/server_info.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>

#include "command/call_options.h"
#include "command/json.h"
#include "command/progress.h"
#include "flags/printable.h"

namespace denoised::command {

ExitCode ServerInfo(const client::Client& client, bool json, const client::CallOptions& call) {
  const auto info = client.GetServerInfo(WithTimeout(call, std::chrono::seconds(10)));
  if (!info.ok()) return Report(info.status(), json);
  if (json) {
    std::puts(PrintableJson(ToJson(*info)).c_str());
    return kOk;
  }
  const auto line = [](const std::string& key, const std::string& value) {
    std::puts(fmt::format("{:<31}{}", Printable(key), Printable(value)).c_str());
  };
  line("version", fmt::format("{} ({})", info->version, info->build));
  line("state", fmt::format("{}, for {}", info->state,
                            HumanDuration(std::chrono::duration<double>(info->uptime_seconds))));
  for (const client::Device& device : info->devices) {
    line("device",
         fmt::format("{}, {}", device.name,
                     device.error.empty() ? device.description : "lost: " + device.error));
  }
  line("batching", info->batching);
  line("you are", info->client);
  line("features", fmt::format("{}", fmt::join(info->features, ", ")));
  for (const auto& [name, value] : info->limits) line(name, fmt::format("{:.15g}", value));
  return kOk;
}

}  // namespace denoised::command
