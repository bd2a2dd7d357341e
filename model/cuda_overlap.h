// Steps of many tokens on several ranks: their sums over ranks run beside products, on a stream of
// their own.
//
// The rows are cut in two at each sum (row_slices.h); attention takes all rows at once. In a layer
//
//   main  qkv(0) qkv(1) attention o(0) o(1)     gate_up(0) gate_up(1) silu down(0) down(1) qkv(0)
//   sums                               sum(0)   sum(1)                             sum(0)  sum(1)
//
// where a sum is that of the slice, by whichever path the step's sums take (cuda_sum.h), with the
// norm behind it. The first and the last sum of a step, of the embedding and of the last layer's
// down, are made whole on the main stream.
//
// What orders the streams: a slice's sum waits for its product, and a product of a slice's norm
// waits for its sum. That is enough:
// - Parts: a row's part is written by a product on the main stream and read on the sum stream, by
//   this rank or its peers. The next product that writes parts (down behind o, the next layer's o
//   behind down) follows, on the main stream, the products of the norms of *all* slices, each of
//   which has waited for its slice's sum. So all that the sum stream does with the parts is over on
//   this rank; and in a window, which peers may read longer, the next sum has its parts in another
//   one (peer_windows.h). Within a sum, slices are other rows of one window: what is written there
//   while peers still read slice 0 is slice 1.
// - Norms: slice i's is written on the sum stream behind a product that follows, on the main
//   stream, all products of the norm before. Two-shot, where a peer writes it in place of the
//   parts, it does so when this rank's block has met it, in a kernel behind that same product. The
//   cuts of two sums may differ for this reason.
// - Residual stream: sums alone touch it. They follow each other on the sum stream; the first and
//   the last sum of the step lie on the main stream, before anything of the sum stream begins and
//   after all of it has been waited for.
// - Everything else is written and read on the main stream alone.
// - Collectives: within the step all are on the sum stream, but for the first and the last sum;
//   those and what comes before and after the step, on the main stream, are ordered with them by
//   the same waits. So no two run at the same time, and their order is that of the calls. A sum
//   whose blocks wait for peers may find no room beside a product; but products wait for no running
//   sum, and end.
#pragma once

#include <array>
#include <cstdint>

#include "model/cuda_ops.h"
#include "model/cuda_rank_sums.h"
#include "model/cuda_weights.h"
#include "model/model_config.h"
#include "model/row_slices.h"

namespace lockstep {

// Thread rule: the rank's engine thread. Stream rule: the main stream is that of every context.
class CudaOverlap {
 public:
  // min_tokens (0: no step overlaps), spare_multiprocessors: as in CudaDecoderOptions. `sums`
  // must outlive the object.
  static absl::StatusOr<CudaOverlap> Create(const ModelConfig& config, int64_t min_tokens,
                                            int spare_multiprocessors, const CudaRankSums& sums);

  // The same on all ranks.
  bool Overlaps(int64_t num_tokens) const { return min_tokens_ > 0 && num_tokens >= min_tokens_; }

  // The two sides of sum number `sum`, which is not the last one; `overlaps` is that of the step.
  // COLLECTIVE. x[T, K] * weight^T (+ bias), summed over ranks and normed.
  absl::Status ProductAndSum(const MatrixView& x, const DeviceMatrix& weight,
                             const DeviceMatrix& bias, int64_t sum, const DeviceMatrix& norm,
                             bool overlaps, const CudaContext& context);
  // y[T, N] = Normed(sum) * weight^T (+ bias). Behind it the main stream has waited for the sum.
  absl::Status ProductOfNorm(int64_t sum, const DeviceMatrix& weight, const DeviceMatrix& bias,
                             const MatrixView& y, bool overlaps, const CudaContext& context);

  // Until the sum stream is idle.
  absl::Status WaitIdle();

 private:
  RowSlices SlicesOf(int64_t sum, int64_t num_tokens, bool overlaps) const;
  // `context` of a product whose rows are cut or not; beside a sum it leaves it multiprocessors.
  CudaContext ForProduct(const CudaContext& context, bool cut, bool beside_sum) const;

  const CudaRankSums* sums_ = nullptr;
  int64_t num_layers_ = 0;
  int64_t min_tokens_ = 0;
  int spare_multiprocessors_ = 0;
  // Elements of a row that go into a product or come out of it, those of E aside; of all ranks
  // together, because a rank with more heads than another would cut differently.
  int64_t qkv_work_ = 0, o_work_ = 0, gate_up_work_ = 0, down_work_ = 0;
  OwnedCudaStream stream_;                // none: nothing overlaps
  OwnedCudaEvent multiplied_;             // the product of the slice whose sum is issued next
  std::array<OwnedCudaEvent, 2> summed_;  // by slice: its latest sum
};

}  // namespace lockstep
