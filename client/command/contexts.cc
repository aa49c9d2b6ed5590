// SPDX-License-Identifier: Apache-2.0
#include "command/contexts.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "command/files.h"
#include "command/json.h"
#include "command/page.h"
#include "command/table.h"
#include "denoised/target.h"

namespace denoised::command {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxName = 64;

// The flags that a context holds, by their names in the file.
struct Text {
  const char *key, *flag;
  std::string* (*of)(ConnectionFlags&);
};
constexpr Text kTexts[] = {
    {"server", "--server", [](ConnectionFlags& flags) { return &flags.server; }},
    {"tls_ca", "--tls-ca", [](ConnectionFlags& flags) { return &flags.files.ca_file; }},
    {"tls_cert", "--tls-cert", [](ConnectionFlags& flags) { return &flags.files.cert_file; }},
    {"tls_key", "--tls-key", [](ConnectionFlags& flags) { return &flags.files.key_file; }},
    {"tls_server_name", "--tls-server-name",
     [](ConnectionFlags& flags) { return &flags.files.server_name; }},
    {"token_file", "--token-file", [](ConnectionFlags& flags) { return &flags.token_file; }}};
struct Switch {
  const char *key, *flag;
  bool* (*of)(ConnectionFlags&);
};
constexpr Switch kSwitches[] = {
    {"tls", "--tls", [](ConnectionFlags& flags) { return &flags.tls; }},
    {"allow_plaintext_token", "--allow-plaintext-token",
     [](ConnectionFlags& flags) { return &flags.allow_plaintext_token; }}};

bool IsName(const std::string& name) {
  if (name.empty() || name.size() > kMaxName) return false;
  for (const char c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.' && c != '_' && c != '-') {
      return false;
    }
  }
  return true;
}

nlohmann::json ContextToJson(Context context) {
  nlohmann::json json = nlohmann::json::object();
  for (const Text& text : kTexts) {
    if (!text.of(context.connection)->empty()) json[text.key] = *text.of(context.connection);
  }
  for (const Switch& flag : kSwitches) {
    if (*flag.of(context.connection)) json[flag.key] = true;
  }
  if (!context.connection.headers.empty()) json["headers"] = context.connection.headers;
  if (!context.page.empty()) json["page"] = context.page;
  return json;
}

/// Throws nlohmann's errors.
Context FromJson(const nlohmann::json& json) {
  Context context;
  for (const Text& text : kTexts) {
    if (json.contains(text.key)) json.at(text.key).get_to(*text.of(context.connection));
  }
  for (const Switch& flag : kSwitches) {
    if (json.contains(flag.key)) json.at(flag.key).get_to(*flag.of(context.connection));
  }
  if (json.contains("headers")) json.at("headers").get_to(context.connection.headers);
  if (json.contains("page")) json.at("page").get_to(context.page);
  return context;
}

absl::Status NoSuchContext(const Contexts& contexts, const std::string& name) {
  if (contexts.by_name.empty()) {
    return absl::InvalidArgumentError(
        fmt::format("there is no context \"{}\"; make it with denoise context add {} --server "
                    "HOST:PORT",
                    name, name));
  }
  std::vector<std::string> names;
  for (const auto& [known, context] : contexts.by_name) names.push_back(known);
  return absl::InvalidArgumentError(
      fmt::format("there is no context \"{}\"; use {}", name, fmt::join(names, ", ")));
}

}  // namespace

std::string ContextsPath() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): before any thread
    return std::string(value == nullptr ? "" : value);
  };
  fs::path folder = variable("XDG_CONFIG_HOME");
  // The specification of XDG: a relative path is invalid and ignored.
  if (!folder.is_absolute()) folder = fs::path(variable("HOME")) / ".config";
  return folder / "denoised" / "contexts.json";
}

