#include "runtime/tp_check.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_join.h"
#include "runtime/core/difference.h"
#include "runtime/core/log.h"
#include "runtime/tensor_exchange.h"

namespace lockstep {

namespace {

// Rank 0 leads: each command says which tensor all ranks exchange next, or that the step is done.
struct Command {
  int64_t tensor = -1;        // -1: done
  int64_t verdict_bytes = 0;  // with done: length of the message that follows; 0: all agree
};

// Where a rank's tensor is apart from one rank's.
struct Difference {
  double relative = 0;
  double tolerance = 1;
  int64_t step = 0;
  int64_t layer = kNoLayer;
  TensorKind kind = TensorKind::kEmbedding;
  int rank = 0;
  int64_t row = 0;     // of the tensor
  int64_t column = 0;  // of the whole tensor
  float value = 0;
  float expected = 0;
  std::string place;  // the row in words

  bool apart() const { return relative > tolerance; }
  bool worse_than(const Difference& other) const {
    return relative * other.tolerance > other.relative * tolerance;
  }
};

int64_t KvColumns(const ModelConfig& config, const RankPartition& partition) {
  return 2 * partition.kv_heads.size() * config.head_dim;
}
bool OfLogitsRows(TensorKind kind) {
  return kind == TensorKind::kFinalNorm || kind == TensorKind::kLogits;
}
bool IsSummed(TensorKind kind) {
  return kind == TensorKind::kEmbedding || kind == TensorKind::kOProj ||
         kind == TensorKind::kDownProj;
}

std::string TensorName(int64_t layer, TensorKind kind) {
  if (layer == kNoLayer) return std::string(Name(kind));
  return absl::StrFormat("layer %d %s", layer, Name(kind));
}

std::string DescribeRow(const ForwardBatch& batch, TensorKind kind, int64_t row) {
  if (OfLogitsRows(kind)) row = batch.logits_rows[static_cast<size_t>(row)];
  const auto starts = batch.attention.query_start_loc;
  if (row >= starts.back()) return absl::StrFormat("padding row %d", row);
  const int64_t request = std::upper_bound(starts.begin(), starts.end(), row) - starts.begin() - 1;
  return absl::StrFormat("row %d (request %d of the step, position %d)", row, request,
                         batch.positions[static_cast<size_t>(row)]);
}

// Rank 0: sees the tensors of the whole model's forward pass and compares each with the ranks'.
class TensorComparer : public TensorObserver {
 public:
  TensorComparer(const ModelConfig& config, const TpTolerances& tolerances,
                 const std::vector<RankPartition>& partition, const RankPartition& whole,
                 Communicator& communicator, const TensorRecorder& recorder)
      : config_(config),
        tolerances_(tolerances),
        partition_(partition),
        whole_(whole),
        communicator_(communicator),
        recorder_(recorder) {}

  void Begin(const ForwardBatch& batch, int64_t step) {
    batch_ = &batch;
    step_ = step;
    tensor_ = 0;
  }
  void Observe(int64_t layer, TensorKind kind, const MatrixView& whole) override {
    if (!status_.ok() || !verdict_.empty()) return;
    status_ = Compare(layer, kind, whole);
  }
  bool writes() const override { return true; }

  // A failed collective: nothing may be sent after it.
  const absl::Status& status() const { return status_; }
  // What is wrong; empty while all agree.
  const std::string& verdict() const { return verdict_; }
  std::string Summary(int64_t steps) const;

 private:
  absl::Status Compare(int64_t layer, TensorKind kind, const MatrixView& whole);
  // The largest difference of one rank's rows.
  Difference CompareRank(int64_t layer, TensorKind kind, const MatrixView& whole, int rank,
                         const float* rows) const;
  void Judge(const std::vector<Difference>& ranks);
  TensorHeader ExpectedHeader(int64_t layer, TensorKind kind, int64_t rows, int rank) const;
  void Align(TensorKind kind, const MatrixView& whole) const;
  std::string Describe(const Difference& difference) const;

  const ModelConfig& config_;
  const TpTolerances tolerances_;
  const std::vector<RankPartition>& partition_;
  const RankPartition& whole_;
  Communicator& communicator_;
  const TensorRecorder& recorder_;

