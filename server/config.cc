// SPDX-License-Identifier: Apache-2.0
#include "server/config.h"

#include <absl/strings/ascii.h>
#include <arpa/inet.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "engine/core/address.h"
#include "engine/core/config_reader.h"
#include "flags/flags.h"
#include "server/models/model_roots.h"
#include "server/security/clients.h"
#include "server/status/name.h"
#include "server/version.h"

namespace denoised {
namespace {

namespace fs = std::filesystem;

/// "max-rows" is DENOISED_MAX_ROWS.
std::string EnvironmentName(const std::string& flag) {
  std::string name = "DENOISED_";
  for (const char c : flag) name += c == '-' ? '_' : static_cast<char>(std::toupper(c));
  return name;
}

/// The user's cache directory; empty if there is no home directory.
std::string CacheDirectory() {
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  // The XDG specification: ignore relative paths.
  const std::string cache = variable("XDG_CACHE_HOME"), home = variable("HOME");
  if (fs::path(cache).is_absolute()) return cache + "/denoised";
  return fs::path(home).is_absolute() ? home + "/.cache/denoised" : "";
}

/// Teaches CLI11 to read its config file as one JSON object whose keys are the long flags:
///   {"listen": "0.0.0.0:50051", "model": {"digits": "models/mnist-32"}, "fp32": true}
/// CLI11's contract is to throw its own exceptions; ParseCommandLine turns them into a Status.
class JsonConfig : public CLI::Config {
 public:
  explicit JsonConfig(const CLI::App* app) : app_(app) {}

  std::string to_config(const CLI::App* app, bool, bool, std::string) const override {
    nlohmann::ordered_json settings;
    for (const CLI::Option* option : app->get_options()) {
      if (!option->get_configurable()) continue;
      const nlohmann::json setting = Setting(*option);
      if (setting != nlohmann::json::array()) settings[option->get_lnames().front()] = setting;
    }
    return settings.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  }

  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
    const std::string text(std::istreambuf_iterator<char>(input), {});
    const auto json = ParseJsonObject(text, "--config: " + File());
    if (!json.ok()) throw CLI::FileError(std::string(json.status().message()));
    std::vector<CLI::ConfigItem> items;
    for (const auto& [key, value] : json->items()) {
      const CLI::Option* const option = app_->get_option_no_throw("--" + key);
      if (option == nullptr) throw UnknownKey(key);
      if (!option->get_configurable())
        throw Wrong(fmt::format("\"{}\" is for the command line alone; remove it", key));
      // As CLI11, which takes an empty variable for none.
      const char* const variable = std::getenv(EnvironmentName(key).c_str());
      if (variable != nullptr && *variable != '\0') continue;
      CLI::ConfigItem item;
      item.name = key;
      if ((key == "model" || key == "precision") && value.is_object()) {
        for (const auto& [name, setting] : value.items()) {
          item.inputs.push_back(name + "=" + Scalar(key, setting));
        }
      } else if (value.is_array()) {
        for (const auto& element : value) item.inputs.push_back(Scalar(key, element));
      } else {
        item.inputs.push_back(Scalar(key, value));
      }
      items.push_back(std::move(item));
    }
    return items;
  }

 private:
  /// The one that is read.
  std::string File() const {
    const auto files = app_->get_config_ptr()->results();
    return files.empty() ? "" : files.back();
  }

  /// CLI11 names neither the file nor a remedy.
  CLI::ConfigError UnknownKey(const std::string& key) const {
    std::string flag = key;
    std::replace(flag.begin(), flag.end(), '_', '-');
    const bool known = app_->get_option_no_throw("--" + flag) != nullptr;
    return Wrong(fmt::format(
        "unknown key \"{}\"; {}", key,
        known ? fmt::format("write \"{}\"", flag) : "the keys are the names of the flags"));
  }
  CLI::ConfigError Wrong(const std::string& problem) const {
    return {fmt::format("--config: {}: {}", File(), problem), CLI::ExitCodes::ConfigError};
  }

  /// The effective value of `option`, or its default.
  static nlohmann::json Setting(const CLI::Option& option) {
    if (option.get_expected_min() == 0) return !option.empty() && option.as<bool>();
    const bool text = option.get_type_name().rfind("TEXT", 0) == 0;
    const auto scalar = [text](const std::string& value) -> nlohmann::json {
      auto number = nlohmann::json::parse(value, nullptr, /*allow_exceptions=*/false);
      if (text || !number.is_number()) return value;
      return number;
    };
    if (option.get_items_expected_max() == 1) {
      return scalar(option.empty() ? option.get_default_str() : option.results().front());
    }
    if (option.empty()) return nlohmann::json::parse(option.get_default_str(), nullptr, false);
    auto list = nlohmann::json::array();
    for (const std::string& value : option.results()) list.push_back(scalar(value));
    return list;
  }

