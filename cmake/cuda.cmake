# SPDX-License-Identifier: Apache-2.0
# Turns DENOISED_CUDA (AUTO, ON, OFF) into DENOISED_WITH_CUDA (TRUE, FALSE).
include(CheckLanguage)
set(DENOISED_WITH_CUDA FALSE)
if(NOT DENOISED_CUDA STREQUAL "OFF")
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(DENOISED_NVCC nvcc PATHS /usr/local/cuda/bin)
    if(DENOISED_NVCC)
      set(CMAKE_CUDA_COMPILER ${DENOISED_NVCC})
    endif()
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES ${DENOISED_CUDA_ARCHITECTURES})
    enable_language(CUDA)
    # From 3.25 on, CMake deprecates the target nvToolsExt, which CUDA 13 no longer has: an error in
    # CMake 3.25 itself.
    set(minimum ${CMAKE_MINIMUM_REQUIRED_VERSION})
    set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
    find_package(CUDAToolkit REQUIRED)
    set(CMAKE_MINIMUM_REQUIRED_VERSION ${minimum})
    set(CMAKE_CUDA_STANDARD 17)  # CMake 3.25 knows no later one for nvcc
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(DENOISED_WITH_CUDA TRUE)
  elseif(DENOISED_CUDA STREQUAL "ON")
    message(FATAL_ERROR "DENOISED_CUDA=ON, but no CUDA compiler was found. Install the CUDA Toolkit "
                        "(12.8 or later), put nvcc on PATH, or configure with -DDENOISED_CUDA=AUTO.")
  endif()
endif()
message(STATUS "CUDA backend: ${DENOISED_WITH_CUDA}")