  const ForwardBatch* batch_ = nullptr;
  int64_t step_ = 0;
  int64_t tensor_ = 0;  // index in the forward pass
  absl::Status status_;
  std::string verdict_;
  Difference largest_;
  int64_t num_tensors_ = 0;  // of all steps
  bool all_rows_ = true;     // no step had rows that were left out
  std::vector<TensorHeader> headers_;
  std::vector<float> received_;
};

absl::Status TensorComparer::Compare(int64_t layer, TensorKind kind, const MatrixView& whole) {
  Command command{.tensor = tensor_};
  LOCKSTEP_RETURN_IF_ERROR(communicator_.Broadcast(&command, sizeof(command), 0));
  LOCKSTEP_RETURN_IF_ERROR(Exchange(communicator_, recorder_.Get(tensor_), headers_, received_));
  ++tensor_;
  ++num_tensors_;
  all_rows_ = all_rows_ && whole.rows <= kCheckedRows;
  std::vector<Difference> differences;
  const float* rows = received_.data();
  for (int rank = 0; rank < communicator_.size(); ++rank) {
    const TensorHeader expected = ExpectedHeader(layer, kind, whole.rows, rank);
    const TensorHeader& header = headers_[rank];
    if (header != expected) {
      verdict_ = absl::StrFormat(
          "step %d: %s of rank %d is not what the partition says: %d rows of %d columns, not %d of "
          "%d%s",
          step_, TensorName(layer, kind), rank, header.rows, header.cols, expected.rows,
          expected.cols, header.kind == expected.kind ? "" : " (another tensor)");
      return absl::OkStatus();
    }
    differences.push_back(CompareRank(layer, kind, whole, rank, rows));
    rows += header.size;
  }
  Judge(differences);
  if (verdict_.empty()) Align(kind, whole);
  return absl::OkStatus();
}

TensorHeader TensorComparer::ExpectedHeader(int64_t layer, TensorKind kind, int64_t rows,
                                            int rank) const {
  TensorHeader header{layer, static_cast<int64_t>(kind), NumKept(rows), 0, 0};
  for (const ColumnRun& run : LocalColumns(kind, config_, partition_[rank])) {
    header.cols += run.count;
  }
  header.size = header.rows * header.cols;
  if (kind == TensorKind::kQkv) {
    header.size += (rows - header.rows) * KvColumns(config_, partition_[rank]);
  }
  return header;
}

// Puts the ranks' values in place of one rank's; of what several ranks hold, the lowest rank's.
void TensorComparer::Align(TensorKind kind, const MatrixView& whole) const {
  const float* values = received_.data() + received_.size();
  for (int rank = communicator_.size() - 1; rank >= 0; --rank) {
    const TensorHeader& header = headers_[rank];
    values -= header.size;
    const std::vector<ColumnRun> runs = LocalColumns(kind, config_, partition_[rank]);
    const float* from = values;
    for (int64_t i = 0; i < header.rows; ++i, from += header.cols) {
      for (const ColumnRun& run : runs) {
        std::copy_n(from + run.local, run.count,
                    whole.row<float>(KeptRow(i, whole.rows)) + run.full);
      }
    }
    if (kind != TensorKind::kQkv) continue;
    for (int64_t i = 0; i < whole.rows - header.rows; ++i) {
      for (const size_t part : {1, 2}) {  // k, v
        std::copy_n(from, runs[part].count,
                    whole.row<float>(kFirstRowBetween + i) + runs[part].full);
        from += runs[part].count;
      }
    }
  }
}

// Each part of a row (q, k, v; gate, up) has its own magnitude: a large key may not hide a value.
Difference TensorComparer::CompareRank(int64_t layer, TensorKind kind, const MatrixView& whole,
                                       int rank, const float* rows) const {
  const std::vector<ColumnRun> runs = LocalColumns(kind, config_, partition_[rank]);
  const std::vector<ColumnRun> parts = LocalColumns(kind, config_, whole_);
  const int64_t cols = runs.back().local + runs.back().count;
  Difference worst{.tolerance = tolerances_.activations,
                   .step = step_,
                   .layer = layer,
                   .kind = kind,
                   .rank = rank,
                   .place = ""};
  for (int64_t i = 0; i < NumKept(whole.rows); ++i) {
    const int64_t row = KeptRow(i, whole.rows);
    const float* const expected = whole.row<const float>(row);
    const float* const values = rows + i * cols;
    for (size_t part = 0; part < runs.size(); ++part) {
      const ColumnRun& run = runs[part];
      const float scale = LargestMagnitude(expected + parts[part].full, parts[part].count);
      Difference here = worst;
      const bool cached = kind == TensorKind::kQkv && part > 0;
      here.tolerance = cached ? tolerances_.keys_and_values : tolerances_.activations;
      here.row = row;
      for (int64_t c = 0; c < run.count; ++c) {
        const float value = values[run.local + c];
        here.relative = RelativeDifference(value, expected[run.full + c], scale);
        if (!here.worse_than(worst)) continue;
        worst = here;
        worst.column = run.full + c;
        worst.value = value;
        worst.expected = expected[run.full + c];
      }
    }
  }
  return worst;
}

// `ranks`: each rank's largest difference in one tensor.
void TensorComparer::Judge(const std::vector<Difference>& ranks) {
  const Difference* worst = &ranks[0];
  std::vector<int> apart;
  bool same = true;  // all ranks have the same wrong number
  for (const Difference& rank : ranks) {
    if (rank.worse_than(*worst)) worst = &rank;
    if (rank.apart()) apart.push_back(rank.rank);
    same = same && rank.row == ranks[0].row && rank.column == ranks[0].column &&
           rank.value == ranks[0].value;
  }
  if (worst->worse_than(largest_)) {
    largest_ = *worst;
    largest_.place = DescribeRow(*batch_, worst->kind, worst->row);
  }
  if (apart.empty()) return;
  verdict_ = absl::StrFormat(
      "step %d: %s is apart on rank%s %s of %d; the tolerance is %.3g. Largest: %s", worst->step,
      TensorName(worst->layer, worst->kind), apart.size() == 1 ? "" : "s",
      absl::StrJoin(apart, ", "), communicator_.size(), worst->tolerance, Describe(largest_));
  if (IsSummed(worst->kind) && same) {
    verdict_ +=
        ". All ranks hold the same sum, so a rank's part of it is wrong: its weights or bias of "
        "this product";
  }
}

std::string TensorComparer::Describe(const Difference& d) const {
  return absl::StrFormat(
      "rank %d, %s, %s: %.9g, one rank has %.9g (apart by %.3g of the row's "
      "largest magnitude)",
      d.rank, d.place, DescribeColumn(d.kind, config_, d.column), d.value, d.expected, d.relative);
}

std::string TensorComparer::Summary(int64_t steps) const {
  std::string text = absl::StrFormat(
      "--check-tp: %d step%s, %d tensors of each of %d ranks compared with one rank's%s", steps,
      steps == 1 ? "" : "s", num_tensors_, communicator_.size(),
      all_rows_ ? "" : absl::StrFormat(" (at most %d rows of a step)", kCheckedRows));
  if (!verdict_.empty()) return text + ": they differ";
  if (largest_.relative == 0) return text + ": no difference";
  absl::StrAppend(&text, ": all agree within ", absl::StrFormat("%.3g", tolerances_.activations));
  if (tolerances_.keys_and_values != tolerances_.activations) {
    absl::StrAppend(&text, ", keys and values within ",
                    absl::StrFormat("%.3g", tolerances_.keys_and_values));
  }
  absl::StrAppend(&text, "; largest difference: step ", largest_.step, ", ",
                  TensorName(largest_.layer, largest_.kind), ", ", Describe(largest_));
  return text;
}

}  // namespace

struct TpChecker::Impl {
  Impl(const ModelConfig& model_config, const TpCheckOptions& check_options,
       const TpTolerances& tolerances, const std::vector<RankPartition>& rank_partition,
       const RankPartition& whole_part, Communicator& ranks)
      : config(model_config),
        options(check_options),
        partition(rank_partition),
        whole_partition(whole_part),
        communicator(ranks),
        recorder(KvColumns(config, partition[static_cast<size_t>(ranks.rank())])),
        comparer(config, tolerances, partition, whole_partition, communicator, recorder) {}

