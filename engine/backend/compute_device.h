// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "engine/backend/capabilities.h"
#include "engine/core/status.h"
#include "engine/core/tensor.h"

/// A device without its ops: memory, transfers, graphs, markers, threads.
///
/// It has one queue, which orders ops, copies and downloads. Errors are kept and returned by
/// status(). Only the thread that owns the device uses it, except inside ForEachPart().

namespace denoised {

/// A pending copy to the host. It may be destroyed early.
class Download {
 public:
  virtual ~Download() = default;
  /// Blocks. Returns the host copy, or the device's error; a second call returns the same memory.
  /// The copy may be kept as long as one likes, and its last owner may be any thread.
  virtual absl::StatusOr<Tensor> Wait() = 0;
};
/// A copy that has already been made, or could not be begun.
class ReadyDownload final : public Download {
 public:
  explicit ReadyDownload(absl::StatusOr<Tensor> copy) : copy_(std::move(copy)) {}
  absl::StatusOr<Tensor> Wait() override { return copy_; }

 private:
  const absl::StatusOr<Tensor> copy_;
};

/// A place in the queue of work.
class Marker {
 public:
  virtual ~Marker() = default;
  virtual bool reached() = 0;
  virtual absl::Status Wait() = 0;
  /// Device time between two markers that were reached.
  virtual double SecondsSince(const Marker& earlier) = 0;
};

/// Ops recorded once, to be launched many times.
class Graph {
 public:
  virtual ~Graph() = default;
};

/// How the rows of an evaluation are divided over the threads of a backend.
struct RowSplit {
  int apart = 0;    // rows [0, apart) are computed in parts, the others together by all threads
  int part = 0;     // rows of the largest part
  int workers = 1;  // parts that are computed at one time
};

struct BackendMemory {
  size_t total = 0, free = 0;  // bytes on the device
};

class ComputeDevice {
 public:
  virtual ~ComputeDevice() = default;

  virtual std::string_view name() const = 0;    // "cpu", "cpu:1", "cuda:0"
  virtual std::string description() const = 0;  // for people: chip, cores or SMs, memory
  virtual Device device() const = 0;
  virtual Capabilities capabilities() const { return {}; }

  // Memory. Persistent allocations are made at load only.
  /// ResourceExhausted says how much `purpose` needed and how much is free.
  virtual absl::StatusOr<Tensor> Allocate(const Shape& shape, DType dtype,
                                          std::string_view purpose) = 0;
  virtual BackendMemory memory() const = 0;
  /// Copies `bytes` of host memory into `to` in stream order; `from` may be reused on return.
  virtual void Upload(const void* from, size_t bytes, const Tensor& to) = 0;
  /// Snapshots `from` (contiguous) at this point of the queue and returns at once.
  virtual std::unique_ptr<Download> BeginDownload(const Tensor& from) = 0;
  /// Reserves memory for `count` downloads of up to `bytes` at a time, as long as the result lives.
  /// Other downloads allocate their memory when they begin, and fail if there is none.
  /// ResourceExhausted as Allocate(). Null if the backend's downloads need no memory.
  virtual absl::StatusOr<std::shared_ptr<const void>> ReserveDownloads(size_t /*bytes*/,
                                                                       int /*count*/) {
    return nullptr;
  }

  // Rows. A CPU is fastest when each thread takes its own rows through all ops: the rows stay in
  // the core's cache, and threads wait for each other once per evaluation instead of once per op.
  /// How an evaluation of `rows` rows should be divided. A row has the same bits either way.
  virtual RowSplit SplitRows(int /*rows*/) const { return {}; }
  /// Calls body(begin, count, worker) for parts of at most split.part rows that make up rows
  /// [0, split.apart), in any order, from up to split.workers threads, each with its own `worker`
  /// < split.workers. The body may call ops that write memory of its rows or its worker. Returns
  /// when all calls have returned.
  virtual void ForEachPart(const RowSplit& split,
                           const std::function<void(int begin, int count, int worker)>& body) {
    if (split.apart > 0) body(0, split.apart, 0);
  }

  // Order.
  /// Runs `body` and records its ops instead of executing them. Tensors must outlive the graph. The
  /// CPU has no graphs: its ops are only checked now and `body` runs again at each Launch(), so all
  /// that it refers to must outlive the graph too. `body` may be run twice now, and what its ops
  /// write, except slots, may be overwritten: see BackendOptions::autotune.
  virtual absl::StatusOr<std::unique_ptr<Graph>> Capture(const std::function<void()>& body) = 0;
  virtual void Launch(Graph& graph) = 0;
  virtual std::unique_ptr<Marker> Mark() = 0;
  /// Waits for all work. Returns the first error since construction, which is final.
  virtual absl::Status Synchronize() = 0;
  /// The same without waiting.
  virtual absl::Status status() const = 0;
};

}  // namespace denoised
