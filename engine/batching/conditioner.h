// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/batching/captured_run.h"
#include "engine/batching/warm_runs.h"
#include "engine/core/arena.h"
#include "engine/job.h"
#include "engine/models/denoiser.h"
#include "engine/models/text_encoder.h"

namespace denoised {

/// The first stage of a pipeline that reads text, on one device: makes condition sets of prompts
/// and keeps them in a pool. Images of equal prompts share a set, and a set that nobody uses stays
/// until its place is needed. Prompts that differ only in their sizes or their guidance are encoded
/// once, and the second set copies the states of the first. Used by the thread that owns the
/// device; calls enqueue work and do not wait for it. The bits of a set do not depend on the
/// prompts that it was made together with.
class Conditioner {
 public:
  struct Encoders {
    std::vector<std::shared_ptr<const TextEncoder>> models;
    bool final_norm = true;               // of their states; SDXL reads a hidden layer as it is
    int skip_layers = 0;                  // by prompts without a clip_skip
    bool zeros_without_negative = false;  // zeros take the place of the states of an empty text
    int max_chunks = 1;                   // of a prompt; a set has room for this many
  };

  /// Takes memory for `sets` sets. ResourceExhausted says how much was needed and how much is free.
  static absl::StatusOr<std::unique_ptr<Conditioner>> Create(
      Backend& backend, std::shared_ptr<const Denoiser> denoiser, const Encoders& encoders,
      int sets);

  /// Whether `count` more prompts can be acquired, whatever they are.
  bool HasRoom(int count) const;
  /// The set of a prompt, and a reference to it. HasRoom(1) must hold. The next Encode() fills it.
  int Acquire(const TokenizedPrompt& prompt);
  /// A set that has no users left before it is filled will not be filled.
  void Release(int set);
  /// Enqueues the work that fills all sets that were acquired and are not filled yet. Returns how
  /// many they are. `ran`: when it ran.
  absl::StatusOr<int> Encode(CapturedRun::Ran* ran);
  /// One run of an encoding that requests without a clip_skip may need (Ordinary()), so that none
  /// of them pays for its first: that of one prompt a few times (WarmRuns), the others once. Fills
  /// no set. Waits for the device. Returns the seconds of one prompt when they have been measured.
  /// Call it until warm().
  absl::StatusOr<std::optional<double>> WarmUp();
  bool warm() const { return to_warm_.empty(); }

  const ConditionSets& sets() const { return sets_; }
  /// Whether the next Encode() fills the set.
  bool Pending(int set) const;
  /// How many prompts the text encoders have read since the start.
  int64_t encoded() const { return encoded_; }
  /// Bytes of device memory.
  size_t bytes() const { return bytes_; }

 private:
  struct Entry {
    std::optional<TokenizedPrompt> prompt;
    int users = 0;
    std::list<int>::iterator idle;  // its place in idle_, while it has no users
  };

  Conditioner(Backend& backend, std::shared_ptr<const Denoiser> denoiser, const Encoders& encoders);
  absl::Status Allocate(int sets);
  /// A graph that makes sets of as many prompts as chunks. Results beyond the wanted ones are not
  /// read.
  struct Encoding {
    std::optional<Arena> arena;  // all encodings use the same memory
    ConditionSets made;
    Tensor pooled;  // of the prompts
    std::optional<CapturedRun> run;
  };

  /// Where the states of a prompt come from.
  enum class States : uint8_t {
    kKnown,    // from another set that has the texts: only what depends on its numbers is computed
    kZeros,    // they are zeros
    kEncoded,  // from the text encoders
  };
  /// Prompts are encoded together if they are of one kind.
  struct Kind {
    States states = States::kEncoded;
    int skip_layers = 0;  // of the text encoders

    auto operator<=>(const Kind&) const = default;
  };
  Kind KindOf(int set) const;
  /// Sets that are filled by one run, of at most together_ chunks.
  struct Together {
    Kind kind;
    int chunks = 0;  // in total
    std::vector<int> sets;
    std::vector<int> others;  // kKnown: the set that each copies, which is filled
  };
  /// Those that fill all pending sets, in this order.
  std::vector<Together> RunsOfPending() const;
  absl::Status EncodeTogether(const Together& together);
  absl::Status CopyTogether(const Together& together);
  /// Uploads the sizes and the guidance of sets, for `count` prompts.
  void UploadNumbers(const std::vector<int>& sets, int count);
  /// The chunks of the encoding that is used for so many.
  int PaddedChunks(int chunks) const;
  Encoding& EncodingOf(int chunks, const Kind& kind);
  /// The chunks and the kinds of the encodings that requests without a clip_skip may need, that of
  /// one prompt first. Without padding one prompt stands for any number.
  std::deque<std::pair<int, Kind>> Ordinary() const;
  /// The states of as many prompts as there are chunks, as the denoiser reads them.
  Prompts Read(Backend& backend, Arena& arena, int chunks, const Kind& kind) const;
  ConditionSets MakeSets(Backend& backend, Arena& arena, int chunks, const Kind& kind,
                         Tensor* pooled) const;

  Backend& backend_;
  const std::shared_ptr<const Denoiser> denoiser_;
  const Encoders encoders_;
  const int together_;    // chunks that are encoded side by side
  int tokens_ = 0;        // of a chunk
  int most_skipped_ = 0;  // layers, of every text encoder
  ConditionSets sets_;
  std::vector<Entry> entries_;
  std::list<int> idle_;  // sets without users, least recently used first
  std::map<TokenizedPrompt, int> known_;
  std::vector<int> pending_;

  std::vector<TextInput> inputs_;  // by encoder, for together_ chunks
  Tensor firsts_;                  // I32 [together_]: the first chunk of each prompt
  Tensor pooled_;                  // [sets, pooled_features]: of each set
  Tensor known_pooled_;            // [together_, pooled_features]: of the sets that are copied
  Tensor sizes_, guidance_;
  Tensor no_states_, no_pooled_;                        // of a prompt that is zeros
  Tensor block_;                                        // for activations
  std::map<std::pair<int, Kind>, Encoding> encodings_;  // by chunks and kind
  int64_t encoded_ = 0;
  std::deque<std::pair<int, Kind>> to_warm_;  // the next first
  WarmRuns warm_runs_;                        // of one prompt
  size_t bytes_ = 0;
};

}  // namespace denoised
