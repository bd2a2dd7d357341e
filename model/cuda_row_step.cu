// Describes a model to the kernel: how blocks, warps and shared memory are shared out, and where
// things lie.
#include <algorithm>
#include <bit>
#include <limits>
#include <numbers>
#include <span>
#include <utility>

#include "model/cuda_row_step_kernel.cuh"

namespace lockstep {

namespace {

absl::Status Refused(const std::string& what) {
  return absl::UnimplementedError(absl::StrCat("decode steps of one kernel: ", what));
}

// The fewest chunks of those possible that hold K columns.
absl::StatusOr<int> ChunksOf(int64_t k, std::span<const int> possible_chunks) {
  for (const int chunks : possible_chunks) {
    if (int64_t{chunks} * kRowWarps * kRowChunkCols >= k) return chunks;
  }
  return Refused(absl::StrFormat("rows of %d", k));
}

absl::StatusOr<RowProduct> MakeProduct(int64_t k, int64_t outputs, int rows_per_output,
                                       int chunks) {
  const int64_t all_chunks = (k + kRowChunkCols - 1) / kRowChunkCols;
  if (k % 8 != 0 || outputs < 1 ||
      outputs * rows_per_output > std::numeric_limits<int32_t>::max()) {
    return Refused(absl::StrFormat("a product of %d columns and %d outputs", k, outputs));
  }
  RowProduct product{.k = static_cast<int>(k),
                     .outputs = static_cast<int>(outputs),
                     .rows_per_output = rows_per_output,
                     .chunks = chunks,
                     .column_warps = static_cast<int>((all_chunks + chunks - 1) / chunks),
                     .row_warps = 1,
                     .stage_rows = 2};
  if (chunks <= 2) {
    constexpr int kMaxRowWarps = 8;
    product.row_warps = std::min(kRowWarps / product.column_warps, kMaxRowWarps);
    product.stage_rows = product.row_warps * (kRowStageChunks / chunks);
    return product;
  }
  // The consumers go through as many stages of a pair of rows as `chunks` takes. A row far shorter
  // than the one that `chunks` was chosen for has fewer, and they would wait for the rest forever.
  constexpr int kStage = kRowStageChunks / 2;
  const int64_t stage_cols = int64_t{kStage} * product.column_warps * kRowChunkCols;
  if ((k + stage_cols - 1) / stage_cols != (chunks + kStage - 1) / kStage) {
    return Refused(absl::StrFormat("rows of %d beside far longer ones", k));
  }
  return product;
}

int64_t AlignUp(int64_t bytes) { return (bytes + 127) / 128 * 128; }

}  // namespace

// What launches share. Addresses in `args` stay.
struct RowStep::Plan {
  RowStepArgs args = {};
  DType dtype = DType::kBF16;
  int grid = 0;
  int64_t shared_bytes = 0;
  std::vector<RowStepLayer> host_layers;
  DeviceBuffer layers;
  DeviceBuffer memory;  // scratch, and windows and counters that are not the peers'
};

namespace {

absl::Status DescribeAttention(const RowStepModel& model, RowStepArgs* args) {
  RowAttentionParams& p = args->attention;
  const int64_t num_kv_heads = std::ssize(model.kv_groups);
  if (model.head_dim % 8 != 0 || model.head_dim > kMaxRowHeadDim || num_kv_heads < 1 ||
      num_kv_heads > kMaxRowKvHeads) {
    return Refused(absl::StrFormat("%d KV heads of %d", num_kv_heads, model.head_dim));
  }
  for (int64_t h = 0; h < num_kv_heads; ++h) {
    const int64_t group = model.kv_groups[h].size();
    if (group > kMaxRowGroup) {
      return Refused(absl::StrFormat("%d query heads of a KV head", group));
    }
    p.first_head[h] = static_cast<int16_t>(model.kv_groups[h].begin);
    args->largest_group = std::max(args->largest_group, static_cast<int>(group));
  }
  p.num_kv_heads = static_cast<int32_t>(num_kv_heads);
  p.num_query_heads = static_cast<int32_t>(model.kv_groups.back().end);
  p.first_head[num_kv_heads] = static_cast<int16_t>(p.num_query_heads);
  p.head_dim = static_cast<int32_t>(model.head_dim);
  p.norm_eps = model.norm_eps;
  p.max_blocks = model.max_blocks;
  p.block_size = static_cast<int32_t>(model.block_size);
  const auto block_size = static_cast<uint64_t>(model.block_size);
  p.block_shift = std::has_single_bit(block_size) ? std::countr_zero(block_size) : -1;
  constexpr double kLog2E = std::numbers::log2e;
  p.scale.factor = static_cast<float>(model.attention_scale * kLog2E);
  if (model.logit_softcap > 0) {
    p.scale.cap_input =
        static_cast<float>(2 * kLog2E * model.attention_scale / model.logit_softcap);
    p.scale.cap_output = static_cast<float>(model.logit_softcap * kLog2E);
  }
  return absl::OkStatus();
}

absl::Status DescribeProducts(const RowStepModel& model, RowStepArgs* args) {
  const RowAttentionParams& p = args->attention;
  const int64_t q_cols = int64_t{p.num_query_heads} * p.head_dim;
  const int64_t kv_cols = int64_t{p.num_kv_heads} * p.head_dim;
  const struct {
    RowProductKind kind;
    int64_t k, outputs;
    int rows_per_output;
  } products[] = {{kQkv, model.hidden_size, q_cols + 2 * kv_cols, 1},
                  {kO, q_cols, model.hidden_size, 1},
                  {kGateUp, model.hidden_size, model.intermediate, 2},
                  {kDown, model.intermediate, model.hidden_size, 1},
                  {kHead, model.hidden_size, model.vocab, 1}};
  LOCKSTEP_ASSIGN_OR_RETURN(const int short_chunks,
                            ChunksOf(std::max(model.hidden_size, q_cols), kShortRowChunks));
  LOCKSTEP_ASSIGN_OR_RETURN(const int long_chunks, ChunksOf(model.intermediate, kLongRowChunks));
  for (const auto& product : products) {
    LOCKSTEP_ASSIGN_OR_RETURN(args->products[product.kind],
                              MakeProduct(product.k, product.outputs, product.rows_per_output,
                                          product.kind == kDown ? long_chunks : short_chunks));
  }
  return absl::OkStatus();
}

// The ring takes what shared memory the rest leaves.
absl::Status ChooseSlots(const RowStepModel& model, RowStepArgs* args, int64_t* shared_bytes) {
  int device = 0, available = 0;
  LOCKSTEP_CUDA(cudaGetDevice(&device));
  LOCKSTEP_CUDA(
      cudaDeviceGetAttribute(&available, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  constexpr int64_t kStaticBytes = 1024;
  const int64_t rest =
      RowStepSharedBytes(model.hidden_size, model.num_layers, args->largest_group, model.head_dim) +
      kStaticBytes;
  args->num_slots =
      static_cast<int>(std::min<int64_t>((available - rest) / kRowSlotBytes, kMaxRowSlots));
  if (args->num_slots < 3) {
    return Refused(absl::StrFormat("%d bytes of shared memory", available));
  }
  *shared_bytes = args->num_slots * kRowSlotBytes + rest - kStaticBytes;
  args->num_in_flight = std::clamp(model.num_in_flight, 1, args->num_slots - 1);
  return absl::OkStatus();
}

absl::Status Describe(const RowStepModel& model, RowStepArgs* args, int64_t* shared_bytes) {
  if (model.dtype != DType::kBF16 && model.dtype != DType::kF16) {
    return Refused(std::string(Name(model.dtype)));
  }
  args->hidden_size = static_cast<int>(model.hidden_size);
  args->norm_eps = model.norm_eps;
  args->final_norm = model.final_norm;
  args->head = static_cast<const char*>(model.head);
  args->num_layers = static_cast<int>(model.num_layers);
  LOCKSTEP_RETURN_IF_ERROR(DescribeAttention(model, args));
  LOCKSTEP_RETURN_IF_ERROR(DescribeProducts(model, args));
  return ChooseSlots(model, args, shared_bytes);
}

}  // namespace

absl::Status RowStep::Check(const RowStepModel& model) {
  RowStepArgs args = {};
  int64_t shared_bytes = 0;
  return Describe(model, &args, &shared_bytes);
}

absl::StatusOr<RowStep> RowStep::Create(const RowStepModel& model, const PeerWindows* peers,
                                        int num_multiprocessors, CudaStream stream) {
  auto plan = std::make_shared<Plan>();
  RowStepArgs& args = plan->args;
  LOCKSTEP_RETURN_IF_ERROR(Describe(model, &args, &plan->shared_bytes));
  LOCKSTEP_CHECK(peers == nullptr ||
                 RowSumBytes(model.hidden_size, peers->addresses().size) <= peers->words_bytes());
  plan->dtype = model.dtype;
  // Every block has a part of every product: see cuda_row_step_kernel.cu.
  plan->grid = num_multiprocessors;
  for (const RowProductKind kind : {kQkv, kO, kGateUp, kDown}) {
    plan->grid = std::min(plan->grid, args.products[kind].outputs);
  }
  // The products before and behind attention wait for the blocks that attend. 6 is the best that
  // was measured for 44 of 132 (3.72 ms become 3.67 at context 512). Not where a lighter share
  // might be none.
  for (const RowProductKind kind : {kQkv, kO}) {
    RowProduct& product = args.products[kind];
    product.lighter_by = product.outputs >= 4 * plan->grid ? 6 : 0;
  }
  LOCKSTEP_CHECK(std::ssize(model.layers) == model.num_layers);
  plan->host_layers = model.layers;
  LOCKSTEP_ASSIGN_OR_RETURN(
      plan->layers,
      DeviceBuffer::Create(std::ssize(model.layers) * static_cast<int64_t>(sizeof(RowStepLayer)),
                           "layers of a step"));
  args.layers = plan->layers.as<const RowStepLayer>();

  // Places in `memory`.
  int64_t size = 0;
  const auto place = [&size](int64_t bytes) { return std::exchange(size, size + AlignUp(bytes)); };
  const RowAttentionParams& p = args.attention;
  const int64_t qkv = place(int64_t{args.products[kQkv].outputs} * 4);
  const int64_t attended = place(int64_t{args.products[kO].k} * 4);
  const int64_t activated = place(int64_t{args.products[kGateUp].outputs} * 2);
  const int64_t parts = int64_t{p.num_query_heads} * kMaxRowSplits;
  const int64_t partials =
      place(parts * (p.head_dim / 2) * static_cast<int64_t>(sizeof(RowFloats)));
  const int64_t stats = place(parts * static_cast<int64_t>(sizeof(RowFloats)));
  const int64_t arrivals = place(4);
  const int64_t progress = place(int64_t{plan->grid} * 2 * 4);
  const int64_t sums = place(peers == nullptr ? RowSumBytes(model.hidden_size, 1) : 0);
  LOCKSTEP_ASSIGN_OR_RETURN(plan->memory, DeviceBuffer::Create(size, "activations of a row"));
  LOCKSTEP_RETURN_IF_ERROR(FillBytesAsync(plan->memory.data(), 0, size, stream));
  LOCKSTEP_RETURN_IF_ERROR(Synchronize(stream));
  char* const at = plan->memory.as<char>();
  const auto words = [at](int64_t offset) { return reinterpret_cast<uint32_t*>(at + offset); };
  args.qkv = words(qkv);
  args.activated = at + activated;
  args.attention.qkv = args.qkv;
  args.attention.attended = words(attended);
  args.attention.partials = reinterpret_cast<RowFloats*>(at + partials);
  args.attention.stats = reinterpret_cast<RowFloats*>(at + stats);
  args.arrivals = words(arrivals);
  args.progress = words(progress);
  args.num_ranks = 1;
  args.sums[0] = words(sums);
  if (peers != nullptr) {
    const PeerAddresses& addresses = peers->addresses();
    args.rank = addresses.rank;
    args.num_ranks = addresses.size;
    args.abort = addresses.abort;
    for (int rank = 0; rank < addresses.size; ++rank) args.sums[rank] = addresses.words[rank];
  }
  LOCKSTEP_RETURN_IF_ERROR(PrepareRowStepKernel(model.dtype, args, plan->shared_bytes));
  RowStep step;
  step.plan_ = std::move(plan);
  return step;
}

absl::Status RowStep::SetCaches(const std::vector<KvCacheView>& caches, CudaStream stream) {
  std::vector<RowStepLayer>& layers = plan_->host_layers;
  LOCKSTEP_CHECK(caches.size() == layers.size());
  for (size_t l = 0; l < layers.size(); ++l) {
    LOCKSTEP_CHECK(caches[l].dtype == plan_->dtype);
    layers[l].keys = caches[l].keys;
    layers[l].values = caches[l].values;
  }
  LOCKSTEP_RETURN_IF_ERROR(
      CopyAsync(plan_->layers.data(), layers.data(), plan_->layers.size_bytes(), stream));
  return Synchronize(stream);
}

absl::Status RowStep::Launch(const RowStepInputs& inputs, CudaStream stream) const {
  RowStepArgs args = plan_->args;
  args.hidden = inputs.hidden;
  args.logits = inputs.logits;
  args.attention.half = static_cast<int32_t>(inputs.rope.rotary_dim / 2);
  args.attention.cos = inputs.rope.cos;
  args.attention.sin = inputs.rope.sin;
  args.attention.angle_row = inputs.rope.rows;
  args.attention.seq_len = inputs.seq_len;
  args.attention.block_tables = inputs.block_tables;
  args.attention.table_row = inputs.table_row;
  args.attention.slot = inputs.slot;
  return LaunchRowStepKernel(plan_->dtype, args, plan_->grid, plan_->shared_bytes, stream);
}

}  // namespace lockstep
