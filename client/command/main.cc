// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "command/bench.h"
#include "command/call_options.h"
#include "command/completion.h"
#include "command/connection_flags.h"
#include "command/contexts.h"
#include "command/generate.h"
#include "command/generate_flags.h"
#include "command/health.h"
#include "command/interrupt.h"
#include "command/jobs.h"
#include "command/man_page.h"
#include "command/models.h"
#include "command/page.h"
#include "command/server_info.h"
#include "flags/flags.h"
#include "flags/printable.h"

using namespace denoised;  // NOLINT: the program itself

namespace {

constexpr char kExitCodes[] = R"(
Exit codes: 0 success; 1 error; 2 wrong command line or refused value; 3 the server cannot be
reached, is not ready or is full; 4 --timeout passed; 130 interrupted.)";

constexpr char kFooter[] = R"(Examples:
  denoise models                            list the models of the server
  denoise generate "a red apple" --grid 4x4
                                            draw sixteen images and watch them appear
  denoise health --wait 60                  wait until the server is ready
  id=$(denoise generate -l 7 -n 64 --detach)
                                            start a job that runs without a connection
  denoise jobs watch $id -o "{index}.png"   follow that job and save its images
  denoise bench -c 16                       measure images per second with 16 requests at a time
  denoise open                              open the page of the server in a browser
  denoise context add studio --server studio:50051
                                            give a server a name
  denoise --server dns:///replicas:50051 generate -l 7
                                            use any of several servers, and another if it fails

"denoise COMMAND --help" explains a command. The options above go with every command.
)";

struct ModelCommands {
  CLI::App *models, *load, *unload, *alias;
};
ModelCommands AddModels(CLI::App& app, command::ModelsFlags& flags,
                        command::ModelChangeFlags& change) {
  CLI::App* models = app.add_subcommand("models", "List the models, or describe one of them");
  models->add_option("name", flags.name, "Describe this model. Default: list all")
      ->type_name(command::kModel);
  models->add_flag("--json", flags.json, "Print JSON");
  models->footer(R"(Examples:
  denoise models                            a table of all models
  denoise models digits                     sizes, classes, samplers and limits of one model)");
  CLI::App* load = models->add_subcommand("load", "Load a model, or a new version of one (admins)");
  load->add_option("name", change.load.name, "Name of the model")->required();
  load->add_option("directory", change.load.directory,
                   "Directory on the server. Default: the directory of the current version, read "
                   "again");
  load->add_option("--version", change.load.version,
                   "Name of the version. Default: the highest number so far plus 1");
  load->add_flag("--keep-current", change.load.keep_current,
                 "Requests that name no version keep the old one; ask for the new one as "
                 "name@version");
  load->add_flag("--unload-previous", change.load.unload_previous,
                 "Unload the old version when its requests have finished");
  load->footer(R"(Examples:
  denoise models load digits /srv/models/digits-2 --keep-current
  denoise generate -m digits@2              try the new version
  denoise models alias digits digits@2      then make it the current one)");
  CLI::App* unload = models->add_subcommand("unload", "Unload a model or one version (admins)");
  unload->add_option("name", change.unload, "name for all versions, or name@version")
      ->required()
      ->type_name(command::kModel);
  unload->footer(R"(Waits until the requests of the model have finished.

Example:
  denoise models unload digits@1)");
  CLI::App* alias = models->add_subcommand("alias", "Give a model another name (admins)");
  alias
      ->add_option("alias", change.alias,
                   "The new name, or the name of a model to set its current version")
      ->required();
  CLI::Option* target = alias
                            ->add_option("target", change.target,
                                         "The model that it stands for: name or name@version")
                            ->type_name(command::kModel);
  alias->add_flag("--delete", change.delete_alias, "Delete the alias")->excludes(target);
  alias->footer(R"(Examples:
  denoise models alias best digits@2        requests for "best" use version 2 of digits
  denoise models alias digits digits@1      go back: version 1 is the current one again
  denoise models alias best --delete)");
  for (CLI::App* command : {load, unload, alias}) {
    command->add_flag("--json", change.json, "Print JSON");
  }
  return {models, load, unload, alias};
}

