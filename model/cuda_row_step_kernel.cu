// The kernel: phases of a layer, and what the blocks hand to each other between them.
//
//   qkv      x = norm(residual stream += down of the layer before)   to the blocks that attend
//   attend   parts of the keys; then columns of all parts            to all blocks
//   o        x = attention's result                                  to all blocks of all ranks
//   gate_up  x = norm(residual stream += o)                          to all blocks
//   down     x = SwiGLU                                              to all blocks of all ranks
//   the head: x = norm(residual stream += down)
//
// The residual stream stands in every block's shared memory; it begins with the embedded token,
// which goes around like the sums do.
//
// What is handed over, but for SwiGLU's result, lies in words that carry their exchange's number
// (cuda_row_words.cuh), one for each value: who reads waits for each. Why nothing is written again
// too early: every block has a part of every product, and gives it behind its reads of what came
// before. So who has x of a product of the next layer knows that all blocks, and behind the sums
// those of all ranks, are done with the same product's x of this layer; attention's parts and
// queries are read by blocks that give their part of o behind it. The next step's kernel may run
// beside a slower rank's last one: it rewrites the embedding's words, which that rank has read
// before it gave the sums without which nobody ends the step, and it gets no further alone.
#include "model/cuda_row_step_kernel.cuh"

namespace lockstep {

namespace {

constexpr int kThreads = kRowThreads + 32;  // and the producer's warp

// What attention needs, in shared memory: not in registers, which are scarce.
template <typename T>
struct RowAttention {
  RowAttentionParams params;
  RowPosition position;
  RowAttentionMemory<T> memory;
};

// What the consumers of a block go through a step with.
template <typename T>
struct Consumers {
  __device__ __forceinline__ RowExchange Exchange() const {
    return {number, arrivals, args.arrivals, args.abort};
  }
  // All threads, which have given their words and are done with what they share; so many blocks do
  // it.
  __device__ __forceinline__ void Arrive(int num_blocks) {
    RowThreadsMeet();
    if (threadIdx.x == 0) AddRowArrival(args.arrivals);
    arrivals += num_blocks;
  }
  // The same, behind plain values.
  __device__ __forceinline__ void Release(int num_blocks) {
    RowThreadsMeet();
    if (threadIdx.x == 0) ReleaseRowArrival(args.arrivals);
    arrivals += num_blocks;
  }

  const RowStepArgs& args;
  RowRing ring;
  uint32_t number;                   // of the exchange that was begun last
  uint32_t arrivals;                 // when all have given what they had last
  const RowStepLayer* layers;        // shared, [L]
  T* hidden;                         // shared, [E]
  float* parts;                      // shared, of the products
  float* squares;                    // shared, [kRowWarps]
  const RowAttention<T>* attention;  // shared
};

// A value of this rank's part of a sum, to all ranks.
template <typename T>
__device__ __forceinline__ void GiveToSum(const RowStepArgs& args, RowSum sum, int col, T value,
                                          const RowExchange& exchange) {
  const int64_t at = int64_t{sum * args.num_ranks + args.rank} * args.hidden_size + col;
  for (int rank = 0; rank < args.num_ranks; ++rank) {
    StoreRowWord(args.sums[rank] + at, value, exchange);
  }
}

// The whole warp: of each lane, 8 columns of the residual stream += the sum over ranks, in rank
// order, float32, rounded once. Lanes that are not `active` have none.
template <typename T>
__device__ __forceinline__ void AddSum(const RowStepArgs& args, RowSum sum, int col, bool active,
                                       const RowExchange& exchange, Vector<T, 8>& residual) {
  const uint32_t* from =
      args.sums[args.rank] + int64_t{sum} * args.num_ranks * args.hidden_size + (active ? col : 0);
  float sums[8] = {};
  const auto add = [&](const RowWords& words) {
    const uint4 bits = words.Values();
    const auto& part = *reinterpret_cast<const Vector<T, 8>*>(&bits);
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j] += Widen(part.at[j]);
  };
#pragma unroll 1
  for (int rank = 0; rank < args.num_ranks; ++rank) {
    RowWords words;
    words.Load(from);
    words.Wait(from, active, exchange);
    add(words);
    from += args.hidden_size;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) residual.at[j] = Narrow<T>(sums[j] + Widen(residual.at[j]));
}

// x = RmsNorm(residual stream), to which the sum is added first.
template <typename T, int kChunks>
__device__ __forceinline__ void LoadNormed(Consumers<T>& c, const RowProduct& p, const float* norm,
                                           RowSum sum, RowX<T, kChunks>& x) {
  const RowConsumer me(p);
  T* const residual = AsShared(c.hidden);
  float* const all_squares = AsShared(c.squares);
  Vector<float, 8> weights[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int col = me.Column(p, i);
    if (col < p.k) weights[i] = LoadVector<8>(norm + col);
  }
  RowThreadsAwait(c.Exchange());
  float squares = 0;
  if (me.row_warp == 0) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int col = me.Column(p, i);
      Vector<T, 8> hidden = {};
      if (col < p.k) hidden = LoadVector<8>(residual + col);
      AddSum(c.args, sum, col, col < p.k, c.Exchange(), hidden);
      if (col >= p.k) continue;
      StoreVector(hidden, residual + col);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        squares = fmaf(Widen(hidden.at[j]), Widen(hidden.at[j]), squares);
      }
    }
    squares = RowWarpSum(squares);
    if (me.lane == 0) all_squares[me.column_warp] = squares;
  }
  RowThreadsMeet();
  const float mean = SumRowParts(p, all_squares) / static_cast<float>(p.k);
  const float scale = 1.0f / sqrtf(mean + c.args.norm_eps);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int col = me.Column(p, i);
    x.at[i] = {};
    if (col >= p.k) continue;
    const Vector<T, 8> hidden = LoadVector<8>(residual + col);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x.at[i].at[j] = Narrow<T>(Widen(hidden.at[j]) * scale * weights[i].at[j]);
    }
  }
}

