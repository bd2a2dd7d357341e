#include "model/decoder.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

#include "model/attention_layer.h"
#include "model/checkpoint/tensor_names.h"
#include "model/layers.h"
#include "model/rope.h"

namespace lockstep {

namespace {

struct DecoderLayer {
  RmsNormLayer input_norm;
  ColumnParallelLinear qkv;
  std::optional<RmsNormLayer> q_norm;
  std::optional<RmsNormLayer> k_norm;
  AttentionLayer attention;
  RowParallelLinear o;
  RmsNormLayer post_attention_norm;
  ColumnParallelLinear gate_up;
  RowParallelLinear down;

  int64_t weight_bytes() const {
    int64_t bytes = input_norm.weight_bytes() + qkv.weight_bytes() + o.weight_bytes() +
                    post_attention_norm.weight_bytes() + gate_up.weight_bytes() +
                    down.weight_bytes();
    if (q_norm.has_value()) bytes += q_norm->weight_bytes();
    if (k_norm.has_value()) bytes += k_norm->weight_bytes();
    return bytes;
  }
};

// What every layer's Load needs to know.
struct LoadContext {
  const Checkpoint& checkpoint;
  const ModelConfig& config;
  const RankPartition& partition;
  DType dtype;
  int rank;
  const AttentionBackend& attention;
};

// A bias the config says is not there has no name.
std::string If(bool present, std::string name) { return present ? std::move(name) : ""; }

absl::StatusOr<ColumnParallelLinear> LoadQkv(const LoadContext& load, int64_t layer) {
  const ModelConfig& config = load.config;
  const Range q_rows = HeadRows(load.partition.query_heads, config.head_dim);
  const Range kv_rows = HeadRows(load.partition.kv_heads, config.head_dim);
  const auto slice = [&](const char* weight, const char* bias, Range rows) {
    return RowSlice{LayerTensor(layer, weight), If(config.qkv_bias, LayerTensor(layer, bias)),
                    rows};
  };
  return ColumnParallelLinear::Load(
      load.checkpoint,
      {slice(kQWeight, kQBias, q_rows), slice(kKWeight, kKBias, kv_rows),
       slice(kVWeight, kVBias, kv_rows)},
      config.hidden_size, load.dtype);
}

absl::StatusOr<ColumnParallelLinear> LoadGateUp(const LoadContext& load, int64_t layer) {
  const Range rows = load.partition.intermediate;
  const auto slice = [&](const char* weight, const char* bias) {
    return RowSlice{LayerTensor(layer, weight), If(load.config.mlp_bias, LayerTensor(layer, bias)),
                    rows};
  };
  return ColumnParallelLinear::Load(load.checkpoint,
                                    {slice(kGateWeight, kGateBias), slice(kUpWeight, kUpBias)},
                                    load.config.hidden_size, load.dtype);
}

absl::StatusOr<RmsNormLayer> LoadNorm(const LoadContext& load, const std::string& name,
                                      int64_t size) {
  return RmsNormLayer::Load(load.checkpoint, name, size, load.config.rms_norm_eps);
}

absl::StatusOr<DecoderLayer> LoadLayer(const LoadContext& load, int64_t layer) {
  const ModelConfig& config = load.config;
  const auto name = [&](const char* suffix) { return LayerTensor(layer, suffix); };
  LOCKSTEP_ASSIGN_OR_RETURN(RmsNormLayer input_norm,
                            LoadNorm(load, name(kInputNorm), config.hidden_size));
  LOCKSTEP_ASSIGN_OR_RETURN(ColumnParallelLinear qkv, LoadQkv(load, layer));
  std::optional<RmsNormLayer> q_norm;
  std::optional<RmsNormLayer> k_norm;
  if (config.qk_norm) {
    LOCKSTEP_ASSIGN_OR_RETURN(q_norm, LoadNorm(load, name(kQNorm), config.head_dim));
    LOCKSTEP_ASSIGN_OR_RETURN(k_norm, LoadNorm(load, name(kKNorm), config.head_dim));
  }
  LOCKSTEP_ASSIGN_OR_RETURN(
      RowParallelLinear o,
      RowParallelLinear::Load(
          load.checkpoint, name(kOWeight), If(config.o_bias, name(kOBias)), config.hidden_size,
          HeadRows(load.partition.query_heads, config.head_dim), load.dtype, load.rank));
  LOCKSTEP_ASSIGN_OR_RETURN(RmsNormLayer post_attention_norm,
                            LoadNorm(load, name(kPostAttentionNorm), config.hidden_size));
  LOCKSTEP_ASSIGN_OR_RETURN(ColumnParallelLinear gate_up, LoadGateUp(load, layer));
  LOCKSTEP_ASSIGN_OR_RETURN(
      RowParallelLinear down,
      RowParallelLinear::Load(load.checkpoint, name(kDownWeight),
                              If(config.mlp_bias, name(kDownBias)), config.hidden_size,
                              load.partition.intermediate, load.dtype, load.rank));
  return DecoderLayer{
      std::move(input_norm),
      std::move(qkv),
      std::move(q_norm),
      std::move(k_norm),
      AttentionLayer(LocalGeometry(load.config, load.partition, layer), load.attention),
      std::move(o),
      std::move(post_attention_norm),
      std::move(gate_up),
      std::move(down)};
}

// Activations of a step, sized once for the largest. All float32, rows without gaps.
class Scratch {
 public:
  static absl::StatusOr<Scratch> Create(const ModelConfig& config, const RankPartition& partition,
                                        const RotaryEmbedding& rope, const DecoderOptions& options);

