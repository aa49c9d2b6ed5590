// SPDX-License-Identifier: Apache-2.0
#include "command/report.h"

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "command/json.h"
#include "command/progress.h"
#include "command/table.h"

namespace denoised::command {
namespace {

struct Flag {
  std::string_view field, flag;
};
// Where the flag is not the name of the field with dashes; a field after its own fields.
constexpr Flag kFlags[] = {{"text_options.clip_skip", "--clip-skip"},
                           {"text_options.max_chunks", "--max-chunks"},
                           {"seeds", "--seed"},
                           {"guidance_scale", "--guidance"},
                           {"image_guidance_scale", "--image-guidance"},
                           {"noise_schedule", "--schedule"},
                           {"s_churn", "--churn"},
                           {"s_tmin", "--churn-min"},
                           {"s_tmax", "--churn-max"},
                           {"s_noise", "--churn-noise"},
                           {"solver_order", "--order"},
                           {"width", "--size"},
                           {"height", "--size"},
                           {"output.format", "--format"},
                           {"output.quality", "--quality"},
                           {"init_image.encoded", "--init-image"},
                           {"init_image.tensor", "--init-image"},
                           {"init_image.strength", "--strength"},
                           {"mask.encoded", "--mask"},
                           {"mask.tensor", "--mask"},
                           {"initial_noise", "--noise"},
                           {"preview.every_evaluations", "--preview-every"},
                           {"preview.kind", "--preview-kind"}};
constexpr std::string_view kOwnNames[] = {"model",          "seed",
                                          "count",          "steps",
                                          "sampler",        "eta",
                                          "request_id",     "init_image",
                                          "mask",           "guidance_rescale",
                                          "guidance_start", "guidance_stop"};

// Where an image's condition comes from.
constexpr Flag kConditions[] = {{"text", "PROMPT"},          {"negative_text", "--negative"},
                                {"text_2", "--prompt-2"},    {"negative_text_2", "--negative-2"},
                                {"class_label", "--labels"}, {"class_vector", "--class-vectors"}};

/// "params.conditions[2].class_label" -> "--labels[2]",
/// "params.init_image.strength" -> "--strength", "params.initial_noise.shape" -> "--noise.shape"; a
/// field without a flag stays as it is.
std::string FlagOf(std::string field) {
  constexpr std::string_view kPrefix = "params.";
  if (field.rfind(kPrefix, 0) == 0) field.erase(0, kPrefix.size());
  const auto begins_with = [&field](std::string_view name) {
    return field.rfind(name, 0) == 0 &&
           (field.size() == name.size() || field[name.size()] == '.' || field[name.size()] == '[');
  };
  const size_t member = field.find("].");
  if (begins_with("conditions") && member != std::string::npos) {
    const std::string index =
        field.substr(sizeof("conditions") - 1, member + 2 - sizeof("conditions"));
    for (const Flag& flag : kConditions) {
      if (field.substr(member + 2) == flag.field) return std::string(flag.flag) + index;
    }
  }
  for (const Flag& flag : kFlags) {
    if (begins_with(flag.field)) return std::string(flag.flag) + field.substr(flag.field.size());
  }
  for (const std::string_view name : kOwnNames) {
    if (!begins_with(name)) continue;
    std::string flag = "--" + field;
    for (char& c : flag) c = c == '_' ? '-' : c;
    return flag;
  }
  return field;
}

}  // namespace

ExitCode ExitCodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kOk;
    case absl::StatusCode::kInvalidArgument:
      return kUsage;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kResourceExhausted:
      return kUnavailable;
    case absl::StatusCode::kDeadlineExceeded:
      return kTimeout;
    case absl::StatusCode::kCancelled:
      return kInterrupted;
    default:
      return kError;
  }
}

std::string Describe(const absl::Status& status) {
  const client::ErrorDetails details = client::Details(status);
  std::string text;
  std::set<std::string> lines;
  for (const client::FieldViolation& violation : details.field_violations) {
    const std::string line = fmt::format("error: {} {}\n", Printable(FlagOf(violation.field)),
                                         Printable(violation.description));
    // --size 33 is a wrong width and a wrong height.
    if (lines.insert(line).second) text += line;
  }
  if (!text.empty()) return text;
  text = fmt::format("error: {}\n", Printable({status.message().data(), status.message().size()}));
  if (absl::IsDeadlineExceeded(status)) {
    text = "error: the time of --timeout is over; give more, or ask for less\n";
  } else if (absl::IsCancelled(status)) {
    text = "cancelled\n";
  } else if (absl::IsUnauthenticated(status)) {
    text += "  give a token with --token-file FILE or DENOISE_TOKEN_FILE\n";
  } else if (absl::IsUnavailable(status) && details.domain.empty()) {
    text += "  is it running? name another one with --server HOST:PORT or DENOISE_SERVER\n";
  }
  if (details.retry_after) {
    text += fmt::format("  try again in {}\n", HumanDuration(*details.retry_after));
  }
  return text;
}

std::string DescribeAsJson(const absl::Status& status) {
  const client::ErrorDetails details = client::Details(status);
  nlohmann::json json = {{"type", "error"},
                         {"code", absl::StatusCodeToString(status.code())},
                         {"message", std::string(status.message())},
                         {"fields", nlohmann::json::array()}};
  for (const client::FieldViolation& violation : details.field_violations) {
    json["fields"].push_back({{"field", violation.field}, {"description", violation.description}});
  }
  if (!details.reason.empty()) json["reason"] = details.reason;
  if (details.retry_after) {
    json["retry_after_seconds"] = std::chrono::duration<double>(*details.retry_after).count();
  }
  return PrintableJson(json);
}

ExitCode Report(const absl::Status& status, bool json) {
  if (status.ok()) return kOk;
  std::fputs(Describe(status).c_str(), stderr);
  if (json) std::puts(DescribeAsJson(status).c_str());
  return ExitCodeOf(status);
}

}  // namespace denoised::command
