// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cpu/host.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

#include "engine/core/control_groups.h"

namespace denoised::cpu {
namespace {

/// The number on a file's first line; nothing when there is no file, or it says "max".
std::optional<size_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  size_t value;
  return file >> value ? std::optional(value) : std::nullopt;
}

/// The number after `key` at the start of a line ("MemTotal:  24 kB", "inactive_file 4096").
std::optional<size_t> ReadField(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string word;
    size_t value;
    if (words >> word && word == key && words >> value) return value;
  }
  return std::nullopt;
}

/// Lowers `memory` to the limit of the group at `directory` and to what is free of it. Less may be
/// free in a group than in a group below it that has a lower limit, since other groups use it too.
void ApplyLimit(const std::string& directory, const char* limit_file, const char* usage_file,
                const char* cache_field, BackendMemory* memory) {
  const std::optional<size_t> limit = ReadNumber(directory + limit_file);
  if (!limit) return;
  memory->total = std::min(memory->total, *limit);
  const size_t usage = ReadNumber(directory + usage_file).value_or(0);
  const size_t cache = ReadField(directory + "/memory.stat", cache_field).value_or(0);
  const size_t held = usage - std::min(usage, cache);
  memory->free = std::min(memory->free, *limit - std::min(*limit, held));
}

}  // namespace

BackendMemory ReadMemory(const std::string& root) {
  BackendMemory memory;
  memory.total = ReadField(root + "proc/meminfo", "MemTotal:").value_or(0) * 1024;
  memory.free = ReadField(root + "proc/meminfo", "MemAvailable:").value_or(0) * 1024;
  for (const ControlGroup& group : ControlGroups("memory", root)) {
    if (group.v1) {
      ApplyLimit(group.directory, "/memory.limit_in_bytes", "/memory.usage_in_bytes",
                 "total_inactive_file", &memory);
    } else {
      ApplyLimit(group.directory, "/memory.max", "/memory.current", "inactive_file", &memory);
    }
  }
  return memory;
}

std::string ReadModelName(const std::string& root) {
  std::ifstream file(root + "proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "CPU";
}

}  // namespace denoised::cpu