  static MatrixView View(const Buffer& buffer, int64_t rows, int64_t cols) {
    return {buffer.data(), DType::kF32, rows, cols, cols};
  }

  Buffer hidden;     // [T, E] the residual stream
  Buffer normed;     // [T, E]
  Buffer delta;      // [T, E] what attention or MLP adds to the residual stream
  Buffer qkv;        // [T, (Hq_local + 2 * Hkv_local) * D]
  Buffer attended;   // [T, Hq_local * D]
  Buffer gate_up;    // [T, 2 * F_local]
  Buffer activated;  // [T, F_local]
  Buffer cos;        // [T, R/2]
  Buffer sin;        // [T, R/2]
  Buffer linear;     // the workspace of Linear
};

absl::StatusOr<Scratch> Scratch::Create(const ModelConfig& config, const RankPartition& partition,
                                        const RotaryEmbedding& rope,
                                        const DecoderOptions& options) {
  const int64_t rows = options.max_num_batched_tokens;
  const int64_t q_cols = partition.query_heads.size() * config.head_dim;
  const int64_t kv_cols = partition.kv_heads.size() * config.head_dim;
  const int64_t widest_input =
      std::max({config.hidden_size, q_cols, partition.intermediate.size()});
  const int64_t workspace = LinearWorkspaceBytes(rows, widest_input, options.dtype, BestCpuIsa());
  const auto create = [](int64_t bytes) { return Buffer::Create(bytes, "activations of a step"); };
  const auto matrix = [&](int64_t cols) { return create(rows * cols * SizeOf(DType::kF32)); };
  Scratch scratch;
  LOCKSTEP_ASSIGN_OR_RETURN(scratch.hidden, matrix(config.hidden_size));
  LOCKSTEP_ASSIGN_OR_RETURN(scratch.normed, matrix(config.hidden_size));
  LOCKSTEP_ASSIGN_OR_RETURN(scratch.delta, matrix(config.hidden_size));
  LOCKSTEP_ASSIGN_OR_RETURN(scratch.qkv, matrix(q_cols + 2 * kv_cols));
  LOCKSTEP_ASSIGN_OR_RETURN(scratch.attended, matrix(q_cols));
  LOCKSTEP_ASSIGN_OR_RETURN(scratch.gate_up, matrix(2 * partition.intermediate.size()));
  LOCKSTEP_ASSIGN_OR_RETURN(scratch.activated, matrix(partition.intermediate.size()));
  LOCKSTEP_ASSIGN_OR_RETURN(scratch.cos, matrix(rope.rotary_dim() / 2));
  LOCKSTEP_ASSIGN_OR_RETURN(scratch.sin, matrix(rope.rotary_dim() / 2));
  LOCKSTEP_ASSIGN_OR_RETURN(scratch.linear, create(workspace));
  return scratch;
}

// Row r becomes row rows[r]; `rows` ascends.
void KeepRows(std::span<const int32_t> rows, const MatrixView& m) {
  for (size_t r = 0; r < rows.size(); ++r) {
    std::memmove(m.row<float>(static_cast<int64_t>(r)), m.row<float>(rows[r]),
                 m.cols * sizeof(float));
  }
}

class CpuDecoder : public Decoder {
 public:
  CpuDecoder(const ModelConfig& config, const DecoderOptions& options, RotaryEmbedding rope,
             Scratch scratch, const AttentionBackend& attention, Communicator& communicator,
             ThreadPool& threads)
      : config_(config),
        options_(options),
        rope_(std::move(rope)),
        scratch_(std::move(scratch)),
        attention_(attention),
        communicator_(communicator),
        context_{threads, scratch_.linear},
        ascending_(options.max_num_batched_tokens) {
    std::iota(ascending_.begin(), ascending_.end(), 0);
  }

