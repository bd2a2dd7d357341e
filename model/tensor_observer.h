// A look at the tensors inside a forward pass, and which part of each a rank holds. For debugging:
// runtime/tp_check.h compares the ranks' tensors with those of one rank.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/model_config.h"
#include "parallel/partition.h"
#include "runtime/core/buffer.h"

namespace lockstep {

// Named tensors of a forward pass, shown in float32, in the order in which they are computed; those
// of a layer once for each layer. "Whole": the same values on every rank.
//
// The residual stream on the CPU is the float32 sum of tensors that are shown. On a GPU it is
// rounded to the type of the activations, and a kernel that sums over ranks rounds once where two
// kernels round twice: it is shown by itself.
enum class TensorKind {
  kEmbedding,          // [T, E] whole
  kInputNorm,          // [T, E] whole
  kQkv,                // [T, (Hq_local + 2 * Hkv_local) * D] own heads; q and k normed and rotated
  kAttention,          // [T, Hq_local * D] own query heads
  kOProj,              // [T, E] whole: after the sum over the ranks
  kAttentionResidual,  // [T, E] whole: the residual stream with o_proj added; GPUs alone, see below
  kPostAttentionNorm,  // [T, E] whole
  kGateUp,             // [T, 2 * F_local] own rows of gate, then of up
  kActivated,          // [T, F_local] silu(gate) * up
  kDownProj,           // [T, E] whole: after the sum over the ranks
  kMlpResidual,        // [T, E] whole: with down_proj added; GPUs alone, but for the last layer
  kFinalNorm,          // [R, E] whole; rows of logits_rows
  kLogits,             // [R, V_local] own rows of the vocabulary
};

// "o_proj", "logits": as Hugging Face names the module, where it has a name for it.
std::string_view Name(TensorKind kind);

// Layer of the tensors that belong to none: embedding, final_norm, logits.
inline constexpr int64_t kNoLayer = -1;

class TensorObserver {
 public:
  virtual ~TensorObserver() = default;
  // From the thread that runs the forward pass; `local` holds until the call returns. What an
  // observer writes to it is what the forward pass goes on with.
  virtual void Observe(int64_t layer, TensorKind kind, const MatrixView& local) = 0;
  // Whether it writes: a decoder on a device, which shows copies, brings back what it has written
  // only then. For a decoder of one rank: what several ranks sum together goes on as it was.
  virtual bool writes() const { return false; }
};

// Columns [local, local + count) of a rank's tensor are columns [full, full + count) of the tensor
// of one rank.
struct ColumnRun {
  int64_t local = 0;
  int64_t full = 0;
  int64_t count = 0;

  bool operator==(const ColumnRun&) const = default;
};

// Ascending, covering the local columns without gaps. With the partition of one rank: all columns.
std::vector<ColumnRun> LocalColumns(TensorKind kind, const ModelConfig& config,
                                    const RankPartition& partition);

// What a column of the whole tensor is: "query head 3, element 5", "up row 17", "column 9".
std::string DescribeColumn(TensorKind kind, const ModelConfig& config, int64_t column);

}  // namespace lockstep
