// SPDX-License-Identifier: Apache-2.0
#include "server/snapshots.h"

#include <malloc.h>
#include <prometheus/metric_family.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/strip.h"
#include "server/security/credentials.h"
#include "server/status/model_name.h"
#include "server/telemetry/metrics.h"
#include "server/version.h"

namespace denoised {
namespace {

using Labels = std::vector<prometheus::ClientMetric::Label>;
using prometheus::MetricFamily;
using prometheus::MetricType;

constexpr std::array<const char*, kEndReasons> kEndReasonNames = {"cancelled", "disconnected",
                                                                  "deadline", "drained", "failed"};

MetricFamily Family(MetricType type, const char* name, const char* help) {
  MetricFamily family;
  family.name = name;
  family.help = help;
  family.type = type;
  return family;
}
MetricFamily Gauge(const char* name, const char* help) {
  return Family(MetricType::Gauge, name, help);
}
MetricFamily Counter(const char* name, const char* help) {
  return Family(MetricType::Counter, name, help);
}

void Add(MetricFamily* family, Labels labels, double value) {
  prometheus::ClientMetric metric;
  metric.label = std::move(labels);
  (family->type == MetricType::Gauge ? metric.gauge.value : metric.counter.value) = value;
  family->metric.push_back(std::move(metric));
}

/// The labels of a version, of the engine's name "digits@2".
Labels VersionLabels(const std::string& engine_name, Labels more = {}) {
  more.push_back({"model", ModelOf(engine_name)});
  more.push_back({"version", VersionOf(engine_name)});
  return more;
}

void Collect(const Catalog& catalog, const std::vector<DeviceState>& devices,
             std::vector<MetricFamily>* families) {
  auto state = Gauge("denoised_model_state", "1 for the state that the version is in");
  auto current = Gauge("denoised_model_current", "1 for the version that the name alone means");
  auto memory = Gauge("denoised_model_memory_bytes", "Memory of a device by purpose");
  for (const CatalogModel& model : catalog.All()) {
    const ModelInfo& info = *model.info;
    const std::string name = EngineName(model.name, model.version);
    Add(&current, VersionLabels(name), model.current);
    for (const auto& [label, value] : {std::pair{"loading", ModelState::kLoading},
                                       {"available", ModelState::kReady},
                                       {"failed", ModelState::kFailed},
                                       {"unloading", ModelState::kUnloading}}) {
      Add(&state, VersionLabels(name, {{"state", label}}), info.state == value);
    }
    for (const auto& [purpose, bytes] : {std::pair{"weights", info.weight_bytes},
                                         {"activations", info.activation_bytes},
                                         {"slots", info.slot_bytes},
                                         {"prompts", info.prompt_bytes}}) {
      for (const DeviceState& device : devices) {
        if (!device.health.ok()) continue;
        Add(&memory, VersionLabels(name, {{"device", device.name}, {"purpose", purpose}}),
            static_cast<double>(bytes));
      }
    }
  }
  for (MetricFamily* family : {&state, &current, &memory}) families->push_back(std::move(*family));
}

void Collect(const Jobs& jobs, const Catalog& catalog, std::vector<MetricFamily>* families) {
  constexpr v1::JobState kStates[] = {v1::JOB_STATE_QUEUED, v1::JOB_STATE_RUNNING,
                                      v1::JOB_STATE_SUCCEEDED, v1::JOB_STATE_FAILED,
                                      v1::JOB_STATE_CANCELLED};
  auto counts = jobs.CountByState();
  // Every model has a series for every state, even if it has no such job.
  for (const CatalogModel& model : catalog.All()) {
    for (const v1::JobState state : kStates) counts.try_emplace({model.name, state}, 0);
  }
  auto family = Gauge("denoised_jobs", "Requests that run or whose results are kept, by state");
  for (const auto& [key, count] : counts) {
    const auto& [model, state] = key;
    const std::string name(absl::StripPrefix(v1::JobState_Name(state), "JOB_STATE_"));
    Add(&family,
        {{"model", model.empty() ? "unknown" : model}, {"state", absl::AsciiStrToLower(name)}},
        count);
  }
  families->push_back(std::move(family));
}

void Collect(const Engine& engine, std::vector<MetricFamily>* families) {
  auto requests = Gauge("denoised_queued_requests", "Requests with images that wait for a slot");
  auto images = Gauge("denoised_queued_images", "Images that wait for a slot");
  auto oldest = Gauge("denoised_oldest_wait_seconds", "Age of the oldest request without a slot");
  auto active = Gauge("denoised_active_images", "Images in flight on the devices");
  auto slots = Gauge("denoised_slots", "Images that can be in flight");
  auto parked = Counter("denoised_parked_images_total",
                        "Images that gave their slot to another before they were done");
  auto wasted = Counter("denoised_wasted_rows_total",
                        "Rows of evaluations spent on requests that ended early");
  for (const EngineStats& stats : engine.Stats()) {
    const std::string& name = stats.model;
    for (size_t i = 0; i < kPriorities; ++i) {
      const Labels labels =
          VersionLabels(name, {{"priority", PriorityLabel(static_cast<Priority>(i))}});
      Add(&requests, labels, stats.queued_requests[i]);
      Add(&images, labels, stats.queued_images_by_priority[i]);
    }
    Add(&oldest, VersionLabels(name), stats.oldest_wait_seconds);
    Add(&active, VersionLabels(name), stats.active_images);
    Add(&slots, VersionLabels(name), stats.slots);
    Add(&parked, VersionLabels(name), static_cast<double>(stats.parked_images));
    for (size_t i = 0; i < kEndReasons; ++i) {
      Add(&wasted, VersionLabels(name, {{"reason", kEndReasonNames[i]}}),
          static_cast<double>(stats.wasted_rows[i]));
    }
  }
  for (MetricFamily* family : {&requests, &images, &oldest, &active, &slots, &parked, &wasted}) {
    families->push_back(std::move(*family));
  }
}

/// A metric without labels.
MetricFamily Single(MetricType type, const char* name, const char* help, double value) {
  MetricFamily family = Family(type, name, help);
  Add(&family, {}, value);
  return family;
}

/// Fields of /proc/self/stat from the third on; the second is the program's name in parentheses.
std::vector<std::string> ReadStat() {
  std::ifstream file("/proc/self/stat");
  const std::string text(std::istreambuf_iterator<char>(file), {});
  std::istringstream rest(text.substr(std::min(text.size(), text.rfind(')') + 1)));
  return {std::istream_iterator<std::string>(rest), {}};
}

/// When the system started, in seconds since 1970.
double BootTime() {
  std::ifstream file("/proc/stat");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("btime ", 0) == 0) return std::stod(line.substr(6));
  }
  return 0;
}

}  // namespace

