// SPDX-License-Identifier: Apache-2.0
#include "engine/training/nccl.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace denoised::training {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kOldest = 21400;  // communicators that do not block

/// The communicator does not block: a call that would wait for another rank returns kInProgress,
/// and CommGetAsyncError() says when it has ended. So a rank that is lost cannot hang this one.
class NcclExchange final : public Exchange {
 public:
  NcclExchange(const Nccl& nccl, Backend& backend, std::unique_ptr<Exchange> host,
               double timeout_seconds)
      : nccl_(nccl), backend_(backend), host_(std::move(host)), timeout_(timeout_seconds) {}
  /// Partners are done when Swap() returns, so nothing is left to wait for.
  ~NcclExchange() override { Abort(); }

  int rank() const override { return host_->rank(); }
  int ranks() const override { return host_->ranks(); }
  denoised::Device device() const override { return backend_.device(); }
  absl::Status CheckRank(int other) override { return host_->CheckRank(other); }
  absl::Status WaitForFirst() override { return host_->WaitForFirst(); }
  Exchange& host() override { return *host_; }

  absl::Status Open(const Nccl::UniqueId& id) {
    stream_ = backend_.Stream();
    Nccl::Config config;
    absl::Status status = nccl_.Check(
        nccl_.CommInitRankConfig(&comm_, ranks(), id, rank(), &config), "ncclCommInitRankConfig");
    if (status.ok() && comm_ == nullptr) status = Unavailable("NCCL made no communicator");
    if (status.ok()) status = Wait(kAllRanks);
    return AbortUnlessOk(status);
  }

  absl::Status Swap(const Tensor& mine, const Tensor& theirs, int partner) override {
    if (comm_ == nullptr) return Unavailable("rank {} is lost: NCCL has failed before", partner);
    const auto count = static_cast<size_t>(mine.elements());
    const auto check = [&](int result, const char* what) {
      return nccl_.Check(result, fmt::format("exchange with rank {}: {}", partner, what));
    };
    absl::Status status = check(nccl_.GroupStart(), "ncclGroupStart");
    status.Update(
        check(nccl_.Send(mine.data(), count, Nccl::kFloat32, partner, comm_, stream_), "ncclSend"));
    status.Update(check(nccl_.Recv(theirs.data(), count, Nccl::kFloat32, partner, comm_, stream_),
                        "ncclRecv"));
    status.Update(check(nccl_.GroupEnd(), "ncclGroupEnd"));
    if (status.ok()) status = Wait(partner);
    // The partner may still read memory of this process: wait for its word.
    if (status.ok()) status = host_->Swap(done_, partner_done_, partner);
    return AbortUnlessOk(status);
  }

 private:
  static constexpr int kAllRanks = -1;

  /// Until the last call and what it enqueued are done.
  absl::Status Wait(int partner) {
    const std::string what =
        partner == kAllRanks ? "NCCL" : fmt::format("exchange with rank {}", partner);
    const auto deadline =
        Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(timeout_ * 1000));
    while (true) {
      int result = Nccl::kSuccess;
      DENOISED_RETURN_IF_ERROR(nccl_.Check(nccl_.CommGetAsyncError(comm_, &result), what));
      DENOISED_RETURN_IF_ERROR(nccl_.Check(result, what));
      if (result == Nccl::kSuccess) {
        DENOISED_ASSIGN_OR_RETURN(const bool done, backend_.Done());
        if (done) return absl::OkStatus();
      }
      for (int other = 0; other < ranks(); ++other)
        if (other != rank() && (partner == kAllRanks || partner == other))
          DENOISED_RETURN_IF_ERROR(host_->CheckRank(other));
      if (Clock::now() >= deadline) {
        if (partner == kAllRanks)
          return Unavailable("not all {} ranks have opened NCCL within {} s", ranks(), timeout_);
        return Unavailable("rank {} has exchanged nothing for {} s", partner, timeout_);
      }
      std::this_thread::yield();
    }
  }

  absl::Status AbortUnlessOk(const absl::Status& status) {
    if (!status.ok()) Abort();
    return status;
  }
  /// Also ends kernels that wait for a lost rank. Its own error adds nothing to what led here.
  void Abort() {
    if (comm_ != nullptr) static_cast<void>(nccl_.CommAbort(comm_));
    comm_ = nullptr;
  }

  const Nccl nccl_;
  Backend& backend_;
  const std::unique_ptr<Exchange> host_;
  const double timeout_;
  CUstream_st* stream_ = nullptr;
  NcclComm* comm_ = nullptr;  // null: not open, or aborted
  const Tensor done_ = Tensor::HostF32({1}, std::vector<float>{1});
  const Tensor partner_done_ = Tensor::Host({1}, DType::kF32);
};

template <typename Function>
absl::Status Load(void* library, const std::string& file, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function != nullptr) return absl::OkStatus();
  return FailedPrecondition("{} has no {}; install NCCL 2.14 or later", file, name);
}

void Write(const std::string& text, std::span<char> to) {
  const size_t size = std::min(text.size(), to.size() - 1);
  std::copy_n(text.data(), size, to.data());
  to[size] = '\0';
}

/// Sets the offer's obstacle, or `nccl`.
NcclOffer OfferOf(ExchangeKind wanted, const Backend& backend, int rank, Nccl* nccl) {
  NcclOffer offer;
  Write(backend.uuid(), offer.gpu);
  if (wanted == ExchangeKind::kTcp) {
    Write("wants TCP", offer.obstacle);
  } else if (backend.device() != denoised::Device::kCuda) {
    Write("has no GPU", offer.obstacle);
  } else {
    absl::StatusOr<Nccl> opened = Nccl::Open();
    absl::Status status = opened.status();
    if (status.ok()) *nccl = *std::move(opened);
    if (status.ok() && rank == 0)
      status = nccl->Check(nccl->GetUniqueId(&offer.id), "ncclGetUniqueId");
    if (!status.ok())
      Write(fmt::format("cannot use NCCL: {}", std::string(status.message())), offer.obstacle);
  }
  return offer;
}

}  // namespace