  std::string Scalar(const std::string& key, const nlohmann::json& value) const {
    if (std::optional<std::string> text = FlagText(value)) return *std::move(text);
    throw Wrong(
        fmt::format("\"{}\" is {}; use a string, a number, true or false", key, value.dump()));
  }

  const CLI::App* const app_;
};

/// The arguments, with --config from the environment when they have none: CLI11 reads the file
/// before the environment, and a default file that is missing or broken it passes over.
std::vector<const char*> WithConfigOfEnvironment(int argc, const char* const* argv) {
  std::vector<const char*> arguments(argv, argv + argc);
  const char* const file = std::getenv("DENOISED_CONFIG");
  const bool given = std::any_of(arguments.begin(), arguments.end(), [](std::string_view text) {
    return text == "--config" || text.substr(0, 9) == "--config=";
  });
  if (file != nullptr && *file != '\0' && !given) {
    arguments.insert(arguments.begin() + 1, {"--config", file});
  }
  return arguments;
}

absl::Status CheckModelName(const std::string& flag, const std::string& name) {
  if (IsName(name)) return absl::OkStatus();
  return InvalidArgument("{}: \"{}\" is not a model name; {}", flag, name, kNameRule);
}

absl::StatusOr<ModelSource> ParseModel(const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos) {
    return InvalidArgument(
        "--model: \"{}\" has no '='; use name=directory, such as "
        "digits=models/mnist-32",
        text);
  }
  ModelSource source{text.substr(0, equals), text.substr(equals + 1)};
  DENOISED_RETURN_IF_ERROR(CheckModelName("--model", source.name));
  return source;
}

absl::Status CheckDirectory(const ModelSource& source) {
  std::error_code error;
  if (fs::is_directory(source.directory, error)) return absl::OkStatus();
  return NotFound(
      "--model {}: \"{}\" is not a directory; give the folder that holds "
      "model_index.json or config.json",
      source.name, source.directory);
}

/// "fp8" for all models, or "digits=fp8" for one of them. `all_known`: whether `config` has
/// all models that a start would have.
absl::Status ApplyPrecision(const std::string& text, bool all_known, Config* config) {
  const size_t equals = text.find('=');
  const bool all = equals == std::string::npos;
  const std::string name = all ? "" : text.substr(0, equals);
  const std::string value = all ? text : text.substr(equals + 1);
  const std::optional<Precision> precision = PrecisionFromName(value);
  if (!precision)
    return InvalidArgument("--precision: \"{}\" is not a precision; use {}", value, kPrecisions);
  if (all) {
    config->engine.precision = precision;
    return absl::OkStatus();
  }
  for (ModelSource& source : config->models) {
    if (source.name != name) continue;
    source.precision = precision;
    return absl::OkStatus();
  }
  if (!all_known) return absl::OkStatus();
  return InvalidArgument("--precision: there is no model \"{}\" among --model and --models", name);
}

/// Why the folder is not taken for a model; nothing if it is none, or hidden.
std::optional<std::string> WhySkipped(const fs::path& path) {
  std::error_code error;
  if (path.filename().string().starts_with('.')) return std::nullopt;
  const bool folder = fs::is_directory(path, error);
  if (!folder && fs::is_symlink(path, error) && !fs::exists(path, error))
    return "it is a link to nothing";
  if (!folder) return std::nullopt;
  const fs::directory_iterator readable(path, error);
  return error ? error.message() : "it holds no model_index.json or config.json";
}

absl::StatusOr<std::vector<ModelSource>> ScanModels(const std::string& directory,
                                                    std::vector<SkippedFolder>* skipped) {
  std::error_code error;
  std::vector<ModelSource> sources;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (!IsModelDirectory(it->path())) {
      if (auto reason = WhySkipped(it->path()))
        skipped->push_back({it->path().string(), *std::move(reason)});
      continue;
    }
    const std::string name = it->path().filename().string();
    DENOISED_RETURN_IF_ERROR(CheckModelName("--models", name));
    sources.push_back({name, it->path().string()});
  }
  if (error) {
    return NotFound("--models: \"{}\" cannot be read: {}; give a directory of model folders",
                    directory, error.message());
  }
  if (sources.empty()) {
    return NotFound(
        "--models: no folder in \"{}\" holds model_index.json or config.json; give the "
        "directory above the models, or use --model name=directory",
        directory);
  }
  std::sort(sources.begin(), sources.end(),
            [](const ModelSource& a, const ModelSource& b) { return a.name < b.name; });
  return sources;
}

