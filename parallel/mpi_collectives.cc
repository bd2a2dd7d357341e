#include "parallel/mpi_collectives.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <thread>

#include "parallel/mpi_status.h"
#include "parallel/rank_order_sum.h"

namespace lockstep {
namespace {

// Sums go in pieces of 4 MiB, which bounds the memory that gathers them.
constexpr int64_t kMaxSumBytes = 4 << 20;
// From this size on, with 3 ranks or more, ranks exchange parts and sums instead of whole messages.
constexpr int kSumInPartsCount = 8 << 10;
constexpr int kGatherTag = 1;

// Tests without pause, then gives the core away between tests, then sleeps for a fixed share of the
// time waited so far: the wait is at most that share (and a timer's slack) too long, and a rank
// that idles wakes some 500 times a second.
absl::Status WaitPolitely(MPI_Request* request) {
  using std::chrono::microseconds;
  constexpr int kSpins = 100;
  constexpr microseconds kYieldFor(300), kLongestSleep(2000);
  constexpr int kSleepShare = 16;
  int done = 0;
  for (int spin = 0; spin < kSpins; ++spin) {
    LOCKSTEP_RETURN_IF_MPI_ERROR(MPI_Test(request, &done, MPI_STATUS_IGNORE));
    if (done != 0) return absl::OkStatus();
  }
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    LOCKSTEP_RETURN_IF_MPI_ERROR(MPI_Test(request, &done, MPI_STATUS_IGNORE));
    if (done != 0) return absl::OkStatus();
    const auto waited =
        std::chrono::duration_cast<microseconds>(std::chrono::steady_clock::now() - start);
    if (waited < kYieldFor) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::min(waited / kSleepShare, kLongestSleep));
    }
  }
}

}  // namespace

absl::Status MpiCollectives::AllReduceSum(float* data, int64_t count) {
  if (size_ == 1) return absl::OkStatus();
  const int64_t piece = std::min(kMaxSumBytes, max_message_bytes_) / int64_t{sizeof(float)};
  for (int64_t begin = 0; begin < count; begin += piece) {
    const int n = static_cast<int>(std::min(piece, count - begin));
    if (size_ == 2 || n < kSumInPartsCount) {
      LOCKSTEP_RETURN_IF_ERROR(SumWhole(data + begin, n));
    } else {
      LOCKSTEP_RETURN_IF_ERROR(SumInParts(data + begin, n));
    }
  }
  return absl::OkStatus();
}

absl::Status MpiCollectives::SumWhole(float* data, int count) {
  gathered_.resize(static_cast<size_t>(size_) * count);
  MPI_Request request;
  LOCKSTEP_RETURN_IF_MPI_ERROR(
      MPI_Iallgather(data, count, MPI_FLOAT, gathered_.data(), count, MPI_FLOAT, comm_, &request));
  LOCKSTEP_RETURN_IF_ERROR(WaitPolitely(&request));
  std::vector<const float*> parts(size_);
  for (int r = 0; r < size_; ++r) parts[r] = gathered_.data() + static_cast<size_t>(r) * count;
  SumInRankOrder(parts, data, count);
  return absl::OkStatus();
}

// Rank r gets part r of every rank's message, sums it, and sends the sum to all.
absl::Status MpiCollectives::SumInParts(float* data, int count) {
  std::vector<int> counts(size_), begins(size_), my_counts(size_), my_begins(size_);
  for (int r = 0; r < size_; ++r) {
    begins[r] = static_cast<int>(int64_t{count} * r / size_);
    counts[r] = static_cast<int>(int64_t{count} * (r + 1) / size_) - begins[r];
  }
  const int mine = counts[rank_];
  gathered_.resize(static_cast<size_t>(size_) * mine);
  std::vector<const float*> parts(size_);
  for (int r = 0; r < size_; ++r) {
    my_counts[r] = mine;
    my_begins[r] = r * mine;
    parts[r] = gathered_.data() + my_begins[r];
  }
  MPI_Request request;
  LOCKSTEP_RETURN_IF_MPI_ERROR(MPI_Ialltoallv(data, counts.data(), begins.data(), MPI_FLOAT,
                                              gathered_.data(), my_counts.data(), my_begins.data(),
                                              MPI_FLOAT, comm_, &request));
  LOCKSTEP_RETURN_IF_ERROR(WaitPolitely(&request));
  SumInRankOrder(parts, data + begins[rank_], mine);
  LOCKSTEP_RETURN_IF_MPI_ERROR(MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data,
                                               counts.data(), begins.data(), MPI_FLOAT, comm_,
                                               &request));
  return WaitPolitely(&request);
}

