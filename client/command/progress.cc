// SPDX-License-Identifier: Apache-2.0
#include "command/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace denoised::command {

std::string HumanDuration(std::chrono::duration<double> duration) {
  const double seconds = std::max(duration.count(), 0.0);
  if (seconds < 59.95) return fmt::format("{:.1f} s", seconds);
  const int64_t whole = std::llround(seconds);
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole % 3600 / 60);
}

std::string ProgressBar(int done, int total, std::chrono::duration<double> elapsed, int columns) {
  total = std::max(total, 1);
  done = std::clamp(done, 0, total);
  std::string text =
      fmt::format(" {:3} %  {}/{} evaluations", done * int64_t{100} / total, done, total);
  if (done > 0 && done < total) {
    text += fmt::format("  {} left", HumanDuration(elapsed * (1.0 * (total - done) / done)));
  }
  const int room = std::min(40, columns - static_cast<int>(text.size()) - 2);
  if (room < 4) return text.substr(1, std::max(columns, 0));
  const auto filled = static_cast<int>(int64_t{room} * done / total);
  std::string bar(filled, '=');
  if (filled < room) bar += '>';
  bar.resize(room, ' ');
  return '[' + bar + ']' + text;
}

}  // namespace denoised::command
