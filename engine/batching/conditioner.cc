// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/conditioner.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "engine/backend/counting.h"

namespace denoised {
namespace {

// Chunks that are encoded together, unless one prompt has more.
constexpr int kTogether = 8;

/// The prompt without its numbers, as text encoders read it.
TokenizedPrompt TextsOf(TokenizedPrompt prompt) {
  prompt.sizes.clear();
  prompt.guidance = 0;
  return prompt;
}

}  // namespace

Conditioner::Conditioner(Backend& backend, std::shared_ptr<const Denoiser> denoiser,
                         const Encoders& encoders)
    : backend_(backend),
      denoiser_(std::move(denoiser)),
      encoders_(encoders),
      together_(std::max(kTogether, encoders.max_chunks)) {}

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
                        const std::string& purpose) -> absl::Status {
    DENOISED_ASSIGN_OR_RETURN(*tensor, backend_.Allocate(shape, type, purpose));
    bytes_ += tensor->bytes();
    return absl::OkStatus();
  };
  most_skipped_ = std::numeric_limits<int>::max();
  for (const auto& encoder : encoders_.models) {
    tokens_ = std::max(tokens_, encoder->traits().max_tokens);
    most_skipped_ = std::min(most_skipped_, encoder->traits().layers);
  }
  DENOISED_RETURN_IF_ERROR(take(
      &sets_.keys_values, {sets, encoders_.max_chunks * tokens_, traits.key_value_columns}, dtype,
      fmt::format("keys and values of {} prompts of {} tokens", sets,
                  encoders_.max_chunks * tokens_)));
  DENOISED_RETURN_IF_ERROR(take(&sets_.key_counts, {sets}, DType::kI32, "token counts"));
  // What WarmUp() reads before any prompt was put there.
  const auto take_zeros = [&](Tensor* tensor, const Shape& shape, DType type,
                              const std::string& purpose) -> absl::Status {
    DENOISED_RETURN_IF_ERROR(take(tensor, shape, type, purpose));
    const std::vector<std::byte> zeros(tensor->bytes());
    backend_.Upload(zeros.data(), zeros.size(), *tensor);
    return absl::OkStatus();
  };
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
    const int64_t tokens = int64_t{together_} * encoder->traits().max_tokens;
    TextInput& input = inputs_.emplace_back();
    DENOISED_RETURN_IF_ERROR(take_zeros(&input.ids, {tokens}, DType::kI32, "tokens"));
    DENOISED_RETURN_IF_ERROR(take(&input.positions, {tokens}, DType::kI32, "tokens"));
    DENOISED_RETURN_IF_ERROR(take_zeros(&input.ends, {together_}, DType::kI32, "tokens"));
    std::vector<int32_t> positions(tokens);
    for (int64_t i = 0; i < tokens; ++i)
      positions[i] = static_cast<int32_t>(i % encoder->traits().max_tokens);
    backend_.Upload(positions.data(), positions.size() * sizeof(int32_t), input.positions);
  }
  if (traits.size_numbers > 0)
    DENOISED_RETURN_IF_ERROR(
        take_zeros(&sizes_, {together_ * traits.size_numbers}, DType::kF32, "sizes of prompts"));
  DENOISED_RETURN_IF_ERROR(take_zeros(&guidance_, {together_}, DType::kF32, "guidance of prompts"));
  DENOISED_RETURN_IF_ERROR(
      take_zeros(&no_states_, {tokens_, traits.text_features}, dtype, "states of no prompt"));
  if (traits.pooled_features > 0) {
    DENOISED_RETURN_IF_ERROR(take_zeros(&firsts_, {together_}, DType::kI32, "tokens"));
    DENOISED_RETURN_IF_ERROR(
        take_zeros(&no_pooled_, {traits.pooled_features}, dtype, "states of no prompt"));
    DENOISED_RETURN_IF_ERROR(
        take(&pooled_, {sets, traits.pooled_features}, dtype, "pooled states of prompts"));
    DENOISED_RETURN_IF_ERROR(take_zeros(&known_pooled_, {together_, traits.pooled_features}, dtype,
                                        "pooled states of prompts"));
  }

  to_warm_ = Ordinary();

  size_t activations = 0;
  // A text encoder that is also pooled keeps the states of an earlier layer while it runs the last
  // ones. So a request's clip_skip changes what it needs.
  std::vector<Kind> kinds = {{States::kZeros}, {States::kKnown}};
  for (int skip = 0; skip <= most_skipped_; ++skip) kinds.push_back({States::kEncoded, skip});
  for (const Kind& kind : kinds) {
    for (int chunks = 1; chunks <= together_; ++chunks) {
      CountingBackend counting(backend_);
      Arena measuring = Arena::Measuring(backend_.device());
      Tensor pooled;
      MakeSets(counting, measuring, chunks, kind, &pooled);
      activations = std::max(activations, measuring.peak());
    }
  }
  return take(&block_, {static_cast<int64_t>(activations)}, DType::kU8, "activations of prompts");
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
  if (--entry.users > 0) return;
  const bool filled = std::erase(pending_, set) == 0;
  entry.idle = idle_.insert(filled ? idle_.end() : idle_.begin(), set);
  if (filled) return;
  known_.erase(*entry.prompt);
  entry.prompt.reset();
}