// x = attention's result.
template <typename T, int kChunks>
__device__ __forceinline__ void LoadAttended(const Consumers<T>& c, const RowProduct& p,
                                             RowX<T, kChunks>& x) {
  const RowConsumer me(p);
  const RowExchange exchange = c.Exchange();
  const uint32_t* const row = c.args.attention.attended;
  RowThreadsAwait(exchange);
  RowWords words[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int col = me.Column(p, i);
    if (col < p.k) words[i].Load(row + col);
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int col = me.Column(p, i);
    words[i].Wait(row + col, col < p.k, exchange);
    const uint4 bits = col < p.k ? words[i].Values() : uint4{};
    x.at[i] = *reinterpret_cast<const Vector<T, 8>*>(&bits);
  }
}

// x = SwiGLU's result. It is the longest row: words would double what all blocks read.
template <typename T, int kChunks>
__device__ __forceinline__ void LoadActivated(const Consumers<T>& c, const RowProduct& p,
                                              RowX<T, kChunks>& x) {
  const RowConsumer me(p);
  RowThreadsAwait(c.Exchange());
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

template <typename T>
__device__ __forceinline__ float2 RowBias(const void* bias, int64_t row) {
  return {bias == nullptr ? 0.0f : Widen(static_cast<const T*>(bias)[row]), 0.0f};
}

template <typename T, int kChunks>
__device__ __forceinline__ void RunQkv(Consumers<T>& c, const RowStepLayer& layer, int l) {
  const RowProduct& p = c.args.products[kQkv];
  RowX<T, kChunks> x;
  LoadNormed(c, p, layer.input_norm, l == 0 ? kEmbeddingSum : kDownSum, x);
  ++c.number;
  const RowExchange exchange = c.Exchange();
  uint32_t* const to = c.args.qkv;
  const void* const bias = layer.qkv_bias;
  ConsumeRows(
      c.ring, p, x, c.parts, layer.attending, [&](int output) { return RowBias<T>(bias, output); },
      [&](int output, float sum, float) { StoreRowWord(to + output, Narrow<T>(sum), exchange); });
}

// Functions of their own, which are not inlined: with the products they need more registers than
// there are.

// This block's first keys and values, as far as they are in the cache. They come while qkv is being
// made.
template <typename T>
__device__ __noinline__ void BeginAttention(const RowAttention<T>* shared,
                                            const RowStepLayer* shared_layer) {
  const RowAttentionParams& p = AsShared(shared)->params;
  const RowPosition& now = AsShared(shared)->position;
  const RowAttentionMemory<T> memory = AsShared(shared)->memory.AsShared();
  const RowStepLayer& layer = *AsShared(shared_layer);
  const RowSplits splits(p, now, layer.sliding_window, gridDim.x);
  if (static_cast<int>(blockIdx.x) >= splits.num_splits * p.num_kv_heads) return;
  LoadFirstRowTile(p, now, layer.keys, layer.values, RowItem(splits, blockIdx.x), memory);
}

//
// Returns how many arrivals there will be, of all blocks.
template <typename T>
__device__ __noinline__ int Attend(const RowAttention<T>* shared, const RowStepLayer* shared_layer,
                                   uint32_t* arrivals, RowExchange exchange) {
  const RowAttentionParams& p = AsShared(shared)->params;
  const RowPosition& now = AsShared(shared)->position;
  const RowAttentionMemory<T> memory = AsShared(shared)->memory.AsShared();
  const RowStepLayer& layer = *AsShared(shared_layer);
  const RowAttentionLayer cache{layer.q_norm, layer.k_norm, layer.keys, layer.values,
                                layer.sliding_window};
  const RowSplits splits(p, now, layer.sliding_window, gridDim.x);
  const int num_items = splits.num_splits * p.num_kv_heads;
#pragma unroll 1
  for (int i = blockIdx.x; i < num_items; i += gridDim.x) {
    const RowItem item(splits, i);
    if (i != static_cast<int>(blockIdx.x)) {
      LoadFirstRowTile(p, now, layer.keys, layer.values, item, memory);
    }
    PrepareRowItem(p, now, cache, item, exchange, memory);
    AttendRowItem(p, now, cache, item, exchange, memory);
    RowThreadsMeet();  // before others use the memory
  }
  // All of this block's parts are there before it waits for those of others.
#pragma unroll 1
  for (int i = blockIdx.x; i < num_items; i += gridDim.x) {
    MergeRowParts(p, RowItem(splits, i), splits.num_splits, exchange, memory);
    RowThreadsMeet();
    if (threadIdx.x == 0) AddRowArrival(arrivals);
  }
  if (num_items > 0) return num_items;
  for (int h = blockIdx.x; h < p.num_kv_heads; h += gridDim.x) {
    ClearRowHeads<T>(p, h, exchange);
    RowThreadsMeet();
    if (threadIdx.x == 0) AddRowArrival(arrivals);
  }
  return p.num_kv_heads;
}

// This rank's part of a sum.
template <typename T, int kChunks>
__device__ __forceinline__ void RunRowParallel(Consumers<T>& c, const RowProduct& p,
                                               RowX<T, kChunks>& x, const void* bias, RowSum sum,
                                               int attending) {
  const RowExchange exchange = c.Exchange();
  ConsumeRows(
      c.ring, p, x, c.parts, attending, [&](int output) { return RowBias<T>(bias, output); },
      [&](int output, float value, float) {
        GiveToSum(c.args, sum, output, Narrow<T>(value), exchange);
      });
}

template <typename T, int kChunks>
__device__ __forceinline__ void RunO(Consumers<T>& c, const RowStepLayer& layer, int l) {
  const RowProduct& p = c.args.products[kO];
  RowX<T, kChunks> x;
  LoadAttended(c, p, x);
  RunRowParallel(c, p, x, layer.o_bias, kOSum, layer.attending);
}

template <typename T, int kChunks>
__device__ __forceinline__ void RunGateUp(Consumers<T>& c, const RowStepLayer& layer, int l) {
  const RowProduct& p = c.args.products[kGateUp];
  RowX<T, kChunks> x;
  LoadNormed(c, p, layer.post_attention_norm, kOSum, x);
  T* const to = static_cast<T*>(c.args.activated);
  const void* const bias = layer.gate_up_bias;
  ConsumeRows(
      c.ring, p, x, c.parts, 0,
      [&](int output) {
        return float2{RowBias<T>(bias, output).x, RowBias<T>(bias, output + p.outputs).x};
      },
      [&](int output, float gate, float up) {
        to[output] = Narrow<T>(gate / (1.0f + expf(-gate)) * up);
      });
}

template <typename T, int kChunks>
__device__ __forceinline__ void RunDown(Consumers<T>& c, const RowStepLayer& layer, int l) {
  const RowProduct& p = c.args.products[kDown];
  RowX<T, kChunks> x;
  LoadActivated(c, p, x);
  RunRowParallel(c, p, x, layer.down_bias, kDownSum, 0);
}

template <typename T, int kChunks>
__device__ __forceinline__ void RunHead(Consumers<T>& c) {
  const RowProduct& p = c.args.products[kHead];
  RowX<T, kChunks> x;
  LoadNormed(c, p, c.args.final_norm, kDownSum, x);
  float* const to = c.args.logits;
  ConsumeRows(
      c.ring, p, x, c.parts, 0, [](int) { return float2{}; },
      [&](int output, float sum, float) { to[output] = sum; });
}

// This block's share of the embedded token, to all.
template <typename T>
__device__ __forceinline__ void GiveEmbedding(Consumers<T>& c) {
  const RowStepArgs& args = c.args;
  ++c.number;
  const int begin = static_cast<int>(int64_t{args.hidden_size} * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(int64_t{args.hidden_size} * (blockIdx.x + 1) / gridDim.x);
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kRowThreads) {
    GiveToSum(args, kEmbeddingSum, i, static_cast<const T*>(args.hidden)[i], c.Exchange());
  }
  for (int i = threadIdx.x; i < args.hidden_size; i += kRowThreads) c.hidden[i] = Narrow<T>(0.0f);
  c.Arrive(gridDim.x);
}

template <typename T, int kChunks, int kLongChunks>
__device__ __forceinline__ void Consume(const RowStepArgs& args, Consumers<T>& c) {
  GiveEmbedding(c);
#pragma unroll 1
  for (int l = 0; l < args.num_layers; ++l) {
    const RowStepLayer& layer = AsShared(c.layers)[l];
    BeginAttention(c.attention, &layer);
    RunQkv<T, kChunks>(c, layer, l);
    RowThreadsMeet();  // before attention uses what the product's parts were in
    c.arrivals += Attend(c.attention, &layer, args.arrivals, c.Exchange());
    RunO<T, kChunks>(c, layer, l);
    c.Arrive(gridDim.x);
    RunGateUp<T, kChunks>(c, layer, l);
    c.Release(gridDim.x);
    RunDown<T, kLongChunks>(c, layer, l);
    c.Arrive(gridDim.x);
  }
  RunHead<T, kChunks>(c);
  if (threadIdx.x != 0) return;
  args.progress[blockIdx.x * 2] = c.number;
  args.progress[blockIdx.x * 2 + 1] = c.arrivals;
}

__device__ void Produce(const RowStepArgs& args, const RowStepLayer* layers, const RowRing& ring) {
  RowProducer producer(ring, args.num_in_flight);
#pragma unroll 1
  for (int l = 0; l < args.num_layers; ++l) {
    const RowStepLayer& layer = layers[l];
    ProduceRows(producer, args.products[kQkv], static_cast<const char*>(layer.qkv),
                layer.attending);
    ProduceRows(producer, args.products[kO], static_cast<const char*>(layer.o), layer.attending);
    ProduceRows(producer, args.products[kGateUp], static_cast<const char*>(layer.gate_up), 0);
    ProduceRows(producer, args.products[kDown], static_cast<const char*>(layer.down), 0);
  }
  ProduceRows(producer, args.products[kHead], args.head, 0);
}

// Shared memory: slots, layers, parts of the products' sums or what attention has in their place,
// the residual stream, attention's tile.
constexpr int64_t kPartsBytes = int64_t{2} * kRowGroup * kRowPartStride * sizeof(float);

template <typename T>
__host__ __device__ int64_t ScratchBytes(int64_t largest_group, int64_t head_dim) {
  const int64_t bytes = RowAttentionMemory<T>::ScratchBytes(largest_group, head_dim);
  return bytes > kPartsBytes ? (bytes + 15) / 16 * 16 : kPartsBytes;
}

template <typename T, int kChunks, int kLongChunks>
__global__ void __launch_bounds__(kThreads, 1)
    RowStepKernel(const __grid_constant__ RowStepArgs args) {
  char* const shared = row_shared_memory;
  __shared__ uint64_t full[kMaxRowSlots], empty[kMaxRowSlots];
  __shared__ float squares[kRowWarps];
  __shared__ alignas(16) char attention_bytes[sizeof(RowAttention<T>)];
  auto& attention = *reinterpret_cast<RowAttention<T>*>(attention_bytes);
  auto* const layers = reinterpret_cast<RowStepLayer*>(shared + args.num_slots * kRowSlotBytes);
  {
    const int words = args.num_layers * static_cast<int>(sizeof(RowStepLayer) / 8);
    for (int i = threadIdx.x; i < words; i += kThreads) {
      reinterpret_cast<uint64_t*>(layers)[i] = reinterpret_cast<const uint64_t*>(args.layers)[i];
    }
  }
  char* const parts = reinterpret_cast<char*>(layers + args.num_layers);
  const RowAttentionParams& p = args.attention;
  T* const hidden = reinterpret_cast<T*>(parts + ScratchBytes<T>(args.largest_group, p.head_dim));
  if (threadIdx.x == 0) {
    attention.params = p;
    attention.position = RowPosition(p);
    attention.memory = RowAttentionMemory<T>(reinterpret_cast<char*>(hidden + args.hidden_size),
                                             parts, args.largest_group, p.head_dim);
    for (int slot = 0; slot < args.num_slots; ++slot) {
      InitBarrier(full + slot, 1);
      InitBarrier(empty + slot, kRowWarps);
    }
    PublishBarriers();
  }
  __syncthreads();
  for (int l = threadIdx.x; l < args.num_layers; l += kThreads) {
    const RowSplits splits(p, attention.position, layers[l].sliding_window, gridDim.x);
    layers[l].attending = min(splits.num_splits * p.num_kv_heads, static_cast<int>(gridDim.x));
  }
  __syncthreads();
  const RowRing ring{shared, full, empty, args.num_slots};
  if (threadIdx.x >= kRowThreads) {
    if (threadIdx.x == kRowThreads) Produce(args, layers, ring);
    return;
  }
  Consumers<T> consumers{
      args,      ring,   args.progress[blockIdx.x * 2],   args.progress[blockIdx.x * 2 + 1],
      layers,    hidden, reinterpret_cast<float*>(parts), squares,
      &attention};
  Consume<T, kChunks, kLongChunks>(args, consumers);
}

// fn(kernel) for a type and numbers of chunks of short and of long rows.
template <typename Fn>
absl::Status WithRowKernel(DType dtype, const RowProduct* products, const Fn& fn) {
  const int chunks = products[kQkv].chunks;
  const int long_chunks = products[kDown].chunks;
  const auto with_long = [&]<typename T, int kLong>() {
    return chunks == kShortRowChunks[0]   ? fn(RowStepKernel<T, kShortRowChunks[0], kLong>)
           : chunks == kShortRowChunks[1] ? fn(RowStepKernel<T, kShortRowChunks[1], kLong>)
                                          : fn(RowStepKernel<T, kShortRowChunks[2], kLong>);
  };
  const auto with_type = [&]<typename T>() {
    return long_chunks == kLongRowChunks[0] ? with_long.template operator()<T, kLongRowChunks[0]>()
           : long_chunks == kLongRowChunks[1]
               ? with_long.template operator()<T, kLongRowChunks[1]>()
               : with_long.template operator()<T, kLongRowChunks[2]>();
  };
  return dtype == DType::kBF16 ? with_type.template operator()<__nv_bfloat16>()
                               : with_type.template operator()<__half>();
}

}  // namespace

int64_t RowStepSharedBytes(int64_t hidden_size, int64_t num_layers, int64_t largest_group,
                           int64_t head_dim) {
  return ScratchBytes<__half>(largest_group, head_dim) + hidden_size * 2 +
         num_layers * static_cast<int64_t>(sizeof(RowStepLayer)) +
         RowAttentionMemory<__half>::TileBytes(head_dim);
}

absl::Status PrepareRowStepKernel(DType dtype, const RowStepArgs& args, int64_t shared_bytes) {
  return WithRowKernel(dtype, args.products, [&](auto kernel) {
    return CudaStatus(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared_bytes)),
                      "shared memory of a decode step");
  });
}

absl::Status LaunchRowStepKernel(DType dtype, const RowStepArgs& args, int grid,
                                 int64_t shared_bytes, CudaStream stream) {
  // All blocks at once on the GPU, or none.
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return WithRowKernel(dtype, args.products, [&](auto kernel) {
    return CudaStatus(cudaLaunchKernelEx(&config, kernel, args), "launch of a decode step");
  });
}

}  // namespace lockstep
