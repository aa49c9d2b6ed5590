// SPDX-License-Identifier: Apache-2.0
#include "server/check.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <chrono>
#include <ostream>
#include <string>

#include "server/models/saved_models.h"
#include "server/security/acceptor.h"
#include "server/security/clients.h"
#include "server/security/credentials.h"
#include "server/telemetry/http_server.h"
#include "server/telemetry/metrics.h"

namespace denoised {
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
      failed_ = true;
    }
  }

  bool failed() const { return failed_; }

 private:
  std::ostream& out_;
  bool failed_ = false;
};

void CheckSecurityFiles(const SecurityConfig& security, Report* report) {
  if (security.tls()) {
    absl::Status status = CheckCertificate(security);
    std::string expiry;
    if (const auto time = CertificateExpiry(security)) {
      expiry = fmt::format("expires {:%F %T} UTC", fmt::gmtime(*time));
      // A server would start with it, and serve once it is renewed; until then nobody can connect.
      if (status.ok() && *time < std::chrono::system_clock::now()) {
        status = InvalidArgument("it expired, {}; clients will refuse it", expiry);
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
      Acceptor::Listen(config.listen, config.connections.max_connections, &metrics);
  report->Add("listen " + config.listen, acceptor.status());
  if (config.metrics_listen.empty()) return;
  report->Add("metrics " + config.metrics_listen,
              HttpServer::Listen(config.metrics_listen, {}).status());
}

std::string Describe(const ModelInfo& model) {
  return fmt::format(
      "{}  {}, {:.1f} M parameters, {}×{}×{}, {} classes, {:.1f} MB, loaded in {:.2f} s",
      model.directory, model.architecture, static_cast<double>(model.parameters) / 1e6,
      model.height, model.width, model.channels, model.num_classes,
      static_cast<double>(model.weight_bytes + model.activation_bytes + model.slot_bytes) / 1e6,
      model.load_seconds);
}

}  // namespace

bool Check(const Config& config, const absl::StatusOr<std::unique_ptr<Engine>>& engine,
           std::ostream& out) {
  Report report(out);
  CheckSecurityFiles(config.security, &report);
  CheckAddresses(config, &report);
  if (!config.state_dir.empty()) {
    const auto state = SavedModelsFile::Open(config.state_dir);
    report.Add("state directory " + config.state_dir,
               state.ok() ? (*state)->Read().status() : state.status());
  }
  if (engine.ok()) {
    for (const DeviceState& device : (*engine)->Devices()) {
      report.Add("device " + device.name, device.health, device.description);
    }
  } else {
    report.Add("device " + config.engine.device, engine.status());
  }
  for (const ModelSource& source : config.models) {
    const std::string item = "model " + source.name;
    if (!engine.ok()) {
      report.Add(item, absl::FailedPreconditionError("not tried, as there is no device"));
    } else if (absl::Status status = (*engine)->Open(source.name, source.directory); !status.ok()) {
      report.Add(item, status);
    } else {
      report.Add(item, status, Describe(*(*engine)->Find(source.name)));
    }
  }
  return !report.failed();
}

}  // namespace denoised
