#pragma once

#include <stop_token>
#include <string>

#include "command/report.h"
#include "denoised/client.h"

namespace denoised::command {

struct ModelsFlags {
  std::string name;  // empty: all
  bool json = false;
};

/// `denoise models`: a table of all models, or everything about one.
ExitCode Models(const client::Client& client, const ModelsFlags& flags, std::stop_token stop);

}  // namespace denoised::command
