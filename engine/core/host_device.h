// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Functions that kernels call and the host, too, in files that a compiler without CUDA reads.
#ifdef __CUDACC__
#define DENOISED_HOST_DEVICE __host__ __device__
#else
#define DENOISED_HOST_DEVICE
#endif
