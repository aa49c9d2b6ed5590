// SPDX-License-Identifier: Apache-2.0
#include "engine/core/control_groups.h"

#include <fstream>

#include "absl/strings/str_cat.h"

namespace denoised {
namespace {

bool Names(const std::string& controllers, const std::string& controller) {
  return ("," + controllers + ",").find("," + controller + ",") != std::string::npos;
}

}  // namespace

std::vector<ControlGroup> ControlGroups(const std::string& controller, const std::string& root) {
  std::vector<ControlGroup> groups;
  // Lines "0::/path" (v2) and "4:memory:/path", "5:cpu,cpuacct:/path" (v1).
  std::ifstream file(root + "proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    const bool v1 = !controllers.empty();
    if (v1 && !Names(controllers, controller)) continue;
    while (true) {
      if (path == "/") path.clear();
      groups.push_back(
          {absl::StrCat(root, "sys/fs/cgroup", v1 ? "/" : "", v1 ? controller : "", path), v1});
      const size_t slash = path.rfind('/');
      if (slash == std::string::npos) break;
      path.resize(slash);
    }
  }
  return groups;
}

}  // namespace denoised
