// SPDX-License-Identifier: Apache-2.0
#include "command/terminal.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace denoised::command {
namespace {

struct Rgb {
  uint8_t r, g, b;
  bool operator==(const Rgb&) const = default;
};

Rgb ColourAt(const Pixels& image, int x, int y) {
  if (y >= image.height) return {0, 0, 0};  // below the last row of an odd height
  const uint8_t* pixel = image.at(x, y);
  if (image.channels == 1) return {pixel[0], pixel[0], pixel[0]};
  return {pixel[0], pixel[1], pixel[2]};
}

/// xterm's palette: 16 + a 6 x 6 x 6 cube at levels 0, 95, 135, ..., 255; 232 + 24 greys at 8, 18,
/// ..., 238.
int Palette(Rgb colour) {
  if (colour.r == colour.g && colour.g == colour.b && colour.r >= 4 && colour.r < 247) {
    return 232 + std::min((colour.r - 3) / 10, 23);
  }
  const auto level = [](uint8_t v) { return v < 48 ? 0 : v < 115 ? 1 : (v - 35) / 40; };
  return 16 + 36 * level(colour.r) + 6 * level(colour.g) + level(colour.b);
}

std::string Escape(int layer, Rgb colour, TerminalColours colours) {  // 38: text, 48: background
  if (colours == TerminalColours::k256) return fmt::format("\x1b[{};5;{}m", layer, Palette(colour));
  return fmt::format("\x1b[{};2;{};{};{}m", layer, colour.r, colour.g, colour.b);
}

char GreyOf(Rgb upper, Rgb lower) {
  constexpr std::string_view kDensity = " .:-=+*#%@";
  // Rec. 601 luma of both pixels.
  const auto luma = [](Rgb c) { return 299 * c.r + 587 * c.g + 114 * c.b; };
  return kDensity[(luma(upper) + luma(lower)) * (kDensity.size() - 1) / (2 * 255'000)];
}

}  // namespace

TerminalColours ColoursOf(const char* colorterm, const char* term, const char* no_color,
                          const char* locale) {
  const auto value = [](const char* text) { return std::string_view(text ? text : ""); };
  const bool utf8 = value(locale).find("UTF-8") != std::string_view::npos ||
                    value(locale).find("utf8") != std::string_view::npos;
  if (!value(no_color).empty() || value(term) == "dumb" || !utf8) return TerminalColours::kGreys;
  if (value(colorterm) == "truecolor" || value(colorterm) == "24bit") {
    return TerminalColours::kTruecolour;
  }
  return value(term).find("256color") != std::string_view::npos ? TerminalColours::k256
                                                                : TerminalColours::kGreys;
}

TerminalColours TerminalColoursOfEnvironment() {
  const char* locale = nullptr;
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {  // in POSIX's order of precedence
    locale = std::getenv(name);
    if (locale != nullptr && *locale != '\0') break;
  }
  return ColoursOf(std::getenv("COLORTERM"), std::getenv("TERM"), std::getenv("NO_COLOR"), locale);
}

bool IsTerminal(int descriptor) {
  const char* term = std::getenv("TERM");
  return isatty(descriptor) && term != nullptr && std::string_view(term) != "dumb";
}

TerminalSize SizeOf(int descriptor) {
  winsize size = {};
  if (ioctl(descriptor, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0) return {};
  return {.columns = size.ws_col, .rows = size.ws_row};
}

std::string Render(const Pixels& image, TerminalColours colours) {
  std::string text;
  for (int y = 0; y < image.height; y += 2) {
    Rgb foreground = {}, background = {};
    for (int x = 0; x < image.width; ++x) {
      const Rgb upper = ColourAt(image, x, y), lower = ColourAt(image, x, y + 1);
      if (colours == TerminalColours::kGreys) {
        text += GreyOf(upper, lower);
        continue;
      }
      if (x == 0 || upper != foreground) text += Escape(38, upper, colours);
      if (x == 0 || lower != background) text += Escape(48, lower, colours);
      foreground = upper;
      background = lower;
      text += "▀";
    }
    text += colours == TerminalColours::kGreys ? "\n" : "\x1b[0m\n";
  }
  return text;
}

Pixels FitTo(const Pixels& image, int columns, int rows) {
  const int width = std::max(columns, 1), height = std::max(2 * rows, 2);
  const int multiple = std::min(width / image.width, height / image.height);
  if (multiple >= 1) return Resized(image, image.width * multiple, image.height * multiple);
  const double scale = std::min(1.0 * width / image.width, 1.0 * height / image.height);
  return Resized(image, std::max(1, static_cast<int>(image.width * scale)),
                 std::max(1, static_cast<int>(image.height * scale)));
}

}  // namespace denoised::command
