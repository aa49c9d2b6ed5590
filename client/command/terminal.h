// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "command/pixels.h"

/// Pictures for a terminal.

namespace denoised::command {

/// What a terminal can show.
enum class TerminalColours {
  kGreys,      // ASCII characters of rising density
  k256,        // xterm's palette
  kTruecolour  // 24 bit
};

/// From the values of COLORTERM, TERM, NO_COLOR and the locale (null: not set). Half blocks need
/// UTF-8 and colours, so without either it is kGreys.
TerminalColours ColoursOf(const char* colorterm, const char* term, const char* no_color,
                          const char* locale);
/// The colours that the environment asks for.
TerminalColours TerminalColoursOfEnvironment();

/// Whether `descriptor` is a terminal whose cursor can be moved.
bool IsTerminal(int descriptor);

struct TerminalSize {
  int columns = 80, rows = 24;  // characters
};
/// The size of the terminal behind `descriptor`; 80 x 24 if it is unknown.
TerminalSize SizeOf(int descriptor);

/// The image at its size: a character is one pixel wide and two high. Lines end with '\n'; escape
/// sequences for colours only, none with kGreys.
std::string Render(const Pixels& image, TerminalColours colours);

/// The largest size within `columns` x `rows` characters at which pixels stay square: a whole
/// multiple when the image fits, a reduction when it does not.
Pixels FitTo(const Pixels& image, int columns, int rows);

}  // namespace denoised::command