  absl::Status LoadWeights(const LoadContext& load);

  absl::Status Forward(const ForwardBatch& batch, const KvPool& pool,
                       const MatrixView& logits) override;
  const AttentionGeometry& Geometry(int64_t layer) const override {
    return layers_[layer].attention.geometry();
  }
  int64_t weight_bytes() const override;

 private:
  absl::Status CheckBatch(const ForwardBatch& batch, const KvPool& pool,
                          const MatrixView& logits) const;
  void NormAndRotateHeads(const DecoderLayer& layer, const MatrixView& qkv) const;
  // Once the last layer has attended, only rows of logits are of use; an observer sees all of them.
  // The same on all ranks.
  bool KeepsLogitsRowsAlone(const ForwardBatch& batch) const;
  // Final norm of hidden + delta, and logits, of these rows.
  void ForwardHead(const MatrixView& hidden, const MatrixView& delta, std::span<const int32_t> rows,
                   const MatrixView& logits) const;

  const ModelConfig config_;
  const DecoderOptions options_;
  const RotaryEmbedding rope_;
  const Scratch scratch_;
  const AttentionBackend& attention_;
  Communicator& communicator_;
  const OpContext context_;
  std::vector<int32_t> ascending_;  // 0, 1, 2, ...

  VocabParallelEmbedding embedding_;
  std::vector<DecoderLayer> layers_;
  RmsNormLayer final_norm_;
  ParallelHead head_;
};

absl::Status CpuDecoder::LoadWeights(const LoadContext& load) {
  const int64_t hidden_size = config_.hidden_size;
  const Range vocab = load.partition.vocab;
  LOCKSTEP_ASSIGN_OR_RETURN(
      embedding_,
      VocabParallelEmbedding::Load(load.checkpoint, kEmbedTokens, vocab, hidden_size, load.dtype));
  layers_.reserve(config_.num_layers);
  for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
    LOCKSTEP_ASSIGN_OR_RETURN(DecoderLayer loaded, LoadLayer(load, layer));
    layers_.push_back(std::move(loaded));
  }
  LOCKSTEP_ASSIGN_OR_RETURN(final_norm_, LoadNorm(load, kFinalNorm, hidden_size));
  if (config_.tie_word_embeddings) {
    head_ = ParallelHead::TiedTo(embedding_);
  } else {
    LOCKSTEP_ASSIGN_OR_RETURN(
        head_, ParallelHead::Load(load.checkpoint, kLmHead, vocab, hidden_size, load.dtype));
  }
  return absl::OkStatus();
}

int64_t CpuDecoder::weight_bytes() const {
  int64_t bytes = embedding_.weight_bytes() + final_norm_.weight_bytes() + head_.weight_bytes();
  for (const DecoderLayer& layer : layers_) bytes += layer.weight_bytes();
  return bytes;
}

// The same batch, hence the same verdict, on every rank: no rank leaves the step alone.
absl::Status CpuDecoder::CheckBatch(const ForwardBatch& batch, const KvPool& pool,
                                    const MatrixView& logits) const {
  const int64_t num_tokens = batch.num_tokens();
  const int64_t num_rows = static_cast<int64_t>(batch.logits_rows.size());
  const int64_t limit = options_.max_num_batched_tokens;
  if (num_tokens > limit || num_rows > limit) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a step of %d tokens and %d rows of logits; max_num_batched_tokens is %d",
                        num_tokens, num_rows, limit));
  }
  LOCKSTEP_CHECK(static_cast<int64_t>(batch.positions.size()) == num_tokens);
  LOCKSTEP_CHECK(static_cast<int64_t>(batch.rope_lengths.size()) == num_tokens);
  LOCKSTEP_CHECK(batch.attention.num_tokens() == num_tokens);
  LOCKSTEP_CHECK(logits.rows == num_rows);
  LOCKSTEP_CHECK(pool.shape().num_layers == config_.num_layers);
  LOCKSTEP_CHECK(pool.shape().num_kv_heads == Geometry(0).num_kv_heads);
  LOCKSTEP_CHECK(pool.shape().head_dim == config_.head_dim);
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (batch.token_ids[t] < 0 || batch.token_ids[t] >= config_.vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrFormat("token id %d is not in [0, %d)", batch.token_ids[t], config_.vocab_size));
    }
    if (batch.positions[t] < 0 || batch.positions[t] >= options_.max_model_len) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "position %d is not in [0, %d)", batch.positions[t], options_.max_model_len));
    }
  }
  for (int32_t row : batch.logits_rows) {
    if (row < 0 || row >= num_tokens) {
      return absl::InvalidArgumentError(
          absl::StrFormat("logits of row %d of a step of %d tokens", row, num_tokens));
    }
  }
  return absl::OkStatus();
}

