#include "server/config.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "server/version.h"

namespace denoised {
namespace {

namespace fs = std::filesystem;

/// Teaches CLI11 to read its config file as one JSON object whose keys are the long flags:
///   {"listen": "0.0.0.0:50051", "model": {"digits": "models/mnist-32"}, "fp32": true}
/// CLI11's contract is to throw its own exceptions; ParseCommandLine turns them into a Status.
class JsonConfig : public CLI::Config {
 public:
  std::string to_config(const CLI::App*, bool, bool, std::string) const override { return "{}\n"; }

  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
    const auto json = nlohmann::json::parse(input, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) {
      throw CLI::FileError(
          "--config: the file is not one JSON object, such as "
          "{\"listen\": \"127.0.0.1:50051\"}");
    }
    std::vector<CLI::ConfigItem> items;
    for (const auto& [key, value] : json.items()) {
      CLI::ConfigItem item;
      item.name = key;
      if (key == "model" && value.is_object()) {
        for (const auto& [name, directory] : value.items()) {
          item.inputs.push_back(name + "=" + Scalar(key, directory));
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
  static std::string Scalar(const std::string& key, const nlohmann::json& value) {
    if (value.is_string()) return value.get<std::string>();
    if (value.is_number() || value.is_boolean()) return value.dump();
    throw CLI::ConversionError(fmt::format(
        "--config: \"{}\" is {}; use a string, a number, true or false", key, value.dump()));
  }
};

bool IsModelName(const std::string& name) {
  return !name.empty() && name.size() <= 64 &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return std::isalnum(c) || c == '.' || c == '_' || c == '-';
         });
}

absl::Status CheckModelName(const std::string& flag, const std::string& name) {
  if (IsModelName(name)) return absl::OkStatus();
  return InvalidArgument(
      "{}: \"{}\" is not a model name; use 1 to 64 letters, digits, '.', '_' or '-'", flag, name);
}

bool IsModelDirectory(const fs::path& path) {
  std::error_code error;
  return fs::exists(path / "model_index.json", error) || fs::exists(path / "config.json", error);
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
  std::error_code error;
  if (!fs::is_directory(source.directory, error)) {
    return NotFound(
        "--model {}: \"{}\" is not a directory; give the folder that holds "
        "model_index.json or config.json",
        source.name, source.directory);
  }
  return source;
}

absl::StatusOr<std::vector<ModelSource>> ScanModels(const std::string& directory) {
  std::error_code error;
  std::vector<ModelSource> sources;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (!IsModelDirectory(it->path())) continue;
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

/// CLI::Range lets NaN through.
CLI::Validator Seconds(double low, double high) {
  return CLI::Validator(
      [low, high](std::string& text) {
        double seconds = 0;
        if (CLI::detail::lexical_cast(text, seconds) && seconds >= low && seconds <= high) {
          return std::string();
        }
        return fmt::format("{} is not a number from {} to {}", text, low, high);
      },
      "SECONDS");
}

absl::Status CheckAddress(const std::string& flag, const std::string& address) {
  const size_t colon = address.rfind(':');
  const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  const bool digits =
      !port.empty() && port.size() <= 5 &&
      std::all_of(port.begin(), port.end(), [](unsigned char c) { return std::isdigit(c); });
  if (colon == 0 || !digits || std::stoi(port) > 65535) {
    return InvalidArgument(
        "{}: \"{}\" is not host:port with a port of 0 to 65535; use for example "
        "127.0.0.1:50051, 0.0.0.0:50051 or [::1]:50051",
        flag, address);
  }
  return absl::OkStatus();
}

absl::Status Finish(const std::vector<std::string>& models, const std::string& models_directory,
                    Config* config) {
  DENOISED_RETURN_IF_ERROR(CheckAddress("--listen", config->listen));
  if (!config->metrics_listen.empty()) {
    DENOISED_RETURN_IF_ERROR(CheckAddress("--metrics-listen", config->metrics_listen));
  }
  for (const std::string& text : models) {
    DENOISED_ASSIGN_OR_RETURN(ModelSource source, ParseModel(text));
    config->models.push_back(std::move(source));
  }
  if (!models_directory.empty()) {
    DENOISED_ASSIGN_OR_RETURN(const std::vector<ModelSource> found, ScanModels(models_directory));
    config->models.insert(config->models.end(), found.begin(), found.end());
  }
  if (config->models.empty()) {
    return InvalidArgument("no model is given; use --model name=directory or --models directory");
  }
  std::set<std::string> names;
  for (const ModelSource& source : config->models) {
    if (!names.insert(source.name).second) {
      return InvalidArgument("two models are named \"{}\"; give each its own name with --model",
                             source.name);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv) {
  CommandLine line;
  Config& config = line.config;
  std::vector<std::string> models;
  std::string models_directory;
  double write_timeout = config.write_timeout.count() / 1e3;
  double keepalive = config.keepalive.count() / 1e3;
  double max_connection_age = config.max_connection_age.count() / 1e3;
  double grace = config.grace.count() / 1e3;

  CLI::App app{
      "denoised keeps diffusion models on the device and draws images over gRPC.\n"
      "Example: denoised --model digits=models/mnist-32"};
  app.name("denoised");
  app.option_defaults()->always_capture_default();
  app.set_version_flag("--version", std::string("denoised ") + kVersion);
  app.config_formatter(std::make_shared<JsonConfig>());
  app.set_config("--config", "", "JSON file with the same names as these flags; flags win");
  app.allow_config_extras(CLI::config_extras_mode::error);

  app.add_option("--model", models, "A model: name=directory in diffusers layout. May be repeated")
      ->group("Models");
  app.add_option("--models", models_directory,
                 "Load every model folder in this directory, each under its folder's name")
      ->group("Models");
  app.add_flag("--check", config.check, "Load the models, say what they are, and exit")
      ->group("Models");

  app.add_option("--listen", config.listen,
                 "Address of the gRPC port; port 0 picks a free one. There is no encryption or "
                 "login: on other addresses than loopback put a proxy in front")
      ->group("Network");
  app.add_option("--metrics-listen", config.metrics_listen,
                 "Address of the HTTP port for Prometheus (GET /metrics); empty disables it")
      ->group("Network");
  app.add_option("--keepalive-seconds", keepalive,
                 "Ping idle connections this often, to notice clients that vanished")
      ->check(Seconds(1.0, 86400.0))
      ->group("Network");
  app.add_option("--max-connection-age-seconds", max_connection_age,
                 "Ask clients to reconnect after so long, so that load spreads over replicas; "
                 "0: never")
      ->check(Seconds(0.0, 31536000.0))
      ->group("Network");
  app.add_option("--write-timeout-seconds", write_timeout,
                 "Cancel a stream whose reader takes nothing for so long")
      ->check(Seconds(0.1, 86400.0))
      ->group("Network");
  app.add_option("--grace-seconds", grace,
                 "After SIGTERM or Ctrl-C, give running requests so long to finish")
      ->check(Seconds(0.0, 86400.0))
      ->group("Network");

  app.add_option("--device", config.engine.device, "\"auto\", \"cpu\", \"cuda\" or \"cuda:N\"")
      ->group("Engine");
  app.add_flag("--generic-kernels", config.engine.generic_kernels,
               "On a Hopper GPU, compute with the kernels that every chip can run")
      ->group("Engine");
  app.add_flag("--fp32", config.engine.fp32, "Compute in 32 bits, for debugging; slower on a GPU")
      ->group("Engine");
  app.add_option("--max-rows", config.engine.max_rows,
                 "Rows of the largest evaluation, 2 or more; 0: 64 on a GPU, 16 on the CPU")
      ->check(CLI::Range(0, 1024))
      ->group("Engine");
  app.add_option("--max-slots", config.engine.max_slots,
                 "Images in flight per model; 0: as --max-rows")
      ->check(CLI::Range(0, 4096))
      ->group("Engine");
  app.add_option("--max-evaluations", config.engine.max_evaluations,
                 "Longest plan a request may need, in model evaluations per image")
      ->check(CLI::Range(1, 100000))
      ->group("Engine");

  app.add_option("--max-queued-images", config.engine.max_queued_images,
                 "Images that may wait; beyond it requests get RESOURCE_EXHAUSTED")
      ->check(CLI::Range(1, 1 << 24))
      ->group("Limits");
  app.add_option("--max-request-bytes", config.limits.max_request_bytes,
                 "Largest request message; an initial noise or image must fit")
      ->check(CLI::Range(int64_t{1024}, int64_t{2147483647}))
      ->group("Limits");
  app.add_option("--max-init-pixels", config.limits.max_init_pixels,
                 "Largest picture for image to image, in unpacked pixels")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 28))
      ->group("Limits");
  app.add_option("--worker-threads", config.worker_threads,
                 "Threads that check requests and encode images; 0: half of the cores, at least 2")
      ->check(CLI::Range(0, 1024))
      ->group("Limits");

  app.add_option("--log-format", config.log_format, "\"text\" or \"json\", a line each on stderr")
      ->transform(CLI::CheckedTransformer(std::map<std::string, log::Format>{
          {"text", log::Format::kText}, {"json", log::Format::kJson}}))
      ->default_str("text")
      ->group("Logs");
  app.add_option("--log-level", config.log_level, "\"debug\", \"info\", \"warning\" or \"error\"")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, log::Level>{{"debug", log::Level::kDebug},
                                            {"info", log::Level::kInfo},
                                            {"warning", log::Level::kWarning},
                                            {"error", log::Level::kError}}))
      ->default_str("info")
      ->group("Logs");

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    line.print = app.help();
    return line;
  } catch (const CLI::CallForVersion&) {
    line.print = std::string("denoised ") + kVersion + "\n";
    return line;
  } catch (const CLI::ParseError& error) {
    return InvalidArgument("{}; see denoised --help", error.what());
  }

  const auto milliseconds = [](double seconds) {
    return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
  };
  config.write_timeout = milliseconds(write_timeout);
  config.keepalive = milliseconds(keepalive);
  config.max_connection_age = milliseconds(max_connection_age);
  config.grace = milliseconds(grace);
  DENOISED_RETURN_IF_ERROR(Finish(models, models_directory, &config));
  return line;
}

}  // namespace denoised