Conditioner::Kind Conditioner::KindOf(int set) const {
  const TokenizedPrompt& prompt = *entries_[set].prompt;
  if (prompt.ids.empty()) return {States::kZeros};
  return {States::kEncoded, prompt.skip_layers};
}

std::vector<Conditioner::Together> Conditioner::RunsOfPending() const {
  std::map<TokenizedPrompt, int> texts;  // and a set with them, filled before others copy it
  for (int set = 0; set < static_cast<int>(entries_.size()) && !pending_.empty(); ++set)
    if (entries_[set].prompt && !Pending(set)) texts.emplace(TextsOf(*entries_[set].prompt), set);
  std::vector<int> read;
  std::vector<std::pair<int, int>> copied;
  for (const int set : pending_) {
    const auto [known, is_new] = texts.emplace(TextsOf(*entries_[set].prompt), set);
    if (is_new) {
      read.push_back(set);
    } else {
      copied.emplace_back(set, known->second);
    }
  }
  std::stable_sort(read.begin(), read.end(), [&](int a, int b) { return KindOf(a) < KindOf(b); });
  std::vector<Together> runs;
  const auto append = [&](const Kind& kind, int chunks) -> Together& {
    if (runs.empty() || runs.back().kind != kind || runs.back().chunks + chunks > together_)
      runs.push_back({.kind = kind});
    runs.back().chunks += chunks;
    return runs.back();
  };
  for (const int set : read) append(KindOf(set), entries_[set].prompt->chunks).sets.push_back(set);
  for (const auto& [set, other] : copied) {
    Together& together = append({States::kKnown}, 1);
    together.sets.push_back(set);
    together.others.push_back(other);
  }
  return runs;
}

absl::StatusOr<int> Conditioner::Encode(CapturedRun::Ran* ran) {
  const std::vector<Together> runs = RunsOfPending();
  for (const Together& together : runs)  // before the time that is measured
    DENOISED_RETURN_IF_ERROR(
        EncodingOf(PaddedChunks(together.chunks), together.kind).run->Capture());
  ran->begin = backend_.Mark();
  for (const Together& together : runs)
    DENOISED_RETURN_IF_ERROR(together.kind.states == States::kKnown ? CopyTogether(together)
                                                                    : EncodeTogether(together));
  ran->end = backend_.Mark();
  const int made = static_cast<int>(pending_.size());
  pending_.clear();
  DENOISED_RETURN_IF_ERROR(backend_.status());
  return made;
}

std::deque<std::pair<int, Conditioner::Kind>> Conditioner::Ordinary() const {
  std::vector<int> sizes = {1};
  while (backend_.capabilities().pads_rows && sizes.back() < together_)
    sizes.push_back(PaddedChunks(sizes.back() + 1));
  std::deque<std::pair<int, Kind>> encodings;
  for (const int chunks : sizes)
    encodings.push_back({chunks, {States::kEncoded, encoders_.skip_layers}});
  // All zeros have equal texts: one set is made, and others copy it.
  if (encoders_.zeros_without_negative) encodings.push_back({1, {States::kZeros}});
  const DenoiserTraits& traits = denoiser_->traits();
  for (const int chunks : sizes)
    if (traits.size_numbers > 0 || traits.guidance_embedding)
      encodings.push_back({chunks, {States::kKnown}});
  return encodings;
}

absl::StatusOr<std::optional<double>> Conditioner::WarmUp() {
  const auto [chunks, kind] = to_warm_.front();
  CapturedRun& run = *EncodingOf(chunks, kind).run;
  DENOISED_RETURN_IF_ERROR(run.Capture());
  DENOISED_ASSIGN_OR_RETURN(const CapturedRun::Ran ran, run.Run());
  DENOISED_RETURN_IF_ERROR(ran.end->Wait());
  std::optional<double> seconds;
  if (chunks == 1 && kind.states == States::kEncoded) {
    seconds = warm_runs_.Add(ran.end->SecondsSince(*ran.begin));
    if (!seconds) return seconds;
  }
  to_warm_.pop_front();
  return seconds;
}

bool Conditioner::Pending(int set) const {
  return std::find(pending_.begin(), pending_.end(), set) != pending_.end();
}