struct JobCommands {
  CLI::App *list, *get, *watch, *cancel;
};
JobCommands AddJobs(CLI::App& app, command::JobsFlags& flags) {
  CLI::App* jobs = app.add_subcommand("jobs", "List, follow and cancel jobs of the server");
  jobs->require_subcommand(1);
  jobs->footer(
      R"(Every request is a job. It ends with its connection, unless generate --detach started it; finished
jobs are kept for a while (denoised --help). Only the server that accepted a job can report on it.

Example:
  id=$(denoise generate -l 7 -n 64 --detach)
  denoise jobs watch $id -o "{index}.png")");
  CLI::App* list = jobs->add_subcommand("list", "List running and finished jobs");
  list->add_flag("--all", flags.query.all_clients, "Jobs of all clients (admins)");
  list->add_option("--limit", flags.query.limit, "List at most this many jobs, newest first")
      ->check(flags::Between(1, INT32_MAX))
      ->capture_default_str();
  list->footer(
      "Example:\n  denoise jobs list --json | jq -r '.[] | select(.state==\"running\") | "
      ".request_id'");
  CLI::App* get = jobs->add_subcommand("get", "Show state and progress of a job");
  get->footer("Example:\n  denoise jobs get $id");
  CLI::App* watch = jobs->add_subcommand("watch", "Follow a job until it ends and save its images");
  watch->footer("Example:\n  denoise jobs watch $id -o \"{index}.png\"");
  CLI::App* cancel = jobs->add_subcommand("cancel", "Cancel a job");
  cancel->footer("Example:\n  denoise jobs cancel $id");
  for (CLI::App* job : {get, watch, cancel}) {
    job->add_option("id", flags.request_id,
                    "Id of the job: what generate --detach printed, or --request-id")
        ->required()
        ->check(CLI::Validator(
            [](const std::string& id) {
              return id.empty() ? "it is empty; use what generate --detach printed" : "";
            },
            ""));
  }
  for (CLI::App* job : {list, get, watch, cancel}) {
    job->add_flag("--json", flags.json, "Print JSON");
  }
  watch->add_option(
      "--after", flags.after_sequence,
      "Skip the events up to this number (last_sequence of jobs get --json). Default: 0");
  watch->add_option("-o,--out", flags.out, "Output file; see denoise generate --help")
      ->type_name(command::kFile)
      ->check(command::NamesAFile());
  return {list, get, watch, cancel};
}

CLI::App* AddServerInfo(CLI::App& app, bool& json) {
  CLI::App* server = app.add_subcommand("server", "Show information about the server");
  server->require_subcommand(1);
  server->footer("Example:\n  denoise server info");
  CLI::App* info = server->add_subcommand("info", "Show version, devices, features and limits");
  info->add_flag("--json", json, "Print JSON");
  info->footer("Example:\n  denoise server info --json | jq .limits");
  return info;
}

CLI::App* AddHealth(CLI::App& app, command::HealthFlags& flags) {
  CLI::App* health = app.add_subcommand(
      "health", "Check whether the server is ready; the exit code is 0 if it is");
  health->add_option("--service", flags.service,
                     "gRPC service to check. Default: the server as a whole");
  health
      ->add_option("--wait", flags.wait_seconds,
                   "Wait up to this many seconds until it is ready. Default: 0")
      ->check(flags::Between(0.0, 1e6));
  health->add_flag("--json", flags.json, "Print JSON");
  health->footer("Example:\n  denoise health --wait 60 && denoise generate -l 7");
  return health;
}

struct ContextCommands {
  CLI::App *add, *list, *use, *remove;
};
ContextCommands AddContexts(CLI::App& app, command::ContextFlags& flags) {
  CLI::App* context = app.add_subcommand("context", "Give servers names");
  context->require_subcommand(1);
  context->footer(
      R"(A context is a name for the options of a connection. The current one is used where the command line
and the environment name no --server; --context names another one, and flags and variables win over it.

Example:
  denoise context add studio --server studio.example:50051 --tls --token-file studio.token
  denoise context use studio)");
  CLI::App* add = context->add_subcommand("add", "Save the options of a connection under a name");
  add->add_option("name", flags.name, "Name of the context")->required();
  add->add_option("--page", flags.page,
                  "Address of the page in a browser, http:// or https://; see denoise open");
  add->add_flag("--replace", flags.replace, "Replace the context of this name");
  add->footer(
      R"(The first context becomes the current one. The file is $XDG_CONFIG_HOME/denoised/contexts.json,
and only its owner may read it.

Example:
  denoise context add studio --server studio.example:50051 --tls --token-file studio.token)");
  CLI::App* list = context->add_subcommand("list", "List the contexts");
  list->add_flag("--json", flags.json, "Print JSON, without headers");
  list->footer("The current one is marked with *.\n\nExample:\n  denoise context list");
  CLI::App* use = context->add_subcommand("use", "Make a context the current one");
  use->footer("Example:\n  denoise context use studio");
  CLI::App* remove = context->add_subcommand("remove", "Remove a context");
  remove->footer("Example:\n  denoise context remove studio");
  for (CLI::App* subcommand : {use, remove}) {
    subcommand->add_option("name", flags.name, "Name of the context")
        ->required()
        ->type_name(command::kContext);
  }
  return {add, list, use, remove};
}