/// An option whose values have names. CLI::CheckedTransformer would replace the names by numbers,
/// in --help and --print-config too.
template <typename Value>
CLI::Option* AddChoice(CLI::App* app, const std::string& flag, Value* value,
                       const std::map<std::string, Value>& values, const std::string& initial,
                       const std::string& description) {
  const auto set = [value, values](const std::string& name) { *value = values.at(name); };
  std::vector<std::string> words;
  words.reserve(values.size());
  for (const auto& [word, meaning] : values) words.push_back(word);
  return app->add_option_function<std::string>(flag, set, description)
      ->check(flags::OneOf(words))
      ->default_str(initial);
}

/// A time in seconds, from `low` to `high`.
void AddSeconds(CLI::App* app, const std::string& flag, std::chrono::milliseconds* time, double low,
                double high, const std::string& description) {
  const auto set = [time](double seconds) {
    *time = std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
  };
  app->add_option_function<double>(flag, set, description)
      ->check(flags::Between(low, high, "SECONDS"))
      ->default_str(fmt::format("{}", time->count() / 1e3));
}

/// An address that others than this machine can reach, if there is one.
std::string OpenAddress(const Config& config) {
  return IsLoopback(config.listen) && !IsLoopbackAlone(config) ? config.http_listen : config.listen;
}

/// "https://studio.example.org" or "http://localhost:5173", as browsers send it.
absl::Status CheckOrigin(const std::string& origin) {
  const size_t scheme = origin.find("://");
  const std::string host = scheme == std::string::npos ? "" : origin.substr(scheme + 3);
  const std::string known = origin.substr(0, std::min(scheme, origin.size()));
  const std::string lower = absl::AsciiStrToLower(known);
  if ((lower == "http" || lower == "https") && !host.empty() &&
      host.find_first_of("/?#@* ") == std::string::npos) {
    std::string sent = absl::AsciiStrToLower(origin);
    const std::string port = lower == "http" ? ":80" : ":443";
    if (sent.ends_with(port)) sent.resize(sent.size() - port.size());
    if (sent == origin) return absl::OkStatus();
    return InvalidArgument("--http-origins: browsers send \"{}\" as \"{}\"; use that", origin,
                           sent);
  }
  return InvalidArgument(
      "--http-origins: \"{}\" is no origin; use scheme://host or scheme://host:port without a "
      "path, such as https://studio.example.org",
      origin);
}

/// Prevents accidents: a server on a network whose tokens everyone can read or whose models
/// everyone can change.
absl::Status CheckSecurity(const Config& config) {
  const SecurityConfig& security = config.security;
  if (security.tls_cert.empty() != security.tls_key.empty()) {
    return InvalidArgument("{} is given without {}; TLS needs both",
                           security.tls_cert.empty() ? "--tls-key" : "--tls-cert",
                           security.tls_cert.empty() ? "--tls-cert" : "--tls-key");
  }
  if (!security.tls_client_ca.empty() && !security.tls()) {
    return InvalidArgument("--tls-client-ca needs TLS; give --tls-cert and --tls-key too");
  }
  if (!security.clients.empty() && !security.tls() && !security.plaintext_tokens) {
    return InvalidArgument(
        "--clients needs TLS, since anybody on the way could read the tokens; give --tls-cert and "
        "--tls-key too, or --allow-plaintext-tokens behind a sidecar that encrypts");
  }
  if (security.plaintext_tokens && security.clients.empty()) {
    return InvalidArgument(
        "--allow-plaintext-tokens without --clients: there are no tokens; name the clients, or "
        "leave it out");
  }
  if (security.plaintext_tokens && (security.tls() || !IsLoopbackAlone(config))) {
    return InvalidArgument(
        "--allow-plaintext-tokens is for a loopback address without TLS, and the server listens on "
        "{}{}; leave it out, or listen on 127.0.0.1 and have a sidecar pass calls on",
        OpenAddress(config), security.tls() ? " with TLS" : "");
  }
  if (config.admin && security.clients.empty() && !EverybodyIsAdmin(config)) {
    return InvalidArgument(
        "--admin=on has no admins on {}{}; name them in --clients with \"admin\": true{}",
        OpenAddress(config), security.tls_client_ca.empty() ? "" : " with --tls-client-ca",
        security.tls_client_ca.empty() ? ", or listen on 127.0.0.1" : "");
  }
  return absl::OkStatus();
}

/// What the flags say, before Finish() resolves and checks it.
struct Flags {
  Config config;
  std::vector<std::string> models, precisions;
  std::string token_for;
  std::string reflection = "auto", admin = "auto", autotune_cache = "auto";
  std::vector<double> priority_weights = {config.engine.priority_weights.begin(),
                                          config.engine.priority_weights.end()};
  bool print_config = false;
};

