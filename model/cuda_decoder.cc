#include "model/cuda_decoder.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "attention/cuda_attention.h"
#include "model/attention_layer.h"
#include "model/checkpoint/tensor_names.h"
#include "model/cuda_attention_check.h"
#include "model/cuda_graph.h"
#include "model/cuda_inputs.h"
#include "model/cuda_layer.h"
#include "model/cuda_observation.h"
#include "model/cuda_ops.h"
#include "model/cuda_overlap.h"
#include "model/cuda_rank_sums.h"
#include "model/cuda_row_step_model.h"
#include "model/cuda_weights.h"
#include "model/rope.h"
#include "runtime/core/cuda_errors.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {

// Batch sizes of decode that have a graph: a step is padded to the next one.
constexpr int64_t kGraphBatchSizes[] = {1,   2,   4,   8,   16,  24,  32,  48,  64, 96,
                                        128, 160, 192, 224, 256, 320, 384, 448, 512};

// Activations of a step, sized once for the largest.
struct CudaScratch {
  DeviceBuffer qkv;        // [T, (Hq_local + 2 * Hkv_local) * D]
  DeviceBuffer attended;   // [T, Hq_local * D]
  DeviceBuffer gate_up;    // [T, 2 * F_local]
  DeviceBuffer activated;  // [T, F_local]
  DeviceBuffer logits;     // float32 [R, V_local]
};

class CudaDecoder : public DeviceDecoder {
 public:
  CudaDecoder(const ModelConfig& config, const RankPartition& part,
              const CudaDecoderOptions& options, const CudaRankContext& context,
              RotaryEmbedding rope)
      : config_(config),
        part_(part),
        options_(options),
        rank_(context),
        rope_(std::move(rope)),
        observation_(context.stream) {
    for (int64_t layer = 0; layer < config.num_layers; ++layer) {
      geometries_.push_back(LocalGeometry(config, part, layer));
    }
  }
  ~CudaDecoder() override {
    Synchronize(rank_.stream).IgnoreError();
    overlap_.WaitIdle().IgnoreError();  // a step that failed did not wait for it
  }

  absl::Status Load(const ModelSource& source, const std::vector<RankPartition>& partition,
                    int rank, ThreadPool& threads);

  absl::Status Forward(const ForwardBatch& batch, const KvPool& pool,
                       const MatrixView& logits) override;
  absl::StatusOr<MatrixView> Enqueue(const ForwardBatch& batch, const KvPool& pool) override;
  int32_t* last_tokens() const override { return inputs_.last_tokens(); }
  absl::Status Prepare(const KvPool& pool) override;
  const AttentionGeometry& Geometry(int64_t layer) const override { return geometries_[layer]; }
  int64_t weight_bytes() const override;
  std::string CheckSummary() const override {
    return attention_check_ == nullptr ? "" : attention_check_->Summary();
  }

 private:
  // Sizes of a launch; a graph is one launch of a decode step.
  struct StepSize {
    int64_t tokens = 0;       // T
    int64_t requests = 0;     // B
    int64_t logits_rows = 0;  // R
    bool decode_only = false;
    bool overlaps = false;  // sums over ranks run beside products
  };

  absl::Status CreateScratch();
  absl::Status CreateRopeTable(ThreadPool& threads);
  absl::Status CreateInputs();
  absl::Status CheckBatch(const ForwardBatch& batch, const KvPool& pool) const;
  int64_t GraphBatchSize(const ForwardBatch& batch) const;
  absl::Status Launch(const StepSize& size, const KvPool& pool);
  absl::Status LaunchLayer(int64_t l, const KvCacheView& cache, const StepSize& size,
                           const CudaAttentionBatch& batch);
  absl::Status CreateRowStep(const std::vector<RankPartition>& partition);
  RopeTable Rope() const;
  absl::Status LaunchRowStep(const CudaAttentionBatch& batch);
  absl::Status LaunchAttention(int64_t l, const MatrixView& qkv, const MatrixView& attended,
                               const KvCacheView& cache, const CudaAttentionBatch& batch);
  MatrixView View(const DeviceBuffer& buffer, int64_t rows, int64_t cols) const {
    return {buffer.data(), options_.dtype, rows, cols, cols};
  }
  const CudaContext& context() const { return *context_; }
  int64_t q_cols() const { return part_.query_heads.size() * config_.head_dim; }
  int64_t kv_cols() const { return part_.kv_heads.size() * config_.head_dim; }