void CpuDecoder::NormAndRotateHeads(const DecoderLayer& layer, const MatrixView& qkv) const {
  const int64_t head_dim = config_.head_dim;
  const AttentionGeometry& geometry = layer.attention.geometry();
  const int64_t q_cols = geometry.num_query_heads * head_dim;
  const int64_t k_cols = geometry.num_kv_heads * head_dim;
  if (config_.qk_norm) {
    RmsNormHeads(Columns(qkv, 0, q_cols), head_dim, layer.q_norm->weight(), layer.q_norm->eps(),
                 context_);
    RmsNormHeads(Columns(qkv, q_cols, k_cols), head_dim, layer.k_norm->weight(),
                 layer.k_norm->eps(), context_);
  }
  ApplyRope(Columns(qkv, 0, q_cols + k_cols), head_dim, rope_.rotary_dim(),
            scratch_.cos.as<float>(), scratch_.sin.as<float>(), context_);
}

bool CpuDecoder::KeepsLogitsRowsAlone(const ForwardBatch& batch) const {
  const std::span<const int32_t> rows = batch.logits_rows;
  return !observed() && static_cast<int64_t>(rows.size()) < batch.num_tokens() &&
         std::adjacent_find(rows.begin(), rows.end(), std::greater_equal<>()) == rows.end();
}

