// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <list>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/core/arena.h"
#include "engine/job.h"
#include "engine/models/denoiser.h"
#include "engine/models/text_encoder.h"

namespace denoised {

/// The first stage of a pipeline that reads text, on one device: makes condition sets of prompts
/// and keeps them in a pool. Images of equal prompts share a set, and a set that nobody uses stays
/// until its place is needed. Used by the thread that owns the device; calls enqueue work and do
/// not wait for it. A set has the same bits whichever prompts it was made beside.
class Conditioner {
 public:
  struct Encoders {
    std::vector<std::shared_ptr<const TextEncoder>> models;
    bool final_norm = true;  // of their states; SDXL reads a hidden layer as it is
  };

  /// Takes memory for `sets` sets. ResourceExhausted says how much was needed and how much is free.
  static absl::StatusOr<std::unique_ptr<Conditioner>> Create(
      Backend& backend, std::shared_ptr<const Denoiser> denoiser, const Encoders& encoders,
      int sets);

  /// Whether `count` more prompts can be acquired, whatever they are.
  bool HasRoom(int count) const;
  /// The set of a prompt, and a reference to it. HasRoom(1) must hold. Its content is made by the
  /// next Encode().
  int Acquire(const TokenizedPrompt& prompt);
  void Release(int set);
  /// Enqueues what makes all sets that were acquired and not made yet.
  absl::Status Encode();

  const ConditionSets& sets() const { return sets_; }
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
  /// All with the same skip_layers.
  void EncodeTogether(const std::vector<int>& sets);
  /// The prompts' states as the denoiser reads them.
  Prompts Read(Backend& backend, Arena& arena, int count, int skip_layers) const;
  void MakeSets(Backend& backend, Arena& arena, const Prompts& prompts,
                const std::vector<int>& sets) const;

  Backend& backend_;
  const std::shared_ptr<const Denoiser> denoiser_;
  const Encoders encoders_;
  int tokens_ = 0;
  ConditionSets sets_;
  std::vector<Entry> entries_;
  std::list<int> idle_;  // sets without users, least recently used first
  std::map<TokenizedPrompt, int> known_;
  std::vector<int> pending_;

  std::vector<TextInput> inputs_;  // by encoder, for kTogether prompts
  Tensor sizes_, guidance_;
  Tensor no_states_, no_pooled_;  // of a prompt that is zeros
  std::vector<bool> zeros_;       // of the prompts that are encoded now: which are zeros
  std::optional<Arena> arena_;
  size_t bytes_ = 0;
};

}  // namespace denoised
