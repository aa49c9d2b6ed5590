// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace denoised {

/// Limits of one request, which bound the server's memory. A model or a client can have lower
/// limits.
struct RequestLimits {
  int64_t max_request_bytes = 64 << 20;
  int64_t max_init_pixels = 4096 * 4096;        // of an uploaded picture, unpacked
  int64_t max_image_pixels = 4096 * 4096;       // of an image that is drawn
  int64_t max_tensor_bytes = int64_t{1} << 30;  // of all images of a request, as float32
  int64_t max_reply_bytes = 256 << 20;          // of one message; never more than gRPC may hold
  int max_steps = 0, max_count = 0;             // 0: as the model
  double max_previews_per_second = 30;          // of one image; 0: no bound
};

}  // namespace denoised
