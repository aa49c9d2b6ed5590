// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "denoised/generation.h"
#include "denoised/v1/image_generation.pb.h"
#include "denoised/v1/model_admin.pb.h"

/// Between the plain types and the wire contract.

namespace denoised::client {

/// INVALID_ARGUMENT for a text that is not UTF-8, by its field's name: protobuf would refuse it on
/// the way, without one.
absl::Status CheckUtf8(
    std::initializer_list<std::pair<std::string_view, std::string_view>> texts_by_field);

/// INVALID_ARGUMENT when more than one of class_labels, class_vectors and prompts is given, and for
/// text that is not UTF-8.
absl::StatusOr<v1::GenerationParams> ToProto(const Generation& generation);
v1::PreviewOptions ToProto(const PreviewOptions& preview);

EffectiveParams FromProto(const v1::GenerationParams& params, const v1::Run& run);
/// Moves the bytes out of `image`.
Image FromProto(v1::Image&& image);
GenerationResult FromProto(v1::GenerateResponse&& response);
/// nullopt for an event that this version does not know.
std::optional<Event> FromProto(v1::StreamGenerateResponse&& response);
Job FromProto(const v1::Job& proto);
ServerInfo FromProto(const v1::GetServerInfoResponse& proto);
v1::LoadModelRequest ToProto(const ModelLoad& load);
Model FromProto(const v1::Model& model);

}  // namespace denoised::client
