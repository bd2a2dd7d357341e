// Which heads, rows and columns each rank holds. One pure function of (dimensions, N); everything
// else asks it.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/core/range.h"
#include "runtime/core/status.h"

namespace lockstep {

// What the partition needs to know of a model.
struct PartitionDims {
  int64_t num_query_heads = 0;    // Hq
  int64_t num_kv_heads = 0;       // Hkv, divides Hq
  int64_t intermediate_size = 0;  // F
  int64_t vocab_size = 0;         // V
};

// One rank's part. Ranges are in the model's own numbering.
struct RankPartition {
  Range query_heads;  // never empty
  Range kv_heads;     // exactly the heads that query_heads read; ranks may share one (replication,
                      // border heads)
  // For each local KV head, the local query heads that read it (relative to query_heads.begin):
  // ragged, in order, covering [0, query_heads.size()) exactly.
  std::vector<Range> kv_groups;
  Range intermediate;  // rows of gate and up, columns of down
  Range vocab;         // rows of the embedding and of the head

  bool operator==(const RankPartition&) const = default;
};

// Query heads are split into contiguous ranges: the largest range is ceil(Hq/N); among such splits
// one whose largest number of KV heads on a rank is smallest; among those, earlier ranks get the
// longer ranges (rank 0 as long as can be, then rank 1, ...). F and V are split equally where N
// divides them, otherwise on the largest multiple (a power of two up to 64, down to 1) that leaves
// no rank empty: near-equal numbers of whole multiples, earlier ranks longer, the end cut off.
// InvalidArgument, with both numbers, when tp_size > Hq (or > F, > V) or tp_size < 1; also when
// Hkv does not divide Hq.
absl::StatusOr<std::vector<RankPartition>> PartitionModel(const PartitionDims& dims, int tp_size);

// One rank that computes what rank `rank` of `tp_size` does, without the others: sums over ranks
// are its own part alone, so its answers mean nothing, but its work is that rank's.
struct EmulatedRank {
  int tp_size = 0;  // 0: nothing is emulated
  int rank = 0;
};

// What each of a job's num_ranks ranks holds: PartitionModel's parts or, on the one rank that an
// emulation runs on, that rank's. InvalidArgument as PartitionModel, and for an emulation on
// several ranks or of a rank that is not in [0, tp_size).
absl::StatusOr<std::vector<RankPartition>> PartitionJob(const PartitionDims& dims, int num_ranks,
                                                        const EmulatedRank& emulated);

}  // namespace lockstep
