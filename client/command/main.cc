// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <numeric>
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
#include "command/table.h"

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

/// What is wrong with a number that CLI11 would not read in base 10; empty if nothing is.
std::string NotDecimal(const std::string& text, bool integer) {
  const size_t begin = std::min(text.find_first_not_of(" \t\n\v\f\r"), text.size());
  const bool signs = begin < text.size() && (text[begin] == '-' || text[begin] == '+');
  const std::string sign = signs && text[begin] == '-' ? "-" : "";
  const std::string_view digits = std::string_view(text).substr(begin + (signs ? 1 : 0));
  if (digits.size() < 2 || digits[0] != '0') return "";
  const auto letter = static_cast<char>(digits[1] | 0x20);  // in lower case
  if (const int base = letter == 'x' ? 16 : letter == 'b' && integer ? 2 : 0; base > 0) {
    uint64_t value = 0;
    const char* const end = digits.data() + digits.size();
    const auto [read, error] = std::from_chars(digits.data() + 2, end, value, base);
    const bool whole = error == std::errc() && read == end;
    return fmt::format("{} is not decimal; write {}", text,
                       whole ? sign + std::to_string(value) : "a decimal number");
  }
  // 010 as FLOAT is ten to everybody.
  if (!integer || digits.find_first_not_of("0123456789") != std::string_view::npos) return "";
  const size_t first = std::min(digits.find_first_not_of('0'), digits.size() - 1);
  return fmt::format("{} begins with a zero, which could mean octal; write {}{}", text, sign,
                     digits.substr(first));
}

/// CLI11 takes NaN and infinities for numbers, also in CLI::Range, and nothing for 0. It reads
/// integers as C does, 010 as 8, and wraps what is negative or too large for UINT.
void CheckNumbers(CLI::App& app) {
  const auto check = [](bool integer) {
    return CLI::Validator(
        [integer](std::string& text) {
          if (text.empty()) return std::string("the value is empty; use a number");
          if (std::string wrong = NotDecimal(text, integer); !wrong.empty()) return wrong;
          double number = 0;
          // What is no number at all is refused later.
          if (!CLI::detail::lexical_cast(text, number) || std::isfinite(number)) {
            return std::string();
          }
          return fmt::format("{} is not a finite number", text);
        },
        "");
  };
  const CLI::Validator unsigned_number(
      [](std::string& text) {
        uint64_t number = 0;
        const char* const end = text.data() + text.size();
        const auto [read, error] = std::from_chars(text.data(), end, number);
        if (error == std::errc() && read == end) return std::string();
        return fmt::format("{} is not a whole number from 0 to {}", text, UINT64_MAX);
      },
      "");
  for (CLI::Option* const option : app.get_options({})) {
    const std::string type = option->get_type_name();
    const bool is_unsigned = type.starts_with("UINT");
    if (is_unsigned) option->transform(unsigned_number);
    // transform() puts it before a CLI::Range, whose message for 08 would have no remedy.
    if (is_unsigned || type.starts_with("INT")) option->transform(check(/*integer=*/true));
    if (type.starts_with("FLOAT")) option->transform(check(/*integer=*/false));
  }
  for (CLI::App* const command : app.get_subcommands({})) CheckNumbers(*command);
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
      ->check(CLI::Range(1, INT32_MAX))
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
      ->check(CLI::Range(0.0, 1e6));
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
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
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

/// "--flag=" as "--flag" and "": CLI11 takes the next argument as the value of the former.
std::vector<std::string> WithEmptyValues(const CLI::App& app,
                                         const std::vector<std::string>& arguments) {
  std::vector<std::string> all;
  const CLI::App* command = &app;
  bool options = true;    // until "--"
  bool is_value = false;  // of the option before
  for (const std::string& text : arguments) {
    if (std::exchange(is_value, false)) {
      all.push_back(text);
      continue;
    }
    options = options && text != "--";
    const auto named = [&](const CLI::App* each) { return each->check_name(text); };
    for (const CLI::App* each : command->get_subcommands(named)) command = each;
    const size_t equals = text.find('=');
    const CLI::Option* option = nullptr;
    if (options && text.starts_with("-")) {
      for (const CLI::App* at = command; at != nullptr && option == nullptr; at = at->get_parent())
        option = at->get_option_no_throw(text.substr(0, equals));
    }
    const bool takes_value = option != nullptr && option->get_items_expected_max() > 0;
    const bool is_empty = takes_value && text.starts_with("--") && equals + 1 == text.size();
    is_value = takes_value && equals == std::string::npos;
    all.push_back(is_empty ? text.substr(0, equals) : text);
    if (is_empty) all.emplace_back();
  }
  return all;
}

/// The command that was given, or its parent: the last that is known.
const CLI::App* CommandOf(const CLI::App& app) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  return command;
}

/// The number of letters to insert, remove or change (Levenshtein) to make `b` of `a`.
size_t Distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t changed = diagonal + (a[i - 1] != b[j - 1] ? 1 : 0);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, changed}));
    }
  }
  return row[b.size()];
}

/// The commands below `app` that help and completion show.
std::vector<const CLI::App*> ShownCommands(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* each) { return !each->get_group().empty(); });
}

bool HasOption(const CLI::App& command, const std::string& name) {
  const CLI::Option* const option = command.get_option_no_throw(name);
  return option != nullptr && !option->get_group().empty();
}