int Conditioner::PaddedChunks(int chunks) const {
  if (!backend_.capabilities().pads_rows) return chunks;
  return std::min(static_cast<int>(std::bit_ceil(static_cast<unsigned>(chunks))), together_);
}

absl::Status Conditioner::EncodeTogether(const Together& together) {
  const Kind& kind = together.kind;
  const std::vector<int>& sets = together.sets;
  const int count = static_cast<int>(sets.size()), chunks = PaddedChunks(together.chunks);
  DENOISED_CHECK(kind.skip_layers >= 0 && kind.skip_layers <= most_skipped_,
                 "skips {} of {} layers", kind.skip_layers, most_skipped_);
  std::vector<int32_t> firsts;  // the first chunk of each prompt
  std::vector<int> places;      // of chunks in the pool
  for (const int set : sets) {
    const TokenizedPrompt& prompt = *entries_[set].prompt;
    DENOISED_CHECK(prompt.chunks >= 1 && prompt.chunks <= encoders_.max_chunks, "{} chunks of {}",
                   prompt.chunks, encoders_.max_chunks);
    firsts.push_back(static_cast<int32_t>(places.size()));
    for (int chunk = 0; chunk < prompt.chunks; ++chunk)
      places.push_back(set * encoders_.max_chunks + chunk);
    const int32_t tokens = prompt.chunks * tokens_;
    backend_.Upload(&tokens, sizeof(tokens), sets_.key_counts.Slice(set, 1));
  }
  for (size_t e = 0; e < encoders_.models.size() && kind.states == States::kEncoded; ++e) {
    const int tokens = encoders_.models[e]->traits().max_tokens;
    std::vector<int32_t> ids, ends;
    for (int i = 0; i < count; ++i) {
      const TokenizedPrompt& prompt = *entries_[sets[i]].prompt;
      ids.insert(ids.end(), prompt.ids[e].begin(), prompt.ids[e].end());
      ends.push_back(firsts[i] * tokens + prompt.ends[e]);
      // Chunks after the first are not pooled, but an encoder pools every row.
      for (int chunk = 1; chunk < prompt.chunks; ++chunk)
        ends.push_back((firsts[i] + chunk) * tokens);
    }
    DENOISED_CHECK(ids.size() == places.size() * tokens, "{} tokens of {} chunks", ids.size(),
                   places.size());
    ids.resize(int64_t{chunks} * tokens);
    ends.resize(chunks);
    backend_.Upload(ids.data(), ids.size() * sizeof(int32_t), inputs_[e].ids);
    backend_.Upload(ends.data(), ends.size() * sizeof(int32_t), inputs_[e].ends);
  }
  if (firsts_) {
    firsts.resize(chunks);
    backend_.Upload(firsts.data(), firsts.size() * sizeof(int32_t), firsts_);
  }
  UploadNumbers(sets, chunks);
  Encoding& encoding = EncodingOf(chunks, kind);
  DENOISED_RETURN_IF_ERROR(encoding.run->Run().status());
  encoded_ += count;
  const auto copy = [&](const Tensor& from, const Tensor& to, const std::vector<int>& to_rows) {
    for (size_t i = 0; from && i < to_rows.size(); ++i)
      backend_.Copy(from.Slice(static_cast<int64_t>(i), 1), to.Slice(to_rows[i], 1));
  };
  const Tensor& pool = sets_.keys_values;
  copy(encoding.made.keys_values,
       pool.Reshape({pool.dim(0) * encoders_.max_chunks, tokens_, pool.dim(2)}), places);
  copy(encoding.made.vectors, sets_.vectors, sets);
  copy(encoding.made.times, sets_.times, sets);
  copy(encoding.pooled, pooled_, sets);
  return backend_.status();
}

absl::Status Conditioner::CopyTogether(const Together& together) {
  const int count = together.chunks, rows = PaddedChunks(count);
  for (int i = 0; i < count; ++i) {
    const int set = together.sets[i], other = together.others[i];
    const int32_t tokens = entries_[set].prompt->chunks * tokens_;
    backend_.Upload(&tokens, sizeof(tokens), sets_.key_counts.Slice(set, 1));
    const auto states = [&](int of) {
      return sets_.keys_values.Slice(of, 1)
          .Reshape({sets_.keys_values.dim(1), sets_.keys_values.dim(2)})
          .Slice(0, tokens);
    };
    backend_.Copy(states(other), states(set));
    if (pooled_) {
      backend_.Copy(pooled_.Slice(other, 1), pooled_.Slice(set, 1));
      backend_.Copy(pooled_.Slice(other, 1), known_pooled_.Slice(i, 1));
    }
  }
  UploadNumbers(together.sets, rows);
  Encoding& encoding = EncodingOf(rows, together.kind);
  DENOISED_RETURN_IF_ERROR(encoding.run->Run().status());
  for (int i = 0; i < count; ++i) {
    const auto copy = [&](const Tensor& from, const Tensor& to) {
      if (from) backend_.Copy(from.Slice(i, 1), to.Slice(together.sets[i], 1));
    };
    copy(encoding.made.vectors, sets_.vectors);
    copy(encoding.made.times, sets_.times);
  }
  return backend_.status();
}

