// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cuda/transfer.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <utility>

namespace denoised::cuda {
namespace {

constexpr size_t kRingBytes = size_t{16} << 20;
constexpr size_t kPieceBytes = size_t{4} << 20;  // several fit, so that packing and copying overlap
constexpr size_t kAlignment = 256;
constexpr size_t kSmallestStaging = 4096;
/// Blocks of host memory that are reserved beyond those of downloads, for results that are still
/// being read. While one is free, a result is not copied: 3 MB for a picture of 512×512.
constexpr int kSpares = 2;

size_t Aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

class StagedDownload final : public Download {
 public:
  StagedDownload(std::shared_ptr<Context> context, DownloadPool& pool,
                 std::shared_ptr<DownloadPool::Staging> staging, const Tensor& from)
      : context_(std::move(context)),
        pool_(pool),
        staging_(std::move(staging)),
        shape_(from.shape()),
        dtype_(from.dtype()) {}

  absl::StatusOr<Tensor> Wait() override {
    context_->Use();
    context_->Record(cudaEventSynchronize(staging_->copied.get()), "download");
    DENOISED_RETURN_IF_ERROR(context_->status());
    if (!result_) {
      if (const auto host = pool_.TakeHost(*staging_)) {
        result_ = Tensor(host->data, shape_, dtype_, Device::kCpu, host);
      } else {
        result_ = Tensor::Host(shape_, dtype_);
        std::memcpy(result_.data(), staging_->host->data, result_.bytes());
      }
    }
    return result_;
  }

