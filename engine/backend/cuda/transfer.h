// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "engine/backend/compute_device.h"
#include "engine/backend/cuda/device.h"

/// Asynchronous copies between host and device.

namespace denoised::cuda {

/// Uploads. A copy stream moves the data from a ring of page-locked host memory over the bus to a
/// ring on the device; the compute stream copies it from there, in order. `from` can be reused on
/// return. Waits only if the rings are full of data that the device has not reached.
class UploadRing {
 public:
  static absl::StatusOr<std::unique_ptr<UploadRing>> Open(std::shared_ptr<Context> context);

  void Upload(const void* from, size_t bytes, void* to);

  /// Enqueues work that reads a piece of an upload. The piece stays in device memory until the work
  /// is done.
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
  /// `bytes` of the rings that no pending work reads.
  size_t Take(size_t bytes);
  void UploadPiece(const void* from, size_t offset, size_t bytes, const Consume& consume);

  const std::shared_ptr<Context> context_;
  const PinnedMemory host_;
  const DeviceMemory device_;  // of the same size
  std::deque<Piece> pieces_;   // oldest first
  size_t head_ = 0;
};

/// Downloads. The compute stream makes a snapshot on the device, so that later ops may overwrite
/// the source at once; a copy stream moves it over the bus to the host.
class DownloadPool {
 public:
  explicit DownloadPool(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  /// Reserves memory for `count` concurrent downloads of up to `bytes` each, and page-locked memory
  /// for some results that are still being read. All of it is kept while the reservation lives; the
  /// pool must outlive it. Results may live longer; they keep all that was page-locked with them.
  /// ResourceExhausted says how much was needed and how much GPU memory is free.
  absl::StatusOr<std::shared_ptr<const void>> Reserve(size_t bytes, int count);
  std::unique_ptr<Download> Begin(const Tensor& from);

  /// Page-locked memory of one download.
  struct Host {
    std::shared_ptr<const PinnedMemory> memory;  // of all that were reserved together
    void* data = nullptr;
  };
  /// A snapshot's memory on both sides, reused when its download was released and the copy has
  /// ended.
  struct Staging {
    std::shared_ptr<const DeviceMemory> memory;  // of all that were reserved together
    void* device = nullptr;
    std::shared_ptr<const Host> host;
    size_t bytes = 0;
    Event snapped, copied;
  };
  /// Exchanges the staging's host memory for a spare block that was reserved with it, and returns
  /// it. Null if all of them are in use. Whoever holds the block, on any thread, may write to it.
  std::shared_ptr<const Host> TakeHost(Staging& staging);

 private:
  struct Added {
    std::shared_ptr<const DeviceMemory> device;
    std::shared_ptr<const PinnedMemory> host;
  };
  absl::StatusOr<Added> Add(size_t bytes, int count, int spares);
  /// The smallest free one that is large enough, or null.
  std::shared_ptr<Staging> Free(size_t bytes);

  const std::shared_ptr<Context> context_;
  std::vector<std::shared_ptr<Staging>> stagings_;
  std::vector<std::shared_ptr<const Host>> hosts_;  // of stagings, spare, and handed out
};

}  // namespace denoised::cuda
