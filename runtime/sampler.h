// Picks the next token of each row from logits whose columns are spread over the ranks.
//
// The request's adjustments come first (LogitAdjuster). Temperature 0: the largest logit, lowest id
// on ties, whatever min_p, top_k and top_p say. Otherwise the logits are divided by the
// temperature, cut to those of at least min_p times the largest probability, then to the top_k
// largest (ties at the border: lowest ids), softmax is renormalised over those, cut to the smallest
// set of most probable ids whose mass reaches top_p, and one id is drawn by the Gumbel-max trick
// (Gumbel 1954; Maddison, Tarlow, Minka, "A* Sampling", 2014): argmax over ids of logit /
// temperature + Gumbel noise. The noise of an id is a pure function of (seed, position, id), so
// equal logits give equal ids at every N, in every batch and after any history.
//
// Exchanged between ranks: one {score, id} a row; for rows with top_k or top_p also the best
// candidates of each rank and, as an integer that sums alike in any order, the rank's softmax mass;
// all logits of a row only where the candidates do not reach top_p.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/communicator.h"
#include "runtime/core/buffer.h"
#include "runtime/core/range.h"
#include "runtime/core/thread_pool.h"
#include "runtime/logit_adjuster.h"
#include "runtime/request.h"

namespace lockstep {

// Stands for the token of a row whose logits hold NaN or +infinity, or -infinity alone.
inline constexpr int32_t kFailedToken = -1;

inline constexpr double kMinTemperature = 1e-6;

struct SampleRow {
  int32_t logits_row = 0;
  int32_t position = 0;  // of the token to be picked
  uint64_t seed = 0;
  double temperature = 0;
  double top_p = 1;
  double min_p = 0;
  int64_t top_k = 0;                        // 0: off
  const LogitAdjuster* adjuster = nullptr;  // null: none
  int32_t num_logprobs = -1;                // -1: none are wanted

  // Below kMinTemperature the noise is smaller than the spacing of float32 logits.
  bool greedy() const { return temperature < kMinTemperature; }
  bool filtered() const { return !greedy() && (top_k > 0 || top_p < 1); }
};

// The same on all ranks.
struct SampleOutput {
  std::vector<int32_t> tokens;             // [rows] ids, or kFailedToken
  std::vector<PositionLogprobs> logprobs;  // [rows], empty when no row wants any
  std::vector<uint64_t> digests;           // [N] what each rank passed, empty when there is no row
};

// Noise of one vocabulary id, Gumbel(0, 1) distributed.
double GumbelNoise(uint64_t seed, int64_t position, int64_t id);

class Sampler {
 public:
  // `vocab_ranges` are all ranks' columns, in rank order; they partition [0, V). The references
  // must outlive the sampler.
  Sampler(std::vector<Range> vocab_ranges, Communicator& communicator, ThreadPool& threads);

  // COLLECTIVE, with the same rows on all ranks. `logits` is float32 [R, V_local]; columns from
  // V_local on are padding and never read. Rows with an adjuster are changed in place. `digest`
  // travels with the first exchange, so comparing ranks costs no collective of its own. Log
  // probabilities are those of the logits as they came in.
  absl::Status Sample(const MatrixView& logits, std::span<const SampleRow> rows, uint64_t digest,
                      SampleOutput& output);

 private:
  // A rank's best id of a row; greater score wins, lower id on ties.
  struct Best {
    double score = 0;  // logit, or logit / temperature + noise
    float logit = 0;   // the rank's largest logit, of rows with top_k or top_p
    int32_t id = 0;    // or kNoId, kBadLogits
  };
  struct Candidate {
    float logit = 0;
    int32_t id = 0;
  };
  // What a rank tells of a row with top_k or top_p; `count` candidates follow, best first.
  struct CandidateHeader {
    uint64_t mass = 0;  // softmax mass of all the rank's ids (see Weight in sampler.cc)
    int64_t count = 0;
  };

  Best FindBest(const float* logits, const SampleRow& row) const;
  absl::Status PickBest(const MatrixView& logits, std::span<const SampleRow> rows,
                        std::span<int32_t> tokens);
  int64_t Capacity(const SampleRow& row, int64_t max_candidates) const;
  // One exchange for the rows `batch` (indices into `rows`), with at most `max_candidates` a rank
  // for rows without top_k. Rows that need more keep kNoId as their token.
  absl::Status ExchangeCandidates(const MatrixView& logits, std::span<const SampleRow> rows,
                                  std::span<const int32_t> batch, int64_t max_candidates,
                                  std::span<int32_t> tokens);
  void CollectCandidates(const float* logits, const SampleRow& row, float max_logit,
                         int64_t capacity, std::byte* out) const;
  int32_t PickFromCandidates(const SampleRow& row, float max_logit, const std::byte* first,
                             int64_t rank_bytes);
  // Moves the next best candidate over all ranks to the end of merged_; false when it is not known
  // (a rank has more than it sent) or there is none.
  bool MergeNext(const std::byte* first, int64_t rank_bytes);

  const std::vector<Range> vocab_ranges_;
  const Range vocab_;  // this rank's
  int64_t max_local_vocab_ = 0;
  Communicator& communicator_;
  ThreadPool& threads_;

  // Kept between steps, so that steady decoding allocates nothing.
  std::vector<Best> my_best_;      // [rows]
  std::vector<Best> all_best_;     // [N, rows]
  std::vector<float> max_logits_;  // [rows] over all ranks
  std::vector<int32_t> pending_;   // rows with top_k or top_p that have no token yet
  std::vector<int64_t> offsets_;   // of the rows of an exchange within a rank's message
  std::vector<std::byte> send_;
  std::vector<std::byte> receive_;
  std::vector<int64_t> next_;      // [N] next candidate of each rank to merge
  std::vector<Candidate> merged_;  // best first
};

}  // namespace lockstep
