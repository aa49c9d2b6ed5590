// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/conditioner.h"

#include <algorithm>

#include "engine/backend/counting.h"

namespace denoised {
namespace {

// Prompts that are encoded side by side.
constexpr int kTogether = 8;

}  // namespace

Conditioner::Conditioner(Backend& backend, std::shared_ptr<const Denoiser> denoiser,
                         const Encoders& encoders)
    : backend_(backend), denoiser_(std::move(denoiser)), encoders_(encoders) {}

absl::StatusOr<std::unique_ptr<Conditioner>> Conditioner::Create(
    Backend& backend, std::shared_ptr<const Denoiser> denoiser, const Encoders& encoders,
    int sets) {
  std::unique_ptr<Conditioner> conditioner(new Conditioner(backend, std::move(denoiser), encoders));
  DENOISED_RETURN_IF_ERROR(conditioner->Allocate(sets));
  return conditioner;
}

absl::Status Conditioner::Allocate(int sets) {
  const DenoiserTraits& traits = denoiser_->traits();
  const DType dtype = backend_.activation_dtype();
  const auto take = [&](Tensor* tensor, const Shape& shape, DType type,
                        const char* purpose) -> absl::Status {
    DENOISED_ASSIGN_OR_RETURN(*tensor, backend_.Allocate(shape, type, purpose));
    bytes_ += tensor->bytes();
    return absl::OkStatus();
  };
  for (const auto& encoder : encoders_.models)
    tokens_ = std::max(tokens_, encoder->traits().max_tokens);
  DENOISED_RETURN_IF_ERROR(take(&sets_.keys_values, {sets, tokens_, traits.key_value_columns},
                                dtype, "keys and values of prompts"));
  DENOISED_RETURN_IF_ERROR(take(&sets_.key_counts, {sets}, DType::kI32, "token counts"));
  const std::vector<int32_t> counts(sets, tokens_);
  backend_.Upload(counts.data(), counts.size() * sizeof(int32_t), sets_.key_counts);
  if (traits.vector_features > 0)
    DENOISED_RETURN_IF_ERROR(
        take(&sets_.vectors, {sets, traits.vector_features}, dtype, "embeddings of prompts"));
  if (traits.time_features > 0)
    DENOISED_RETURN_IF_ERROR(
        take(&sets_.times, {sets, traits.time_features}, dtype, "embeddings of guidance"));
  for (int set = 0; set < sets; ++set) idle_.push_back(set);
  entries_.resize(sets);
  for (auto it = idle_.begin(); it != idle_.end(); ++it) entries_[*it].idle = it;

  for (const auto& encoder : encoders_.models) {
    const int64_t tokens = int64_t{kTogether} * encoder->traits().max_tokens;
    TextInput& input = inputs_.emplace_back();
    DENOISED_RETURN_IF_ERROR(take(&input.ids, {tokens}, DType::kI32, "tokens"));
    DENOISED_RETURN_IF_ERROR(take(&input.positions, {tokens}, DType::kI32, "tokens"));
    DENOISED_RETURN_IF_ERROR(take(&input.ends, {kTogether}, DType::kI32, "tokens"));
    std::vector<int32_t> positions(tokens);
    for (int64_t i = 0; i < tokens; ++i)
      positions[i] = static_cast<int32_t>(i % encoder->traits().max_tokens);
    backend_.Upload(positions.data(), positions.size() * sizeof(int32_t), input.positions);
  }
  if (traits.size_numbers > 0)
    DENOISED_RETURN_IF_ERROR(
        take(&sizes_, {kTogether * traits.size_numbers}, DType::kF32, "sizes of prompts"));
  DENOISED_RETURN_IF_ERROR(take(&guidance_, {kTogether}, DType::kF32, "guidance of prompts"));
  const std::vector<float> zeros(std::max<size_t>(
      static_cast<size_t>(tokens_) * traits.text_features, traits.pooled_features));
  DENOISED_RETURN_IF_ERROR(
      take(&no_states_, {tokens_, traits.text_features}, dtype, "states of no prompt"));
  backend_.Upload(zeros.data(), no_states_.bytes(), no_states_);
  if (traits.pooled_features > 0) {
    DENOISED_RETURN_IF_ERROR(
        take(&no_pooled_, {traits.pooled_features}, dtype, "states of no prompt"));
    backend_.Upload(zeros.data(), no_pooled_.bytes(), no_pooled_);
  }

  size_t activations = 0;
  for (int count = 1; count <= kTogether; ++count) {
    CountingBackend counting(backend_);
    Arena measuring = Arena::Measuring(backend_.device());
    zeros_.assign(count, true);
    MakeSets(counting, measuring, Read(counting, measuring, count, 0), std::vector<int>(count));
    activations = std::max(activations, measuring.peak());
  }
  Tensor block;
  DENOISED_RETURN_IF_ERROR(
      take(&block, {static_cast<int64_t>(activations)}, DType::kU8, "activations of prompts"));
  arena_.emplace(std::move(block));
  return backend_.status();
}

bool Conditioner::HasRoom(int count) const { return static_cast<int>(idle_.size()) >= count; }

int Conditioner::Acquire(const TokenizedPrompt& prompt) {
  if (const auto known = known_.find(prompt); known != known_.end()) {
    Entry& entry = entries_[known->second];
    if (entry.users++ == 0) idle_.erase(entry.idle);
    return known->second;
  }
  DENOISED_CHECK(!idle_.empty(), "all condition sets are in use");
  const int set = idle_.front();
  idle_.pop_front();
  Entry& entry = entries_[set];
  if (entry.prompt) known_.erase(*entry.prompt);
  entry.prompt = prompt;
  entry.users = 1;
  known_[prompt] = set;
  pending_.push_back(set);
  return set;
}

void Conditioner::Release(int set) {
  Entry& entry = entries_[set];
  DENOISED_CHECK(entry.users > 0, "set {} has no users", set);
  if (--entry.users == 0) entry.idle = idle_.insert(idle_.end(), set);
}

absl::Status Conditioner::Encode() {
  const auto skip = [&](int set) { return entries_[set].prompt->skip_layers; };
  std::stable_sort(pending_.begin(), pending_.end(),
                   [&](int a, int b) { return skip(a) < skip(b); });
  for (auto begin = pending_.begin(); begin != pending_.end();) {
    auto end = begin;
    while (end != pending_.end() && end - begin < kTogether && skip(*end) == skip(*begin)) ++end;
    EncodeTogether(std::vector<int>(begin, end));
    begin = end;
  }
  pending_.clear();
  return backend_.status();
}

void Conditioner::EncodeTogether(const std::vector<int>& sets) {
  const DenoiserTraits& traits = denoiser_->traits();
  const int count = static_cast<int>(sets.size());
  zeros_.clear();
  for (const int set : sets) zeros_.push_back(entries_[set].prompt->ids.empty());
  for (size_t e = 0; e < encoders_.models.size(); ++e) {
    const int tokens = encoders_.models[e]->traits().max_tokens;
    std::vector<int32_t> ids, ends;
    for (int i = 0; i < count; ++i) {
      const TokenizedPrompt& prompt = *entries_[sets[i]].prompt;
      if (zeros_[i]) {
        ids.resize(ids.size() + tokens);
        ends.push_back(i * tokens);
        continue;
      }
      ids.insert(ids.end(), prompt.ids[e].begin(), prompt.ids[e].end());
      ends.push_back(i * tokens + prompt.ends[e]);
    }
    DENOISED_CHECK(ids.size() == static_cast<size_t>(count) * tokens, "{} tokens of {} prompts",
                   ids.size(), count);
    backend_.Upload(ids.data(), ids.size() * sizeof(int32_t), inputs_[e].ids);
    backend_.Upload(ends.data(), ends.size() * sizeof(int32_t), inputs_[e].ends);
  }
  std::vector<float> sizes, guidance;
  for (const int set : sets) {
    const TokenizedPrompt& prompt = *entries_[set].prompt;
    sizes.insert(sizes.end(), prompt.sizes.begin(), prompt.sizes.end());
    guidance.push_back(prompt.guidance);
  }
  if (traits.size_numbers > 0) backend_.Upload(sizes.data(), sizes.size() * sizeof(float), sizes_);
  backend_.Upload(guidance.data(), guidance.size() * sizeof(float), guidance_);
  const int skip = entries_[sets.front()].prompt->skip_layers;
  MakeSets(backend_, *arena_, Read(backend_, *arena_, count, skip), sets);
}

Prompts Conditioner::Read(Backend& backend, Arena& arena, int count, int skip_layers) const {
  const DenoiserTraits& traits = denoiser_->traits();
  nn::Context context{backend, arena};
  const bool alone = encoders_.models.size() == 1;
  Prompts prompts;
  if (!alone) prompts.states = context.New({count, tokens_, traits.text_features});
  int column = 0;
  for (size_t e = 0; e < encoders_.models.size(); ++e) {
    const TextEncoder& encoder = *encoders_.models[e];
    const int features = encoder.traits().features;
    const int64_t tokens = int64_t{count} * encoder.traits().max_tokens;
    const TextInput input{.ids = inputs_[e].ids.Slice(0, tokens),
                          .positions = inputs_[e].positions.Slice(0, tokens),
                          .ends = inputs_[e].ends.Slice(0, count)};
    // SDXL pools its second encoder, whose states come last.
    const bool pool = traits.pooled_features > 0 && e + 1 == encoders_.models.size();
    const TextOutput output = encoder.Forward(
        context, input,
        {.skip_layers = skip_layers, .final_norm = encoders_.final_norm, .pool = pool});
    if (pool) prompts.pooled = output.pooled;
    if (alone) {
      prompts.states = output.states;
    } else {
      backend.Copy(output.states, prompts.states.Columns(column, features));
      column += features;
    }
  }
  for (int i = 0; i < count; ++i) {
    if (!zeros_[i]) continue;
    backend.Copy(no_states_, prompts.states.Slice(i, 1));
    if (prompts.pooled) backend.Copy(no_pooled_, prompts.pooled.Slice(i, 1));
  }
  if (sizes_) prompts.sizes = sizes_.Slice(0, int64_t{count} * traits.size_numbers);
  prompts.guidance = guidance_.Slice(0, count);
  return prompts;
}

void Conditioner::MakeSets(Backend& backend, Arena& arena, const Prompts& prompts,
                           const std::vector<int>& sets) const {
  nn::Context context{backend, arena};
  const auto rows_of = [&](const Tensor& pool) {
    if (!pool) return Tensor();
    return pool.shape().rank() == 3 ? context.New({prompts.states.dim(0), pool.dim(1), pool.dim(2)})
                                    : context.New({prompts.states.dim(0), pool.dim(1)});
  };
  const ConditionSets made{.keys_values = rows_of(sets_.keys_values),
                           .vectors = rows_of(sets_.vectors),
                           .times = rows_of(sets_.times)};
  denoiser_->Condition(context, prompts, made);
  for (size_t i = 0; i < sets.size(); ++i) {
    for (const auto& [from, to] :
         {std::pair{&made.keys_values, &sets_.keys_values},
          std::pair{&made.vectors, &sets_.vectors}, std::pair{&made.times, &sets_.times}})
      if (*from) backend.Copy(from->Slice(static_cast<int64_t>(i), 1), to->Slice(sets[i], 1));
  }
}

}  // namespace denoised
