// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/core/status.h"
#include "engine/core/tensor.h"

namespace denoised::training {

/// How ranks exchange gradients. Each rank owns a subtree of a step's chunks. At level i it swaps
/// its sum with rank ^ 2ⁱ, and both add the two; this computes the rest of the tree. The sum of two
/// numbers does not depend on their order, so all ranks have the same bits as one rank alone.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual int rank() const = 0;
  virtual int ranks() const = 0;
  /// The memory that Swap() reads and writes.
  virtual denoised::Device device() const { return denoised::Device::kCpu; }
  /// Sends `mine` to `partner` and receives as many bytes from it into `theirs`; both must call it.
  /// Follows what a GPU's backend has enqueued. Unavailable names the rank that is lost.
  virtual absl::Status Swap(const Tensor& mine, const Tensor& theirs, int partner) = 0;
  /// Unavailable if `other` has ended, as far as is known without waiting.
  virtual absl::Status CheckRank(int /*other*/) { return absl::OkStatus(); }
  /// All ranks call this. The others wait until rank 0 has, without a time limit, since its disk
  /// may be slow. Unavailable if it is lost.
  virtual absl::Status WaitForFirst() = 0;
  /// The same ranks, for tensors of the host.
  virtual Exchange& host() { return *this; }
};

/// All ranks call this with a tensor [ranks, …] of the host, in which each has filled its own row,
/// and get the rows of the others. `ranks` is a power of two.
absl::Status GatherRows(const Tensor& all, Exchange& host);

/// All ranks call this with their own text and get those of all, by rank.
absl::StatusOr<std::vector<std::string>> GatherTexts(const std::string& mine, Exchange& host);

/// One rank.
std::unique_ptr<Exchange> NewSoleExchange();

/// Several ranks on threads of this process.
std::vector<std::unique_ptr<Exchange>> NewLoopbackExchanges(int ranks);

/// Whether a connected socket is its own other end. While nothing listens on a port that the system
/// also gives to sockets that connect, one of them may get it and reach itself.
bool ReachesItself(int socket);

/// Several processes, over TCP. Rank 0 listens on `address` ("host:port"); the others connect to
/// it, learn each other's addresses and connect to each other. Waits `timeout_seconds` for all of
/// them, and for the host's name to be known, and as long for a partner in Swap(). The connections
/// are neither encrypted nor authenticated: use a private network. InvalidArgument, Unavailable.
/// nccl.h has what replaces it between GPUs.
absl::StatusOr<std::unique_ptr<Exchange>> ConnectExchange(int rank, int ranks,
                                                          const std::string& address,
                                                          double timeout_seconds);

}  // namespace denoised::training
