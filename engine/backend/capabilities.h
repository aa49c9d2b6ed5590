// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace denoised {

/// What a device can do. Schedulers query this, never the kind of device.
struct Capabilities {
  /// Launch() returns before the work is done, so the host may run ahead of the device.
  bool runs_ahead = false;
  /// Work on several streams overlaps, so models get streams of their own.
  bool overlaps_streams = false;
  /// Several images in one op are faster than one after the other.
  bool gains_from_batches = false;
  /// A graph is captured for one number of rows. If capturing is slow and padding rows are cheap,
  /// few graphs are captured and rows are padded to the next size. Otherwise every number of rows
  /// has its own graph, because a padding row costs as much as any other.
  bool pads_rows = false;
  /// Work may never end, as after a fault of a GPU. Where it cannot, it is only slow, and
  /// EngineOptions::watchdog_seconds does not count.
  bool may_hang = false;
  /// Default of EngineOptions::max_rows.
  int default_rows = 16;
};

}  // namespace denoised
