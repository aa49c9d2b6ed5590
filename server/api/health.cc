// SPDX-License-Identifier: Apache-2.0
#include "server/api/health.h"

namespace denoised {

void Health::Attach(grpc::HealthCheckServiceInterface* service) {
  MutexLock lock(&mutex_);
  service_ = service;
  Publish();
}

v1::ServerState Health::State() const {
  MutexLock lock(&mutex_);
  return StateLocked();
}

v1::ServerState Health::StateLocked() const {
  const DrainState drain = drain_->state;
  if (drain == DrainState::kDraining || !live_) return v1::SERVER_STATE_DRAINING;
  if (drain == DrainState::kLameDuck) return v1::SERVER_STATE_LAME_DUCK;
  return started_ ? v1::SERVER_STATE_SERVING : v1::SERVER_STATE_STARTING;
}

bool Health::live() const {
  MutexLock lock(&mutex_);
  return live_;
}

void Health::Serve() {
  MutexLock lock(&mutex_);
  started_ = true;
  Publish();
}

void Health::Update() {
  MutexLock lock(&mutex_);
  Publish();
}

void Health::Die() {
  MutexLock lock(&mutex_);
  live_ = false;
  Publish();
}

void Health::Publish() {
  if (service_ == nullptr) return;
  const bool ready = StateLocked() == v1::SERVER_STATE_SERVING;
  for (const char* name : {"", "denoised.v1.ImageGeneration", "inference.GRPCInferenceService"}) {
    service_->SetServingStatus(name, ready);
  }
  service_->SetServingStatus("liveness", live_);
}

}  // namespace denoised
