// The sum over ranks after a row-parallel product, with the residual addition and the norm that
// follow, in one kernel over the GPUs' own memory: a collective of its own, and the launch and the
// pass over memory behind it, cost more. Two forms of it, and which of them, or NCCL, a sum takes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "model/cuda_ops.h"
#include "parallel/peer_windows.h"
#include "runtime/core/range.h"
#include "runtime/core/status.h"

namespace lockstep {

// How the parts of a sum come together.
enum class SumPath {
  kOneShot,  // every rank reads all parts of all rows, and sums them
  kTwoShot,  // rows are dealt to the ranks; each sums its own and writes the result to all
  kNccl,     // ncclAllReduce, then a kernel that norms
};

// Up to how many bytes of all its rows, S = T * E * SizeOf(dtype), a sum takes which path: the same
// on all ranks.
struct SumPaths {
  int64_t one_shot_bytes = 0;
  int64_t two_shot_bytes = 0;  // beyond: NCCL

  SumPath Of(int64_t bytes) const {
    return bytes <= one_shot_bytes   ? SumPath::kOneShot
           : bytes <= two_shot_bytes ? SumPath::kTwoShot
                                     : SumPath::kNccl;
  }
};

// A window holds the parts of the largest step, but no more than this. There are kNumWindows on
// each rank.
inline constexpr int64_t kMaxSumWindowBytes = int64_t{64} << 20;
inline int64_t SumWindowBytes(int64_t bytes_of_largest_step) {
  return std::min(bytes_of_largest_step, kMaxSumWindowBytes);
}

// Over a rank's links come (N - 1) S bytes one-shot, 2 (N - 1) / N S two-shot, which needs a second
// meeting of the ranks, 2 us. At 400 GB/s the one costs what the other saves at
//   S = 2 us * 400 GB/s * N / ((N - 1) (N - 2)): 1.2 MB on 3 ranks, 152 KB on 8.
// On 2 ranks the links carry the same. There two-shot saves half of the traffic in the GPU's own
// memory, 4 S of 4.5 TB/s one-shot, part of it hidden behind the links': 2 us at some MB.
// NCCL gains on neither with size: its links carry what two-shot's do, and the norm behind it reads
// and writes all rows on every rank. It takes what does not fit in a window.
inline SumPaths ChooseSumPaths(int num_ranks, int64_t window_bytes) {
  constexpr int64_t kMeetingBytes = 2 * 400 * 1000;  // what a link carries in 2 us
  constexpr int64_t kOneShotBytesOfTwo = int64_t{2} << 20;
  const int64_t n = num_ranks;
  const int64_t one_shot =
      n <= 2 ? kOneShotBytesOfTwo
             : std::min(kOneShotBytesOfTwo, kMeetingBytes * n / ((n - 1) * (n - 2)));
  return {std::min(one_shot, window_bytes), window_bytes};
}

// The rank that a two-shot sum deals a row to: in turn, so that any piece of a step's rows has as
// many for each rank, but for one, and a row has the same rank in whatever piece it is summed.
inline int RankOfSumRow(int64_t row, int num_ranks) { return static_cast<int>(row % num_ranks); }

// The window of sum number `sum` of a step of L layers, which has 2L + 1: of the embedding, and in
// each layer of o and of down. They alternate; the last takes the third, because the next step
// begins with the first.
inline int WindowOfSum(int64_t sum, int64_t num_layers) {
  return sum == 2 * num_layers ? 2 : static_cast<int>(sum % 2);
}
// Where a two-shot sum that is the last of its step leaves the norm of the wanted rows: the last to
// read this window was the product behind sum 2L - 2, the next to write it is the next step.
inline constexpr int kWindowOfWantedRows = 0;

// Whether SumAddRmsNorm takes rows of this width and type: 16-byte vectors, at most 2048 a row.
bool SumAddRmsNormSupports(int64_t cols, DType dtype);

// What becomes of the sum over ranks, a row of which is `sum`.
enum class ResidualUse {
  kAdd,      // residual += sum
  kReplace,  // residual = sum: the embedding, which begins the residual stream
};

// One sum: the same on all ranks.
struct PeerSum {
  SumPath path = SumPath::kOneShot;  // or kTwoShot
  int window = 0;                    // of the parts
  Range rows;                        // of the residual, and of the parts; see SumAddRmsNorm
  ResidualUse use = ResidualUse::kAdd;
  const int32_t* wanted = nullptr;  // int32 [R], or null
  // A kernel of fewer blocks leaves multiprocessors to others, and takes longer where rows are
  // many.
  int max_blocks = kMaxPeerBlocks;
};

// COLLECTIVE over the ranks of `peers`, under the rules of peer_windows.h. Of rows [T, E] this
// takes those of sum.rows, all or a piece. Row t of each rank's partial sums is row t of its window
// number sum.window, which has no gaps between rows, and where the kernels before have left it.
// sum = ((p0 + p1) + p2) + ..., float32; then the residual takes it, rounded once to its dtype, and
// out = RmsNorm(residual), row by row. The same bits on all ranks, and the same with either path,
// any number of blocks and any division into pieces.
//
// With `wanted`: out[r] is the norm of residual[wanted[r]] and the sum of that row, for those
// wanted[r] that are in sum.rows; the others of out, and residual, stay. Otherwise out is [T, E].
//
// One-shot: residual and out are this rank's own. The window may be written again when the ranks
// have met in the next sum.
//
// Two-shot: residual counts, and changes, in the rows dealt to this rank alone (RankOfSumRow), in
// every sum of a step. `out` is memory of a window: without `wanted` that of the parts themselves,
// each row of which gives way to its norm; with it that of another window, as peer_windows.h says.
// When the kernel has ended, all rows of out are there on all ranks.
//
// A kernel waits for its peers, which must launch theirs: see PeerWindows::Abort.
//
// residual [T, E]; out [T, E] or [R, E], both with rows at multiples of 16 bytes; weight float32
// [E].
absl::Status SumAddRmsNorm(const PeerWindows& peers, const PeerSum& sum, const MatrixView& residual,
                           const float* weight, float eps, const MatrixView& out,
                           const CudaContext& context);

}  // namespace lockstep
