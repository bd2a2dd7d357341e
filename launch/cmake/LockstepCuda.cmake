# The CUDA part: built where a toolkit is found, with cuBLAS and NCCL; absent elsewhere, and the program says so.
#   LOCKSTEP_CUDA OFF (default, until the engine runs on it) | AUTO | ON      CMAKE_CUDA_ARCHITECTURES, default 90a (H100, H200)
# Sets LOCKSTEP_HAS_CUDA. Included before any target; languages are enabled here. LockstepDependencies.cmake finds the libraries.
set(LOCKSTEP_CUDA OFF CACHE STRING "Build the CUDA part: AUTO (where a toolkit is found), ON or OFF")
set_property(CACHE LOCKSTEP_CUDA PROPERTY STRINGS AUTO ON OFF)
set(LOCKSTEP_HAS_CUDA OFF)

if(NOT LOCKSTEP_CUDA STREQUAL "OFF")
  find_program(LOCKSTEP_NVCC nvcc PATHS /usr/local/cuda/bin ENV CUDA_HOME PATH_SUFFIXES bin)
  get_filename_component(_cuda_root "${LOCKSTEP_NVCC}" REALPATH)
  get_filename_component(_cuda_root "${_cuda_root}/../.." ABSOLUTE)
  find_path(LOCKSTEP_NCCL_INCLUDE_DIR nccl.h PATHS ${_cuda_root}/include)
  find_library(LOCKSTEP_NCCL_LIBRARY nccl PATHS ${_cuda_root}/lib64)
  if(LOCKSTEP_NVCC AND LOCKSTEP_NCCL_INCLUDE_DIR AND LOCKSTEP_NCCL_LIBRARY)
    set(LOCKSTEP_HAS_CUDA ON)
  elseif(LOCKSTEP_CUDA STREQUAL "ON")
    message(FATAL_ERROR "LOCKSTEP_CUDA is ON, but this is missing: nvcc (${LOCKSTEP_NVCC}), "
      "nccl.h (${LOCKSTEP_NCCL_INCLUDE_DIR}) or libnccl (${LOCKSTEP_NCCL_LIBRARY})")
  endif()
endif()

if(LOCKSTEP_HAS_CUDA)
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a)
  endif()
  set(CMAKE_CUDA_COMPILER ${LOCKSTEP_NVCC})
  set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)  # else cudart_static would be linked beside cudart
  enable_language(CUDA)
  # CMake 3.25 does not know that nvcc 13 takes C++20.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
endif()
message(STATUS "CUDA part: ${LOCKSTEP_HAS_CUDA}")