void AddModelFlags(CLI::App* app, Flags* flags) {
  app->option_defaults()->group("Models");
  Config& config = flags->config;
  app->add_option("--model", flags->models,
                  "A model: name=directory in diffusers layout. May be repeated");
  app->add_option("--models", config.models_directory,
                  "Load every model folder in this directory, each under its folder's name");
  app->add_option(
      "--precision", flags->precisions,
      "Precision of products: \"fp8\" or \"default\" (the device's), for all models; "
      "name=fp8 for one. Overrides the model's own setting. fp8 needs a calibration, see "
      "--calibrate. May be repeated");
  app->add_option("--calibrations", config.engine.calibrations,
                  "Directory of calibrations, which --calibrate writes and --precision fp8 reads. "
                  "Calibrations that it does not have are read from the model's directory");
  app->add_option(
         "--model-roots", config.model_roots,
         "Directories, separated by commas. Admins may load models only from these and their "
         "subdirectories. Default: that of --models, and the directories that contain the "
         "configured models")
      ->delimiter(',');
  app->add_option("--state-dir", config.state_dir,
                  "Directory that keeps loads, unloads and aliases of admins across restarts. A "
                  "model whose --model has changed since follows --model. Empty: a restart "
                  "undoes the changes of admins");
  AddSeconds(app, "--reload-models-seconds", &config.reload_models, 0.0, 86400.0,
             "How often to check for changed model files. A model is reloaded once its files "
             "have stayed the same for a second, or for this time if it is shorter. If that "
             "fails, the old version keeps serving. 0: never");
}

void AddNetworkFlags(CLI::App* app, Flags* flags) {
  app->option_defaults()->group("Network");
  Config& config = flags->config;
  app->add_option("--listen", config.listen,
                  "Address of the gRPC port; port 0 picks a free one. On other addresses than "
                  "loopback see Security");
  app->add_option(
      "--http-listen", config.http_listen,
      "Address of the HTTP port: the page, OpenAI's images API, and the calls of gRPC in "
      "JSON; empty disables it. On other addresses than loopback see Security");
  app->add_option(
         "--http-origins", config.http_origins,
         "Comma-separated origins whose pages may call the HTTP port "
         "(https://studio.example.org). Its own page always may. If everybody is an admin, "
         "also the host names of proxies")
      ->delimiter(',');
  AddSeconds(app, "--http-link-seconds", &config.http_link_time, 1.0, 86400.0,
             "How long links to images work (response_format \"url\" of OpenAI's API)");
  app->add_option(
      "--metrics-listen", config.metrics_listen,
      "Address of the HTTP port for Prometheus (/metrics) and probes (/healthz, /readyz); "
      "empty disables it");
  AddSeconds(app, "--keepalive-seconds", &config.connections.keepalive, 1.0, 86400.0,
             "How often to ping idle connections, to detect clients that are gone");
  AddSeconds(app, "--max-connection-age-seconds", &config.connections.max_age, 0.0, 31536000.0,
             "Ask clients to reconnect after this time, to spread load over replicas; 0: never");
  AddSeconds(app, "--max-connection-idle-seconds", &config.connections.max_idle, 0.0, 31536000.0,
             "Close connections without calls after this time; 0: never");
  AddSeconds(
      app, "--handshake-timeout-seconds", &config.connections.handshake, 0.1, 3600.0,
      "Close connections that take longer to become TLS and HTTP/2, or to send the headers of "
      "a request of HTTP/1.1");
  AddSeconds(app, "--write-timeout-seconds", &config.write_timeout, 0.1, 86400.0,
             "Cancel a stream whose client reads nothing for this time");
  AddSeconds(app, "--lame-duck-seconds", &config.lame_duck, 0.0, 3600.0,
             "After SIGTERM, SIGHUP or Ctrl-C, health is NOT_SERVING for this time before new "
             "requests are refused, so that load balancers can choose other servers");
  AddSeconds(app, "--grace-seconds", &config.grace, 0.0, 86400.0,
             "Time for running requests to finish after that");
}

