#include "server/catalog.h"

#include <utility>

#include "server/quote.h"
#include "server/status_details.h"

namespace denoised {

Catalog::Catalog(std::vector<ModelSource> sources, const Engine* engine)
    : sources_(std::move(sources)), engine_(engine) {}

void Catalog::Fail(const std::string& name, const absl::Status& error) {
  std::lock_guard lock(mutex_);
  errors_[name] = error;
}

std::shared_ptr<const ModelInfo> Catalog::Find(const std::string& name) const {
  for (const ModelSource& source : sources_) {
    if (source.name != name) continue;
    if (auto known = engine_->Find(name)) return known;
    auto info = std::make_shared<ModelInfo>();
    info->name = name;
    info->directory = source.directory;
    std::lock_guard lock(mutex_);
    if (const auto it = errors_.find(name); it != errors_.end()) {
      info->state = ModelState::kFailed;
      info->error = it->second;
    }
    return info;
  }
  return nullptr;
}

std::vector<std::shared_ptr<const ModelInfo>> Catalog::All() const {
  std::vector<std::shared_ptr<const ModelInfo>> all;
  for (const ModelSource& source : sources_) all.push_back(Find(source.name));
  return all;
}

std::string Catalog::Names() const {
  std::string names;
  for (const ModelSource& source : sources_) names += (names.empty() ? "" : ", ") + source.name;
  return names;
}

std::shared_ptr<const ModelInfo> Catalog::Select(const std::string& name, const std::string& field,
                                                 const std::string& request_id,
                                                 grpc::Status* refusal) const {
  if (name.empty()) {
    if (sources_.size() == 1) return Find(sources_[0].name);
    *refusal = InvalidFields(
        {{field,
          fmt::format("is not set, and the server holds several models; use one of: {}", Names())}},
        request_id);
    return nullptr;
  }
  auto model = Find(name);
  if (model == nullptr) {
    *refusal = ToGrpcStatus(
        NotFound("{}: there is no model {}; this server holds: {}", field, Quote(name), Names()),
        reason::kModelNotFound, request_id);
  }
  return model;
}

grpc::Status CheckReady(const ModelInfo& model, const std::string& request_id) {
  switch (model.state) {
    case ModelState::kReady:
      return grpc::Status::OK;
    case ModelState::kLoading:
      return ToGrpcStatus(
          FailedPrecondition(
              "model \"{}\" is still loading; ask again when GetModel says AVAILABLE", model.name),
          reason::kModelLoading, request_id, std::chrono::seconds(2));
    case ModelState::kFailed:
      return ToGrpcStatus(FailedPrecondition("model \"{}\" could not be loaded: {}", model.name,
                                             std::string(model.error.message())),
                          reason::kModelFailed, request_id);
  }
  return grpc::Status(grpc::StatusCode::INTERNAL, "model state");
}

}  // namespace denoised
