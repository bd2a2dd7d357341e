#include "parallel/partition.h"

#include <algorithm>

namespace lockstep {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What a range of query heads may be: at most max_heads heads that read at most max_kv KV heads.
struct HeadLimits {
  int64_t num_heads;
  int64_t group_size;  // query heads of one KV head
  int64_t max_heads;
  int64_t max_kv;

  // The farthest end of a range that begins at `begin`. Never decreases with `begin`, which is why
  // taking the farthest end each time covers the heads with the fewest ranks.
  int64_t FarthestEnd(int64_t begin) const {
    return std::min({begin + max_heads, (begin / group_size + max_kv) * group_size, num_heads});
  }

  int64_t FewestRanges() const {
    int64_t ranges = 0;
    for (int64_t begin = 0; begin < num_heads; begin = FarthestEnd(begin)) ++ranges;
    return ranges;
  }
};

// A split into more ranges than the fewest always exists (cut any range in two), down to single
// heads. So the smallest max_kv whose FewestRanges() fits in N is the optimum, and the longest
// range for rank 0, then for rank 1 and so on is the farthest end that leaves one head for each
// rank after it.
std::vector<Range> SplitHeads(const PartitionDims& dims, int tp_size) {
  HeadLimits limits = {.num_heads = dims.num_query_heads,
                       .group_size = dims.num_query_heads / dims.num_kv_heads,
                       .max_heads = CeilDiv(dims.num_query_heads, tp_size),
                       .max_kv = 1};
  while (limits.FewestRanges() > tp_size) ++limits.max_kv;
  std::vector<Range> ranges;
  int64_t begin = 0;
  for (int rank = 0; rank < tp_size; ++rank) {
    const int64_t ranks_after = tp_size - 1 - rank;
    const int64_t end = std::min(limits.FarthestEnd(begin), limits.num_heads - ranks_after);
    ranges.push_back({begin, end});
    begin = end;
  }
  return ranges;
}

// Equal parts where tp_size divides `count`; otherwise near-equal numbers of whole units, the last
// unit of the last rank being cut off at `count`.
std::vector<Range> SplitRows(int64_t count, int tp_size) {
  int64_t unit = 64;
  if (count % tp_size == 0) {
    unit = count / tp_size;
  } else {
    while (CeilDiv(count, unit) < tp_size) unit /= 2;
  }
  const int64_t units = CeilDiv(count, unit);
  const int64_t longer_ranks = units % tp_size;
  std::vector<Range> ranges;
  int64_t begin = 0;
  for (int rank = 0; rank < tp_size; ++rank) {
    const int64_t rank_units = units / tp_size + (rank < longer_ranks ? 1 : 0);
    const int64_t end = std::min(begin + rank_units * unit, count);
    ranges.push_back({begin, end});
    begin = end;
  }
  return ranges;
}

std::vector<Range> KvGroups(Range query_heads, Range kv_heads, int64_t group_size) {
  std::vector<Range> groups;
  for (int64_t kv = kv_heads.begin; kv < kv_heads.end; ++kv) {
    const int64_t begin = std::max(kv * group_size, query_heads.begin);
    const int64_t end = std::min((kv + 1) * group_size, query_heads.end);
    groups.push_back({begin - query_heads.begin, end - query_heads.begin});
  }
  return groups;
}

absl::Status CheckDims(const PartitionDims& dims, int tp_size) {
  if (tp_size < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the tensor-parallel size must be at least 1, not %d", tp_size));
  }
  if (dims.num_query_heads < 1 || dims.num_kv_heads < 1 ||
      dims.num_query_heads % dims.num_kv_heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d query heads cannot be shared out over %d KV heads: the number of query "
                        "heads must be a multiple of the number of KV heads",
                        dims.num_query_heads, dims.num_kv_heads));
  }
  const struct {
    int64_t count;
    const char* what;
  } limits[] = {{dims.num_query_heads, "query heads"},
                {dims.intermediate_size, "rows of the MLP (intermediate_size)"},
                {dims.vocab_size, "rows of the vocabulary (vocab_size)"}};
  for (const auto& limit : limits) {
    if (tp_size > limit.count) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%d ranks are too many for this model: it has %d %s, and every rank needs at least one; "
          "start at most %d ranks",
          tp_size, limit.count, limit.what,
          std::min({dims.num_query_heads, dims.intermediate_size, dims.vocab_size})));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<RankPartition>> PartitionModel(const PartitionDims& dims, int tp_size) {
  LOCKSTEP_RETURN_IF_ERROR(CheckDims(dims, tp_size));
  const int64_t group_size = dims.num_query_heads / dims.num_kv_heads;
  const std::vector<Range> query_heads = SplitHeads(dims, tp_size);
  const std::vector<Range> intermediate = SplitRows(dims.intermediate_size, tp_size);
  const std::vector<Range> vocab = SplitRows(dims.vocab_size, tp_size);
  std::vector<RankPartition> parts(tp_size);
  for (int rank = 0; rank < tp_size; ++rank) {
    RankPartition& part = parts[rank];
    part.query_heads = query_heads[rank];
    part.kv_heads = {part.query_heads.begin / group_size,
                     CeilDiv(part.query_heads.end, group_size)};
    part.kv_groups = KvGroups(part.query_heads, part.kv_heads, group_size);
    part.intermediate = intermediate[rank];
    part.vocab = vocab[rank];
  }
  return parts;
}

absl::StatusOr<std::vector<RankPartition>> PartitionJob(const PartitionDims& dims, int num_ranks,
                                                        const EmulatedRank& emulated) {
  if (emulated.tp_size == 0) return PartitionModel(dims, num_ranks);
  if (emulated.rank < 0 || emulated.rank >= emulated.tp_size) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--rank %d is not a rank of --emulate-tp %d: 0 to %d", emulated.rank,
                        emulated.tp_size, emulated.tp_size - 1));
  }
  if (num_ranks != 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--emulate-tp %d needs one rank, which computes the share of one of %d; %d were started",
        emulated.tp_size, emulated.tp_size, num_ranks));
  }
  LOCKSTEP_ASSIGN_OR_RETURN(const std::vector<RankPartition> all,
                            PartitionModel(dims, emulated.tp_size));
  return std::vector<RankPartition>{all[static_cast<size_t>(emulated.rank)]};
}

}  // namespace lockstep
