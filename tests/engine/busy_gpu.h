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
  int* go_on_ = nullptr;  // page-locked; the kernel waits for it to become other than zero
  bool ok_ = false;
};

}  // namespace denoised
