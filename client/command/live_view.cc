// SPDX-License-Identifier: Apache-2.0
#include "command/live_view.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string_view>
#include <thread>

namespace denoised::command {
namespace {

// ECMA-48 control sequences and DEC's cursor mode.
constexpr char kHideCursor[] = "\x1b[?25l";
constexpr char kShowCursor[] = "\x1b[?25h";
constexpr char kEraseToEndOfScreen[] = "\x1b[J";
constexpr char kEraseToEndOfLine[] = "\x1b[K";

std::atomic<int> hidden_cursor = -1;  // the terminal of the view
std::atomic_flag hiding;              // held by a view while it begins, and by WithCursorShown()

void ShowHiddenCursor(bool shown) {
  const std::string_view sequence = shown ? kShowCursor : kHideCursor;
  const int terminal = hidden_cursor;
  if (terminal < 0) return;
  // Where nobody reads the terminal, a write would hang, and the end with it.
  pollfd ready = {.fd = terminal, .events = POLLOUT, .revents = 0};
  if (poll(&ready, 1, 0) != 1) return;
  // Not by stdio, which may be in the middle of a drawing that hangs.
  [[maybe_unused]] const ssize_t ignored = write(terminal, sequence.data(), sequence.size());
}

}  // namespace

void WithCursorShown(const std::function<void()>& end) {
  // At most 100 ms: a view that begins hangs, too, where nobody reads the terminal.
  bool held = false;
  for (int i = 0; !held && i < 100; ++i) {
    held = !hiding.test_and_set();
    if (!held) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ShowHiddenCursor(true);
  end();
  ShowHiddenCursor(false);
  if (held) hiding.clear();
}

LiveView::LiveView(std::FILE* terminal, TerminalColours colours)
    : terminal_(terminal), colours_(colours) {
  while (hiding.test_and_set()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  hidden_cursor = fileno(terminal_);
  std::fputs(kHideCursor, terminal_);
  std::fflush(terminal_);
  hiding.clear();
}

LiveView::~LiveView() {
  std::fputs(kShowCursor, terminal_);
  std::fflush(terminal_);
  hidden_cursor = -1;
}

int LiveView::columns() const { return SizeOf(fileno(terminal_)).columns - 1; }

void LiveView::Draw(const Pixels* picture, const std::string& line) {
  std::string text;
  if (picture != nullptr) {
    const TerminalSize size = SizeOf(fileno(terminal_));
    // A full last column would wrap and a full last row would scroll.
    text = Render(FitTo(*picture, size.columns - 1, size.rows - 3), colours_);
  }
  Replace(line.empty() ? text : text + line.substr(0, columns()) + "\n");
}

void LiveView::DrawLine(const std::string& line) {
  std::fputs(fmt::format("\x1b[1F{}{}\n", line.substr(0, columns()), kEraseToEndOfLine).c_str(),
             terminal_);
  std::fflush(terminal_);
}

void LiveView::Finish(const Pixels* picture) { Draw(picture, ""); }

void LiveView::Replace(const std::string& text) {
  std::string output = lines_ > 0 ? fmt::format("\x1b[{}F", lines_) : "\r";
  // Erasing only what the new text leaves of a line, so that nothing flickers.
  for (const char c : text)
    output += c == '\n' ? std::string(kEraseToEndOfLine) + '\n' : std::string(1, c);
  output += kEraseToEndOfScreen;
  lines_ = static_cast<int>(std::count(text.begin(), text.end(), '\n'));
  std::fputs(output.c_str(), terminal_);
  std::fflush(terminal_);
}

}  // namespace denoised::command