absl::StatusOr<Contexts> ReadContexts(const std::string& path) {
  struct stat information = {};
  if (stat(path.c_str(), &information) != 0) {
    // A service may have no home, or none that it may look into.
    if (errno == ENOENT || errno == ENOTDIR || errno == EACCES) return Contexts();
    const std::string reason = std::strerror(errno);
    return absl::InvalidArgumentError(fmt::format("cannot read {}: {}", path, reason));
  }
  auto text = ReadFile(path, kMaxSmallFileBytes);
  if (!text.ok()) return text.status();
  const auto json = ParseJson(*text);
  if (!json.ok()) {
    return absl::InvalidArgumentError(
        fmt::format("{} is not a file of contexts; mend or remove it: it {}", path,
                    std::string(json.status().message())));
  }
  Contexts contexts;
  bool secrets = false;
  try {
    contexts.current = json->value("current", "");
    for (const auto& [name, context] : json->at("contexts").items()) {
      contexts.by_name[name] = FromJson(context);
      secrets = secrets || context.contains("headers");
    }
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(
        fmt::format("{} is not a file of contexts; mend or remove it: {}", path, error.what()));
  }
  if (secrets && (information.st_mode & 077) != 0) {
    return absl::InvalidArgumentError(fmt::format(
        "{} holds headers, and others than its owner may read it; run chmod 600 {}", path, path));
  }
  return contexts;
}

absl::Status WriteContexts(const std::string& path, const Contexts& contexts) {
  nlohmann::json json = {{"current", contexts.current}, {"contexts", nlohmann::json::object()}};
  for (const auto& [name, context] : contexts.by_name)
    json["contexts"][name] = ContextToJson(context);
  const std::string text = PrintableJson(json, 2) + "\n";
  const std::string folder = fs::path(path).parent_path();
  std::error_code error;
  if (fs::create_directories(folder, error); error) {
    return absl::InvalidArgumentError(fmt::format("cannot create {}: {}", folder, error.message()));
  }
  return WriteFile(path, text, S_IRUSR | S_IWUSR);
}

absl::Status ApplyContext(const CLI::App& app, ConnectionFlags& flags, std::string& page) {
  const bool named = app.get_option("--context")->count() > 0;
  if (named ? flags.context.empty() : app.get_option("--server")->count() > 0) {
    return absl::OkStatus();
  }
  const auto contexts = ReadContexts(ContextsPath());
  if (!contexts.ok()) return contexts.status();
  const std::string name = named ? flags.context : contexts->current;
  if (name.empty()) return absl::OkStatus();
  const auto found = contexts->by_name.find(name);
  if (found == contexts->by_name.end()) return NoSuchContext(*contexts, name);
  Context context = found->second;
  // What tells who calls goes to no server but the context's own, and only for that one was a token
  // without TLS allowed.
  if (app.get_option("--server")->count() > 0 && flags.server != context.connection.server) {
    ConnectionFlags& connection = context.connection;
    connection.tls = ToOptions(connection).tls.has_value();  // its certificate may have implied it
    connection.files.cert_file.clear();
    connection.files.key_file.clear();
    connection.token_file.clear();
    connection.allow_plaintext_token = false;
    connection.headers.clear();
    context.page.clear();
  }
  for (const Text& text : kTexts) {
    std::string& value = *text.of(context.connection);
    if (app.get_option(text.flag)->count() == 0 && !value.empty()) *text.of(flags) = value;
  }
  for (const Switch& flag : kSwitches) {
    if (app.get_option(flag.flag)->count() == 0) *flag.of(flags) = *flag.of(context.connection);
  }
  if (flags.headers.empty()) flags.headers = context.connection.headers;
  if (page.empty()) page = context.page;
  return absl::OkStatus();
}

namespace {

/// Keeps other denoises from changing the file at `path` while this one does. On a file system
/// without locks it does nothing.
class ContextsLock {
 public:
  explicit ContextsLock(const std::string& path) {
    std::error_code ignored;
    fs::create_directories(fs::path(path).parent_path(), ignored);
    const std::string lock = path + ".lock";
    file_ = open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, S_IRUSR | S_IWUSR);
    if (file_ >= 0) {
      flock(file_, LOCK_EX);
    } else {
      const std::string reason = std::strerror(errno);
      status_ = absl::InternalError(fmt::format("cannot open {}: {}", lock, reason));
    }
  }
  ~ContextsLock() {
    if (file_ >= 0) close(file_);
  }
  ContextsLock(const ContextsLock&) = delete;
  ContextsLock& operator=(const ContextsLock&) = delete;
  const absl::Status& status() const { return status_; }