absl::StatusOr<Nccl> Nccl::Open(const std::string& file) {
  // Multicast is for collectives, which are not called; its set-up takes memory of every GPU.
  setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/0);
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    return FailedPrecondition(
        "{}; install NCCL (NVIDIA's package libnccl2), or put its folder into LD_LIBRARY_PATH",
        why != nullptr ? why : file);
  }
  Nccl nccl;
  const auto load = [&](const char* name, auto* function) {
    return Load(library, file, name, function);
  };
  DENOISED_RETURN_IF_ERROR(load("ncclGetVersion", &nccl.GetVersion));
  DENOISED_RETURN_IF_ERROR(load("ncclGetErrorString", &nccl.GetErrorString));
  DENOISED_RETURN_IF_ERROR(load("ncclGetLastError", &nccl.GetLastError));
  DENOISED_RETURN_IF_ERROR(load("ncclGetUniqueId", &nccl.GetUniqueId));
  DENOISED_RETURN_IF_ERROR(load("ncclCommInitRankConfig", &nccl.CommInitRankConfig));
  DENOISED_RETURN_IF_ERROR(load("ncclCommGetAsyncError", &nccl.CommGetAsyncError));
  DENOISED_RETURN_IF_ERROR(load("ncclCommAbort", &nccl.CommAbort));
  DENOISED_RETURN_IF_ERROR(load("ncclGroupStart", &nccl.GroupStart));
  DENOISED_RETURN_IF_ERROR(load("ncclGroupEnd", &nccl.GroupEnd));
  DENOISED_RETURN_IF_ERROR(load("ncclSend", &nccl.Send));
  DENOISED_RETURN_IF_ERROR(load("ncclRecv", &nccl.Recv));
  int version = 0;
  DENOISED_RETURN_IF_ERROR(nccl.Check(nccl.GetVersion(&version), "ncclGetVersion"));
  nccl.version = fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
  if (version < kOldest)
    return FailedPrecondition("{} is NCCL {}; install 2.14 or later", file, nccl.version);
  return nccl;
}

absl::Status Nccl::Check(int result, std::string_view what) const {
  if (result == kSuccess || result == kInProgress) return absl::OkStatus();
  const std::string last = GetLastError(nullptr);
  return Unavailable("{}: {}{}{}", what, GetErrorString(result), last.empty() ? "" : ": ", last);
}

absl::StatusOr<std::unique_ptr<Exchange>> NewNcclExchange(const Nccl& nccl,
                                                          const Nccl::UniqueId& id,
                                                          Backend& backend,
                                                          std::unique_ptr<Exchange> host,
                                                          double timeout_seconds) {
  auto exchange = std::make_unique<NcclExchange>(nccl, backend, std::move(host), timeout_seconds);
  DENOISED_RETURN_IF_ERROR(exchange->Open(id));
  return exchange;
}

absl::StatusOr<std::vector<NcclOffer>> GatherOffers(const NcclOffer& mine, Exchange& host) {
  const Tensor all = Tensor::Host({host.ranks(), sizeof(NcclOffer)}, DType::kU8);
  std::memcpy(all.Slice(host.rank(), 1).data(), &mine, sizeof mine);
  DENOISED_RETURN_IF_ERROR(GatherRows(all, host));
  std::vector<NcclOffer> offers(host.ranks());
  std::memcpy(offers.data(), all.data(), all.bytes());
  return offers;
}

std::string Obstacle(std::span<const NcclOffer> offers) {
  for (size_t rank = 0; rank < offers.size(); ++rank)
    if (offers[rank].obstacle[0] != '\0')
      return fmt::format("rank {} {}", rank, offers[rank].obstacle);
  for (size_t rank = 0; rank < offers.size(); ++rank)
    for (size_t other = 0; other < rank; ++other)
      if (std::strcmp(offers[other].gpu, offers[rank].gpu) == 0)
        return fmt::format("ranks {} and {} share a GPU (LOCAL_RANK chooses it)", other, rank);
  return "";
}

absl::StatusOr<ChosenExchange> ChooseExchange(ExchangeKind wanted, Backend& backend,
                                              std::unique_ptr<Exchange> tcp,
                                              double timeout_seconds) {
  if (tcp->ranks() == 1) return ChosenExchange{std::move(tcp), ""};
  Nccl nccl;
  const NcclOffer mine = OfferOf(wanted, backend, tcp->rank(), &nccl);
  DENOISED_ASSIGN_OR_RETURN(const std::vector<NcclOffer> offers, GatherOffers(mine, *tcp));
  if (const std::string obstacle = Obstacle(offers); !obstacle.empty()) {
    if (wanted == ExchangeKind::kNccl)
      return FailedPrecondition("exchange is \"nccl\", but {}; without it, use auto or tcp",
                                obstacle);
    return ChosenExchange{std::move(tcp), fmt::format("TCP: {}", obstacle)};
  }
  absl::StatusOr<std::unique_ptr<Exchange>> exchange =
      NewNcclExchange(nccl, offers[0].id, backend, std::move(tcp), timeout_seconds);
  if (!exchange.ok())
    return Unavailable(
        "NCCL {} does not start: {}; NCCL_DEBUG=INFO says more, and exchange tcp "
        "does without it",
        nccl.version, std::string(exchange.status().message()));
  return ChosenExchange{*std::move(exchange), fmt::format("NCCL {}", nccl.version)};
}

}  // namespace denoised::training
