// Functions that host code and kernels share.
#pragma once

#ifdef __CUDACC__
#define LOCKSTEP_HOST_DEVICE_INLINE __host__ __device__ __forceinline__
#else
#define LOCKSTEP_HOST_DEVICE_INLINE inline __attribute__((always_inline))
#endif
