// SPDX-License-Identifier: Apache-2.0
#include "command/timeline.h"

#include <iterator>
#include <set>

namespace denoised::command {

Timeline::Timeline(int count, int columns, int width, int height)
    : columns_(columns), width_(width), height_(height), pictures_(count) {}

void Timeline::Add(int index, int evaluation, const Pixels& picture, bool keep) {
  if (index < 0 || index >= static_cast<int>(pictures_.size())) return;
  std::map<int, Pixels>& pictures = pictures_[index];
  if (!keep) pictures.clear();
  const bool fits = picture.width == width_ && picture.height == height_;
  pictures[evaluation] = fits ? picture : Resized(picture, width_, height_);
}

Pixels Timeline::Latest() const {
  std::vector<Pixels> latest;
  for (const auto& pictures : pictures_) {
    latest.push_back(pictures.empty() ? Blank(width_, height_, 1) : pictures.rbegin()->second);
  }
  return ContactSheet(latest, columns_);
}

std::vector<Pixels> Timeline::Frames() const {
  std::set<int> evaluations;
  for (const auto& pictures : pictures_) {
    for (const auto& [evaluation, picture] : pictures) evaluations.insert(evaluation);
  }
  std::vector<Pixels> frames;
  for (const int evaluation : evaluations) {
    std::vector<Pixels> then;
    for (const auto& pictures : pictures_) {
      const auto after = pictures.upper_bound(evaluation);
      then.push_back(after == pictures.begin() ? Blank(width_, height_, 1)
                                               : std::prev(after)->second);
    }
    frames.push_back(ContactSheet(then, columns_));
  }
  return frames;
}

}  // namespace denoised::command
