// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "engine/core/tensor.h"
#include "engine/io/safetensors.h"

namespace denoised {

/// What a load does next: wait for files, as long as they take, or work that may wait for the
/// device.
enum class LoadPart { kFiles, kDevice };
using LoadProgress = std::function<void(LoadPart next)>;

/// A view of a model's tensors below a prefix, so that constructors mirror checkpoint names:
///
///   Weights unet(tensors, "unet/diffusion_pytorch_model.safetensors");
///   Weights conv = unet / "down_blocks" / 0 / "resnets" / 1 / "conv1";
///   DENOISED_ASSIGN_OR_RETURN(Tensor weight, conv.Get("weight", {64, 32, 3, 3}));
///
/// Attention layers may have the names of checkpoints before diffusers 0.18 in the file (query,
/// key, value, proj_attn): who asks for to_q, to_k, to_v or to_out.0 gets these if there is no
/// other.
///
/// Copies share the record of what was read. Not thread-safe.
class Weights {
 public:
  Weights(Safetensors tensors, std::string file);
  /// Has every tensor asked for: matrices and kernels uniform in ±√3/√(fan-in), so that activations
  /// keep their scale, biases in ±0.5, other vectors in 1 ± 0.5, from (seed, name) alone. For
  /// benchmarks and tests of architectures without a checkpoint.
  static Weights Synthetic(uint64_t seed);
  /// The same, but all are zeros, which take memory only where they are read: a model loaded with
  /// them on a CountingBackend says what WriteSynthetic() is to write.
  static Weights SyntheticToWrite(uint64_t seed);

  Weights operator/(std::string_view name) const;
  Weights operator/(int index) const;

  /// A float tensor of exactly this shape. NotFound names the tensor and the closest names in the
  /// file; InvalidArgument names the shape in the file and the shape that the config needs.
  absl::StatusOr<Tensor> Get(std::string_view name, const Shape& shape) const;
  bool Has(std::string_view name) const;
  /// A tensor that has no effect here: CheckAllUsed() does not name it. It may be absent.
  void Ignore(std::string_view name) const;

  /// What layers in e4m3 need beside their tensors: scales of their inputs by prefix, 0 for a layer
  /// that stays in the activation dtype; nullopt: all do. For the denoiser, whose layers may be in
  /// e4m3; call on the root.
  void SetInputScales(std::optional<std::map<std::string, float>> scales) const;
  /// Whether SetInputScales() was called.
  bool MayHaveInputScales() const;
  /// The input scale of the layer at this prefix, or at its old name; 0 if there are no scales.
  /// NotFound if there are scales but none for this layer.
  absl::StatusOr<float> InputScale() const;

  /// 16 hexadecimal digits that differ, as good as certainly, for other names, shapes or values of
  /// tensors. Reads the whole file.
  std::string Fingerprint() const;

  /// If `progress` is not empty, Get() of this and any other view of the file reads the tensor's
  /// data from the disk, between kFiles and kDevice, so that whoever packs it need not wait for the
  /// disk. Fingerprint() is kFiles.
  void SetProgress(LoadProgress progress) const;

  /// Elements of all float tensors in the file.
  int64_t parameters() const;
  /// "down_blocks.0.resnets.1.conv1"
  const std::string& prefix() const { return prefix_; }
  const std::string& file() const;

  /// Writes the synthetic tensors that were read so far as a safetensors file, in F32, F16 or BF16.
  /// Each number is drawn as it is written. Internal if the file cannot be written.
  absl::Status WriteSynthetic(const std::string& path, DType dtype = DType::kF32,
                              int threads = 1) const;

  /// InvalidArgument naming tensors or scales that nobody read: the config and the weights do not
  /// belong together. Call once on the root after the model was built.
  absl::Status CheckAllUsed() const;

 private:
  struct State;
  Weights(std::shared_ptr<State> state, std::string prefix);
  std::string Full(std::string_view name) const;
  std::shared_ptr<State> state_;
  std::string prefix_;
};

}  // namespace denoised