void AddSecurityFlags(CLI::App* app, Flags* flags) {
  app->option_defaults()->group("Security");
  Config& config = flags->config;
  app->add_option("--tls-cert", config.security.tls_cert,
                  "Certificate chain of the server, PEM: turns TLS on. All files of this group are "
                  "read again when they change");
  app->add_option("--tls-key", config.security.tls_key,
                  "Its private key, PEM, without a passphrase");
  app->add_option("--tls-client-ca", config.security.tls_client_ca,
                  "Clients must have a certificate from this authority (mutual TLS), PEM");
  app->add_option(
      "--clients", config.security.clients,
      "JSON file of the clients that may call, by token or certificate, with their rights "
      "and limits; needs TLS, or --allow-plaintext-tokens");
  app->add_flag("--allow-plaintext-tokens", config.security.plaintext_tokens,
                "Accept the tokens of --clients without TLS, on a loopback address: for a server "
                "behind the encrypting sidecar of a service mesh. Every program on this host can "
                "reach the port");
  app->add_option("--make-token", flags->token_for,
                  "Make a token for the client of this name, print it and its entry for --clients, "
                  "and exit")
      ->configurable(false);
  AddSeconds(app, "--credentials-refresh-seconds", &config.security.refresh, 1.0, 86400.0,
             "How often to check these files for changes");
  app->add_option("--reflection", flags->reflection,
                  "Offer grpc.reflection: \"on\", \"off\", or \"auto\": only on loopback")
      ->check(flags::OneOf({"auto", "on", "off"}));
  app->add_option(
         "--admin", flags->admin,
         "Let admins load and unload models: \"on\", \"off\", or \"auto\": if there are "
         "admins. Admins are the clients with \"admin\": true in --clients. Without "
         "--clients and --tls-client-ca, everyone is an admin on a loopback address and "
         "nobody on others. Callers that a proxy forwards with x-forwarded-for, "
         "forwarded or via are not admins; use \"off\" or --clients behind a proxy on this "
         "machine that adds none of these")
      ->check(flags::OneOf({"auto", "on", "off"}));
}

void AddEngineFlags(CLI::App* app, Flags* flags) {
  app->option_defaults()->group("Engine");
  Config& config = flags->config;
  app->add_option("--device", config.engine.device,
                  "\"cpu\", \"cuda\", or \"auto\": CUDA if there is a GPU")
      ->check(flags::OneOf({"auto", "cpu", "cuda"}));
  app->add_option(
         "--devices", config.engine.devices,
         "Numbers of the GPUs to use, \"0,1\", all of one kind: each holds every model, and "
         "an image goes to one that has room. On the CPU each number is a separate worker")
      ->check(flags::Between(0, 1023))
      ->delimiter(',');
  app->add_flag("--generic-kernels", config.engine.generic_kernels,
                "On a Hopper GPU, use the kernels for all GPUs");
  AddChoice<bool>(app, "--autotune", &config.engine.autotune, {{"on", true}, {"off", false}}, "on",
                  "On a GPU, measure which kernels are the fastest for a model's shapes "
                  "when it is first loaded: \"on\" or \"off\". Images do not depend on it");
  app->add_option("--autotune-cache", flags->autotune_cache,
                  "Directory that keeps the autotuner's measurements; \"auto\": denoised in "
                  "$XDG_CACHE_HOME or ~/.cache. Empty: every start measures again");
  AddChoice<DType>(
      app, "--cpu-dtype", &config.engine.cpu_dtype, {{"fp32", DType::kF32}, {"bf16", DType::kBF16}},
      "fp32",
      "On the CPU, multiply in \"fp32\" or \"bf16\". bf16 needs AVX512-BF16 or AMX; it "
      "is faster, and images differ slightly from those of fp32");
  app->add_flag("--fp32", config.engine.fp32, "Compute in 32 bits, for debugging; slower on a GPU");
  app->add_option("--max-rows", config.engine.max_rows,
                  "Rows of the largest evaluation, 2 or more; 0: 64 on a GPU, 16 on the CPU")
      ->check(flags::ZeroOr(2, 1024));
  app->add_option("--max-slots", config.engine.max_slots,
                  "Images in flight per model and device; 0: same as --max-rows")
      ->check(flags::Between(0, 4096));
  app->add_option(
         "--max-prompt-chunks", config.engine.max_prompt_chunks,
         "Chunks of a prompt that models read (CLIP: 75 tokens each); longer prompts are cut "
         "off. Memory for keys and values of prompts is proportional to it")
      ->check(flags::Between(1, 16));
  app->add_option("--max-evaluations", config.engine.max_evaluations,
                  "Longest plan a request may need, in model evaluations per image")
      ->check(flags::Between(1, 100000));
  AddChoice<Batching>(app, "--batching", &config.engine.batching,
                      {{"step", Batching::kStep}, {"request", Batching::kRequest}}, "step",
                      "\"step\": images join at any evaluation; \"request\": only once the batch "
                      "before is done, as a baseline to compare with");
  app->add_option(
         "--priority-weights", flags->priority_weights,
         "Shares of interactive, normal and batch requests while all of them wait, \"16,4,1\"")
      ->check(flags::Between(1e-3, 1e3))
      ->delimiter(',');
  app->add_option("--keep-evaluations", config.engine.keep_evaluations,
                  "An image with at most this many evaluations left keeps its slot even if another "
                  "image has precedence")
      ->check(flags::Between(0, 100000));
  app->add_option(
         "--watchdog-seconds", config.engine.watchdog_seconds,
         "A GPU that takes longer for one evaluation, or for one step of loading or unloading a "
         "model, counts as lost; without a device the process exits. Reading files may take any "
         "time. At least 1; 0: never")
      ->check(flags::ZeroOr(1.0, 86400.0, "SECONDS"));
  app->add_flag(
      "--allow-nonfinite", config.engine.allow_nonfinite,
      "For debugging: deliver images that contain NaN or infinity. Without it, their requests "
      "end with DATA_LOSS");
}

