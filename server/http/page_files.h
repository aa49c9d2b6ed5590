// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <vector>

namespace denoised {

/// A file of server/http/page/, compiled into the program by cmake/embed.cmake.
struct PageFile {
  std::string_view path;  // "/" for index.html, else "/" and its name
  std::string_view mime_type;
  std::string_view etag;  // with its quotes
  std::string_view bytes;
};

const std::vector<PageFile>& PageFiles();

}  // namespace denoised
