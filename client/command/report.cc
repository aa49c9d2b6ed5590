// SPDX-License-Identifier: Apache-2.0
#include "command/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "absl/strings/ascii.h"
#include "command/json.h"
#include "command/progress.h"
#include "flags/printable.h"

namespace denoised::command {
namespace {

struct Flag {
  std::string_view field, flag;
};
// Every field of a request that the command sets, without indices, and the option that sets it.
constexpr Flag kFlags[] = {
    {"params.model", "--model"},
    {"params.request_id", "--request-id"},
    {"params.seed", "--seed"},
    {"params.seeds", "--seed"},
    {"params.count", "--count"},
    {"params.conditions", "PROMPT, --labels or --class-vectors"},  // one of them: too many
    {"params.conditions.text", "PROMPT"},
    {"params.conditions.negative_text", "--negative"},
    {"params.conditions.text_2", "--prompt-2"},
    {"params.conditions.negative_text_2", "--negative-2"},
    {"params.conditions.class_label", "--labels"},
    {"params.conditions.class_vector", "--class-vectors"},
    {"params.text_options.clip_skip", "--clip-skip"},
    {"params.text_options.max_chunks", "--max-chunks"},
    {"params.guidance_scale", "--guidance"},
    {"params.image_guidance_scale", "--image-guidance"},
    {"params.guidance_rescale", "--guidance-rescale"},
    {"params.guidance_start", "--guidance-start"},
    {"params.guidance_stop", "--guidance-stop"},
    {"params.steps", "--steps"},
    {"params.sampler", "--sampler"},
    {"params.noise_schedule", "--schedule"},
    {"params.eta", "--eta"},
    {"params.s_churn", "--churn"},
    {"params.s_tmin", "--churn-min"},
    {"params.s_tmax", "--churn-max"},
    {"params.s_noise", "--churn-noise"},
    {"params.solver_order", "--order"},
    {"params.width", "--size"},
    {"params.height", "--size"},
    {"params.output.format", "--format"},
    {"params.output.quality", "--quality"},
    {"params.initial_noise", "--noise"},
    {"params.init_image", "--init-image"},
    {"params.init_image.encoded", "--init-image"},
    {"params.init_image.tensor", "--init-image"},
    {"params.init_image.strength", "--strength"},
    {"params.mask", "--mask"},
    {"params.mask.encoded", "--mask"},
    {"params.mask.tensor", "--mask"},
    {"params.priority", "--priority"},
    {"params.disconnect_policy", "--detach"},
    {"params.include_timings", "--timings"},
    {"preview.kind", "--preview-kind"},
    {"preview.every_evaluations", "--preview-every"},
    {"preview.decoder", "--preview-decoder"},
    // As the library names them, before they are sent.
    {"prompts.text", "PROMPT"},
    {"prompts.negative", "--negative"},
    {"prompts.text_2", "--prompt-2"},
    {"prompts.negative_2", "--negative-2"},
    // Of the connection.
    {"tls.ca_file", "--tls-ca"},
    {"tls.cert_file", "--tls-cert"},
    {"tls.key_file", "--tls-key"},
    {"token_file", "--token-file"}};

/// How much of `path` is `field`, whose indices are left out; 0 if it does not begin with it.
size_t Covered(std::string_view path, std::string_view field) {
  size_t at = 0;
  for (const char c : field) {
    if (c == '.' && at < path.size() && path[at] == '[') {
      at = std::min(path.find(']', at), path.size() - 1) + 1;
    }
    if (at == path.size() || path[at++] != c) return 0;
  }
  return at == path.size() || path[at] == '.' || path[at] == '[' ? at : 0;
}

/// "params.conditions[2].class_label" -> "--labels[2]",
/// "params.init_image.strength" -> "--strength", "params.initial_noise.shape" -> "--noise.shape"; a
/// field without an option stays as it is.
std::string FlagOf(std::string_view path) {
  const Flag* best = nullptr;
  size_t covered = 0;
  for (const Flag& flag : kFlags) {
    const size_t bytes = Covered(path, flag.field);
    if (bytes > covered) covered = bytes, best = &flag;
  }
  if (best == nullptr) return std::string(path);
  std::string index;  // of an image, inside of what the field's name covers
  if (const size_t begin = path.find('['); begin < covered) {
    index = path.substr(begin, path.find(']', begin) + 1 - begin);
  }
  return fmt::format("{}{}{}", best->flag, index, path.substr(covered));
}

bool IsIdentifier(char c) { return absl::ascii_isalnum(c) || c == '_'; }

/// The length of "params.conditions[2].text" at the begin of `text`, or of a single name.
size_t PathLength(std::string_view text) {
  size_t end = 0;
  while (end < text.size()) {
    const size_t bracket = text[end] == '[' ? text.find(']', end) : std::string::npos;
    if (bracket != std::string::npos) {
      end = bracket + 1;
    } else if (IsIdentifier(text[end]) ||
               (text[end] == '.' && end + 1 < text.size() && IsIdentifier(text[end + 1]))) {
      ++end;
    } else {
      break;
    }
  }
  return end;
}

/// The last part of a field's path.
std::string_view LastName(std::string_view field) { return field.substr(field.rfind('.') + 1); }

/// A server's text with options in the place of fields: "below params.steps" -> "below --steps".
/// With `names` also in that of a field's last name, where it has an underscore, so that it is no
/// word: "use class_label" -> "use --labels". Quoted text stays, because it is a user's.
std::string WithFlags(std::string_view text, bool names) {
  std::string changed;
  bool quoted = false;
  for (size_t i = 0; i < text.size();) {
    if (!IsIdentifier(text[i])) {
      if (text[i] == '"') quoted = !quoted;
      const bool escape = text[i] == '\\' && i + 1 < text.size();
      changed += text.substr(i, escape ? 2 : 1);
      i += escape ? 2 : 1;
      continue;
    }
    const std::string_view path = text.substr(i, std::max<size_t>(PathLength(text.substr(i)), 1));
    i += path.size();
    const auto* named = std::find_if(std::begin(kFlags), std::end(kFlags), [&](const Flag& flag) {
      return names && path.find('_') != std::string_view::npos && path == LastName(flag.field);
    });
    if (quoted) {
      changed += path;
    } else if (named != std::end(kFlags)) {
      changed += named->flag;
    } else {
      changed += path.find_first_of(".[") != std::string_view::npos ? FlagOf(path) : path;
      // A remedy, for what a picture cannot hold.
      if (path == "params.init_image.tensor" || path == "params.mask.tensor")
        changed += " FILE.npy";
    }
  }
  return changed;
}

/// A message with options in the place of fields: "params.model: there is no ..." -> "--model:
/// ...". This side's own messages name files without quotes, and a file may be called params.seed,
/// so there only what the message begins with is a field.
std::string MessageWithFlags(const std::string& message, bool by_server) {
  if (by_server) return WithFlags(message, /*names=*/false);
  const size_t length = PathLength(message);
  const std::string rest = message.substr(length);
  const bool is_field = rest.starts_with(": ") || rest.starts_with(" is ");
  return is_field ? FlagOf(message.substr(0, length)) + rest : message;
}

/// Of this side. Another one may cancel the job, which the server tells.
bool IsInterrupt(const absl::Status& status) {
  return absl::IsCancelled(status) && client::Details(status).domain.empty();
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
      return IsInterrupt(status) ? kInterrupted : kError;
    default:
      return kError;
  }
}

std::string Describe(const absl::Status& status) {
  const client::ErrorDetails details = client::Details(status);
  std::string text;
  std::set<std::string> lines;
  for (const client::FieldViolation& violation : details.field_violations) {
    // "the image is neither …" is a sentence of its own.
    const char* const colon = violation.description.starts_with("the ") ? ":" : "";
    const std::string line =
        fmt::format("error: {}{} {}\n", Printable(FlagOf(violation.field)), colon,
                    Printable(WithFlags(violation.description, /*names=*/true)));
    // --size 33 is a wrong width and a wrong height.
    if (lines.insert(line).second) text += line;
  }
  if (!text.empty()) return text;
  text = fmt::format("error: {}\n",
                     Printable(MessageWithFlags(std::string(status.message()),
                                                /*by_server=*/!details.domain.empty())));
  if (absl::IsDeadlineExceeded(status)) {
    // The server says why it cannot be in time.
    if (details.domain.empty()) text = "error: the server did not answer in time\n";
    text += "  if you gave --timeout, give more, or ask for less\n";
  } else if (IsInterrupt(status)) {
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
