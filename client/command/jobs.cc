// SPDX-License-Identifier: Apache-2.0
#include "command/jobs.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <cstdio>

#include "command/call_options.h"
#include "command/generate.h"
#include "command/json.h"
#include "command/table.h"
#include "flags/printable.h"

namespace denoised::command {
namespace {

std::string LocalTime(double seconds) {
  return fmt::format("{:%Y-%m-%d %H:%M:%S}", fmt::localtime(static_cast<time_t>(seconds)));
}

void Print(const client::Job& job) {
  const auto line = [](const char* key, const std::string& value) {
    std::puts(fmt::format("{:<12}{}", key, Printable(value)).c_str());
  };
  line("request_id", job.request_id);
  line("state", std::string(client::Name(job.state)));
  if (!job.error.empty()) line("error", job.error);
  line("model", fmt::format("{}@{}", job.params.model, job.params.model_version));
  line("images", fmt::format("{} of {}", job.images_done, job.params.count));
  if (job.progress.evaluations_total > 0) {
    line("evaluations",
         fmt::format("{} of {}", job.progress.evaluations_done, job.progress.evaluations_total));
  }
  line("created", LocalTime(job.create_time));
  if (job.start_time) line("started", LocalTime(*job.start_time));
  if (job.end_time) line("ended", LocalTime(*job.end_time));
  if (job.expire_time) line("kept until", LocalTime(*job.expire_time));
}

ExitCode Tell(const absl::StatusOr<client::Job>& job, bool json) {
  if (!job.ok()) return Report(job.status(), json);
  if (json) {
    std::puts(PrintableJson(ToJson(*job)).c_str());
  } else {
    Print(*job);
  }
  return kOk;
}

void PrintTable(const std::vector<client::Job>& jobs) {
  std::vector<std::vector<std::string>> rows = {
      {"ID", "CLIENT", "STATE", "MODEL", "IMAGES", "EVALUATIONS", "CREATED"}};
  for (const client::Job& job : jobs) {
    rows.push_back(
        {job.request_id, job.client, std::string(client::Name(job.state)),
         fmt::format("{}@{}", job.params.model, job.params.model_version),
         fmt::format("{}/{}", job.images_done, job.params.count),
         fmt::format("{}/{}", job.progress.evaluations_done, job.progress.evaluations_total),
         LocalTime(job.create_time)});
  }
  std::fputs(Table(rows).c_str(), stdout);
}

}  // namespace

ExitCode ListJobs(const client::Client& client, const JobsFlags& flags,
                  const client::CallOptions& call) {
  const auto jobs = client.ListJobs(flags.query, WithTimeout(call, kQuestionTimeout));
  if (!jobs.ok()) return Report(jobs.status(), flags.json);
  if (!flags.json) {
    PrintTable(*jobs);
    return kOk;
  }
  nlohmann::json json = nlohmann::json::array();
  for (const client::Job& job : *jobs) json.push_back(ToJson(job));
  std::puts(PrintableJson(json).c_str());
  return kOk;
}

ExitCode GetJob(const client::Client& client, const JobsFlags& flags,
                const client::CallOptions& call) {
  return Tell(client.GetJob(flags.request_id, WithTimeout(call, kQuestionTimeout)), flags.json);
}

ExitCode WatchJob(const client::Client& client, const JobsFlags& flags,
                  const client::CallOptions& call) {
  GenerateFlags saving;
  saving.out = flags.out;
  saving.json = flags.json;
  return Watch(client, flags.request_id, flags.after_sequence, saving, call);
}

ExitCode CancelJob(const client::Client& client, const JobsFlags& flags,
                   const client::CallOptions& call) {
  return Tell(client.CancelJob(flags.request_id, WithTimeout(call, kQuestionTimeout)), flags.json);
}

}  // namespace denoised::command
