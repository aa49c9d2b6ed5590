// SPDX-License-Identifier: Apache-2.0
#pragma once

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
                   const client::CallOptions& call);
ExitCode UnloadModel(const client::Client& client, const ModelChangeFlags& flags,
                     const client::CallOptions& call);
ExitCode SetAlias(const client::Client& client, const ModelChangeFlags& flags,
                  const client::CallOptions& call);

/// `denoise models`: a table of all models, or everything about one.
ExitCode Models(const client::Client& client, const ModelsFlags& flags,
                const client::CallOptions& call);

}  // namespace denoised::command
