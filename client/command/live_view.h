// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <functional>
#include <string>

#include "command/pixels.h"
#include "command/terminal.h"

namespace denoised::command {

/// A picture with a line of text below, redrawn in place on a terminal. Not thread-safe.
class LiveView {
 public:
  /// Draws on `terminal`, which it does not own, and hides the cursor until it is destroyed.
  LiveView(std::FILE* terminal, TerminalColours colours);
  ~LiveView();
  LiveView(const LiveView&) = delete;
  LiveView& operator=(const LiveView&) = delete;

  /// Draws over what was drawn before; `picture` (null: none) is scaled to the terminal, and the
  /// line is cut to it.
  void Draw(const Pixels* picture, const std::string& line);
  /// Draws the line anew, below the picture that the last Draw() left.
  void DrawLine(const std::string& line);
  /// Takes the last line of text away and leaves the picture.
  void Finish(const Pixels* picture);
  /// Room for the line, bytes of ASCII.
  int columns() const;

 private:
  void Replace(const std::string& text);

  std::FILE* const terminal_;
  const TerminalColours colours_;
  int lines_ = 0;  // drawn so far, above the cursor; the last one is the line of text
};

/// Calls `end`, which ends or stops the program, while the cursor is shown that a view hides; after
/// that it is hidden again. Meanwhile no view can begin.
void WithCursorShown(const std::function<void()>& end);

}  // namespace denoised::command