void AddLimitFlags(CLI::App* app, Flags* flags) {
  app->option_defaults()->group("Limits");
  Config& config = flags->config;
  app->add_option("--max-queued-requests", config.engine.max_queued_requests,
                  "Requests that may wait; more get RESOURCE_EXHAUSTED")
      ->check(flags::Between(1, 1 << 24));
  app->add_option("--max-queued-bytes", config.engine.max_queued_bytes,
                  "Memory of waiting requests, mostly their initial noise and images")
      ->check(flags::Between(size_t{1} << 20, size_t{1} << 40));
  app->add_option("--max-queued-images", config.engine.max_queued_images,
                  "Images that may wait; requests beyond that get RESOURCE_EXHAUSTED")
      ->check(flags::Between(1, 1 << 24));
  AddSeconds(app, "--job-retention-seconds", &config.jobs.time, 0.0, 31536000.0,
             "How long results are kept for WatchJob and for retries. Only results of requests "
             "with a request_id or DISCONNECT_POLICY_CONTINUE are kept");
  app->add_option("--max-kept-job-bytes", config.jobs.max_bytes,
                  "Memory for these results and for running jobs together; the oldest results are "
                  "dropped first")
      ->check(flags::Between(int64_t{0}, int64_t{1} << 40));
  app->add_option("--max-request-bytes", config.limits.max_request_bytes,
                  "Largest request message, uploads included")
      ->check(flags::Between(int64_t{1024}, int64_t{2147483647}));
  app->add_option("--max-init-pixels", config.limits.max_init_pixels,
                  "Largest uploaded picture, width times height")
      ->check(flags::Between(int64_t{1}, int64_t{1} << 28));
  app->add_option("--max-image-pixels", config.limits.max_image_pixels,
                  "Width times height of the largest image to draw")
      ->check(flags::Between(int64_t{1}, int64_t{1} << 28));
  app->add_option("--max-count", config.engine.max_count,
                  "Images of one request; no more than --max-queued-images")
      ->check(flags::Between(1, 1 << 16));
  app->add_option("--max-steps", config.limits.max_steps,
                  "Denoising steps of one request; 0: the model's maximum")
      ->check(flags::Between(0, 100000));
  app->add_option("--max-tensor-bytes", config.limits.max_tensor_bytes,
                  "Size of all images of one request as float32")
      ->check(flags::Between(int64_t{1024}, int64_t{1} << 40));
  app->add_option("--max-reply-bytes", config.limits.max_reply_bytes,
                  "Largest reply message, as estimated before drawing; larger results have to be "
                  "streamed. Never more than --max-buffered-bytes")
      ->check(flags::Between(int64_t{1024}, int64_t{2147483647}));
  app->add_option("--max-decoding-bytes", config.max_decoding_bytes,
                  "Memory for unpacking uploaded images and noise, over all requests. A "
                  "request that does not fit gets RESOURCE_EXHAUSTED and a time to retry after")
      ->check(flags::Between(int64_t{1} << 20, int64_t{1} << 40));
  app->add_option("--max-previews-per-second", config.limits.max_previews_per_second,
                  "Previews of one image per second; the others are dropped. 0: no limit")
      ->check(flags::Between(0.0, 1e6));
  app->add_option(
         "--max-connections", config.connections.max_connections,
         "Concurrent connections, within the system's limit of open files; further ones are "
         "closed")
      ->check(flags::Between(1, 1 << 20));
  app->add_option("--max-streams-per-connection", config.connections.max_streams,
                  "Concurrent calls of one connection; more wait in the client")
      ->check(flags::Between(1, 1 << 20));
  app->add_option(
         "--max-streams-per-client", config.connections.max_streams_per_client,
         "Concurrent calls of one client: a name from --clients or a certificate, else a host")
      ->check(flags::Between(1, 1 << 20));
  app->add_option("--max-queued-requests-per-client",
                  config.connections.max_queued_requests_per_client,
                  "Requests of one client, as above, that may wait for the device; 0: "
                  "--max-queued-requests")
      ->check(flags::Between(0, 1 << 20));
  app->add_option(
         "--max-buffered-bytes", config.connections.max_buffered_bytes,
         "Memory for messages that gRPC sends and receives, over all connections; beyond it gRPC "
         "slows down and then refuses. As much again is for messages that are read until their "
         "jobs begin, together with uploads to the HTTP port")
      ->check(flags::Between(int64_t{1} << 24, int64_t{1} << 40));
  app->add_option("--worker-threads", config.worker_threads,
                  "Threads that check requests and encode images; 0: half of the cores within the "
                  "CPU quota, at least 2")
      ->check(flags::Between(0, 1024));
}

