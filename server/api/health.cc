// SPDX-License-Identifier: Apache-2.0
#include "server/api/health.h"

namespace denoised {
namespace {

constexpr char kLiveness[] = "liveness";

}  // namespace

Health::Health(grpc::HealthCheckServiceInterface* service) : service_(service) {
  MutexLock lock(&mutex_);
  Set(false);
  service_->SetServingStatus(kLiveness, true);
}

bool Health::Serve() {
  MutexLock lock(&mutex_);
  if (!stopped_) Set(true);
  return !stopped_;
}

void Health::Stop() {
  MutexLock lock(&mutex_);
  stopped_ = true;
  Set(false);
}

void Health::Die() {
  Stop();
  MutexLock lock(&mutex_);
  live_ = false;
  service_->SetServingStatus(kLiveness, false);
}

bool Health::ready() const {
  MutexLock lock(&mutex_);
  return serving_;
}

bool Health::live() const {
  MutexLock lock(&mutex_);
  return live_;
}

void Health::Set(bool serving) {
  serving_ = serving;
  service_->SetServingStatus("", serving);
  service_->SetServingStatus("denoised.v1.ImageGeneration", serving);
  service_->SetServingStatus("inference.GRPCInferenceService", serving);
}

}  // namespace denoised
