// SPDX-License-Identifier: Apache-2.0
#include "engine/models/clip_text.h"

#include <cmath>
#include <optional>
#include <vector>

#include "engine/core/config_reader.h"

namespace denoised {
namespace {

using nn::Context;
using nn::LayerNorm;
using nn::Linear;

constexpr int kMaxFeatures = 1 << 16;

/// In configs before transformers 4.31, whatever the tokenizer's end token was. The class then
/// pools at the largest id, which is the end token's.
constexpr int kLegacyEndToken = 2;

}  // namespace

absl::StatusOr<ClipTextConfig> ClipTextConfig::Parse(const nlohmann::json& json,
                                                     const std::string& file,
                                                     const std::string& class_name) {
  ClipTextConfig config;
  config.with_projection = class_name == "CLIPTextModelWithProjection";
  if (!config.with_projection && class_name != "CLIPTextModel")
    return InvalidArgument(
        "{}: text encoder class {} is not supported; use CLIPTextModel or "
        "CLIPTextModelWithProjection",
        file, class_name);
  ConfigReader reader(json, file);
  reader.Refuse("model_type", "clip_text_model");
  reader.Read("vocab_size", &config.vocab_size);
  reader.Read("hidden_size", &config.hidden_size);
  reader.Read("intermediate_size", &config.intermediate_size);
  reader.Read("projection_dim", &config.projection_dim);
  reader.Read("num_hidden_layers", &config.num_hidden_layers);
  reader.Read("num_attention_heads", &config.num_attention_heads);
  reader.Read("max_position_embeddings", &config.max_position_embeddings);
  reader.Read("layer_norm_eps", &config.layer_norm_eps);
  reader.Read("eos_token_id", &config.eos_token_id);
  nn::ReadActivation(reader, "hidden_act", &config.hidden_act, /*quick_gelu=*/true);
  reader.Refuse("is_decoder", false);
  reader.Refuse("add_cross_attention", false);
  reader.Refuse("quantization_config", nullptr);
  reader.Refuse("pruned_heads", nlohmann::json::object());
  // For training, for other tasks, or of the tokenizer.
  reader.Ignore({"architectures",
                 "attention_dropout",
                 "bos_token_id",
                 "chunk_size_feed_forward",
                 "dropout",
                 "dtype",
                 "finetuning_task",
                 "gradient_checkpointing",
                 "id2label",
                 "initializer_factor",
                 "initializer_range",
                 "is_encoder_decoder",
                 "label2id",
                 "output_attentions",
                 "output_hidden_states",
                 "pad_token_id",
                 "prefix",
                 "problem_type",
                 "return_dict",
                 "sep_token_id",
                 "task_specific_params",
                 "tie_encoder_decoder",
                 "tie_word_embeddings",
                 "tokenizer_class",
                 "torch_dtype",
                 "torchscript",
                 "transformers_version",
                 "use_bfloat16",
                 "use_cache"});
  // Settings for generating text, which are in configs that were copied from a whole CLIP model's.
  reader.Ignore({"bad_words_ids",
                 "begin_suppress_tokens",
                 "cross_attention_hidden_size",
                 "decoder_start_token_id",
                 "diversity_penalty",
                 "do_sample",
                 "early_stopping",
                 "encoder_no_repeat_ngram_size",
                 "exponential_decay_length_penalty",
                 "forced_bos_token_id",
                 "forced_eos_token_id",
                 "length_penalty",
                 "max_length",
                 "min_length",
                 "no_repeat_ngram_size",
                 "num_beam_groups",
                 "num_beams",
                 "num_return_sequences",
                 "output_scores",
                 "remove_invalid_values",
                 "repetition_penalty",
                 "return_dict_in_generate",
                 "suppress_tokens",
                 "temperature",
                 "tf_legacy_loss",
                 "top_k",
                 "top_p",
                 "typical_p"});

  reader.CheckRange("vocab_size", config.vocab_size, 1, 1 << 24);
  reader.CheckRange("hidden_size", config.hidden_size, 1, kMaxFeatures);
  reader.CheckRange("intermediate_size", config.intermediate_size, 1, 4 * kMaxFeatures);
  reader.CheckRange("projection_dim", config.projection_dim, 1, kMaxFeatures);
  reader.CheckRange("num_hidden_layers", config.num_hidden_layers, 1, 256);
  reader.CheckRange("max_position_embeddings", config.max_position_embeddings, 1, 1 << 16);
  if (config.num_attention_heads < 1 || config.hidden_size % config.num_attention_heads != 0) {
    reader.Complain("num_attention_heads",
                    fmt::format("must divide the hidden_size of {}", config.hidden_size));
  } else if (config.hidden_size / config.num_attention_heads > kMaxHeadDim) {
    reader.Complain("num_attention_heads",
                    fmt::format("gives heads {} wide; at most {} are supported",
                                config.hidden_size / config.num_attention_heads, kMaxHeadDim));
  }
  if (!(config.layer_norm_eps > 0)) reader.Complain("layer_norm_eps", "must be greater than 0");
  // No token may have it; then the first one is pooled, as in transformers.
  if (config.eos_token_id < 0) reader.Complain("eos_token_id", "must be at least 0");
  DENOISED_RETURN_IF_ERROR(reader.Finish());
  return config;
}

namespace {

class ClipText : public TextEncoder {
 public:
  explicit ClipText(const ClipTextConfig& config) : config_(config) {}

