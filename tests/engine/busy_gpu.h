// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace denoised {

/// Keeps a GPU from running anything else, as one that hangs does, for as long as it lives.
class BusyGpu {
 public:
  explicit BusyGpu(int device);
  ~BusyGpu();
  BusyGpu(const BusyGpu&) = delete;
  BusyGpu& operator=(const BusyGpu&) = delete;

  /// False when it could not, or in a build without CUDA.
  bool ok() const { return ok_; }

 private:
  // Page-locked; the kernel waits until it is no longer zero. Without CUDA nothing uses it.
  [[maybe_unused]] int* go_on_ = nullptr;
  bool ok_ = false;
};

}  // namespace denoised