 private:
  int file_ = -1;
  absl::Status status_;
};

absl::Status Add(const ContextFlags& flags, const CLI::App& app, ConnectionFlags connection) {
  if (!IsName(flags.name)) {
    return absl::InvalidArgumentError(
        fmt::format("\"{}\" is no name for a context; use 1 to {} letters, digits, '.', '_' or '-'",
                    flags.name, kMaxName));
  }
  if (app.get_option("--server")->count() == 0) {
    return absl::InvalidArgumentError("--server is missing; name the server that " + flags.name +
                                      " stands for, as host:port");
  }
  if (const auto target = client::ParseTarget(connection.server); !target.ok()) {
    return target.status();
  }
  if (!flags.page.empty()) {
    if (absl::Status status = CheckPage(flags.page); !status.ok()) return status;
  }
  // The context is used from any folder.
  for (std::string* path : {&connection.files.ca_file, &connection.files.cert_file,
                            &connection.files.key_file, &connection.token_file}) {
    if (path->empty()) continue;
    if (const auto bytes = ReadFile(*path, kMaxSmallFileBytes); !bytes.ok()) {
      return bytes.status();
    }
    *path = fs::absolute(*path).lexically_normal();
  }
  const std::string path = ContextsPath();
  const ContextsLock lock(path);
  if (!lock.status().ok()) return lock.status();
  auto contexts = ReadContexts(path);
  if (!contexts.ok()) return contexts.status();
  if (contexts->by_name.contains(flags.name) && !flags.replace) {
    return absl::InvalidArgumentError(
        fmt::format("there is a context \"{}\"; use another name, or --replace", flags.name));
  }
  contexts->by_name[flags.name] = {std::move(connection), flags.page};
  if (contexts->current.empty()) contexts->current = flags.name;
  return WriteContexts(path, *contexts);
}

/// Changes the file by `change`, if there is a context of this name.
template <typename Change>
ExitCode ChangeContext(const std::string& name, Change change) {
  const std::string path = ContextsPath();
  const ContextsLock lock(path);
  if (!lock.status().ok()) return Report(lock.status(), /*json=*/false);
  auto contexts = ReadContexts(path);
  if (!contexts.ok()) return Report(contexts.status(), /*json=*/false);
  if (!contexts->by_name.contains(name)) return Report(NoSuchContext(*contexts, name), false);
  change(*contexts);
  return Report(WriteContexts(path, *contexts), /*json=*/false);
}

}  // namespace

ExitCode AddContext(const ContextFlags& flags, const CLI::App& app, ConnectionFlags connection) {
  return Report(Add(flags, app, std::move(connection)), /*json=*/false);
}

ExitCode ListContexts(const ContextFlags& flags) {
  const auto contexts = ReadContexts(ContextsPath());
  if (!contexts.ok()) return Report(contexts.status(), flags.json);
  if (flags.json) {
    nlohmann::json json = nlohmann::json::array();
    for (const auto& [name, context] : contexts->by_name) {
      nlohmann::json entry = ContextToJson(context);
      // What is secret stays in the file.
      entry.erase("headers");
      entry["name"] = name;
      entry["current"] = name == contexts->current;
      json.push_back(entry);
    }
    std::puts(PrintableJson(json).c_str());
    return kOk;
  }
  std::vector<std::vector<std::string>> rows = {{"", "NAME", "SERVER", "TOKEN FILE", "PAGE"}};
  const auto or_dash = [](const std::string& text) { return text.empty() ? "-" : text; };
  for (const auto& [name, context] : contexts->by_name) {
    rows.push_back({name == contexts->current ? "*" : " ", name, context.connection.server,
                    or_dash(context.connection.token_file), or_dash(context.page)});
  }
  std::fputs(Table(rows).c_str(), stdout);
  return kOk;
}

ExitCode UseContext(const ContextFlags& flags) {
  return ChangeContext(flags.name, [&](Contexts& contexts) { contexts.current = flags.name; });
}

ExitCode RemoveContext(const ContextFlags& flags) {
  return ChangeContext(flags.name, [&](Contexts& contexts) {
    contexts.by_name.erase(flags.name);
    if (contexts.current == flags.name) contexts.current.clear();
  });
}

}  // namespace denoised::command
