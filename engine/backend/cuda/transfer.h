#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/backend/cuda/device.h"

/// Copies between host and device that do not make the caller wait for the device.

namespace denoised::cuda {

/// Host memory to the device in stream order, through a ring of page-locked memory: `from` is free
/// again on return. Waits only when the ring is full of copies that the device has not reached.
class UploadRing {
 public:
  static absl::StatusOr<std::unique_ptr<UploadRing>> Open(std::shared_ptr<Context> context);

  void Upload(const void* from, size_t bytes, void* to);

 private:
  struct Piece {
    size_t begin, end;
    Event copied;
  };
  UploadRing(std::shared_ptr<Context> context, PinnedMemory memory)
      : context_(std::move(context)), memory_(std::move(memory)) {}
  /// `bytes` of the ring that no copy under way reads.
  size_t Take(size_t bytes);
  void UploadPiece(const void* from, size_t bytes, void* to);

  const std::shared_ptr<Context> context_;
  const PinnedMemory memory_;
  std::deque<Piece> pieces_;  // oldest first
  size_t head_ = 0;
};

/// Device memory to the host: a snapshot on the device in the compute stream, so that later ops may
/// overwrite the source at once, then the slow way to the host in a stream of its own.
class DownloadPool {
 public:
  explicit DownloadPool(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  /// Allocates until `count` downloads of `bytes` can be under way at one time.
  absl::Status Reserve(size_t bytes, int count);
  std::unique_ptr<Download> Begin(const Tensor& from);

  /// A snapshot's memory on both sides; used again when its download has been let go and the copy
  /// is over.
  struct Staging {
    size_t bytes = 0;
    DeviceMemory device;
    PinnedMemory host;
    Event snapped, copied;
  };

 private:
  absl::StatusOr<std::shared_ptr<Staging>> Allocate(size_t rounded_bytes);
  absl::StatusOr<std::shared_ptr<Staging>> Take(size_t bytes);

  const std::shared_ptr<Context> context_;
  std::vector<std::shared_ptr<Staging>> stagings_;
};

}  // namespace denoised::cuda
