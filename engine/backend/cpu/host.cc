#include "engine/backend/cpu/host.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <optional>
#include <sstream>

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

bool Names(const std::string& controllers, const std::string& controller) {
  return ("," + controllers + ",").find("," + controller + ",") != std::string::npos;
}

/// visit(directory, first version?) for every group that bounds this process's use of `controller`.
/// A limit may sit on any group above the process's own; inside a container only the root of the
/// tree is mounted.
template <typename Visit>
void ForEachGroup(const std::string& root, const std::string& controller, const Visit& visit) {
  // Lines "0::/path" (v2) and "4:memory:/path", "5:cpu,cpuacct:/path" (v1).
  std::ifstream groups(root + "proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    const bool v1 = !controllers.empty();
    if (v1 && !Names(controllers, controller)) continue;
    while (true) {
      if (path == "/") path.clear();
      visit(root + "sys/fs/cgroup" + (v1 ? "/" + controller : "") + path, v1);
      const size_t slash = path.rfind('/');
      if (slash == std::string::npos) break;
      path.resize(slash);
    }
  }
}

/// Lowers `memory` to what the group at `directory` may still take.
void ApplyLimit(const std::string& directory, const char* limit_file, const char* usage_file,
                const char* cache_field, BackendMemory* memory) {
  const std::optional<size_t> limit = ReadNumber(directory + limit_file);
  if (!limit || *limit >= memory->total) return;
  memory->total = *limit;
  const size_t usage = ReadNumber(directory + usage_file).value_or(0);
  const size_t cache = ReadField(directory + "/memory.stat", cache_field).value_or(0);
  const size_t held = usage - std::min(usage, cache);
  memory->free = std::min(memory->free, *limit - std::min(*limit, held));
}

/// The quota and the period of one group, in microseconds.
struct CpuTime {
  double quota = 0, period = 0;
};

/// Zeros where there is no limit: v2 says "max 100000", v1 a quota of -1.
CpuTime ReadCpuTime(const std::string& directory, bool v1) {
  CpuTime time;
  if (v1) {
    std::ifstream(directory + "/cpu.cfs_quota_us") >> time.quota;
    std::ifstream(directory + "/cpu.cfs_period_us") >> time.period;
  } else {
    std::ifstream(directory + "/cpu.max") >> time.quota >> time.period;
  }
  return time;
}

}  // namespace

BackendMemory ReadMemory(const std::string& root) {
  BackendMemory memory;
  memory.total = ReadField(root + "proc/meminfo", "MemTotal:").value_or(0) * 1024;
  memory.free = ReadField(root + "proc/meminfo", "MemAvailable:").value_or(0) * 1024;
  ForEachGroup(root, "memory", [&](const std::string& directory, bool v1) {
    if (v1) {
      ApplyLimit(directory, "/memory.limit_in_bytes", "/memory.usage_in_bytes",
                 "total_inactive_file", &memory);
    } else {
      ApplyLimit(directory, "/memory.max", "/memory.current", "inactive_file", &memory);
    }
  });
  return memory;
}

std::optional<double> ReadCpuQuota(const std::string& root) {
  std::optional<double> cores;
  ForEachGroup(root, "cpu", [&](const std::string& directory, bool v1) {
    const CpuTime time = ReadCpuTime(directory, v1);
    if (time.quota <= 0 || time.period <= 0) return;
    cores = std::min(cores.value_or(time.quota / time.period), time.quota / time.period);
  });
  return cores;
}

int UsefulThreads(int cores, std::optional<double> quota) {
  if (!quota || *quota >= cores) return cores;
  return std::max(1, static_cast<int>(std::ceil(*quota)));
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