  const ModelConfig config_;
  const RankPartition part_;
  const CudaDecoderOptions options_;
  const CudaRankContext rank_;
  const RotaryEmbedding rope_;
  std::vector<AttentionGeometry> geometries_;

  DeviceMatrix embedding_;  // [V_local, E]
  std::vector<CudaLayer> layers_;
  DeviceMatrix final_norm_;
  DeviceMatrix head_;  // none: the embedding's rows

  std::unique_ptr<CudaLinear> linear_;
  std::optional<CudaContext> context_;
  CudaScratch scratch_;
  CudaRankSums sums_;
  CudaOverlap overlap_;
  CudaInputs inputs_;
  CudaAttentionWorkspace workspace_;
  DeviceBuffer rope_cos_;  // float32 [max_model_len, R/2]; none with dynamic RoPE
  DeviceBuffer rope_sin_;
  std::optional<RowStep> row_step_;      // decode steps of one request, where it can make them
  std::map<int64_t, CudaGraph> graphs_;  // by batch size
  std::unique_ptr<CudaAttentionCheck> attention_check_;  // null: not asked for
  CudaObservation observation_;
};

absl::Status CudaDecoder::Load(const ModelSource& source,
                               const std::vector<RankPartition>& partition, int rank,
                               ThreadPool& threads) {
  LOCKSTEP_ASSIGN_OR_RETURN(linear_, CudaLinear::Create());
  context_.emplace(CudaContext{.stream = rank_.stream,
                               .num_multiprocessors = rank_.info.num_multiprocessors,
                               .linear = *linear_,
                               .programmatic_launch = true});
  {
    DeviceWeightLoader loader(*source.checkpoint, threads, rank_.stream);
    CudaLayerReader reader(config_, part_, rank, options_.dtype, options_.kv_dtype, loader);
    const Range columns{0, config_.hidden_size};
    LOCKSTEP_ASSIGN_OR_RETURN(embedding_,
                              loader.Load({{kEmbedTokens, part_.vocab, columns}}, options_.dtype));
    for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
      LOCKSTEP_ASSIGN_OR_RETURN(CudaLayer loaded, reader.Read(layer));
      layers_.push_back(std::move(loaded));
    }
    LOCKSTEP_ASSIGN_OR_RETURN(final_norm_, reader.Norm(kFinalNorm, config_.hidden_size));
    if (!config_.tie_word_embeddings) {
      LOCKSTEP_ASSIGN_OR_RETURN(head_,
                                loader.Load({{kLmHead, part_.vocab, columns}}, options_.dtype));
    }
    LOCKSTEP_RETURN_IF_ERROR(loader.Finish());
    LogInfo("weights: " + loader.Summary());  // rank 0's; the others are silent
  }
  LOCKSTEP_RETURN_IF_ERROR(CreateScratch());
  if (overlap_.Overlaps(options_.max_num_batched_tokens)) {
    LogInfo(
        absl::StrFormat("sums over ranks in steps of %d tokens or more: beside products, which "
                        "leave them %d multiprocessors",
                        options_.overlap_min_tokens, options_.overlap_spare_multiprocessors));
  }
  if (options_.check_attention) {
    LOCKSTEP_ASSIGN_OR_RETURN(
        attention_check_,
        CudaAttentionCheck::Create(options_.dtype, options_.max_num_batched_tokens, q_cols()));
  }
  LOCKSTEP_RETURN_IF_ERROR(CreateRopeTable(threads));
  LOCKSTEP_RETURN_IF_ERROR(CreateRowStep(partition));
  return CreateInputs();
}

