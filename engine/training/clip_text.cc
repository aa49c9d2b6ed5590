// SPDX-License-Identifier: Apache-2.0
#include "engine/training/clip_text.h"

#include <cmath>

namespace denoised::training {

absl::StatusOr<std::unique_ptr<ClipText>> ClipText::Make(const Declare& declare,
                                                         const ClipTextConfig& config) {
  if (config.with_projection)
    return InvalidArgument(
        "the text encoder is a CLIPTextModelWithProjection, which cannot be trained; use a "
        "CLIPTextModel");
  std::unique_ptr<ClipText> model(new ClipText(config));
  const int c = config.hidden_size, inner = config.intermediate_size;
  // CLIPPreTrainedModel._init_weights, with an initializer_factor of 1.
  const double narrow = 1 / std::sqrt(static_cast<double>(c)),
               deep = narrow / std::sqrt(2.0 * config.num_hidden_layers);
  const auto normal = [](double deviation) {
    return LinearOptions{.bias = true, .deviation = deviation};
  };
  const Declare text = declare / "text_model", embeddings = text / "embeddings";
  model->token_table_ =
      (embeddings / "token_embedding").Add("weight", {config.vocab_size, c}, Initial::Normal(0.02));
  model->position_table_ =
      (embeddings / "position_embedding")
          .Add("weight", {config.max_position_embeddings, c}, Initial::Normal(0.02));
  for (int i = 0; i < config.num_hidden_layers; ++i) {
    const Declare at = text / "encoder" / "layers" / i, attention = at / "self_attn";
    Layer layer;
    layer.norm1 = LayerNorm(at / "layer_norm1", c, config.layer_norm_eps);
    layer.qkv = Linear({attention / "q_proj", attention / "k_proj", attention / "v_proj"}, c,
                       {c, c, c}, normal(deep));
    layer.out = Linear({attention / "out_proj"}, c, {c}, normal(narrow));
    layer.norm2 = LayerNorm(at / "layer_norm2", c, config.layer_norm_eps);
    layer.fc1 = Linear({at / "mlp" / "fc1"}, c, {inner}, normal(1 / std::sqrt(2.0 * c)));
    layer.fc2 = Linear({at / "mlp" / "fc2"}, inner, {c}, normal(deep));
    model->layers_.push_back(std::move(layer));
  }
  model->final_norm_ = LayerNorm(text / "final_layer_norm", c, config.layer_norm_eps);
  return model;
}

void ClipText::Pack(const Masters& masters) const {
  for (const Layer& layer : layers_)
    for (const Linear* linear : {&layer.qkv, &layer.out, &layer.fc1, &layer.fc2})
      linear->Pack(masters);
}

Tensor ClipText::Run(Pass& pass, const Layer& layer, const Tensor& x, Kept::Layer* kept) const {
  const int c = config_.hidden_size;
  Tensor normed = layer.norm1.Forward(pass, x, &kept->norm1);
  if (!pass.recompute_norms) kept->normed1 = normed;
  const Tensor qkv = layer.qkv.Forward(pass, normed);
  const Tensor attended = attention_.Forward(pass, qkv.Columns(0, c), qkv.Columns(c, c),
                                             qkv.Columns(2 * c, c), &kept->attention);
  const Tensor middle = layer.out.Forward(pass, attended, x);
  normed = layer.norm2.Forward(pass, middle, &kept->norm2);
  if (!pass.recompute_norms) kept->normed2 = normed;
  kept->hidden = layer.fc1.Forward(pass, normed);
  kept->activated = pass.New(kept->hidden.shape());
  pass.backend.Activate(config_.hidden_act, kept->hidden, kept->activated);
  return layer.fc2.Forward(pass, kept->activated, middle);
}

Tensor ClipText::RunBackward(Pass& pass, const Layer& layer, const Kept::Layer& kept,
                             const Tensor& dout) const {
  const int c = config_.hidden_size;
  Tensor d = layer.fc2.Backward(pass, kept.activated, dout);
  pass.backend.ActivateBackward(config_.hidden_act, kept.hidden, d, d);
  d = layer.fc1.Backward(pass, kept.normed2 ? kept.normed2 : layer.norm2.Again(pass, kept.norm2),
                         d);
  d = layer.norm2.Backward(pass, kept.norm2, d, dout);
  const Tensor dattended = layer.out.Backward(pass, kept.attention.out, d);
  const Tensor dqkv = pass.New({dout.dim(0), dout.dim(1), 3 * c});
  attention_.Backward(pass, kept.attention, dattended, dqkv.Columns(0, c), dqkv.Columns(c, c),
                      dqkv.Columns(2 * c, c));
  const Tensor dnormed = layer.qkv.Backward(
      pass, kept.normed1 ? kept.normed1 : layer.norm1.Again(pass, kept.norm1), dqkv);
  return layer.norm1.Backward(pass, kept.norm1, dnormed, d);
}

Tensor ClipText::Forward(Pass& pass, const Tensor& ids, const Tensor& positions, Kept* kept) const {
  Tensor x = pass.New({ids.dim(0), ids.dim(1), config_.hidden_size});
  {
    const Tensor places = pass.New(x.shape());
    pass.backend.Embedding(pass.Weight(token_table_), ids, x);
    pass.backend.Embedding(pass.Weight(position_table_), positions, places);
    pass.backend.Add(x, 1, places, 1, 0, x);
  }
  kept->layers.resize(layers_.size());
  for (size_t i = 0; i < layers_.size(); ++i) x = Run(pass, layers_[i], x, &kept->layers[i]);
  return final_norm_.Forward(pass, x, &kept->final_norm);
}

void ClipText::Backward(Pass& pass, const Tensor& ids, const Tensor& positions, Kept kept,
                        const Tensor& dstates) const {
  Tensor d = final_norm_.Backward(pass, kept.final_norm, dstates, {});
  kept.final_norm = {};
  for (size_t i = layers_.size(); i-- > 0;) {
    d = RunBackward(pass, layers_[i], kept.layers[i], d);
    kept.layers[i] = {};
  }
  pass.backend.EmbeddingBackward(ids, d, pass.Gradient(token_table_));
  pass.backend.EmbeddingBackward(positions, d, pass.Gradient(position_table_));
}

}  // namespace denoised::training
