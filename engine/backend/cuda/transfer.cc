#include "engine/backend/cuda/transfer.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace denoised::cuda {
namespace {

constexpr size_t kRingBytes = size_t{16} << 20;
constexpr size_t kPieceBytes = size_t{4} << 20;  // several fit, so packing and copying overlap
constexpr size_t kAlignment = 256;
constexpr size_t kSmallestStaging = 4096;

size_t Rounded(size_t bytes) { return std::bit_ceil(std::max(bytes, kSmallestStaging)); }

class StagedDownload final : public Download {
 public:
  StagedDownload(std::shared_ptr<Context> context, std::shared_ptr<DownloadPool::Staging> staging,
                 const Tensor& from)
      : context_(std::move(context)),
        staging_(std::move(staging)),
        shape_(from.shape()),
        dtype_(from.dtype()) {}

  bool ready() override {
    context_->Use();
    return !context_->status().ok() || context_->Reached(staging_->copied.get(), "download");
  }

  absl::StatusOr<Tensor> Wait() override {
    context_->Use();
    context_->Record(cudaEventSynchronize(staging_->copied.get()), "download");
    DENOISED_RETURN_IF_ERROR(context_->status());
    Tensor copy = Tensor::Host(shape_, dtype_);
    std::memcpy(copy.data(), staging_->host.get(), copy.bytes());
    return copy;
  }

 private:
  const std::shared_ptr<Context> context_;
  const std::shared_ptr<DownloadPool::Staging> staging_;
  const Shape shape_;
  const DType dtype_;
};

class FailedDownload final : public Download {
 public:
  explicit FailedDownload(absl::Status status) : status_(std::move(status)) {}
  bool ready() override { return true; }
  absl::StatusOr<Tensor> Wait() override { return status_; }

 private:
  const absl::Status status_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<UploadRing>> UploadRing::Open(std::shared_ptr<Context> context) {
  DENOISED_ASSIGN_OR_RETURN(PinnedMemory memory, AllocatePinned(kRingBytes, "the upload ring"));
  return std::unique_ptr<UploadRing>(new UploadRing(std::move(context), std::move(memory)));
}

size_t UploadRing::Take(size_t bytes) {
  while (!pieces_.empty() && context_->Reached(pieces_.front().copied.get(), "upload")) {
    pieces_.pop_front();
  }
  if (head_ + bytes > kRingBytes) head_ = 0;
  const auto overlaps = [&](const Piece& piece) {
    return piece.begin < head_ + bytes && head_ < piece.end;
  };
  // Pieces follow one another around the ring, so the oldest are those in the way.
  while (std::any_of(pieces_.begin(), pieces_.end(), overlaps)) {
    context_->Record(cudaEventSynchronize(pieces_.front().copied.get()), "upload");
    pieces_.pop_front();
  }
  const size_t begin = head_;
  head_ = begin + (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return begin;
}

void UploadRing::UploadPiece(const void* from, size_t bytes, void* to) {
  absl::StatusOr<Event> copied = NewEvent(/*timing=*/false);
  if (!copied.ok()) return context_->Record(copied.status());
  const size_t begin = Take(bytes);
  std::byte* staged = static_cast<std::byte*>(memory_.get()) + begin;
  std::memcpy(staged, from, bytes);
  context_->Record(cudaMemcpyAsync(to, staged, bytes, cudaMemcpyHostToDevice, context_->compute()),
                   "upload");
  context_->Record(cudaEventRecord(copied->get(), context_->compute()), "upload");
  pieces_.push_back({begin, begin + bytes, *std::move(copied)});
}

void UploadRing::Upload(const void* from, size_t bytes, void* to) {
  for (size_t done = 0; done < bytes; done += kPieceBytes) {
    UploadPiece(static_cast<const std::byte*>(from) + done, std::min(kPieceBytes, bytes - done),
                static_cast<std::byte*>(to) + done);
  }
}

absl::StatusOr<std::shared_ptr<DownloadPool::Staging>> DownloadPool::Take(size_t bytes) {
  const size_t rounded = Rounded(bytes);
  for (const std::shared_ptr<Staging>& staging : stagings_) {
    if (staging->bytes == rounded && staging.use_count() == 1 &&
        context_->Reached(staging->copied.get(), "download")) {
      return staging;
    }
  }
  return Allocate(rounded);
}

absl::StatusOr<std::shared_ptr<DownloadPool::Staging>> DownloadPool::Allocate(size_t rounded) {
  auto staging = std::make_shared<Staging>();
  staging->bytes = rounded;
  DENOISED_ASSIGN_OR_RETURN(staging->device, AllocateDevice(rounded, "a download"));
  DENOISED_ASSIGN_OR_RETURN(staging->host, AllocatePinned(rounded, "a download"));
  DENOISED_ASSIGN_OR_RETURN(staging->snapped, NewEvent(/*timing=*/false));
  DENOISED_ASSIGN_OR_RETURN(staging->copied, NewEvent(/*timing=*/false));
  stagings_.push_back(staging);
  return staging;
}

absl::Status DownloadPool::Reserve(size_t bytes, int count) {
  const size_t rounded = Rounded(bytes);
  const auto fits = [&](const auto& staging) { return staging->bytes == rounded; };
  for (auto have = std::count_if(stagings_.begin(), stagings_.end(), fits); have < count; ++have)
    DENOISED_RETURN_IF_ERROR(Allocate(rounded).status());
  return absl::OkStatus();
}

std::unique_ptr<Download> DownloadPool::Begin(const Tensor& from) {
  absl::StatusOr<std::shared_ptr<Staging>> taken = Take(from.bytes());
  if (!taken.ok()) return std::make_unique<FailedDownload>(taken.status());
  const Staging& staging = **taken;
  Context& context = *context_;
  context.Record(cudaMemcpyAsync(staging.device.get(), from.data(), from.bytes(),
                                 cudaMemcpyDeviceToDevice, context.compute()),
                 "download");
  context.Record(cudaEventRecord(staging.snapped.get(), context.compute()), "download");
  context.Record(cudaStreamWaitEvent(context.copies(), staging.snapped.get(), 0), "download");
  context.Record(cudaMemcpyAsync(staging.host.get(), staging.device.get(), from.bytes(),
                                 cudaMemcpyDeviceToHost, context.copies()),
                 "download");
  context.Record(cudaEventRecord(staging.copied.get(), context.copies()), "download");
  return std::make_unique<StagedDownload>(context_, *std::move(taken), from);
}

}  // namespace denoised::cuda