void Conditioner::UploadNumbers(const std::vector<int>& sets, int count) {
  std::vector<float> sizes, guidance;
  for (const int set : sets) {
    const TokenizedPrompt& prompt = *entries_[set].prompt;
    sizes.insert(sizes.end(), prompt.sizes.begin(), prompt.sizes.end());
    guidance.push_back(prompt.guidance);
  }
  guidance.resize(count);
  sizes.resize(int64_t{count} * denoiser_->traits().size_numbers);
  if (sizes_) backend_.Upload(sizes.data(), sizes.size() * sizeof(float), sizes_);
  backend_.Upload(guidance.data(), guidance.size() * sizeof(float), guidance_);
}

Conditioner::Encoding& Conditioner::EncodingOf(int chunks, const Kind& kind) {
  Encoding& encoding = encodings_[{chunks, kind}];
  if (encoding.run) return encoding;
  encoding.arena.emplace(block_);
  encoding.run.emplace(backend_, [this, &encoding, chunks, kind] {
    // Nothing else is in this arena, so the sets have the same addresses each time.
    encoding.made = {};
    encoding.pooled = {};
    encoding.made = MakeSets(backend_, *encoding.arena, chunks, kind, &encoding.pooled);
  });
  return encoding;
}

Prompts Conditioner::Read(Backend& backend, Arena& arena, int chunks, const Kind& kind) const {
  const DenoiserTraits& traits = denoiser_->traits();
  nn::Context context{backend, arena};
  const bool alone = encoders_.models.size() == 1;
  Prompts prompts;
  if (sizes_) prompts.sizes = sizes_.Slice(0, int64_t{chunks} * traits.size_numbers);
  prompts.guidance = guidance_.Slice(0, chunks);
  if (kind.states == States::kKnown) {
    if (known_pooled_) prompts.pooled = known_pooled_.Slice(0, chunks);
    return prompts;
  }
  if (!alone || kind.states == States::kZeros)
    prompts.states = context.New({chunks, tokens_, traits.text_features});
  if (traits.pooled_features > 0) prompts.pooled = context.New({chunks, traits.pooled_features});
  if (kind.states == States::kZeros) {
    for (int i = 0; i < chunks; ++i) {
      backend.Copy(no_states_, prompts.states.Slice(i, 1));
      if (prompts.pooled) backend.Copy(no_pooled_, prompts.pooled.Slice(i, 1));
    }
    return prompts;
  }
  int column = 0;
  for (size_t e = 0; e < encoders_.models.size(); ++e) {
    const TextEncoder& encoder = *encoders_.models[e];
    const int features = encoder.traits().features;
    const int64_t tokens = int64_t{chunks} * encoder.traits().max_tokens;
    const TextInput input{.ids = inputs_[e].ids.Slice(0, tokens),
                          .positions = inputs_[e].positions.Slice(0, tokens),
                          .ends = inputs_[e].ends.Slice(0, chunks)};
    // SDXL pools its second encoder, whose states come last.
    const bool pool = prompts.pooled && e + 1 == encoders_.models.size();
    const TextOutput output = encoder.Forward(
        context, input,
        {.skip_layers = kind.skip_layers, .final_norm = encoders_.final_norm, .pool = pool});
    if (pool)
      backend.Embedding(
          {.table = output.pooled, .index = firsts_.Slice(0, chunks), .out = prompts.pooled});
    if (alone) {
      prompts.states = output.states;
    } else {
      backend.Copy(output.states, prompts.states.Columns(column, features));
      column += features;
    }
  }
  return prompts;
}

ConditionSets Conditioner::MakeSets(Backend& backend, Arena& arena, int chunks, const Kind& kind,
                                    Tensor* pooled) const {
  nn::Context context{backend, arena};
  const auto rows_of = [&](const Tensor& pool) {
    return pool ? context.New({chunks, pool.dim(1)}) : Tensor();
  };
  ConditionSets made;
  if (kind.states != States::kKnown)
    made.keys_values = context.New({chunks, tokens_, sets_.keys_values.dim(2)});
  made.vectors = rows_of(sets_.vectors);
  made.times = rows_of(sets_.times);
  const Prompts prompts = Read(backend, arena, chunks, kind);
  denoiser_->Condition(context, prompts, made);
  *pooled = prompts.pooled;
  return made;
}

}  // namespace denoised