absl::Status CudaDecoder::CreateScratch() {
  const auto matrix = [&](int64_t rows, int64_t cols, DType dtype) {
    return DeviceBuffer::Create(rows * cols * SizeOf(dtype), "activations of a step");
  };
  const int64_t rows = options_.max_num_batched_tokens;
  const DType dtype = options_.dtype;
  const int64_t intermediate = part_.intermediate.size();
  const bool may_overlap = rank_.nccl != nullptr && options_.overlap_min_tokens <= rows;
  const int64_t overlap_min_tokens = may_overlap ? options_.overlap_min_tokens : 0;
  const CudaRankSumsOptions sums{.dtype = dtype,
                                 .hidden_size = config_.hidden_size,
                                 .num_layers = config_.num_layers,
                                 .max_tokens = rows,
                                 .max_rows = options_.max_logits_rows,
                                 .norm_eps = static_cast<float>(config_.rms_norm_eps)};
  LOCKSTEP_ASSIGN_OR_RETURN(sums_, CudaRankSums::Create(sums, rank_, observation_));
  LOCKSTEP_ASSIGN_OR_RETURN(overlap_,
                            CudaOverlap::Create(config_, overlap_min_tokens,
                                                options_.overlap_spare_multiprocessors, sums_));
  LOCKSTEP_ASSIGN_OR_RETURN(scratch_.qkv, matrix(rows, q_cols() + 2 * kv_cols(), dtype));
  LOCKSTEP_ASSIGN_OR_RETURN(scratch_.attended, matrix(rows, q_cols(), dtype));
  LOCKSTEP_ASSIGN_OR_RETURN(scratch_.gate_up, matrix(rows, 2 * intermediate, dtype));
  LOCKSTEP_ASSIGN_OR_RETURN(scratch_.activated, matrix(rows, intermediate, dtype));
  LOCKSTEP_ASSIGN_OR_RETURN(scratch_.logits,
                            matrix(options_.max_logits_rows, part_.vocab.size(), DType::kF32));
  return absl::OkStatus();
}

// Angles depend on the position alone, but for dynamic RoPE.
absl::Status CudaDecoder::CreateRopeTable(ThreadPool& threads) {
  if (config_.rope.type == RopeType::kDynamic) return absl::OkStatus();
  const int64_t positions = options_.max_model_len;
  std::vector<int32_t> all(static_cast<size_t>(positions));
  for (int64_t p = 0; p < positions; ++p) all[p] = static_cast<int32_t>(p);
  std::vector<int32_t> lengths(all.size());
  for (int64_t p = 0; p < positions; ++p) lengths[p] = static_cast<int32_t>(p + 1);
  const size_t size = all.size() * static_cast<size_t>(rope_.rotary_dim() / 2);
  std::vector<float> cos(size);
  std::vector<float> sin(size);
  threads.ParallelFor(positions, 64, [&](int64_t begin, int64_t end) {
    rope_.FillCosSin(all, lengths, begin, end, cos.data(), sin.data());
  });
  const int64_t bytes = static_cast<int64_t>(size * sizeof(float));
  LOCKSTEP_ASSIGN_OR_RETURN(rope_cos_, DeviceBuffer::Create(bytes, "RoPE table"));
  LOCKSTEP_ASSIGN_OR_RETURN(rope_sin_, DeviceBuffer::Create(bytes, "RoPE table"));
  LOCKSTEP_RETURN_IF_ERROR(CopyAsync(rope_cos_.data(), cos.data(), bytes, rank_.stream));
  LOCKSTEP_RETURN_IF_ERROR(CopyAsync(rope_sin_.data(), sin.data(), bytes, rank_.stream));
  return Synchronize(rank_.stream);
}

