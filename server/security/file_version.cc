// SPDX-License-Identifier: Apache-2.0
#include "server/security/file_version.h"

#include <fmt/format.h>
#include <sys/stat.h>

namespace denoised {

std::string FileVersion(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return "absent";
  // The time of the last change is also that of its owner or mode.
  return fmt::format("{} {} {}.{} {}.{}", info.st_ino, info.st_size, info.st_mtim.tv_sec,
                     info.st_mtim.tv_nsec, info.st_ctim.tv_sec, info.st_ctim.tv_nsec);
}

}  // namespace denoised
