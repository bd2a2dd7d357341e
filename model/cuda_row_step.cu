// The kernel: phases of a layer, and the meetings between them.
//
//   qkv      x = norm(residual stream)                 local meeting
//   attend   parts of the keys, merged by who reads    local
//   o        x = merged attention                      all ranks
//   gate_up  x = norm(residual stream += o)            local
//   down     x = SwiGLU                                all ranks
//   qkv of the next layer, or the head: residual stream += down
//
// The residual stream stands in every block's shared memory. A window is written again only behind
// a meeting of all ranks that who reads it comes to when it has been read: the windows of o and
// down alternate, and the last is one of its own, as in the chain of kernels (WindowOfSum).
#include <algorithm>
#include <bit>
#include <limits>
#include <numbers>
#include <span>
#include <utility>

#include "model/cuda_row_product.cuh"
#include "model/cuda_row_step.h"

namespace lockstep {

namespace {

constexpr int kThreads = kRowThreads + 32;  // and the producer's warp

enum Kind { kQkv, kO, kGateUp, kDown, kHead, kNumKinds };

struct RowStepArgs {
  RowAttentionParams attention;
  RowProduct products[kNumKinds];
  const RowStepLayer* layers;
  int num_layers;
  int hidden_size;
  int largest_group;
  int num_slots;
  int num_in_flight;
  float norm_eps;
  const float* final_norm;
  const char* head;
  const void* hidden;
  void* qkv;
  void* activated;
  float* logits;
  // Sums over ranks.
  int rank;
  int num_ranks;
  char* windows[kMaxPeers];
  int64_t window_bytes;
  // Meetings: how many blocks have come to those of this GPU, and to those of all ranks.
  uint32_t* local_arrivals;
  uint32_t* rank_arrivals[kMaxPeers];
  uint32_t* progress;     // [grid, 2] what a block waited for last
  const uint32_t* abort;  // null: one rank
  int64_t* trace;         // see RowStepInputs
};

// Meetings of all blocks; of one GPU or of all. A block arrives at one when what it wrote is to be
// read, and waits for it before it reads. The numbers of arrivals only grow, and wrap around.
class Meetings {
 public:
  __device__ __forceinline__ explicit Meetings(const RowStepArgs& args)
      : args_(args),
        local_(args.progress[blockIdx.x * 2]),
        ranks_(args.progress[blockIdx.x * 2 + 1]) {}
  // All consumer threads.
  __device__ __forceinline__ void Arrive(bool all_ranks) {
    RowThreadsMeet();
    all_ranks_ = all_ranks && args_.num_ranks > 1;
    if (all_ranks_) {
      ranks_ += gridDim.x * args_.num_ranks;
    } else {
      local_ += gridDim.x;
    }
    if (threadIdx.x != 0) return;
    if (!all_ranks_) {
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(args_.local_arrivals)
                   : "memory");
      return;
    }
    for (int rank = 0; rank < args_.num_ranks; ++rank) {
      asm volatile("red.release.sys.global.add.u32 [%0], 1;" ::"l"(args_.rank_arrivals[rank])
                   : "memory");
    }
  }
  __device__ __forceinline__ void Wait() {
    if (threadIdx.x == 0) {
      if (all_ranks_) {
        WaitFor(args_.rank_arrivals[args_.rank], ranks_);
      } else {
        WaitFor(args_.local_arrivals, local_);
      }
    }
    RowThreadsMeet();
  }
  __device__ __forceinline__ void Save() const {
    if (threadIdx.x != 0) return;
    args_.progress[blockIdx.x * 2] = local_;
    args_.progress[blockIdx.x * 2 + 1] = ranks_;
  }

 private:
  __device__ __forceinline__ void WaitFor(const uint32_t* arrivals, uint32_t wanted) const {
    for (uint32_t tries = 1;; ++tries) {
      uint32_t now;
      if (all_ranks_) {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(now) : "l"(arrivals) : "memory");
      } else {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrivals) : "memory");
      }
      if (static_cast<int32_t>(now - wanted) >= 0) return;
      if (tries % 1024 == 0 && Aborted()) return;
    }
  }
  // Wrong results, but an end.
  __device__ __forceinline__ bool Aborted() const {
    if (args_.abort == nullptr) return false;
    uint32_t aborted;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(aborted) : "l"(args_.abort));
    return aborted != 0;
  }

  const RowStepArgs& args_;
  uint32_t local_;
  uint32_t ranks_;
  bool all_ranks_ = false;
};