void AddLogFlags(CLI::App* app, Flags* flags) {
  app->option_defaults()->group("Logs");
  Config& config = flags->config;
  AddChoice<log::Format>(app, "--log-format", &config.log_format,
                         {{"text", log::Format::kText}, {"json", log::Format::kJson}}, "text",
                         "\"text\" or \"json\", a line each on stderr");
  AddChoice<log::Level>(app, "--log-level", &config.log_level,
                        {{"debug", log::Level::kDebug},
                         {"info", log::Level::kInfo},
                         {"warning", log::Level::kWarning},
                         {"error", log::Level::kError}},
                        "info", "\"debug\", \"info\", \"warning\" or \"error\"");
}

/// The engine refuses this too, but later than --print-config.
absl::Status CheckDevices(const std::vector<int>& devices) {
  std::set<int> numbers;
  for (const int device : devices) {
    if (!numbers.insert(device).second) {
      return InvalidArgument("--devices: {} is given twice; give each number once", device);
    }
  }
  return absl::OkStatus();
}

absl::Status SetPriorityWeights(const std::vector<double>& given,
                                std::array<double, kPriorities>* weights) {
  if (given.size() != weights->size()) {
    return InvalidArgument(
        "--priority-weights: {} has {} numbers; give {}, for interactive, normal and batch "
        "requests: 16,4,1",
        fmt::join(given, ","), given.size(), weights->size());
  }
  std::copy(given.begin(), given.end(), weights->begin());
  return absl::OkStatus();
}

/// Resolves what depends on several flags, and checks it. Collects all errors, one line each, with
/// the code of the first. For --print-config no model has to be given, and directories may be those
/// of another machine.
absl::Status Finish(Flags* flags) {
  Config* const config = &flags->config;
  config->engine.autotune_cache =
      flags->autotune_cache == "auto" ? CacheDirectory() : flags->autotune_cache;
  config->reflection =
      flags->reflection == "on" || (flags->reflection == "auto" && IsLoopbackAlone(*config));
  config->admin = flags->admin != "off";
  if (flags->admin == "auto" && config->security.clients.empty()) {
    config->admin = EverybodyIsAdmin(*config);
  }
  // gRPC holds a whole reply at once.
  config->limits.max_reply_bytes =
      std::min(config->limits.max_reply_bytes, config->connections.max_buffered_bytes);

  absl::Status problems;
  std::set<std::string> said;  // what is given twice is wrong in the same way twice
  const auto note = [&problems, &said](const absl::Status& status) {
    if (status.ok() || !said.emplace(status.message()).second) return;
    const std::string before = problems.ok() ? "" : std::string(problems.message()) + "\n";
    problems = absl::Status(problems.ok() ? status.code() : problems.code(),
                            before + std::string(status.message()));
  };
  const bool to_print = flags->print_config;
  note(CheckAddress("--listen", config->listen, 50051));
  note(CheckSecurity(*config));
  if (!config->http_listen.empty()) note(CheckAddress("--http-listen", config->http_listen, 8080));
  for (const std::string& origin : config->http_origins) note(CheckOrigin(origin));
  if (!config->metrics_listen.empty()) {
    note(CheckAddress("--metrics-listen", config->metrics_listen, 9090));
  }
  note(CheckDevices(config->engine.devices));
  note(SetPriorityWeights(flags->priority_weights, &config->engine.priority_weights));
  bool all_known = true;
  for (const std::string& text : flags->models) {
    absl::StatusOr<ModelSource> source = ParseModel(text);
    note(source.status());
    if (!source.ok()) {
      all_known = false;
      continue;
    }
    if (!to_print) note(CheckDirectory(*source));
    config->models.push_back(*std::move(source));
  }
  if (!config->models_directory.empty()) {
    const auto found = ScanModels(config->models_directory, &config->skipped_models);
    if (!to_print || !absl::IsNotFound(found.status())) note(found.status());
    if (found.ok()) config->models.insert(config->models.end(), found->begin(), found->end());
    all_known = all_known && found.ok();
  } else if (flags->models.empty() && to_print) {
    all_known = false;
  } else if (flags->models.empty() && config->calibrate.empty()) {
    note(InvalidArgument("no model is given; use --model name=directory or --models directory"));
  }
  std::set<std::string> names;
  for (const ModelSource& source : config->models) {
    if (!names.insert(source.name).second) {
      note(InvalidArgument("two models are named \"{}\"; give each its own name with --model",
                           source.name));
    }
  }
  for (const std::string& text : flags->precisions) note(ApplyPrecision(text, all_known, config));
  if (!to_print)
    note(ModelRoots::Make(config->model_roots, config->models, config->models_directory).status());
  return problems;
}

}  // namespace

