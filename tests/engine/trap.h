#pragma once

namespace denoised {

/// Makes a kernel fail on a GPU, which is an error of its whole context: all that this process does
/// there fails from then on. False when it could not, or in a build without CUDA.
bool TrapOnGpu(int device);

}  // namespace denoised