// What the consumers of a block go through a step with.
template <typename T>
struct Consumers {
  // The time at which block 0 came to a point of a layer.
  __device__ __forceinline__ void Mark(int l, int point) const {
    if (args.trace == nullptr || blockIdx.x != 0 || threadIdx.x != 0) return;
    args.trace[l * kRowTracePoints + point] = clock64();
  }

  const RowStepArgs& args;
  RowRing ring;
  Meetings meetings;
  const RowStepLayer* layers;              // shared, [L]
  T* hidden;                               // shared, [E]
  float* parts;                            // shared, of the products
  float* squares;                          // shared, [kRowWarps]
  const RowPosition& position;             // shared
  const RowAttentionMemory<T>& attention;  // shared
};

// The window of the o sum of layer l is that of number 2l + 1, of the down sum number 2l + 2; see
// WindowOfSum.
template <typename T>
__device__ __forceinline__ const T* Window(const RowStepArgs& args, int rank, int sum) {
  const int window = sum == 2 * args.num_layers ? 2 : sum % 2;
  return reinterpret_cast<const T*>(args.windows[rank] + window * args.window_bytes);
}

// x = RmsNorm(residual stream), behind the meeting after sum number `sum`, which is added first; 0:
// there is nothing to add or to wait for.
template <typename T, int kChunks>
__device__ __forceinline__ void LoadNormed(Consumers<T>& c, const RowProduct& p, const float* norm,
                                           int sum, RowX<T, kChunks>& x) {
  const RowConsumer me(p);
  Vector<float, 8> weights[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int col = me.Column(p, i);
    if (col < p.k) weights[i] = LoadVector<8>(norm + col);
  }
  if (sum > 0) c.meetings.Wait();
  float squares = 0;
  if (me.row_warp == 0) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int col = me.Column(p, i);
      if (col >= p.k) continue;
      Vector<T, 8> hidden = LoadVector<8>(c.hidden + col);
      if (sum > 0) {
        float sums[8] = {};
        for (int rank = 0; rank < c.args.num_ranks; ++rank) {
          const uint4 bits =
              __ldcg(reinterpret_cast<const uint4*>(Window<T>(c.args, rank, sum) + col));
          const auto& part = *reinterpret_cast<const Vector<T, 8>*>(&bits);
#pragma unroll
          for (int j = 0; j < 8; ++j) sums[j] += Widen(part.at[j]);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) hidden.at[j] = Narrow<T>(sums[j] + Widen(hidden.at[j]));
        StoreVector(hidden, c.hidden + col);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        squares = fmaf(Widen(hidden.at[j]), Widen(hidden.at[j]), squares);
      }
    }
    squares = RowWarpSum(squares);
    if (me.lane == 0) c.squares[me.column_warp] = squares;
  }
  RowThreadsMeet();
  const float mean = SumRowParts(p, c.squares) / static_cast<float>(p.k);
  const float scale = 1.0f / sqrtf(mean + c.args.norm_eps);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int col = me.Column(p, i);
    x.at[i] = {};
    if (col >= p.k) continue;
    const Vector<T, 8> hidden = LoadVector<8>(c.hidden + col);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x.at[i].at[j] = Narrow<T>(Widen(hidden.at[j]) * scale * weights[i].at[j]);
    }
  }
}

template <typename T, int kChunks>
__device__ __forceinline__ void LoadActivated(Consumers<T>& c, const RowProduct& p,
                                              RowX<T, kChunks>& x) {
  const RowConsumer me(p);
  c.meetings.Wait();
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int col = me.Column(p, i);
    uint4 bits = {};
    if (col < p.k) {
      bits = __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(c.args.activated) + col));
    }
    x.at[i] = *reinterpret_cast<const Vector<T, 8>*>(&bits);
  }
}

template <typename T, int kChunks>
__device__ __forceinline__ void LoadAttended(Consumers<T>& c, const RowProduct& p, int32_t window,
                                             RowX<T, kChunks>& x) {
  const RowConsumer me(p);
  c.meetings.Wait();
  const int num_splits = RowSplits(c.args.attention, c.position, window, gridDim.x).num_splits;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int col = me.Column(p, i);
    float merged[8] = {};
    if (col < p.k) MergedRowVector(c.args.attention, num_splits, col, merged);
#pragma unroll
    for (int j = 0; j < 8; ++j) x.at[i].at[j] = Narrow<T>(merged[j]);
  }
}

template <typename T>
__device__ __forceinline__ float2 RowBias(const void* bias, int64_t row) {
  return {bias == nullptr ? 0.0f : Widen(static_cast<const T*>(bias)[row]), 0.0f};
}