/// Adds the commands below `parent` that have the option, as they are called ("jobs list").
void AddCommandsWith(const std::string& name, const CLI::App& parent, const std::string& path,
                     std::vector<std::string>* found) {
  for (const CLI::App* command : ShownCommands(parent)) {
    const std::string called = path + command->get_name();
    if (HasOption(*command, name)) found->push_back(called);
    AddCommandsWith(name, *command, called + " ", found);
  }
}
std::vector<std::string> CommandsWith(const std::string& name, const CLI::App& app) {
  std::vector<std::string> found;
  AddCommandsWith(name, app, "", &found);
  return found;
}

std::string NameOf(const std::string& option) { return option.substr(0, option.find('=')); }

/// What is wrong with an option that the command does not have, or not at this place.
std::string UnknownOption(const CLI::App& app, const std::string& given) {
  const std::string name = NameOf(given);
  const CLI::App* const command = CommandOf(app);
  if (HasOption(*command, name)) return fmt::format("{} must follow {}", name, command->get_name());
  const std::vector<std::string> others = CommandsWith(name, app);
  if (!others.empty()) {
    return fmt::format("{} is no option of {}, but of {}", name, command->get_name(),
                       fmt::join(others, ", "));
  }
  std::string close;
  size_t least = std::min<size_t>(2, (name.size() - 1) / 3) + 1;  // of a few letters all are near
  for (const CLI::App* at = command; at != nullptr; at = at->get_parent()) {
    for (const CLI::Option* option : at->get_options()) {
      for (const std::string& known : option->get_lnames()) {
        const size_t distance = Distance(name, "--" + known);
        if (!option->get_group().empty() && distance < least) least = distance, close = known;
      }
    }
  }
  return fmt::format("{} is no option{}", name,
                     close.empty() ? "" : fmt::format("; did you mean --{}?", close));
}

/// "Could not convert: --steps = 1.5", with what the option takes.
std::string NotConverted(const CLI::App& app, const std::string& what) {
  const size_t begin = what.find(": "), equals = what.find(" = ");
  if (begin == std::string::npos || equals == std::string::npos || equals < begin) return what;
  const std::string name = what.substr(begin + 2, equals - begin - 2);
  const std::string value = what.substr(equals + 3);
  const CLI::Option* option = nullptr;
  for (const CLI::App* at = CommandOf(app); at != nullptr && option == nullptr;
       at = at->get_parent())
    option = at->get_option_no_throw(name);
  const std::string type = option == nullptr ? "" : option->get_type_name();
  if (!type.starts_with("INT") && !type.starts_with("UINT"))
    return fmt::format("{}: {} is not a number; use one", name, value);
  const size_t digits = value.find_first_of("+-") == 0 ? 1 : 0;
  const bool whole =
      value.size() > digits && value.find_first_not_of("0123456789", digits) == std::string::npos;
  return whole ? fmt::format("{}: {} is too {}; use a {} whole number", name, value,
                             value[0] == '-' ? "small" : "large",
                             value[0] == '-' ? "larger" : "smaller")
               : fmt::format("{}: {} is not a whole number; use one", name, value);
}

/// "--steps: At Most 1 required but received 2" in plain words.
std::string Repeated(const std::string& what) {
  constexpr std::string_view kOnce = ": At Most 1 required but received ";
  const size_t at = what.find(kOnce);
  if (at == std::string::npos) return what;
  return fmt::format("{} is given {} times; give it once", what.substr(0, at),
                     what.substr(at + kOnce.size()));
}

/// What is wrong with the command line. Of a word that is no command CLI11 says only that one is
/// required; of an unknown option, whatever else it did not expect.
std::string Explained(const CLI::App& app, const CLI::Error& error) {
  const std::vector<std::string> rest = app.remaining(/*recurse=*/true);
  const auto option = std::find_if(rest.begin(), rest.end(), [](const std::string& text) {
    return text.size() > 1 && text.starts_with("-");
  });
  const bool is_unknown = option != rest.end() && *option != "--";
  // CLI11 names this error after the command, so its exit code tells what it is.
  const bool is_extra = error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError);
  if (is_extra && is_unknown) return UnknownOption(app, *option);
  if (error.get_name() == "ConversionError") return NotConverted(app, error.what());
  if (error.get_name() == "ArgumentMismatch") return Repeated(error.what());
  if (error.get_name() != "RequiredError") return error.what();
  std::vector<std::string> names;
  for (const CLI::App* each : ShownCommands(*CommandOf(app))) names.push_back(each->get_name());
  if (names.empty()) return error.what();  // an argument is required
  if (is_unknown && option == rest.begin() && CommandsWith(NameOf(*option), app).empty())
    return UnknownOption(app, *option);
  const std::string wrong = rest.empty() || rest[0].starts_with("-")
                                ? "A command is required"
                                : fmt::format("\"{}\" is no command", rest[0]);
  return fmt::format("{}; use {}", wrong, fmt::join(names, ", "));
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
  CheckNumbers(app);
  app.failure_message([](const CLI::App* failed, const CLI::Error& error) {
    // It quotes the command line, which may come from somebody else.
    return CLI::FailureMessage::simple(
        failed, CLI::Error(error.get_name(), command::Printable(Explained(*failed, error)),
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
    std::vector<std::string> arguments = WithEmptyValues(app, {argv + 1, argv + argc});
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
  const int code = Run(argc, argv);
  std::cout.flush();  // CLI11 prints the help there
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good()) return code;
  std::fputs("error: stdout cannot be written, the output is incomplete\n", stderr);
  return code == command::kOk ? static_cast<int>(command::kError) : code;
}