std::vector<MetricFamily> CollectServing(const SnapshotSources& sources) {
  std::vector<MetricFamily> families;
  auto build = Gauge("denoised_build_info", "1, with the version and the devices");
  Add(&build, {{"version", kVersion}, {"device", sources.info->DeviceNames()}}, 1);
  families.push_back(std::move(build));
  const std::vector<DeviceState> devices = sources.engine->Devices();
  auto up = Gauge("denoised_device_up", "1 while the device works, 0 when it is lost");
  for (const DeviceState& device : devices) Add(&up, {{"device", device.name}}, device.health.ok());
  families.push_back(std::move(up));
  auto state = Gauge("denoised_server_state", "1 for the state that the server is in");
  const v1::ServerState now = sources.info->health().State();
  for (const auto& [name, value] : {std::pair{"starting", v1::SERVER_STATE_STARTING},
                                    {"serving", v1::SERVER_STATE_SERVING},
                                    {"lame_duck", v1::SERVER_STATE_LAME_DUCK},
                                    {"draining", v1::SERVER_STATE_DRAINING}}) {
    Add(&state, {{"state", name}}, now == value);
  }
  families.push_back(std::move(state));
  families.push_back(Single(MetricType::Gauge, "denoised_drain_deadline_time_seconds",
                            "By when the drain should be over, in seconds since 1970; 0 before it",
                            sources.drain->deadline));
  Collect(*sources.catalog, devices, &families);
  Collect(*sources.engine, &families);
  Collect(*sources.jobs, *sources.catalog, &families);
  if (const auto expiry = CertificateExpiry(sources.security)) {
    families.push_back(Single(MetricType::Gauge, "denoised_certificate_expiry_time_seconds",
                              "When the certificate expires, in seconds since 1970",
                              std::chrono::duration<double>(expiry->time_since_epoch()).count()));
  }
  families.push_back(Single(MetricType::Gauge, "denoised_job_bytes",
                            "Events that are held for those who watch jobs or may ask for them",
                            static_cast<double>(sources.jobs->bytes())));
  families.push_back(Single(MetricType::Gauge, "denoised_decoding_bytes",
                            "Memory that is reserved to unpack uploads",
                            static_cast<double>(sources.decoding->reserved())));
  const struct mallinfo2 heap = mallinfo2();
  families.push_back(
      Single(MetricType::Gauge, "denoised_heap_bytes",
             "Host memory that malloc has given out; what it keeps for reuse is not in it",
             static_cast<double>(heap.uordblks + heap.hblkhd)));
  return families;
}

std::vector<MetricFamily> CollectProcess() {
  // utime, stime, num_threads, starttime, vsize, rss of proc(5), counted from its field 3.
  constexpr size_t kUser = 11, kSystem = 12, kThreads = 17, kStart = 19, kVirtual = 20, kRss = 21;
  const std::vector<std::string> stat = ReadStat();
  if (stat.size() <= kRss) return {};
  const auto number = [&](size_t field) { return std::stod(stat[field]); };
  const double ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  std::error_code error;
  double open_files = 0;
  for (std::filesystem::directory_iterator it("/proc/self/fd", error), end; !error && it != end;
       it.increment(error)) {
    ++open_files;
  }
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  return {
      Single(MetricType::Counter, "process_cpu_seconds_total", "User and system time",
             (number(kUser) + number(kSystem)) / ticks),
      Single(MetricType::Gauge, "process_resident_memory_bytes", "Host memory in use",
             number(kRss) * static_cast<double>(sysconf(_SC_PAGESIZE))),
      Single(MetricType::Gauge, "process_virtual_memory_bytes", "Address space in use",
             number(kVirtual)),
      Single(MetricType::Gauge, "process_threads", "Threads", number(kThreads)),
      Single(MetricType::Gauge, "process_open_fds", "Open file descriptors, connections included",
             open_files),
      Single(MetricType::Gauge, "process_max_fds", "Limit of open file descriptors",
             static_cast<double>(files.rlim_cur)),
      Single(MetricType::Gauge, "process_start_time_seconds", "Start, in seconds since 1970",
             BootTime() + number(kStart) / ticks),
  };
}

}  // namespace denoised
