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

/// `denoise models load`, `unload` and `alias`, for admins.
struct ModelChangeFlags {
  client::ModelLoad load;
  std::string unload;
  std::string alias, target;
  bool delete_alias = false;
  bool json = false;
};
ExitCode LoadModel(const client::Client& client, const ModelChangeFlags& flags,
                   std::stop_token stop);
ExitCode UnloadModel(const client::Client& client, const ModelChangeFlags& flags,
                     std::stop_token stop);
ExitCode SetAlias(const client::Client& client, const ModelChangeFlags& flags,
                  std::stop_token stop);

/// `denoise models`: a table of all models, or everything about one.
ExitCode Models(const client::Client& client, const ModelsFlags& flags, std::stop_token stop);

}  // namespace denoised::command
