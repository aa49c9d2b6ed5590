// SPDX-License-Identifier: Apache-2.0
#include "server/check.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <ostream>
#include <set>
#include <string>
#include <utility>

#include "server/models/catalog.h"
#include "server/models/saved_models.h"
#include "server/security/acceptor.h"
#include "server/security/clients.h"
#include "server/security/credentials.h"
#include "server/status/model_name.h"
#include "server/telemetry/metrics.h"

namespace denoised {

bool IsWrongSetting(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsNotFound(status);
}

namespace {

class Report {
 public:
  explicit Report(std::ostream& out) : out_(out) {}

  /// `detail` says more of an `item` that is right; `status`, what is wrong with it.
  void Add(const std::string& item, const absl::Status& status, const std::string& detail = "") {
    if (status.ok()) {
      out_ << "ok      " << item << (detail.empty() ? "" : "  ") << detail << std::endl;
    } else {
      out_ << "failed  " << item << ": " << status.message() << std::endl;
      if (failure_.ok() || (IsWrongSetting(status) && !IsWrongSetting(failure_))) failure_ = status;
    }
  }

  /// The first wrong setting, else the first failure.
  const absl::Status& failure() const { return failure_; }

 private:
  std::ostream& out_;
  absl::Status failure_;
};

/// For failures that a start does not report as a wrong setting.
absl::Status NoWrongSetting(const absl::Status& status) {
  return status.ok() ? status : absl::FailedPreconditionError(status.message());
}

void CheckSecurityFiles(const SecurityConfig& security, Report* report) {
  if (security.tls()) {
    absl::Status status = CheckCertificate(security);
    std::string expiry;
    if (const auto time = CertificateExpiry(security)) {
      expiry = fmt::format("expires {:%F %T} UTC", fmt::gmtime(*time));
      // A server would start with it, and serve once it is renewed; until then nobody can connect.
      if (status.ok() && *time < std::chrono::system_clock::now()) {
        status = FailedPrecondition("it expired, {}; clients will refuse it", expiry);
      }
    }
    report->Add("certificate " + security.tls_cert, status, expiry);
  }
  if (!security.tls_client_ca.empty()) {
    report->Add("client authority " + security.tls_client_ca, CheckClientAuthority(security));
  }
  if (!security.clients.empty()) {
    report->Add("clients " + security.clients,
                Clients::Open(security.clients, security.refresh).status());
  }
}

/// Both at the same time, so that one address given twice is found.
void CheckAddresses(const Config& config, Report* report) {
  Metrics metrics;
  const auto acceptor =
      Acceptor::Listen("--listen", config.listen, config.connections.max_connections, &metrics);
  report->Add("listen " + config.listen, acceptor.status());
  absl::StatusOr<std::unique_ptr<Acceptor>> http;
  if (!config.http_listen.empty()) {
    http = Acceptor::Listen("--http-listen", config.http_listen, config.connections.max_connections,
                            &metrics);
    report->Add("http " + config.http_listen, http.status());
  }
  if (config.metrics_listen.empty()) return;
  report->Add("metrics " + config.metrics_listen,
              Acceptor::Listen("--metrics-listen", config.metrics_listen,
                               config.connections.max_connections, &metrics)
                  .status());
}

double Megabytes(size_t bytes) { return static_cast<double>(bytes) / 1e6; }

/// The stages of a pipeline, and the times of those that were measured: of a prompt, row or image.
std::string DescribeStages(const ModelInfo& model) {
  std::string stages;
  for (const Stage stage : model.stages) {
    const double seconds = model.stage_seconds[static_cast<size_t>(stage)];
    stages += fmt::format("{}{}", stages.empty() ? "" : ", ", StageName(stage));
    if (seconds > 0) stages += fmt::format(" {:.{}f} ms", 1e3 * seconds, seconds < 0.1 ? 1 : 0);
  }
  return stages;
}

std::string Describe(const ModelInfo& model) {
  std::string text = fmt::format(
      "{}  {}, {:.1f} M parameters, {}, {}×{}×{}, {}, {:.1f} MB, loaded in {:.2f} s",
      model.directory, model.pipeline.empty() ? model.architecture : model.pipeline,
      static_cast<double>(model.parameters) / 1e6, model.precision, model.height, model.width,
      model.channels,
      model.text
          ? fmt::format("prompts of {} tokens", model.text->max_chunks * model.text->chunk_tokens)
          : fmt::format("{} classes", model.num_classes),
      Megabytes(model.bytes()), model.load_seconds);
  if (model.stages.size() > 1)
    text += fmt::format(
        "; stages: {}; memory: weights {:.1f} MB, activations {:.1f} MB, images in flight {:.1f} "
        "MB, "
        "prompts {:.1f} MB",
        DescribeStages(model), Megabytes(model.weight_bytes), Megabytes(model.activation_bytes),
        Megabytes(model.slot_bytes), Megabytes(model.prompt_bytes));
  return text;
}

/// What a server would load: the models of the configuration, and what --state-dir restores.
absl::StatusOr<CatalogOptions> ReadModels(const Config& config, Report* report) {
  const auto read = [&](const std::string& state_dir) {
    return MakeCatalogOptions(config.models, config.model_roots, state_dir,
                              config.models_directory);
  };
  if (config.state_dir.empty()) return read("");
  const std::string item = "state directory " + config.state_dir;
  std::error_code error;
  if (!std::filesystem::exists(config.state_dir, error)) {
    report->Add(item, SavedModelsFile::CheckCreatable(config.state_dir), "will be made");
    return read("");
  }
  auto options = read(config.state_dir);
  report->Add(item, options.status());
  if (options.ok()) return options;
  return read("");
}

/// Most steps of the image that is drawn, if its sampler can do with so few. What is not finite
/// shows in the first; PNDM needs four.
constexpr int kSteps = 4;

/// Draws an image; says how long that took.
absl::Status Draw(Engine& engine, const std::string& name, std::string* detail) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  DENOISED_RETURN_IF_ERROR(DrawAtDefaults(engine, name, /*count=*/1, kSteps));
  *detail += fmt::format("; an image drawn in {:.2f} s",
                         std::chrono::duration<double>(Clock::now() - start).count());
  return absl::OkStatus();
}

void CheckModels(const Config& config, Engine* engine, Report* report) {
  auto options = ReadModels(config, report);
  if (!options.ok()) return report->Add("models", options.status());
  Metrics metrics;
  Catalog catalog(*std::move(options), engine, &metrics);
  std::set<std::string> reported;
  for (const std::string& listed : catalog.Listed()) {
    if (engine == nullptr) {
      report->Add("model " + listed,
                  absl::FailedPreconditionError("not tried, as there is no device"));
      continue;
    }
    catalog.LoadListed(listed).IgnoreError();
    // More than one version, when the configured directory was loaded in place of a saved one.
    for (const CatalogModel& model : catalog.All()) {
      const ModelInfo& info = *model.info;
      const std::string name = EngineName(model.name, model.version);
      if (info.state == ModelState::kLoading || !reported.insert(name).second) continue;
      absl::Status status = NoWrongSetting(info.error);
      std::string detail;
      if (status.ok()) {
        detail = Describe(info);
        status = NoWrongSetting(Draw(*engine, name, &detail));
      }
      report->Add("model " + name, status, detail);
    }
  }
}

}  // namespace

absl::Status Check(const Config& config, const absl::StatusOr<std::unique_ptr<Engine>>& engine,
                   std::ostream& out) {
  Report report(out);
  CheckSecurityFiles(config.security, &report);
  CheckAddresses(config, &report);
  if (engine.ok()) {
    for (const DeviceState& device : (*engine)->Devices()) {
      report.Add("device " + device.name, device.health, device.description);
    }
  } else {
    report.Add("device " + config.engine.device, engine.status());
  }
  CheckModels(config, engine.ok() ? engine->get() : nullptr, &report);
  return report.failure();
}

}  // namespace denoised