CLI::App* AddOpen(CLI::App& app, std::string& page) {
  CLI::App* open = app.add_subcommand("open", "Open the page of the server in a browser");
  open->add_option(
      "--page", page,
      "Address of the page, http:// or https://. Default: that of the context, or else "
      "port 8080 on the host of --server");
  open->footer(R"(Prints the address. Without a display and $BROWSER it only prints it.

Examples:
  denoise open
  denoise open --page https://studio.example/)");
  return open;
}

CLI::App* AddCompletion(CLI::App& app, std::string& shell) {
  CLI::App* completion =
      app.add_subcommand("completion", "Print a script that completes commands in a shell");
  completion->add_option("shell", shell, "Shell")
      ->required()
      ->check(flags::OneOf({"bash", "zsh", "fish"}));
  completion->footer(
      R"(The Debian package installs the scripts. The names of models come from the server, within a second.

Examples:
  denoise completion bash > ~/.local/share/bash-completion/completions/denoise
  denoise completion zsh > "${fpath[1]}/_denoise"
  denoise completion fish > ~/.config/fish/completions/denoise.fish)");
  return completion;
}

CLI::App* AddMan(CLI::App& app, std::string& folder) {
  CLI::App* man = app.add_subcommand("man", "Write the man pages into a folder");
  man->group("");  // for packages
  man->add_option("folder", folder, "Where to")->required();
  return man;
}

/// Values that a server or the file of contexts knows; none if they cannot be had at once.
std::vector<std::string> KnownValues(CLI::App& app, command::ConnectionFlags& flags,
                                     const std::string& argument,
                                     std::vector<std::string> connection) {
  std::vector<std::string> values;
  if (argument == command::kContext) {
    const auto contexts = command::ReadContexts(command::ContextsPath());
    if (!contexts.ok()) return {};
    for (const auto& [name, context] : contexts->by_name) values.push_back(name);
    return values;
  }
  connection.emplace_back("models");
  std::reverse(connection.begin(), connection.end());  // CLI11 takes them so
  std::string page;
  try {
    app.parse(connection);
  } catch (const CLI::ParseError&) {
    return {};
  }
  if (!command::ApplyContext(app, flags, page).ok()) return {};
  client::ConnectionOptions options = command::ToOptions(flags);
  options.retry.max_attempts = 1;
  const auto connected = client::Connect(flags.server, options);
  if (!connected.ok()) return {};
  const auto models = client::Client(*connected)
                          .ListModels(command::WithTimeout(command::ToCallOptions(flags, {}),
                                                           std::chrono::seconds(1)));
  if (!models.ok()) return {};
  for (const client::Model& model : *models) {
    // Versions of a model follow each other.
    if (values.empty() || values.back() != model.name) values.push_back(model.name);
  }
  return values;
}

int Run(int argc, char** argv) {
  CLI::App app("Generates images with the diffusion models of a denoised server.", "denoise");
  app.set_version_flag("--version", DENOISED_VERSION);
  app.require_subcommand(1);
  app.fallthrough();  // --server may follow the subcommand
  command::ConnectionFlags connection_flags;
  command::AddConnectionFlags(app, connection_flags);

  command::GenerateFlags generate_flags;
  CLI::App* generate = app.add_subcommand("generate", "Generate images");
  command::AddGenerateFlags(*generate, generate_flags);

  command::ModelsFlags models_flags;
  command::ModelChangeFlags change;
  const ModelCommands models = AddModels(app, models_flags, change);
  command::JobsFlags jobs_flags;
  const JobCommands jobs = AddJobs(app, jobs_flags);
  bool info_json = false;
  CLI::App* server_info = AddServerInfo(app, info_json);
  command::HealthFlags health_flags;
  CLI::App* health = AddHealth(app, health_flags);

  command::BenchFlags bench_flags;
  CLI::App* bench = app.add_subcommand("bench", "Load-test the server");
  command::AddBenchFlags(*bench, bench_flags);

  command::ContextFlags context_flags;
  const ContextCommands contexts = AddContexts(app, context_flags);
  std::string page, shell, man_folder;
  CLI::App* open = AddOpen(app, page);
  CLI::App* completion = AddCompletion(app, shell);
  CLI::App* man = AddMan(app, man_folder);
  // Last: subcommands inherit the footer that is set when they are added.
  app.footer(std::string(kFooter) + kExitCodes);
  flags::CheckNumbers(app);
  app.failure_message([](const CLI::App* failed, const CLI::Error& error) {
    // It quotes the command line, which may come from somebody else.
    return CLI::FailureMessage::simple(
        failed, CLI::Error(error.get_name(), Printable(flags::Explain(*failed, error)),
                           error.get_exit_code()));
  });

  // Before anything is parsed: the words are not flags of this call.
  if (argc > 1 && std::string_view(argv[1]) == "complete-words") {
    const command::Completion found = command::Complete(
        app, {argv + 2, argv + argc},
        [&](const std::string& argument, const std::vector<std::string>& connection) {
          return KnownValues(app, connection_flags, argument, connection);
        });
    std::fputs(command::ToText(found).c_str(), stdout);
    return command::kOk;
  }
  try {
    std::vector<std::string> arguments = flags::ForCli11(app, {argv + 1, argv + argc});
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? command::kOk : command::kUsage;
  }

  if (completion->parsed()) {
    std::fputs(command::CompletionScript(shell).c_str(), stdout);
    return command::kOk;
  }
  if (man->parsed()) {
    return command::Report(command::WriteManPages(app, DENOISED_VERSION, man_folder), false);
  }
  if (contexts.add->parsed()) return command::AddContext(context_flags, app, connection_flags);
  if (contexts.list->parsed()) return command::ListContexts(context_flags);
  if (contexts.use->parsed()) return command::UseContext(context_flags);
  if (contexts.remove->parsed()) return command::RemoveContext(context_flags);
  if (const absl::Status status = command::ApplyContext(app, connection_flags, page);
      !status.ok()) {
    return command::Report(status, generate_flags.json);
  }
  if (open->parsed()) {
    return command::OpenPage(page, connection_flags.server,
                             command::ToOptions(connection_flags).tls.has_value());
  }

  const command::Interrupt interrupt;
  client::ConnectionOptions options = command::ToOptions(connection_flags);
  if (health->parsed()) options.retry = command::HealthRetries(health_flags);
  if (bench->parsed()) options.retry.max_attempts = 1;  // it counts every error
  std::vector<client::Client> clients;
  for (int i = 0; i < bench_flags.connections; ++i) {
    auto connection = client::Connect(connection_flags.server, options);
    if (!connection.ok()) return command::Report(connection.status(), generate_flags.json);
    clients.emplace_back(*std::move(connection));
  }
  const client::Client& client = clients.front();
  const client::CallOptions call = command::ToCallOptions(connection_flags, interrupt.token());
  if (generate->parsed()) return command::Generate(client, generate_flags, call);
  if (models.load->parsed()) return command::LoadModel(client, change, call);
  if (models.unload->parsed()) return command::UnloadModel(client, change, call);
  if (models.alias->parsed()) return command::SetAlias(client, change, call);
  if (jobs.list->parsed()) return command::ListJobs(client, jobs_flags, call);
  if (jobs.get->parsed()) return command::GetJob(client, jobs_flags, call);
  if (jobs.watch->parsed()) return command::WatchJob(client, jobs_flags, call);
  if (jobs.cancel->parsed()) return command::CancelJob(client, jobs_flags, call);
  if (server_info->parsed()) return command::ServerInfo(client, info_json, call);
  if (models.models->parsed()) return command::Models(client, models_flags, call);
  if (bench->parsed()) return command::Bench(clients, bench_flags, call);
  return command::Health(client, health_flags, call);
}

}  // namespace

int main(int argc, char** argv) {
  // gRPC would log the same failures, less clearly. Who debugs it sets the variable.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  const int code = Run(argc, argv);
  std::cout.flush();  // CLI11 prints the help there
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good()) return code;
  std::fputs("error: stdout cannot be written, the output is incomplete\n", stderr);
  return code == command::kOk ? static_cast<int>(command::kError) : code;
}