template <typename T, int kChunks>
__device__ __forceinline__ void RunQkv(Consumers<T>& c, const RowStepLayer& layer, int l) {
  const RowProduct& p = c.args.products[kQkv];
  RowX<T, kChunks> x;
  LoadNormed(c, p, layer.input_norm, 2 * l, x);
  c.Mark(l, 0);
  T* const to = static_cast<T*>(c.args.qkv);
  const void* const bias = layer.qkv_bias;
  ConsumeRows(
      c.ring, p, x, c.parts, [&](int output) { return RowBias<T>(bias, output); },
      [&](int output, float sum, float) { to[output] = Narrow<T>(sum); });
}

// This rank's part of sum number `sum`.
template <typename T, int kChunks>
__device__ __forceinline__ void RunRowParallel(Consumers<T>& c, const RowProduct& p,
                                               RowX<T, kChunks>& x, const void* bias, int sum) {
  T* const to = const_cast<T*>(Window<T>(c.args, c.args.rank, sum));
  ConsumeRows(
      c.ring, p, x, c.parts, [&](int output) { return RowBias<T>(bias, output); },
      [&](int output, float value, float) { to[output] = Narrow<T>(value); });
}

template <typename T, int kChunks>
__device__ __forceinline__ void RunO(Consumers<T>& c, const RowStepLayer& layer, int l) {
  RowX<T, kChunks> x;
  LoadAttended(c, c.args.products[kO], layer.sliding_window, x);
  c.Mark(l, 4);
  RunRowParallel(c, c.args.products[kO], x, layer.o_bias, 2 * l + 1);
}

template <typename T, int kChunks>
__device__ __forceinline__ void RunGateUp(Consumers<T>& c, const RowStepLayer& layer, int l) {
  const RowProduct& p = c.args.products[kGateUp];
  RowX<T, kChunks> x;
  LoadNormed(c, p, layer.post_attention_norm, 2 * l + 1, x);
  c.Mark(l, 6);
  T* const to = static_cast<T*>(c.args.activated);
  const void* const bias = layer.gate_up_bias;
  ConsumeRows(
      c.ring, p, x, c.parts,
      [&](int output) {
        return float2{RowBias<T>(bias, output).x, RowBias<T>(bias, output + p.outputs).x};
      },
      [&](int output, float gate, float up) {
        to[output] = Narrow<T>(gate / (1.0f + expf(-gate)) * up);
      });
}

template <typename T, int kChunks>
__device__ __forceinline__ void RunDown(Consumers<T>& c, const RowStepLayer& layer, int l) {
  RowX<T, kChunks> x;
  LoadActivated(c, c.args.products[kDown], x);
  c.Mark(l, 8);
  RunRowParallel(c, c.args.products[kDown], x, layer.down_bias, 2 * l + 2);
}

template <typename T, int kChunks>
__device__ __forceinline__ void RunHead(Consumers<T>& c) {
  const RowProduct& p = c.args.products[kHead];
  RowX<T, kChunks> x;
  LoadNormed(c, p, c.args.final_norm, 2 * c.args.num_layers, x);
  float* const to = c.args.logits;
  ConsumeRows(
      c.ring, p, x, c.parts, [](int) { return float2{}; },
      [&](int output, float sum, float) { to[output] = sum; });
}

template <typename T>
__device__ __forceinline__ void Attend(Consumers<T>& c, const RowStepLayer& layer, int l) {
  const RowAttentionParams& p = c.args.attention;
  const RowAttentionLayer cache{layer.q_norm, layer.k_norm, layer.keys, layer.values,
                                layer.sliding_window};
  const RowSplits splits(p, c.position, layer.sliding_window, gridDim.x);
  const int num_items = splits.num_splits * p.num_kv_heads;
  RowTile<T> tile;
  // The cache's keys and values are there; this step's are not.
  if (static_cast<int>(blockIdx.x) < num_items) {
    const RowItem item(splits, blockIdx.x);
    tile.Load(p, c.position, cache, item, item.begin, c.attention);
  }
  c.meetings.Wait();
  c.Mark(l, 2);
  for (int i = blockIdx.x; i < num_items; i += gridDim.x) {
    const RowItem item(splits, i);
    if (i != static_cast<int>(blockIdx.x))
      tile.Load(p, c.position, cache, item, item.begin, c.attention);
    AttendRowItem(p, c.position, cache, item, tile, c.attention);
  }
}

// Chunks of a warp that there are kernels for: of products of the residual stream and of
// attention's result, one number for all of them, and of SwiGLU's.
constexpr int kShortRowChunks[] = {1, 2, 4};
constexpr int kLongRowChunks[] = {1, 2, 3, 4, 5};

