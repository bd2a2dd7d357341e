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
#include "model/cuda_row_step_kernel.cuh"

namespace lockstep {

namespace {

constexpr int kThreads = kRowThreads + 32;  // and the producer's warp

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

}  // namespace

int64_t RowStepSharedBytes(int64_t hidden_size, int64_t num_layers, int64_t largest_group,
                           int64_t head_dim) {
  return kPartsBytes + hidden_size * 2 + num_layers * static_cast<int64_t>(sizeof(RowStepLayer)) +
         RowAttentionMemory<__half>::Bytes(largest_group, head_dim);
}

absl::Status PrepareRowStepKernel(DType dtype, int short_chunks, int64_t shared_bytes) {
  return WithRowKernel(dtype, short_chunks, [&](auto kernel) {
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
  return WithRowKernel(dtype, args.products[kQkv].chunks, [&](auto kernel) {
    return CudaStatus(cudaLaunchKernelEx(&config, kernel, args), "launch of a decode step");
  });
}

}  // namespace lockstep
