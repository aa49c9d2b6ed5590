// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "command/connection_flags.h"
#include "command/report.h"

/// Servers under names of the user's own: `denoise context`.

namespace denoised::command {

/// What --context NAME stands for.
struct Context {
  ConnectionFlags connection;  // all but `context` and `traceparent`
  std::string page;            // address of the page in a browser; may be empty
};

struct Contexts {
  std::string current;  // used where the command line names none; may be empty
  std::map<std::string, Context> by_name;
};

/// $XDG_CONFIG_HOME/denoised/contexts.json; ~/.config where the variable is not set.
std::string ContextsPath();

/// Those of the file; none if there is no file. Errors name the file and the remedy, also when
/// others than its owner may read headers in it.
absl::StatusOr<Contexts> ReadContexts(const std::string& path);

/// Replaces the file, readable by its owner alone.
absl::Status WriteContexts(const std::string& path, const Contexts& contexts);

/// Fills in what neither a flag nor a variable of the environment has set on the parsed `app`, from
/// --context or else from the current context. Where --server is set and --context is not, no
/// context is used; where both are, and the context has another server, its token, its client
/// certificate, its headers and its page are not, nor is its leave to send a token without TLS.
/// `page` is set where it is empty.
absl::Status ApplyContext(const CLI::App& app, ConnectionFlags& flags, std::string& page);

/// `denoise context`.
struct ContextFlags {
  std::string name;
  std::string page;
  bool replace = false;
  bool json = false;
};
ExitCode AddContext(const ContextFlags& flags, const CLI::App& app, ConnectionFlags connection);
ExitCode ListContexts(const ContextFlags& flags);
ExitCode UseContext(const ContextFlags& flags);
ExitCode RemoveContext(const ContextFlags& flags);

}  // namespace denoised::command