absl::Status MpiCollectives::AllGatherV(const void* send, std::span<const int64_t> bytes_per_rank,
                                        void* recv) {
  std::vector<int64_t> begins(size_);
  int64_t total = 0;
  for (int r = 0; r < size_; ++r) {
    begins[r] = total;
    total += bytes_per_rank[r];
  }
  uint8_t* out = static_cast<uint8_t*>(recv);
  if (total <= max_message_bytes_) {
    const std::vector<int> counts(bytes_per_rank.begin(), bytes_per_rank.end());
    const std::vector<int> offsets(begins.begin(), begins.end());
    MPI_Request request;
    LOCKSTEP_RETURN_IF_MPI_ERROR(MPI_Iallgatherv(send, counts[rank_], MPI_BYTE, out, counts.data(),
                                                 offsets.data(), MPI_BYTE, comm_, &request));
    return WaitPolitely(&request);
  }
  if (bytes_per_rank[rank_] > 0) {
    std::memmove(out + begins[rank_], send, static_cast<size_t>(bytes_per_rank[rank_]));
  }
  for (int r = 0; r < size_; ++r) {
    LOCKSTEP_RETURN_IF_ERROR(Broadcast(out + begins[r], bytes_per_rank[r], r));
  }
  return absl::OkStatus();
}

absl::Status MpiCollectives::GatherV(const void* send, std::span<const int64_t> bytes_per_rank,
                                     void* recv, int root) {
  const auto transfer = [&](int64_t bytes, auto start) -> absl::Status {
    for (int64_t at = 0; at < bytes; at += max_message_bytes_) {
      MPI_Request request;
      const int n = static_cast<int>(std::min(max_message_bytes_, bytes - at));
      LOCKSTEP_RETURN_IF_ERROR(MpiStatus(start(at, n, &request), "MPI_Isend or MPI_Irecv"));
      LOCKSTEP_RETURN_IF_ERROR(WaitPolitely(&request));
    }
    return absl::OkStatus();
  };
  if (rank_ != root) {
    const uint8_t* from = static_cast<const uint8_t*>(send);
    return transfer(bytes_per_rank[rank_], [&](int64_t at, int n, MPI_Request* request) {
      return MPI_Isend(from + at, n, MPI_BYTE, root, kGatherTag, comm_, request);
    });
  }
  uint8_t* out = static_cast<uint8_t*>(recv);
  for (int r = 0; r < size_; ++r) {
    if (r != root) {
      LOCKSTEP_RETURN_IF_ERROR(
          transfer(bytes_per_rank[r], [&](int64_t at, int n, MPI_Request* request) {
            return MPI_Irecv(out + at, n, MPI_BYTE, r, kGatherTag, comm_, request);
          }));
    } else if (bytes_per_rank[r] > 0) {
      std::memmove(out, send, static_cast<size_t>(bytes_per_rank[r]));
    }
    out += bytes_per_rank[r];
  }
  return absl::OkStatus();
}

absl::Status MpiCollectives::Broadcast(void* data, int64_t bytes, int root) {
  for (int64_t at = 0; at < bytes; at += max_message_bytes_) {
    const int n = static_cast<int>(std::min(max_message_bytes_, bytes - at));
    MPI_Request request;
    LOCKSTEP_RETURN_IF_MPI_ERROR(
        MPI_Ibcast(static_cast<uint8_t*>(data) + at, n, MPI_BYTE, root, comm_, &request));
    LOCKSTEP_RETURN_IF_ERROR(WaitPolitely(&request));
  }
  return absl::OkStatus();
}

absl::Status MpiCollectives::Barrier() {
  MPI_Request request;
  LOCKSTEP_RETURN_IF_MPI_ERROR(MPI_Ibarrier(comm_, &request));
  return WaitPolitely(&request);
}

}  // namespace lockstep
