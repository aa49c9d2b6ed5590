// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/core/tensor.h"

namespace denoised {

/// The tensors of one safetensors file, or of all shards of an index, memory-mapped. Every offset
/// is checked against the header, the shapes and the file's length before any is used: a bad file
/// gives InvalidArgument that names the file and the tensor, never a crash. Format:
/// github.com/huggingface/safetensors, README "Format". Immutable; thread-safe. Data is mapped for
/// reading only, and a file must not be shortened while it is mapped: replace it by renaming.
class Safetensors {
 public:
  /// Maps one file. Tensors stay valid as long as any of them, or this, lives.
  static absl::StatusOr<Safetensors> Open(const std::string& path);
  /// Maps `directory`/`stem`.safetensors, or the shards of
  /// `directory`/`stem`.safetensors.index.json; with fp16 or bf16 variants when there is no plain
  /// file. NotFound lists what was looked for.
  static absl::StatusOr<Safetensors> OpenDirectory(const std::string& directory,
                                                   const std::string& stem);
  /// The same checks over bytes in memory, which must outlive the result (fuzzing, tests).
  static absl::StatusOr<Safetensors> Parse(const void* bytes, size_t size, const std::string& name,
                                           const std::shared_ptr<const void>& storage);

  /// By name. F32, F16, BF16, I64, I32 and U8 tensors on the CPU; others are refused when opened.
  /// Data that the file does not align for its type has been copied.
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }
  /// Text of the header's __metadata__.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  static absl::StatusOr<Safetensors> OpenIndex(const std::string& path);

  std::map<std::string, Tensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

/// Writes tensors (host, contiguous) as one file whose data is aligned for its types. `path`
/// appears whole or not at all, also after a power cut. InvalidArgument for the reserved name
/// __metadata__, Internal when the disk refuses.
absl::Status WriteSafetensors(const std::string& path, const std::map<std::string, Tensor>& tensors,
                              const std::map<std::string, std::string>& metadata);

/// A tensor that is made while it is written.
struct TensorType {
  Shape shape;
  DType dtype = DType::kF32;
};
/// Makes `count` elements of the tensor from element `first` on. May be called by several threads.
using MakeElements =
    std::function<void(const std::string& name, int64_t first, int64_t count, void* to)>;
/// The same of tensors that need not fit into memory, made by `threads` threads.
absl::Status WriteSafetensors(const std::string& path,
                              const std::map<std::string, TensorType>& tensors,
                              const std::map<std::string, std::string>& metadata,
                              const MakeElements& make, int threads);

}  // namespace denoised
