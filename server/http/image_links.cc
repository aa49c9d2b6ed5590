// SPDX-License-Identifier: Apache-2.0
#include "server/http/image_links.h"

#include <utility>

#include "server/security/job_id.h"

namespace denoised {

void ImageLinks::DropOldest() {
  const auto it = images_.find(expiries_.front().second);
  bytes_ -= it->second->bytes.size();
  images_.erase(it);
  expiries_.pop_front();
}

void ImageLinks::DropExpired(Clock::time_point now) {
  while (!expiries_.empty() && expiries_.front().first <= now) DropOldest();
}

absl::StatusOr<std::string> ImageLinks::Add(Image image, Clock::time_point now) {
  if (image.bytes.size() > max_bytes_) {
    return ResourceExhausted(
        "an image of {} bytes is more than links may hold, {}; ask for b64_json",
        image.bytes.size(), max_bytes_);
  }
  DENOISED_ASSIGN_OR_RETURN(std::string name, MakeJobId());
  MutexLock lock(&mutex_);
  DropExpired(now);
  while (bytes_ + image.bytes.size() > max_bytes_) DropOldest();
  bytes_ += image.bytes.size();
  images_[name] = std::make_shared<const Image>(std::move(image));
  expiries_.emplace_back(now + time_, name);
  return name;
}

std::shared_ptr<const ImageLinks::Image> ImageLinks::Find(const std::string& name,
                                                          Clock::time_point now) {
  MutexLock lock(&mutex_);
  DropExpired(now);
  const auto it = images_.find(name);
  return it == images_.end() ? nullptr : it->second;
}

void ImageLinks::Expire(Clock::time_point now) {
  MutexLock lock(&mutex_);
  DropExpired(now);
}

}  // namespace denoised
