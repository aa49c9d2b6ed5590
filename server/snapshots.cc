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
#include <map>
#include <sstream>
#include <string>
#include <utility>

#include "engine/engine.h"
#include "server/api/server_info.h"
#include "server/api/translate.h"
#include "server/jobs/jobs.h"
#include "server/models/catalog.h"
#include "server/security/credentials.h"
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

/// What the engine says, by model: versions share the series, so that these go on when a model is
/// replaced.
std::map<std::string, EngineStats> ByModel(const std::vector<EngineStats>& versions) {
  std::map<std::string, EngineStats> models;
  for (const EngineStats& stats : versions) {
    EngineStats& sum = models[ModelOf(stats.model)];
    sum.active_images += stats.active_images;
    sum.slots += stats.slots;
    sum.oldest_wait_seconds = std::max(sum.oldest_wait_seconds, stats.oldest_wait_seconds);
    sum.parked_images += stats.parked_images;
    for (size_t i = 0; i < kPriorities; ++i) {
      sum.queued_requests[i] += stats.queued_requests[i];
      sum.queued_images_by_priority[i] += stats.queued_images_by_priority[i];
    }
    for (size_t i = 0; i < kEndReasons; ++i) sum.wasted_rows[i] += stats.wasted_rows[i];
  }
  return models;
}

void Collect(const Catalog& catalog, const std::vector<DeviceState>& devices,
             std::vector<MetricFamily>* families) {
  auto state = Gauge("denoised_model_state", "1 for the state that the model is in");
  auto memory = Gauge("denoised_model_memory_bytes", "Memory of a device by purpose");
  std::map<std::string, std::array<size_t, 3>> bytes;
  for (const CatalogModel& model : catalog.All()) {
    const ModelInfo& info = *model.info;
    std::array<size_t, 3>& sum = bytes[model.name];
    sum[0] += info.weight_bytes;
    sum[1] += info.activation_bytes;
    sum[2] += info.slot_bytes;
    if (!model.current) continue;
    for (const auto& [name, value] : {std::pair{"loading", ModelState::kLoading},
                                      {"available", ModelState::kReady},
                                      {"failed", ModelState::kFailed},
                                      {"unloading", ModelState::kUnloading}}) {
      Add(&state, {{"model", model.name}, {"state", name}}, info.state == value);
    }
  }
  for (const auto& [model, sum] : bytes) {
    for (const auto& [purpose, index] :
         {std::pair{"weights", 0}, {"activations", 1}, {"slots", 2}}) {
      for (const DeviceState& device : devices) {
        if (!device.health.ok()) continue;
        Add(&memory, {{"device", device.name}, {"model", model}, {"purpose", purpose}},
            static_cast<double>(sum[index]));
      }
    }
  }
  families->push_back(std::move(state));
  families->push_back(std::move(memory));
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
  for (const auto& [name, stats] : ByModel(engine.Stats())) {
    const Labels::value_type model = {"model", name};
    for (size_t i = 0; i < kPriorities; ++i) {
      const Labels::value_type priority = {"priority", denoised::Label(static_cast<Priority>(i))};
      Add(&requests, {model, priority}, stats.queued_requests[i]);
      Add(&images, {model, priority}, stats.queued_images_by_priority[i]);
    }
    Add(&oldest, {model}, stats.oldest_wait_seconds);
    Add(&active, {model}, stats.active_images);
    Add(&slots, {model}, stats.slots);
    Add(&parked, {model}, static_cast<double>(stats.parked_images));
    for (size_t i = 0; i < kEndReasons; ++i) {
      Add(&wasted, {model, {"reason", kEndReasonNames[i]}},
          static_cast<double>(stats.wasted_rows[i]));
    }
  }
  for (MetricFamily* family : {&requests, &images, &oldest, &active, &slots, &parked, &wasted}) {
    families->push_back(std::move(*family));
  }
}

/// A gauge without labels.
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

void ServingSnapshot::Detach() {
  std::lock_guard lock(mutex_);
  serving_ = nullptr;
}

std::vector<MetricFamily> ServingSnapshot::Collect() const {
  std::lock_guard lock(mutex_);
  if (serving_ == nullptr) return {};
  std::vector<MetricFamily> families;
  auto build = Gauge("denoised_build_info", "1, with the version and the devices");
  Add(&build, {{"version", kVersion}, {"device", DeviceNames(*serving_->engine)}}, 1);
  families.push_back(std::move(build));
  const std::vector<DeviceState> devices = serving_->engine->Devices();
  auto up = Gauge("denoised_device_up", "1 while the device works, 0 when it is lost");
  for (const DeviceState& device : devices) Add(&up, {{"device", device.name}}, device.health.ok());
  families.push_back(std::move(up));
  auto state = Gauge("denoised_server_state", "1 for the state that the server is in");
  for (const auto& [name, value] : {std::pair{"starting", v1::SERVER_STATE_STARTING},
                                    {"serving", v1::SERVER_STATE_SERVING},
                                    {"lame_duck", v1::SERVER_STATE_LAME_DUCK},
                                    {"draining", v1::SERVER_STATE_DRAINING}}) {
    Add(&state, {{"state", name}}, StateOf(*serving_) == value);
  }
  families.push_back(std::move(state));
  families.push_back(Single(MetricType::Gauge, "denoised_drain_deadline_time_seconds",
                            "By when the drain should be over, in seconds since 1970; 0 before it",
                            serving_->drain_deadline));
  denoised::Collect(*serving_->catalog, devices, &families);
  denoised::Collect(*serving_->engine, &families);
  if (const auto expiry = CertificateExpiry(serving_->config->security)) {
    families.push_back(Single(MetricType::Gauge, "denoised_certificate_expiry_time_seconds",
                              "When the certificate expires, in seconds since 1970",
                              std::chrono::duration<double>(expiry->time_since_epoch()).count()));
  }
  families.push_back(Single(MetricType::Gauge, "denoised_jobs",
                            "Requests that run or whose results are kept",
                            static_cast<double>(serving_->jobs->size())));
  families.push_back(Single(MetricType::Gauge, "denoised_job_bytes",
                            "Events that are held for those who watch jobs or may ask for them",
                            static_cast<double>(serving_->jobs->bytes())));
  const struct mallinfo2 heap = mallinfo2();
  families.push_back(
      Single(MetricType::Gauge, "denoised_heap_bytes",
             "Host memory that malloc has given out; what it keeps for reuse is not in it",
             static_cast<double>(heap.uordblks + heap.hblkhd)));
  return families;
}

std::vector<MetricFamily> ProcessSnapshot::Collect() const {
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