  absl::Status Load(NetworkOps& ops, const Weights& weights);
  const TextEncoderTraits& traits() const override { return traits_; }
  TextOutput Forward(Context& context, const TextInput& input,
                     const TextOptions& options) const override;

 private:
  struct Layer {
    LayerNorm norm1, norm2;
    Linear qkv, out, fc1, fc2;
  };

  absl::StatusOr<Layer> LoadLayer(NetworkOps& ops, const Weights& weights) const;
  Tensor Embed(Context& context, const TextInput& input, int64_t rows, int64_t tokens) const;
  Tensor Run(Context& context, const Layer& layer, Tensor x) const;

  ClipTextConfig config_;
  TextEncoderTraits traits_;
  Tensor token_table_, position_table_;
  std::vector<Layer> layers_;
  LayerNorm final_norm_;
  std::optional<Linear> projection_;
};

absl::Status ClipText::Load(NetworkOps& ops, const Weights& weights) {
  const int features = config_.hidden_size;
  traits_ = {.max_tokens = config_.max_position_embeddings,
             .features = features,
             .pooled_features = config_.with_projection ? config_.projection_dim : features,
             .layers = config_.num_hidden_layers,
             .vocabulary = config_.vocab_size,
             .end_token = config_.eos_token_id == kLegacyEndToken ? -1 : config_.eos_token_id};

  const bool prefixed = weights.Has("text_model.embeddings.token_embedding.weight");
  const Weights model = prefixed ? weights / "text_model" : weights;
  const Weights embeddings = model / "embeddings";
  DENOISED_ASSIGN_OR_RETURN(
      const Tensor tokens,
      (embeddings / "token_embedding").Get("weight", {config_.vocab_size, features}));
  DENOISED_ASSIGN_OR_RETURN(const Tensor positions,
                            (embeddings / "position_embedding")
                                .Get("weight", {config_.max_position_embeddings, features}));
  DENOISED_ASSIGN_OR_RETURN(token_table_, ops.PackVector(tokens));
  DENOISED_ASSIGN_OR_RETURN(position_table_, ops.PackVector(positions));
  embeddings.Ignore("position_ids");  // 0, 1, …, saved by transformers before 4.31

  for (int i = 0; i < config_.num_hidden_layers; ++i) {
    DENOISED_ASSIGN_OR_RETURN(Layer layer, LoadLayer(ops, model / "encoder" / "layers" / i));
    layers_.push_back(std::move(layer));
  }
  DENOISED_ASSIGN_OR_RETURN(final_norm_, LayerNorm::Load(ops, model / "final_layer_norm", features,
                                                         config_.layer_norm_eps));
  if (config_.with_projection) {
    DENOISED_ASSIGN_OR_RETURN(
        projection_, Linear::Load(ops, weights / "text_projection", features,
                                  config_.projection_dim, nn::Products::kWide, nn::Bias::kNo));
  }
  traits_.parameters = weights.parameters();
  return absl::OkStatus();
}

absl::StatusOr<ClipText::Layer> ClipText::LoadLayer(NetworkOps& ops, const Weights& weights) const {
  const int features = config_.hidden_size, inner = config_.intermediate_size;
  const Weights attention = weights / "self_attn", mlp = weights / "mlp";
  Layer layer;
  DENOISED_ASSIGN_OR_RETURN(
      layer.norm1, LayerNorm::Load(ops, weights / "layer_norm1", features, config_.layer_norm_eps));
  DENOISED_ASSIGN_OR_RETURN(
      layer.qkv,
      Linear::LoadFused(ops, {attention / "q_proj", attention / "k_proj", attention / "v_proj"},
                        features, {features, features, features}));
  DENOISED_ASSIGN_OR_RETURN(layer.out,
                            Linear::Load(ops, attention / "out_proj", features, features));
  DENOISED_ASSIGN_OR_RETURN(
      layer.norm2, LayerNorm::Load(ops, weights / "layer_norm2", features, config_.layer_norm_eps));
  DENOISED_ASSIGN_OR_RETURN(layer.fc1, Linear::Load(ops, mlp / "fc1", features, inner));
  DENOISED_ASSIGN_OR_RETURN(layer.fc2, Linear::Load(ops, mlp / "fc2", inner, features));
  return layer;
}

Tensor ClipText::Embed(Context& context, const TextInput& input, int64_t rows,
                       int64_t tokens) const {
  Tensor states = context.New({rows, tokens, config_.hidden_size});
  const Shape flat = {rows * tokens, config_.hidden_size};
  const Tensor words = context.NewF32(flat), positions = context.NewF32(flat);
  context.ops.Embedding({.table = token_table_, .index = input.ids, .out = words});
  context.ops.Embedding({.table = position_table_, .index = input.positions, .out = positions});
  context.ops.Add(words, 1.0f, positions, 0.0f, Activation::kNone, states.Reshape(flat));
  return states;
}

Tensor ClipText::Run(Context& context, const Layer& layer, Tensor x) const {
  const int64_t features = config_.hidden_size;
  {
    const Tensor qkv = layer.qkv(context, {.x = layer.norm1(context, x)});
    const Tensor attended = context.New(x.shape());
    const auto head_dim = static_cast<float>(features / config_.num_attention_heads);
    context.ops.Attention({.q = qkv.Columns(0, features),
                           .k = qkv.Columns(features, features),
                           .v = qkv.Columns(2 * features, features),
                           .causal = true,
                           .heads = config_.num_attention_heads,
                           .scale = 1.0f / std::sqrt(head_dim),
                           .out = attended});
    x = layer.out(context, {.x = attended, .epilogue = {.residual = x}});
  }
  const Tensor hidden = layer.fc1(
      context, {.x = layer.norm2(context, x), .epilogue = {.activation = config_.hidden_act}});
  return layer.fc2(context, {.x = hidden, .epilogue = {.residual = x}});
}

TextOutput ClipText::Forward(Context& context, const TextInput& input,
                             const TextOptions& options) const {
  const int64_t rows = input.ends.dim(0), tokens = input.ids.dim(0) / rows;
  const int layers = config_.num_hidden_layers, last = layers - options.skip_layers;
  DENOISED_CHECK(tokens * rows == input.ids.dim(0) && tokens <= config_.max_position_embeddings,
                 "{} tokens in {} prompts", input.ids.dim(0), rows);
  DENOISED_CHECK(options.skip_layers >= 0 && last >= 0, "skips {} of {} layers",
                 options.skip_layers, layers);

  TextOutput output;
  Tensor x = Embed(context, input, rows, tokens);
  context.Trace("embeddings", x);
  for (int i = 0;; ++i) {
    if (i == last) output.states = options.final_norm ? final_norm_(context, x) : x;
    if (i == (options.pool ? layers : last)) break;
    x = Run(context, layers_[i], std::move(x));
    context.Trace(fmt::format("encoder.layers.{}", i), x);
  }
  if (!options.pool) return output;

  // The final norm is of each token by itself, so only the pooled ones need it.
  const Tensor ends = context.New({rows, config_.hidden_size});
  context.ops.Embedding(
      {.table = x.Reshape({rows * tokens, config_.hidden_size}), .index = input.ends, .out = ends});
  output.pooled = final_norm_(context, ends);
  if (projection_) output.pooled = (*projection_)(context, {.x = output.pooled});
  return output;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TextEncoder>> LoadClipText(NetworkOps& ops,
                                                          const ClipTextConfig& config,
                                                          const Weights& weights) {
  auto model = std::make_unique<ClipText>(config);
  DENOISED_RETURN_IF_ERROR(model->Load(ops, weights));
  DENOISED_RETURN_IF_ERROR(weights.CheckAllUsed());
  return model;
}

}  // namespace denoised
