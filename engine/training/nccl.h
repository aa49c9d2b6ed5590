// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <climits>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/core/status.h"
#include "engine/training/backend.h"
#include "engine/training/exchange.h"

/// Gradients from GPU to GPU by NCCL, and the choice between it and TCP. Neither NCCL's header nor
/// CUDA is needed to build this: libnccl.so.2 is opened when a run has several ranks.

namespace denoised::training {

struct NcclComm;  // ncclComm

/// The functions of libnccl.so.2 that are called. They have nccl.h's names without the prefix; an
/// int that they return is an ncclResult_t.
struct Nccl {
  /// Opens the library and never closes it. FailedPrecondition, with the remedy, if it is not
  /// there, has no such functions, or is older than 2.14.
  static absl::StatusOr<Nccl> Open(const std::string& file = "libnccl.so.2");

  /// OK for kSuccess and kInProgress; else Unavailable: "what: NCCL's words".
  absl::Status Check(int result, std::string_view what) const;

  static constexpr int kSuccess = 0, kInProgress = 7;  // ncclResult_t
  static constexpr int kFloat32 = 7;                   // ncclDataType_t

  /// ncclUniqueId.
  struct UniqueId {
    char internal[128] = {};
  };
  /// ncclConfig_t as NCCL 2.14 declares it; later versions add fields, and read `size` and
  /// `version` first.
  struct Config {
    size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = 21400;
    int blocking = 0;
    int next_field = INT_MIN;  // undefined, where 2.14 has padding
  };

  int (*GetVersion)(int* version) = nullptr;
  int (*GetUniqueId)(UniqueId* id) = nullptr;
  int (*CommInitRankConfig)(NcclComm** comm, int ranks, UniqueId id, int rank,
                            Config* config) = nullptr;
  int (*CommGetAsyncError)(NcclComm* comm, int* error) = nullptr;
  int (*CommAbort)(NcclComm* comm) = nullptr;
  int (*GroupStart)() = nullptr;
  int (*GroupEnd)() = nullptr;
  int (*Send)(const void* from, size_t count, int type, int peer, NcclComm* comm,
              CUstream_st* stream) = nullptr;
  int (*Recv)(void* to, size_t count, int type, int peer, NcclComm* comm,
              CUstream_st* stream) = nullptr;
  const char* (*GetErrorString)(int result) = nullptr;
  const char* (*GetLastError)(const NcclComm* comm) = nullptr;

  std::string version;  // "2.28.9"
};

/// Swap() sends and receives on the backend's stream, between tensors of its device, and returns
/// when both partners are done. `host` connects the same ranks: over it partners agree that they
/// are done, and a rank that ends is noticed. All ranks call this with the `id` of one of them.
/// Unavailable if they are not all there within `timeout_seconds`, or if NCCL fails. `backend` must
/// outlive the exchange.
absl::StatusOr<std::unique_ptr<Exchange>> NewNcclExchange(const Nccl& nccl,
                                                          const Nccl::UniqueId& id,
                                                          Backend& backend,
                                                          std::unique_ptr<Exchange> host,
                                                          double timeout_seconds);

/// What a rank tells the others before they choose. Sent as bytes.
struct NcclOffer {
  char obstacle[256] = {};  // what this rank has against NCCL: "has no GPU"; or empty
  char gpu[48] = {};        // its UUID
  Nccl::UniqueId id;        // of the first rank
};
/// All ranks call this with their own offer and get those of all, by rank.
absl::StatusOr<std::vector<NcclOffer>> GatherOffers(const NcclOffer& mine, Exchange& host);
/// The first thing that stands against NCCL: "rank 1 has no GPU". Empty: nothing.
std::string Obstacle(std::span<const NcclOffer> offers);

enum class ExchangeKind { kAuto, kTcp, kNccl };

struct ChosenExchange {
  std::unique_ptr<Exchange> exchange;
  std::string description;  // "NCCL 2.28.9", or "TCP: rank 1 has no GPU"
};
/// NCCL if no rank wants kTcp, every rank can open the library and has a GPU of its own; else `tcp`
/// itself, or for kNccl FailedPrecondition, which names the rank and the reason. All ranks call
/// this. `backend` must outlive the exchange.
absl::StatusOr<ChosenExchange> ChooseExchange(ExchangeKind wanted, Backend& backend,
                                              std::unique_ptr<Exchange> tcp,
                                              double timeout_seconds);

}  // namespace denoised::training