absl::Status CudaDecoder::CreateInputs() {
  const bool dynamic = config_.rope.type == RopeType::kDynamic;
  const int64_t block_size = options_.block_size;
  const CudaInputLimits limits{.max_tokens = options_.max_num_batched_tokens,
                               .max_requests = options_.max_num_seqs,
                               .max_logits_rows = options_.max_logits_rows,
                               .max_blocks = (options_.max_model_len + block_size - 1) / block_size,
                               .num_slots = options_.max_num_seqs,
                               .rotary_dim = dynamic ? rope_.rotary_dim() : 0};
  LOCKSTEP_ASSIGN_OR_RETURN(inputs_, CudaInputs::Create(limits, rank_.stream));
  const std::set<int64_t> windows(config_.layer_windows.begin(), config_.layer_windows.end());
  CudaAttentionWorkspace::Options workspace;
  workspace.max_num_requests = options_.max_num_seqs;
  workspace.max_num_tokens = options_.max_num_batched_tokens;
  workspace.max_model_len = options_.max_model_len;
  workspace.num_query_heads = part_.query_heads.size();
  workspace.num_kv_heads = part_.kv_heads.size();
  workspace.head_dim = config_.head_dim;
  workspace.sliding_windows = {windows.begin(), windows.end()};
  workspace.programmatic_launch = context().programmatic_launch;
  LOCKSTEP_ASSIGN_OR_RETURN(workspace_, CudaAttentionWorkspace::Create(workspace, rank_.stream));
  return Synchronize(rank_.stream);
}

int64_t CudaDecoder::weight_bytes() const {
  int64_t bytes = embedding_.bytes() + final_norm_.bytes() + head_.bytes();
  for (const CudaLayer& layer : layers_) bytes += layer.bytes();
  return bytes;
}

// The same batch, hence the same verdict, on every rank: no rank leaves the step alone.
absl::Status CudaDecoder::CheckBatch(const ForwardBatch& batch, const KvPool& pool) const {
  const int64_t rows = std::ssize(batch.logits_rows);
  if (batch.num_tokens() > options_.max_num_batched_tokens ||
      batch.attention.num_requests() > options_.max_num_seqs || rows > options_.max_logits_rows) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "a step of %d tokens, %d requests and %d rows of logits; the limits are %d, %d and %d",
        batch.num_tokens(), batch.attention.num_requests(), rows, options_.max_num_batched_tokens,
        options_.max_num_seqs, options_.max_logits_rows));
  }
  LOCKSTEP_CHECK(!observed() || !observer()->writes() || rank_.nccl == nullptr);
  LOCKSTEP_CHECK(pool.shape().dtype == options_.kv_dtype &&
                 pool.shape().block_size == options_.block_size);
  return absl::OkStatus();
}

// The graph for a step of one token a request, each with its logits; 0: there is none.
int64_t CudaDecoder::GraphBatchSize(const ForwardBatch& batch) const {
  const int64_t num_requests = batch.attention.num_requests();
  if (batch.num_tokens() != num_requests || std::ssize(batch.logits_rows) != num_requests) return 0;
  const auto graph = graphs_.lower_bound(num_requests);
  return graph == graphs_.end() ? 0 : graph->first;
}

absl::StatusOr<MatrixView> CudaDecoder::Enqueue(const ForwardBatch& batch, const KvPool& pool) {
  LOCKSTEP_RETURN_IF_ERROR(CheckBatch(batch, pool));
  const int64_t logits_rows = std::ssize(batch.logits_rows);
  const int64_t graph_size = observed() ? 0 : GraphBatchSize(batch);
  observation_.BeginStep(observer(), batch.attention.slot_mapping, options_.block_size);
  StepSize size{.tokens = batch.num_tokens(),
                .requests = batch.attention.num_requests(),
                .logits_rows = logits_rows,
                .overlaps = !observed() && overlap_.Overlaps(batch.num_tokens())};
  LOCKSTEP_RETURN_IF_ERROR(inputs_.BeginStep());
  if (attention_check_ != nullptr) attention_check_->BeginStep(batch.attention);
  if (graph_size > 0) size = {graph_size, graph_size, graph_size, true};
  if (config_.rope.type == RopeType::kDynamic) {
    rope_.FillCosSin(batch.positions, batch.rope_lengths, 0, batch.num_tokens(), inputs_.host_cos(),
                     inputs_.host_sin());
  }
  LOCKSTEP_RETURN_IF_ERROR(
      inputs_.Upload(batch, size.requests, size.tokens, size.logits_rows, rank_.stream));
  LOCKSTEP_RETURN_IF_ERROR(graph_size > 0 ? graphs_.at(graph_size).Replay(rank_.stream)
                                          : Launch(size, pool));
  const int64_t vocab = part_.vocab.size();
  return MatrixView{scratch_.logits.data(), DType::kF32, logits_rows, vocab, vocab};
}

