#include "server/api/health.h"

namespace denoised {
namespace {

constexpr char kLiveness[] = "liveness";

}  // namespace

Health::Health(grpc::HealthCheckServiceInterface* service) : service_(service) {
  Set(false);
  service_->SetServingStatus(kLiveness, true);
}

bool Health::Serve() {
  std::lock_guard lock(mutex_);
  if (!stopped_) Set(true);
  return !stopped_;
}

void Health::Stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  Set(false);
}

void Health::Die() {
  Stop();
  service_->SetServingStatus(kLiveness, false);
}

void Health::Set(bool serving) {
  service_->SetServingStatus("", serving);
  service_->SetServingStatus("denoised.v1.ImageGeneration", serving);
  service_->SetServingStatus("inference.GRPCInferenceService", serving);
}

}  // namespace denoised
