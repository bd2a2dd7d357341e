// Tests that run under mpirun with a GPU a rank: every rank runs the same tests, rank 0 prints, and
// the exit status is not 0 on any rank where a test failed on one.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "parallel/cuda_ranks.h"
#include "parallel/mpi_communicator.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/dtype.h"

namespace lockstep {

inline Communicator* job = nullptr;

// Others may be inside a collective that this rank will never enter: the job ends.
inline void OrAbort(const absl::Status& status, const char* file, int line) {
  if (status.ok()) return;
  std::fprintf(stderr, "rank %d, %s:%d: %s\n", job->rank(), file, line, status.ToString().c_str());
  AbortJob(1);
}
template <typename T>
T ValueOrAbort(absl::StatusOr<T> value, const char* file, int line) {
  OrAbort(value.status(), file, line);
  return *std::move(value);
}
#define OR_ABORT(call) ::lockstep::OrAbort(call, __FILE__, __LINE__)
#define VALUE_OR_ABORT(call) ::lockstep::ValueOrAbort(call, __FILE__, __LINE__)

// COLLECTIVE. The same on all ranks.
inline bool GpuForEveryRank() {
  const int64_t mine = NumCudaDevices();
  std::vector<int64_t> all(job->size());
  OR_ABORT(job->AllGather(&mine, sizeof(mine), all.data()));
  return *std::min_element(all.begin(), all.end()) >= job->ranks_on_host();
}

// With LOCKSTEP_TEST_ONE_GPU in the environment all ranks take the first GPU, in turns that the
// driver gives them: each meeting of the ranks then takes milliseconds, and fewer are made.
inline bool OnOneGpu() { return std::getenv("LOCKSTEP_TEST_ONE_GPU") != nullptr; }

// COLLECTIVE.
inline absl::StatusOr<CudaDeviceInfo> TakeGpu() {
  if (OnOneGpu()) return SelectCudaDevice(0);
  LOCKSTEP_ASSIGN_OR_RETURN(const CudaBinding binding, BindCudaDevice(*job));
  return binding.info;
}

// `count` normal numbers of rank `rank`, rounded to dtype.
inline std::vector<float> Numbers(int rank, int64_t count, DType dtype, uint32_t seed) {
  std::mt19937 random(seed * 1000 + rank);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& number : numbers) {
    number = normal(random);
    if (dtype == DType::kBF16) number = ToFloat(ToBF16(number));
    if (dtype == DType::kF16) number = ToFloat(ToF16(number));
  }
  return numbers;
}

inline int RunJobTests(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  auto communicator = CreateMpiCommunicator();
  if (!communicator.ok()) {
    std::fprintf(stderr, "%s\n", communicator.status().ToString().c_str());
    return 1;
  }
  job = communicator->get();
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  if (job->rank() != 0) delete listeners.Release(listeners.default_result_printer());
  const int64_t failed = RUN_ALL_TESTS();
  std::vector<int64_t> all(job->size());
  if (!job->AllGather(&failed, sizeof(failed), all.data()).ok()) return 1;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == 0) continue;
    if (job->rank() == 0) std::fprintf(stderr, "a test failed on rank %zu\n", rank);
    return 1;
  }
  return 0;
}

}  // namespace lockstep