absl::Status CudaDecoder::Forward(const ForwardBatch& batch, const KvPool& pool,
                                  const MatrixView& logits) {
  LOCKSTEP_ASSIGN_OR_RETURN(const MatrixView from, Enqueue(batch, pool));
  LOCKSTEP_CHECK(logits.rows == from.rows && logits.cols == from.cols &&
                 logits.stride == logits.cols && logits.dtype == DType::kF32);
  LOCKSTEP_RETURN_IF_ERROR(
      CopyAsync(logits.data, from.data, from.rows * from.cols * SizeOf(DType::kF32), rank_.stream));
  return Synchronize(rank_.stream);
}

// Warms every decode shape and captures it. COLLECTIVE: the ranks' sums are captured, too.
absl::Status CudaDecoder::Prepare(const KvPool& pool) {
  if (row_step_.has_value()) {
    std::vector<KvCacheView> caches;
    for (int64_t l = 0; l < config_.num_layers; ++l) caches.push_back(pool.Layer(l));
    LOCKSTEP_RETURN_IF_ERROR(row_step_->SetCaches(caches, rank_.stream));
  }
  if (!options_.graphs || options_.check_attention) return absl::OkStatus();
  absl::Status first_error;
  const int64_t largest =
      std::min({options_.max_num_seqs, options_.max_num_batched_tokens, options_.max_logits_rows});
  for (const int64_t batch_size : kGraphBatchSizes) {
    if (batch_size > largest) break;
    // A step of padding alone: it writes nothing.
    const int32_t starts[] = {0};
    ForwardBatch nothing;
    nothing.attention.query_start_loc = starts;
    nothing.table_changes.emplace();
    const StepSize size{batch_size, batch_size, batch_size, true};
    LOCKSTEP_RETURN_IF_ERROR(inputs_.BeginStep());
    LOCKSTEP_RETURN_IF_ERROR(
        inputs_.Upload(nothing, batch_size, batch_size, batch_size, rank_.stream));
    LOCKSTEP_RETURN_IF_ERROR(Launch(size, pool));
    LOCKSTEP_RETURN_IF_ERROR(Synchronize(rank_.stream));
    // A rank that has no memory for a graph still takes part in the sums of the next sizes.
    CudaGraph graph;
    const absl::Status captured = graph.Capture(rank_.stream, [&] { return Launch(size, pool); });
    if (captured.ok()) {
      graphs_[batch_size] = std::move(graph);
    } else if (first_error.ok()) {
      first_error = Annotate(
          captured, absl::StrFormat("capturing the CUDA graph of a batch of %d", batch_size));
    }
  }
  return first_error;
}