bool IsLoopback(const std::string& address) {
  const std::string host = address.substr(0, address.rfind(':'));
  in_addr numeric{};
  // Not every name that begins with "127." is an address of this machine.
  if (inet_pton(AF_INET, host.c_str(), &numeric) == 1) return ntohl(numeric.s_addr) >> 24 == 127;
  return host == "localhost" || host == "[::1]";
}

bool IsLoopbackAlone(const Config& config) {
  return IsLoopback(config.listen) &&
         (config.http_listen.empty() || IsLoopback(config.http_listen));
}

bool EverybodyIsAdmin(const Config& config) {
  return config.admin && IsLoopbackAlone(config) && config.security.clients.empty() &&
         config.security.tls_client_ca.empty();
}

absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv) {
  const std::vector<const char*> arguments = WithConfigOfEnvironment(argc, argv);
  CommandLine line;
  Flags flags;
  CLI::App app{
      "denoised keeps diffusion models on the device and draws images over gRPC and HTTP.\n"
      "Example: denoised --model digits=models/mnist-32"};
  app.name("denoised");
  app.option_defaults()->always_capture_default();
  app.set_version_flag("--version", std::string("denoised ") + kVersion);
  app.config_formatter(std::make_shared<JsonConfig>(&app));
  app.set_config(
      "--config", "",
      "JSON file with the same names as these flags. Flags win over the environment "
      "(DENOISED_MAX_ROWS for --max-rows; empty is unset), that over the file, that over "
      "defaults");
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.add_flag("--print-config", flags.print_config,
               "Print the effective settings of flags, environment and --config, as a file "
               "for --config, and exit. Refuses values that a start refuses, but needs no model, "
               "certificates or directories")
      ->configurable(false);
  app.add_flag(
         "--check", flags.config.check,
         "Test certificates, clients, addresses and the device, load every model and draw an image "
         "with it. Print a line for each, and exit with 2 if a setting is wrong, or with 1 if "
         "something else fails")
      ->configurable(false);
  app.add_option(
         "--calibrate", flags.config.calibrate,
         "Draw images with the model in this directory on --device, write the scales that it "
         "needs for --precision fp8 to fp8.json in it, and exit. See --calibrations")
      ->configurable(false);

  AddModelFlags(&app, &flags);
  AddNetworkFlags(&app, &flags);
  AddSecurityFlags(&app, &flags);
  AddEngineFlags(&app, &flags);
  AddLimitFlags(&app, &flags);
  AddLogFlags(&app, &flags);

  flags::CheckNumbers(app);
  for (CLI::Option* option : app.get_options()) {
    // DENOISED_VERSION is what images and charts call their tag, and DENOISED_CHECK no setting.
    if (!option->get_configurable() && option != app.get_config_ptr()) continue;
    option->envname(EnvironmentName(option->get_lnames().front()));
  }

  try {
    std::vector<std::string> all = flags::ForCli11(app, {arguments.begin() + 1, arguments.end()});
    std::reverse(all.begin(), all.end());  // as CLI11 wants them
    app.parse(std::move(all));
  } catch (const CLI::CallForHelp&) {
    line.print = app.help();
    return line;
  } catch (const CLI::CallForVersion&) {
    line.print = std::string("denoised ") + kVersion + "\n";
    return line;
  } catch (const CLI::ParseError& error) {
    return InvalidArgument("{} (see denoised --help)", flags::Explain(app, error));
  }

  if (app.get_option("--make-token")->count() > 0) {
    DENOISED_ASSIGN_OR_RETURN(line.print, MakeToken(flags.token_for));
    return line;
  }
  if (app.get_option("--calibrate")->count() > 0 && flags.config.calibrate.empty()) {
    return InvalidArgument("--calibrate: \"\" is no directory; give that of the model");
  }
  DENOISED_RETURN_IF_ERROR(Finish(&flags));
  if (flags.print_config) {
    line.print = app.config_to_str();
    return line;
  }
  line.config = std::move(flags.config);
  return line;
}

}  // namespace denoised