absl::Status CpuDecoder::Forward(const ForwardBatch& batch, const KvPool& pool,
                                 const MatrixView& logits) {
  LOCKSTEP_RETURN_IF_ERROR(CheckBatch(batch, pool, logits));
  const int64_t rows = batch.num_tokens();
  const int64_t hidden_size = config_.hidden_size;
  const AttentionGeometry& heads = Geometry(0);
  const int64_t q_cols = heads.num_query_heads * heads.head_dim;
  const int64_t kv_cols = heads.num_kv_heads * heads.head_dim;
  const int64_t intermediate = layers_[0].gate_up.local_output_size() / 2;
  const MatrixView qkv = Scratch::View(scratch_.qkv, rows, q_cols + 2 * kv_cols);
  MatrixView hidden = Scratch::View(scratch_.hidden, rows, hidden_size);
  MatrixView normed = Scratch::View(scratch_.normed, rows, hidden_size);
  MatrixView delta = Scratch::View(scratch_.delta, rows, hidden_size);
  MatrixView attended = Scratch::View(scratch_.attended, rows, q_cols);
  MatrixView gate_up = Scratch::View(scratch_.gate_up, rows, 2 * intermediate);
  MatrixView activated = Scratch::View(scratch_.activated, rows, intermediate);
  std::span<const int32_t> logits_rows = batch.logits_rows;

  LOCKSTEP_ASSIGN_OR_RETURN(const std::unique_ptr<AttentionMetadata> metadata,
                            attention_.BuildMetadata(batch.attention, pool.shape().block_size));
  rope_.FillCosSin(batch.positions, batch.rope_lengths, 0, rows, scratch_.cos.as<float>(),
                   scratch_.sin.as<float>());

  LOCKSTEP_RETURN_IF_ERROR(embedding_.Forward(batch.token_ids, hidden, context_, communicator_));
  Observe(kNoLayer, TensorKind::kEmbedding, hidden);
  for (int64_t l = 0; l < config_.num_layers; ++l) {
    const DecoderLayer& layer = layers_[l];
    const RmsNormLayer& norm = layer.input_norm;
    if (l == 0) {
      RmsNorm(hidden, norm.weight(), norm.eps(), normed, context_);
    } else {
      AddRmsNorm(hidden, delta, norm.weight(), norm.eps(), normed, context_);
    }
    Observe(l, TensorKind::kInputNorm, normed);
    layer.qkv.Forward(normed, qkv, context_);
    NormAndRotateHeads(layer, qkv);
    Observe(l, TensorKind::kQkv, qkv);
    layer.attention.Forward(qkv, batch.attention.slot_mapping, *metadata, pool.Layer(l), attended);
    Observe(l, TensorKind::kAttention, attended);
    if (l + 1 == config_.num_layers && KeepsLogitsRowsAlone(batch)) {
      KeepRows(logits_rows, attended);
      KeepRows(logits_rows, hidden);
      for (MatrixView* m : {&hidden, &normed, &delta, &attended, &gate_up, &activated}) {
        m->rows = logits.rows;
      }
      logits_rows = std::span(ascending_).first(logits.rows);
    }
    LOCKSTEP_RETURN_IF_ERROR(layer.o.Forward(attended, delta, context_, communicator_));
    Observe(l, TensorKind::kOProj, delta);

    const RmsNormLayer& post_norm = layer.post_attention_norm;
    AddRmsNorm(hidden, delta, post_norm.weight(), post_norm.eps(), normed, context_);
    Observe(l, TensorKind::kPostAttentionNorm, normed);
    layer.gate_up.Forward(normed, gate_up, context_);
    Observe(l, TensorKind::kGateUp, gate_up);
    SiluMul(gate_up, activated, context_);
    Observe(l, TensorKind::kActivated, activated);
    LOCKSTEP_RETURN_IF_ERROR(layer.down.Forward(activated, delta, context_, communicator_));
    Observe(l, TensorKind::kDownProj, delta);
  }
  ForwardHead(hidden, delta, logits_rows, logits);
  return absl::OkStatus();
}

void CpuDecoder::ForwardHead(const MatrixView& hidden, const MatrixView& delta,
                             std::span<const int32_t> rows, const MatrixView& logits) const {
  const MatrixView last = Scratch::View(scratch_.normed, logits.rows, config_.hidden_size);
  AddRmsNormRows(hidden, delta, rows, final_norm_.weight(), final_norm_.eps(), last, context_);
  Observe(kNoLayer, TensorKind::kFinalNorm, last);
  head_.Forward(last, logits, context_);
  Observe(kNoLayer, TensorKind::kLogits, logits);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::Load(const ModelSource& source,
                                                       const std::vector<RankPartition>& partition,
                                                       const DecoderOptions& options,
                                                       const AttentionBackend& attention,
                                                       Communicator& communicator,
                                                       ThreadPool& threads) {
  if (options.dtype == DType::kF16) {
    return absl::InvalidArgumentError("float16 is not supported on cpu; use bfloat16 or float32");
  }
  const ModelConfig& config = source.config;
  LOCKSTEP_CHECK(options.max_num_batched_tokens >= 1 && options.max_model_len >= 1);
  LOCKSTEP_CHECK(static_cast<int64_t>(partition.size()) == communicator.size());
  LOCKSTEP_CHECK(config.num_layers >= 1);
  LOCKSTEP_CHECK(static_cast<int64_t>(config.layer_windows.size()) == config.num_layers);
  const LoadContext load = {
      *source.checkpoint,  config,   partition[communicator.rank()], options.dtype,
      communicator.rank(), attention};
  LOCKSTEP_ASSIGN_OR_RETURN(RotaryEmbedding rope,
                            RotaryEmbedding::Create(config.rope, config.head_dim));
  LOCKSTEP_ASSIGN_OR_RETURN(Scratch scratch,
                            Scratch::Create(config, load.partition, rope, options));
  auto decoder = std::make_unique<CpuDecoder>(config, options, std::move(rope), std::move(scratch),
                                              attention, communicator, threads);
  LOCKSTEP_RETURN_IF_ERROR(decoder->LoadWeights(load));
  return std::unique_ptr<Decoder>(std::move(decoder));
}

}  // namespace lockstep