// Everything between the step's arrays and its logits, on the device.
absl::Status CudaDecoder::Launch(const StepSize& size, const KvPool& pool) {
  CudaAttentionBatch batch = inputs_.attention(size.requests, size.tokens, options_.block_size);
  batch.may_have_prefill = !size.decode_only;
  const bool one_row = size.requests == 1 && size.tokens == 1 && size.logits_rows == 1;
  if (row_step_.has_value() && one_row && !observed()) {
    return LaunchRowStep(batch);
  }
  LOCKSTEP_RETURN_IF_ERROR(GatherRows(inputs_.token_ids(), part_.vocab, embedding_.view,
                                      sums_.Partial(size.tokens, 0), context()));
  LOCKSTEP_RETURN_IF_ERROR(workspace_.PlanStep(batch, rank_.stream));
  LOCKSTEP_RETURN_IF_ERROR(
      sums_.SumAndNorm(size.tokens, 0, layers_[0].input_norm.values(), context()));
  for (int64_t l = 0; l < config_.num_layers; ++l) {
    LOCKSTEP_RETURN_IF_ERROR(LaunchLayer(l, pool.Layer(l), size, batch));
  }
  const MatrixView last = sums_.LastNormed(size.tokens, size.logits_rows);
  const int64_t vocab = part_.vocab.size();
  const MatrixView logits{scratch_.logits.data(), DType::kF32, size.logits_rows, vocab, vocab};
  LOCKSTEP_RETURN_IF_ERROR(
      Linear(last, head_ ? head_.view : embedding_.view, nullptr, logits, context()));
  return observation_.Show(kNoLayer, TensorKind::kLogits, logits);
}

// From the normed residual stream to that of the next layer, or to the rows whose logits are
// wanted.
absl::Status CudaDecoder::LaunchLayer(int64_t l, const KvCacheView& cache, const StepSize& size,
                                      const CudaAttentionBatch& batch) {
  const CudaLayer& layer = layers_[l];
  const int64_t rows = size.tokens;
  const int64_t intermediate = part_.intermediate.size();
  const MatrixView qkv = View(scratch_.qkv, rows, q_cols() + 2 * kv_cols());
  const MatrixView attended = View(scratch_.attended, rows, q_cols());
  const MatrixView gate_up = View(scratch_.gate_up, rows, 2 * intermediate);
  const MatrixView activated = View(scratch_.activated, rows, intermediate);

  const int64_t o_sum = 2 * l + 1;
  LOCKSTEP_RETURN_IF_ERROR(
      overlap_.ProductOfNorm(o_sum - 1, layer.qkv, layer.qkv_bias, qkv, size.overlaps, context()));
  LOCKSTEP_RETURN_IF_ERROR(LaunchAttention(l, qkv, attended, cache, batch));
  LOCKSTEP_RETURN_IF_ERROR(observation_.Show(l, TensorKind::kAttention, attended));
  LOCKSTEP_RETURN_IF_ERROR(overlap_.ProductAndSum(
      attended, layer.o, layer.o_bias, o_sum, layer.post_attention_norm, size.overlaps, context()));

  const MatrixView normed = sums_.Normed(rows, o_sum);
  // Gate and up in one product's registers, unless somebody wants to see them.
  if (!observed() && !size.overlaps &&
      linear_->TakesSwiGlu(normed, layer.gate_up.view, activated)) {
    LOCKSTEP_RETURN_IF_ERROR(LinearSwiGlu(normed, layer.gate_up.view, layer.gate_up_bias.view.data,
                                          activated, context()));
  } else {
    LOCKSTEP_RETURN_IF_ERROR(overlap_.ProductOfNorm(o_sum, layer.gate_up, layer.gate_up_bias,
                                                    gate_up, size.overlaps, context()));
    LOCKSTEP_RETURN_IF_ERROR(observation_.Show(l, TensorKind::kGateUp, gate_up));
    LOCKSTEP_RETURN_IF_ERROR(SiluMul(gate_up, activated, context()));
    LOCKSTEP_RETURN_IF_ERROR(observation_.Show(l, TensorKind::kActivated, activated));
  }
  if (l + 1 < config_.num_layers) {
    return overlap_.ProductAndSum(activated, layer.down, layer.down_bias, o_sum + 1,
                                  layers_[l + 1].input_norm, size.overlaps, context());
  }
  LOCKSTEP_RETURN_IF_ERROR(Linear(activated, layer.down.view, layer.down_bias.view.data,
                                  sums_.Partial(rows, o_sum + 1), context()));
  return sums_.LastSumAndNorm(rows, inputs_.logits_rows(), size.logits_rows, final_norm_.values(),
                              context());
}