// fn.template operator()<chunks>().
template <typename Fn>
__device__ __forceinline__ void WithLongRow(int chunks, Fn fn) {
  switch (chunks) {
    case 1:
      return fn.template operator()<1>();
    case 2:
      return fn.template operator()<2>();
    case 3:
      return fn.template operator()<3>();
    case 4:
      return fn.template operator()<4>();
    default:
      return fn.template operator()<5>();
  }
}

// Everything is inlined and in registers or shared memory: what is in local memory comes from far
// behind each meeting, which empties the L1 cache.
template <typename T, int kChunks>
__device__ __forceinline__ void Consume(Consumers<T>& c) {
  const RowStepArgs& args = c.args;
  for (int i = threadIdx.x; i < args.hidden_size; i += kRowThreads) {
    c.hidden[i] = static_cast<const T*>(args.hidden)[i];
  }
  RowThreadsMeet();
#pragma unroll 1
  for (int l = 0; l < args.num_layers; ++l) {
    const RowStepLayer& layer = c.layers[l];
    RunQkv<T, kChunks>(c, layer, l);
    c.Mark(l, 1);
    c.meetings.Arrive(false);
    Attend(c, layer, l);
    c.Mark(l, 3);
    c.meetings.Arrive(false);
    RunO<T, kChunks>(c, layer, l);
    c.Mark(l, 5);
    c.meetings.Arrive(true);
    RunGateUp<T, kChunks>(c, layer, l);
    c.Mark(l, 7);
    c.meetings.Arrive(false);
    WithLongRow(args.products[kDown].chunks, [&]<int kLong>() { RunDown<T, kLong>(c, layer, l); });
    c.Mark(l, 9);
    c.meetings.Arrive(true);
  }
  RunHead<T, kChunks>(c);
  c.meetings.Save();
}

__device__ void Produce(const RowStepArgs& args, const RowStepLayer* layers, const RowRing& ring) {
  RowProducer producer(ring, args.num_in_flight);
#pragma unroll 1
  for (int l = 0; l < args.num_layers; ++l) {
    const RowStepLayer& layer = layers[l];
    ProduceRows(producer, args.products[kQkv], static_cast<const char*>(layer.qkv));
    ProduceRows(producer, args.products[kO], static_cast<const char*>(layer.o));
    ProduceRows(producer, args.products[kGateUp], static_cast<const char*>(layer.gate_up));
    ProduceRows(producer, args.products[kDown], static_cast<const char*>(layer.down));
  }
  ProduceRows(producer, args.products[kHead], args.head);
}

// Shared memory: slots, layers, the residual stream, parts of sums, attention.
constexpr int64_t kPartsBytes = int64_t{2} * kRowGroup * kRowPartStride * sizeof(float);

template <typename T, int kChunks>
__global__ void __launch_bounds__(kThreads, 1)
    RowStepKernel(const __grid_constant__ RowStepArgs args) {
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t full[kMaxRowSlots], empty[kMaxRowSlots];
  __shared__ float squares[kRowWarps];
  // Not in registers, which are scarce.
  __shared__ alignas(16) char position[sizeof(RowPosition)];
  __shared__ alignas(16) char attention[sizeof(RowAttentionMemory<T>)];
  auto* const layers = reinterpret_cast<RowStepLayer*>(shared + args.num_slots * kRowSlotBytes);
  {
    const int words = args.num_layers * static_cast<int>(sizeof(RowStepLayer) / 8);
    for (int i = threadIdx.x; i < words; i += kThreads) {
      reinterpret_cast<uint64_t*>(layers)[i] = reinterpret_cast<const uint64_t*>(args.layers)[i];
    }
  }
  char* const parts = reinterpret_cast<char*>(layers + args.num_layers);
  T* const hidden = reinterpret_cast<T*>(parts + kPartsBytes);
  if (threadIdx.x == 0) {
    *reinterpret_cast<RowPosition*>(position) = RowPosition(args.attention);
    *reinterpret_cast<RowAttentionMemory<T>*>(attention) =
        RowAttentionMemory<T>(reinterpret_cast<char*>(hidden + args.hidden_size),
                              args.largest_group, args.attention.head_dim);
    for (int slot = 0; slot < args.num_slots; ++slot) {
      InitBarrier(full + slot, 1);
      InitBarrier(empty + slot, kRowWarps);
    }
    PublishBarriers();
  }
  __syncthreads();
  const RowRing ring{shared, full, empty, args.num_slots};
  if (threadIdx.x >= kRowThreads) {
    if (threadIdx.x == kRowThreads) Produce(args, layers, ring);
    return;
  }
  Consumers<T> consumers{args,
                         ring,
                         Meetings(args),
                         layers,
                         hidden,
                         reinterpret_cast<float*>(parts),
                         squares,
                         *reinterpret_cast<const RowPosition*>(position),
                         *reinterpret_cast<const RowAttentionMemory<T>*>(attention)};
  Consume<T, kChunks>(consumers);
}

