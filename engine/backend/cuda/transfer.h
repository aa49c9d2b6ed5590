// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/backend/cuda/device.h"

/// Copies between host and device that do not make the caller wait for the device.

namespace denoised::cuda {

/// Host memory to the device: the slow way in a stream of its own, to a ring on the device, and
/// from there in the order of the compute stream. The host's side is a ring of page-locked memory:
/// `from` is free again on return. Waits only when the rings are full of what the device has not
/// reached.
class UploadRing {
 public:
  static absl::StatusOr<std::unique_ptr<UploadRing>> Open(std::shared_ptr<Context> context);

  void Upload(const void* from, size_t bytes, void* to);

  /// Enqueues what reads a piece of an upload, which lies in device memory until that is done.
  using Consume = std::function<cudaError_t(const void* piece, size_t offset, size_t bytes)>;
  /// In pieces of whole `unit`s, each of at most some MiB.
  void UploadThrough(const void* from, size_t bytes, size_t unit, const Consume& consume);

 private:
  struct Piece {
    size_t begin, end;
    Event arrived, consumed;
  };
  UploadRing(std::shared_ptr<Context> context, PinnedMemory host, DeviceMemory device)
      : context_(std::move(context)), host_(std::move(host)), device_(std::move(device)) {}
  /// `bytes` of the rings that nothing under way reads.
  size_t Take(size_t bytes);
  void UploadPiece(const void* from, size_t offset, size_t bytes, const Consume& consume);

  const std::shared_ptr<Context> context_;
  const PinnedMemory host_;
  const DeviceMemory device_;  // of the same size
  std::deque<Piece> pieces_;   // oldest first
  size_t head_ = 0;
};

/// Device memory to the host: a snapshot on the device in the compute stream, so that later ops may
/// overwrite the source at once, then the slow way to the host in a stream of its own.
class DownloadPool {
 public:
  explicit DownloadPool(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  /// Memory for `count` downloads of up to `bytes` at a time, until the result, which the pool must
  /// outlive, goes. ResourceExhausted says what was needed and, of GPU memory, what is free.
  absl::StatusOr<std::shared_ptr<const void>> Reserve(size_t bytes, int count);
  std::unique_ptr<Download> Begin(const Tensor& from);

  /// A snapshot's memory on both sides; used again when its download has been let go and the copy
  /// is over.
  struct Staging {
    struct Memory {
      DeviceMemory device;
      PinnedMemory host;
    };
    std::shared_ptr<const Memory> memory;
    void* device = nullptr;
    void* host = nullptr;
    size_t bytes = 0;
    Event snapped, copied;
  };

 private:
  absl::StatusOr<std::shared_ptr<const Staging::Memory>> Add(size_t bytes, int count);
  /// The smallest that is free and large enough, or null.
  std::shared_ptr<Staging> Free(size_t bytes);

  const std::shared_ptr<Context> context_;
  std::vector<std::shared_ptr<Staging>> stagings_;
};

}  // namespace denoised::cuda