  absl::Status Lead(const ForwardBatch& batch, const DeviceDecoder* device);
  absl::Status Follow();
  // COLLECTIVE. A part of the start that rank 0 alone has.
  absl::Status OnRank0(const std::function<absl::Status()>& start);

  const ModelConfig config;
  const TpCheckOptions options;
  const std::vector<RankPartition> partition;
  const RankPartition whole_partition;
  Communicator& communicator;
  int64_t steps = 0;
  TensorRecorder recorder;
  TensorComparer comparer;            // rank 0
  std::unique_ptr<WholeModel> whole;  // rank 0, until the last step
};

// Whatever the forward pass of one rank comes to, the others are told, and all return alike.
absl::Status TpChecker::Impl::Lead(const ForwardBatch& batch, const DeviceDecoder* device) {
  comparer.Begin(batch, steps);
  const absl::Status ran = CatchExhaustion("--check-tp: the step on one rank",
                                           [&] { return whole->Run(batch, device, comparer); });
  LOCKSTEP_RETURN_IF_ERROR(comparer.status());
  const std::string verdict = ran.ok() ? comparer.verdict() : std::string(ran.message());
  Command done{.tensor = -1, .verdict_bytes = static_cast<int64_t>(verdict.size())};
  LOCKSTEP_RETURN_IF_ERROR(communicator.Broadcast(&done, sizeof(done), 0));
  if (verdict.empty()) return absl::OkStatus();
  std::string message = verdict;
  LOCKSTEP_RETURN_IF_ERROR(
      communicator.Broadcast(message.data(), static_cast<int64_t>(message.size()), 0));
  return absl::InternalError("--check-tp: " + message);
}

absl::Status TpChecker::Impl::Follow() {
  std::vector<TensorHeader> headers;
  std::vector<float> nothing;
  while (true) {
    Command command;
    LOCKSTEP_RETURN_IF_ERROR(communicator.Broadcast(&command, sizeof(command), 0));
    if (command.tensor >= 0) {
      LOCKSTEP_RETURN_IF_ERROR(
          Exchange(communicator, recorder.Get(command.tensor), headers, nothing));
      continue;
    }
    if (command.verdict_bytes == 0) return absl::OkStatus();
    std::string message(static_cast<size_t>(command.verdict_bytes), '\0');
    LOCKSTEP_RETURN_IF_ERROR(communicator.Broadcast(message.data(), command.verdict_bytes, 0));
    return absl::InternalError("--check-tp: " + message);
  }
}

absl::Status CheckTpNeedsRanks(int num_ranks) {
  if (num_ranks > 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "--check-tp needs at least two ranks: it compares them with one");
}

absl::Status TpChecker::Impl::OnRank0(const std::function<absl::Status()>& start) {
  const char* const what = "--check-tp: the whole model on rank 0";
  return Agree(communicator, CatchExhaustion(what, [&]() -> absl::Status {
                 if (communicator.rank() != 0) return absl::OkStatus();
                 return Annotate(start(), what);
               }));
}

TpTolerances TpTolerancesOf(DType activations, DType keys_and_values) {
  const auto of = [](DType dtype) {
    switch (dtype) {
      case DType::kF32:
        return 0x1p-12;
      case DType::kF16:
        return 0x1p-8;
      case DType::kBF16:
        return 0x1p-5;
      case DType::kF8E4M3:
        return 0x1p-2;
    }
    LOCKSTEP_CHECK(false);
  };
  return {of(activations), std::max(of(activations), of(keys_and_values))};
}

absl::StatusOr<std::unique_ptr<TpChecker>> TpChecker::Create(
    const ModelSource& source, const TpCheckOptions& options,
    const std::vector<RankPartition>& partition, const CudaSeat* cuda, Communicator& communicator,
    ThreadPool& threads) {
  LOCKSTEP_RETURN_IF_ERROR(CheckTpNeedsRanks(communicator.size()));
  if (options.num_steps < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--check-tp: %d steps; it must be at least 1", options.num_steps));
  }
  LOCKSTEP_ASSIGN_OR_RETURN(const std::vector<RankPartition> whole_partition,
                            PartitionModel(source.config.Dims(), 1));
  const WholeModelOptions& model = options.model;
  const TpTolerances tolerances = cuda != nullptr ? TpTolerancesOf(model.dtype, model.kv_dtype)
                                                  : TpTolerancesOf(DType::kF32, DType::kF32);
  auto impl = std::make_unique<Impl>(source.config, options, tolerances, partition,
                                     whole_partition[0], communicator);
  LOCKSTEP_RETURN_IF_ERROR(impl->OnRank0([&]() -> absl::Status {
    LogInfo("--check-tp: rank 0 loads the whole model besides its share");
    LOCKSTEP_ASSIGN_OR_RETURN(
        impl->whole, WholeModel::Load(source, model, impl->whole_partition, cuda, threads));
    return absl::OkStatus();
  }));
  return std::unique_ptr<TpChecker>(new TpChecker(std::move(impl)));
}

int64_t TpChecker::gpu_bytes_per_block() const {
  return impl_->whole == nullptr ? 0 : impl_->whole->gpu_bytes_per_block();
}

absl::Status TpChecker::CreatePool(int64_t num_blocks) {
  return impl_->OnRank0([&] { return impl_->whole->CreatePool(num_blocks); });
}

TpChecker::TpChecker(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TpChecker::~TpChecker() = default;

bool TpChecker::active() const { return impl_->steps < impl_->options.num_steps; }

TensorObserver* TpChecker::observer() { return active() ? &impl_->recorder : nullptr; }

absl::Status TpChecker::ChangePool(std::span<const int32_t> poisoned_blocks,
                                   std::span<const PlanBlockCopy> block_copies) {
  if (impl_->whole == nullptr) return absl::OkStatus();
  return impl_->whole->ChangePool(poisoned_blocks, block_copies);
}

absl::Status TpChecker::Check(const ForwardBatch& batch, const DeviceDecoder* device) {
  LOCKSTEP_CHECK(active());
  Communicator& communicator = impl_->communicator;
  LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, impl_->recorder.status()));
  ++impl_->steps;
  LOCKSTEP_RETURN_IF_ERROR(communicator.rank() == 0 ? impl_->Lead(batch, device) : impl_->Follow());
  impl_->recorder.Clear();
  if (!active()) {
    impl_->whole.reset();
    impl_->recorder.Release();
  }
  return absl::OkStatus();
}

std::string TpChecker::Summary() const { return impl_->comparer.Summary(impl_->steps); }

}  // namespace lockstep