// ---- Host ---------------------------------------------------------------------------------------

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

// fn(kernel) of this type, and of so many chunks of short rows.
template <typename Fn>
absl::Status WithRowKernel(DType dtype, int chunks, const Fn& fn) {
  const auto with_type = [&]<typename T>() {
    return chunks == 1   ? fn(RowStepKernel<T, 1>)
           : chunks == 2 ? fn(RowStepKernel<T, 2>)
                         : fn(RowStepKernel<T, 4>);
  };
  return dtype == DType::kBF16 ? with_type.template operator()<__nv_bfloat16>()
                               : with_type.template operator()<__half>();
}

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
    Kind kind;
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
      kPartsBytes + model.hidden_size * 2 + model.num_layers * sizeof(RowStepLayer) +
      RowAttentionMemory<__half>::Bytes(args->largest_group, model.head_dim) + kStaticBytes;
  args->num_slots =
      static_cast<int>(std::min<int64_t>((available - rest) / kRowSlotBytes, kMaxRowSlots));
  if (args->num_slots < 3) {
    return Refused(absl::StrFormat("%d bytes of shared memory", available));
  }
  *shared_bytes = args->num_slots * kRowSlotBytes + rest - kStaticBytes;
  args->num_in_flight = std::clamp(model.num_in_flight, 1, args->num_slots - 1);
  return absl::OkStatus();
}

}  // namespace

namespace {

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
  LOCKSTEP_CHECK(peers == nullptr || model.hidden_size * 2 <= peers->window_bytes());
  plan->dtype = model.dtype;
  plan->grid = num_multiprocessors;
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
  const int64_t qkv = place(int64_t{args.products[kQkv].outputs} * 2);
  const int64_t activated = place(int64_t{args.products[kGateUp].outputs} * 2);
  const int64_t partials = place(int64_t{p.num_query_heads} * kMaxRowSplits * p.head_dim * 4);
  const int64_t stats = place(int64_t{p.num_query_heads} * kMaxRowSplits * 2 * 4);
  const int64_t progress = place(int64_t{plan->grid} * 2 * 4);
  const int64_t arrivals = place(4);
  const int64_t own_arrivals = place(4);
  const int64_t windows = place(PeerWindows::kNumWindows * AlignUp(model.hidden_size * 2));
  LOCKSTEP_ASSIGN_OR_RETURN(plan->memory, DeviceBuffer::Create(size, "activations of a row"));
  LOCKSTEP_RETURN_IF_ERROR(FillBytesAsync(plan->memory.data(), 0, size, stream));
  LOCKSTEP_RETURN_IF_ERROR(Synchronize(stream));
  char* const at = plan->memory.as<char>();
  args.qkv = at + qkv;
  args.activated = at + activated;
  args.attention.qkv = args.qkv;
  args.attention.partials = reinterpret_cast<float*>(at + partials);
  args.attention.stats = reinterpret_cast<float*>(at + stats);
  args.progress = reinterpret_cast<uint32_t*>(at + progress);
  args.local_arrivals = reinterpret_cast<uint32_t*>(at + arrivals);
  args.num_ranks = 1;
  args.windows[0] = at + windows;
  args.window_bytes = AlignUp(model.hidden_size * 2);
  args.rank_arrivals[0] = reinterpret_cast<uint32_t*>(at + own_arrivals);
  if (peers != nullptr) {
    const PeerAddresses& addresses = peers->addresses();
    args.rank = addresses.rank;
    args.num_ranks = addresses.size;
    args.window_bytes = addresses.window_bytes;
    args.abort = addresses.abort;
    for (int rank = 0; rank < addresses.size; ++rank) {
      args.windows[rank] = addresses.windows[rank];
      args.rank_arrivals[rank] = addresses.step_arrivals[rank];
    }
  }
  LOCKSTEP_RETURN_IF_ERROR(WithRowKernel(model.dtype, args.products[kQkv].chunks, [&](auto kernel) {
    return CudaStatus(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(plan->shared_bytes)),
                      "shared memory of a decode step");
  }));
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
  args.trace = inputs.trace;
  // All blocks at once on the GPU, or none.
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan_->grid));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(plan_->shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return WithRowKernel(plan_->dtype, args.products[kQkv].chunks, [&](auto kernel) {
    return CudaStatus(cudaLaunchKernelEx(&config, kernel, args), "launch of a decode step");
  });
}

}  // namespace lockstep
