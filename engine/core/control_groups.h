// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace denoised {

/// A control group (cgroup) that limits this process.
struct ControlGroup {
  std::string directory;  // where its files are, without a slash at the end
  bool v1 = false;        // version 1, where each controller has a tree of its own
};

/// The groups that limit this process's use of `controller` ("cpu", "memory"): its own and those
/// above it, since a limit may be set on any of them. Inside a container only the root of the tree
/// is mounted; the groups whose directory is missing are listed too. `root` is "/" except in tests.
std::vector<ControlGroup> ControlGroups(const std::string& controller,
                                        const std::string& root = "/");

}  // namespace denoised