 private:
  const std::shared_ptr<Context> context_;
  DownloadPool& pool_;
  const std::shared_ptr<DownloadPool::Staging> staging_;
  const Shape shape_;
  const DType dtype_;
  Tensor result_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<UploadRing>> UploadRing::Open(std::shared_ptr<Context> context) {
  DENOISED_ASSIGN_OR_RETURN(PinnedMemory host, AllocatePinned(kRingBytes, "the upload ring"));
  DENOISED_ASSIGN_OR_RETURN(DeviceMemory device, AllocateDevice(kRingBytes, "the upload ring"));
  return std::unique_ptr<UploadRing>(
      new UploadRing(std::move(context), std::move(host), std::move(device)));
}

size_t UploadRing::Take(size_t bytes) {
  while (!pieces_.empty() && context_->Reached(pieces_.front().consumed.get(), "upload")) {
    pieces_.pop_front();
  }
  if (head_ + bytes > kRingBytes) head_ = 0;
  const auto overlaps = [&](const Piece& piece) {
    return piece.begin < head_ + bytes && head_ < piece.end;
  };
  // Pieces are allocated around the ring, so the oldest ones are freed first.
  while (std::any_of(pieces_.begin(), pieces_.end(), overlaps)) {
    context_->Record(cudaEventSynchronize(pieces_.front().consumed.get()), "upload");
    pieces_.pop_front();
  }
  const size_t begin = head_;
  head_ = begin + Aligned(bytes);
  return begin;
}

void UploadRing::Upload(const void* from, size_t bytes, void* to) {
  UploadThrough(from, bytes, 1, [&](const void* piece, size_t offset, size_t piece_bytes) {
    return cudaMemcpyAsync(static_cast<std::byte*>(to) + offset, piece, piece_bytes,
                           cudaMemcpyDeviceToDevice, context_->compute());
  });
}

void UploadRing::UploadThrough(const void* from, size_t bytes, size_t unit,
                               const Consume& consume) {
  DENOISED_CHECK(unit <= kPieceBytes && bytes % unit == 0, "{} bytes in units of {}", bytes, unit);
  const size_t most = kPieceBytes / unit * unit;
  for (size_t done = 0; done < bytes; done += most) {
    UploadPiece(static_cast<const std::byte*>(from) + done, done, std::min(most, bytes - done),
                consume);
  }
}

void UploadRing::UploadPiece(const void* from, size_t offset, size_t bytes,
                             const Consume& consume) {
  absl::StatusOr<Event> arrived = NewEvent(/*timing=*/false);
  if (!arrived.ok()) return context_->Record(arrived.status());
  absl::StatusOr<Event> consumed = NewEvent(/*timing=*/false);
  if (!consumed.ok()) return context_->Record(consumed.status());
  Context& context = *context_;
  const size_t begin = Take(bytes);
  std::byte* const staged = static_cast<std::byte*>(host_.get()) + begin;
  std::byte* const piece = static_cast<std::byte*>(device_.get()) + begin;
  std::memcpy(staged, from, bytes);
  context.Record(cudaMemcpyAsync(piece, staged, bytes, cudaMemcpyHostToDevice, context.uploads()),
                 "upload");
  context.Record(cudaEventRecord(arrived->get(), context.uploads()), "upload");
  context.Record(cudaStreamWaitEvent(context.compute(), arrived->get(), 0), "upload");
  context.Record(consume(piece, offset, bytes), "upload");
  context.Record(cudaEventRecord(consumed->get(), context.compute()), "upload");
  pieces_.push_back({begin, begin + bytes, *std::move(arrived), *std::move(consumed)});
}

absl::StatusOr<DownloadPool::Added> DownloadPool::Add(size_t bytes, int count, int spares) {
  const size_t each = Aligned(bytes);
  const std::string purpose = fmt::format("{} downloads at a time", count);
  DENOISED_ASSIGN_OR_RETURN(DeviceMemory device, AllocateDevice(each * count, purpose));
  DENOISED_ASSIGN_OR_RETURN(PinnedMemory host, AllocatePinned(each * (count + spares), purpose));
  const Added added = {std::make_shared<const DeviceMemory>(std::move(device)),
                       std::make_shared<const PinnedMemory>(std::move(host))};
  std::vector<std::shared_ptr<const Host>> hosts;
  for (int i = 0; i < count + spares; ++i) {
    hosts.push_back(std::make_shared<const Host>(
        Host{added.host, static_cast<std::byte*>(added.host->get()) + i * each}));
  }
  std::vector<std::shared_ptr<Staging>> stagings;
  for (int i = 0; i < count; ++i) {
    auto staging = std::make_shared<Staging>();
    staging->memory = added.device;
    staging->device = static_cast<std::byte*>(added.device->get()) + i * each;
    staging->host = hosts[i];
    staging->bytes = each;
    DENOISED_ASSIGN_OR_RETURN(staging->snapped, NewEvent(/*timing=*/false));
    DENOISED_ASSIGN_OR_RETURN(staging->copied, NewEvent(/*timing=*/false));
    stagings.push_back(std::move(staging));
  }
  hosts_.insert(hosts_.end(), hosts.begin(), hosts.end());
  stagings_.insert(stagings_.end(), stagings.begin(), stagings.end());
  return added;
}

absl::StatusOr<std::shared_ptr<const void>> DownloadPool::Reserve(size_t bytes, int count) {
  DENOISED_ASSIGN_OR_RETURN(const Added added, Add(bytes, count, count > 0 ? kSpares : 0));
  return std::shared_ptr<const void>(added.device.get(), [this, added](const void*) {
    std::erase_if(stagings_, [&](const auto& staging) { return staging->memory == added.device; });
    std::erase_if(hosts_, [&](const auto& host) { return host->memory == added.host; });
  });
}

std::shared_ptr<const DownloadPool::Host> DownloadPool::TakeHost(Staging& staging) {
  for (const std::shared_ptr<const Host>& spare : hosts_) {
    if (spare->memory != staging.host->memory || spare.use_count() > 1) continue;
    std::atomic_thread_fence(std::memory_order_acquire);  // after the last reader's release
    return std::exchange(staging.host, spare);
  }
  return nullptr;
}

std::shared_ptr<DownloadPool::Staging> DownloadPool::Free(size_t bytes) {
  std::shared_ptr<Staging> best;
  for (const std::shared_ptr<Staging>& staging : stagings_) {
    if (staging->bytes >= bytes && (!best || staging->bytes < best->bytes) &&
        staging.use_count() == 1 && context_->Reached(staging->copied.get(), "download")) {
      best = staging;
    }
  }
  return best;
}

std::unique_ptr<Download> DownloadPool::Begin(const Tensor& from) {
  std::shared_ptr<Staging> taken = Free(from.bytes());
  if (!taken) {
    const absl::Status added =
        Add(std::bit_ceil(std::max(from.bytes(), kSmallestStaging)), 1, 0).status();
    if (!added.ok()) return std::make_unique<ReadyDownload>(added);
    taken = stagings_.back();
  }
  const Staging& staging = *taken;
  Context& context = *context_;
  context.Record(cudaMemcpyAsync(staging.device, from.data(), from.bytes(),
                                 cudaMemcpyDeviceToDevice, context.compute()),
                 "download");
  context.Record(cudaEventRecord(staging.snapped.get(), context.compute()), "download");
  context.Record(cudaStreamWaitEvent(context.downloads(), staging.snapped.get(), 0), "download");
  context.Record(cudaMemcpyAsync(staging.host->data, staging.device, from.bytes(),
                                 cudaMemcpyDeviceToHost, context.downloads()),
                 "download");
  context.Record(cudaEventRecord(staging.copied.get(), context.downloads()), "download");
  return std::make_unique<StagedDownload>(context_, *this, std::move(taken), from);
}

}  // namespace denoised::cuda