absl::Status CudaDecoder::LaunchAttention(int64_t l, const MatrixView& qkv,
                                          const MatrixView& attended, const KvCacheView& cache,
                                          const CudaAttentionBatch& batch) {
  const CudaLayer& layer = layers_[l];
  const HeadNorm head_norm{layer.q_norm.values(), layer.k_norm.values(),
                           static_cast<float>(config_.rms_norm_eps)};
  LOCKSTEP_RETURN_IF_ERROR(NormRopeWriteKv(qkv, part_.query_heads.size(), head_norm, Rope(),
                                           batch.slot_mapping, cache, context()));
  LOCKSTEP_RETURN_IF_ERROR(observation_.ShowQkv(l, qkv, cache));
  if (attention_check_ != nullptr) {
    return attention_check_->Forward(l, layer.attention, batch, workspace_,
                                     {qkv.data, options_.dtype, qkv.stride}, cache, attended,
                                     context());
  }
  return layer.attention.Forward(batch, workspace_, {qkv.data, options_.dtype, qkv.stride}, cache,
                                 {attended.data, options_.dtype, attended.stride}, rank_.stream);
}

RopeTable CudaDecoder::Rope() const {
  const bool dynamic = config_.rope.type == RopeType::kDynamic;
  return {.cos = dynamic ? inputs_.cos() : rope_cos_.as<float>(),
          .sin = dynamic ? inputs_.sin() : rope_sin_.as<float>(),
          .rows = dynamic ? nullptr : inputs_.positions(),
          .rotary_dim = rope_.rotary_dim()};
}

absl::Status CudaDecoder::CreateRowStep(const std::vector<RankPartition>& partition) {
  const absl::Status possible = CheckRowSteps(config_, partition, options_, rank_.peers != nullptr);
  if (part_.query_heads.begin == 0 && !options_.always_observed) {  // rank 0
    LogInfo(possible.ok() ? "decode steps of one request: one kernel"
                          : absl::StrCat("decode steps of one request: a chain of kernels (",
                                         absl::string_view(possible.message()), ")"));
  }
  if (!possible.ok()) return absl::OkStatus();
  const RowStepModel model = DescribeForRowSteps(config_, part_, options_, layers_, final_norm_,
                                                 head_ ? head_ : embedding_);
  LOCKSTEP_ASSIGN_OR_RETURN(
      row_step_, RowStep::Create(model, rank_.peers, rank_.info.num_multiprocessors, rank_.stream));
  return absl::OkStatus();
}

absl::Status CudaDecoder::LaunchRowStep(const CudaAttentionBatch& batch) {
  const MatrixView embedded = sums_.Residual(1);
  LOCKSTEP_RETURN_IF_ERROR(
      GatherRows(inputs_.token_ids(), part_.vocab, embedding_.view, embedded, context()));
  return row_step_->Launch({.hidden = embedded.data,
                            .rope = Rope(),
                            .seq_len = batch.seq_lens,
                            .block_tables = batch.block_tables,
                            .table_row = batch.table_rows,
                            .slot = batch.slot_mapping,
                            .logits = scratch_.logits.as<float>()},
                           rank_.stream);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Decoder>> LoadCudaDecoder(
    const ModelSource& source, const std::vector<RankPartition>& partition, int rank,
    const CudaDecoderOptions& options, const CudaRankContext& context, ThreadPool& threads) {
  LOCKSTEP_CHECK(options.max_num_batched_tokens >= 1 && options.max_num_seqs >= 1 &&
                 options.max_logits_rows >= 1 && options.max_model_len >= 1 &&
                 options.block_size >= 1);
  const ModelConfig& config = source.config;
  LOCKSTEP_ASSIGN_OR_RETURN(RotaryEmbedding rope,
                            RotaryEmbedding::Create(config.rope, config.head_dim));
  auto decoder = std::make_unique<CudaDecoder>(config, partition[static_cast<size_t>(rank)],
                                               options, context, std::move(rope));
  LOCKSTEP_RETURN_IF_ERROR(decoder->Load(source, partition, rank, threads));
  return std::unique_ptr<Decoder>(std::move(decoder));
}

}  // namespace lockstep
