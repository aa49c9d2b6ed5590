// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>

namespace denoised::command {

/// "1.4 s", "2 min 05 s", "1 h 02 min".
std::string HumanDuration(std::chrono::duration<double> duration);

/// "[=====>    ]  52 %  37/72 evaluations  1.4 s left", at most `columns` characters. The time left
/// supposes that the rest goes as the `elapsed` part went.
std::string ProgressBar(int done, int total, std::chrono::duration<double> elapsed, int columns);

}  // namespace denoised::command
