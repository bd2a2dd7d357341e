// CUDA attention of one layer: decode as a share of reading K and V once, prefill as TFLOP/s.
//
//   bytes = 2 * Hkv * D * (2, fp8: 1) * sum of seq_lens   floor = bytes / 4.51 TB/s (H200,
//   measured) flop  = 4 * Hq * D * (query, key) pairs under the causal mask
//
// Times are medians of graph replays; a graph holds a chain of calls, one for each of several
// layers' caches, so that together they exceed the L2 cache, as in a model, and at least 28. Random
// data: zeros would run faster.
//
//   cuda_attention_bench [decode | prefill | splits | chain | fp8 |
//   B,ctx,part,pdl,cache[,Hq,Hkv,D]]...
//
// All but the last by default; a line a case. The last is one decode step: B requests of ctx
// tokens, in parts of about `part` keys, with programmatic launches (1) or not (0), cache bf16
// or fp8.
//
// prefill: by the products that are the default here, and by mma.sync.
// fp8: decode and prefill over an fp8 cache and over one of bfloat16.
// chain: the decode steps that matter most, by least size of the parts, with programmatic launches
// and without.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention/cuda_attention.h"
#include "attention/kv_convert.h"
#include "runtime/core/cuda_errors.h"

namespace lockstep {
namespace {

constexpr double kBandwidth = 4.51e12;
constexpr int64_t kBlockSize = 16;
constexpr int64_t kL2Bytes = int64_t{150} << 20;  // more than twice an H200's
constexpr int64_t kLeastLayers = 28;

struct Heads {
  int64_t query = 28;
  int64_t kv = 4;
  int64_t dim = 128;
};

void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(1);
}

template <typename T>
T Must(absl::StatusOr<T> value) {
  Must(value.status());
  return *std::move(value);
}

DeviceBuffer Allocate(int64_t bytes) { return Must(DeviceBuffer::Create(bytes, "benchmark")); }

template <typename T>
DeviceBuffer ToDevice(const std::vector<T>& values) {
  DeviceBuffer buffer = Allocate(static_cast<int64_t>(values.size() * sizeof(T)));
  Must(CopyAsync(buffer.data(), values.data(), buffer.size_bytes(), nullptr));
  Must(Synchronize(nullptr));
  return buffer;
}

// Fills with normal numbers, of fp8 100 times as large: 16 Mi of them, again and again.
void FillRandom(const DeviceBuffer& buffer, DType dtype, std::mt19937& rng) {
  static const std::vector<float> normal = [&rng] {
    std::normal_distribution<float> distribution;
    std::vector<float> v(int64_t{16} << 20);
    for (float& x : v) x = distribution(rng);
    return v;
  }();
  static std::map<DType, std::vector<char>> stored;
  std::vector<char>& values = stored[dtype];
  const int64_t piece = std::ssize(normal) * SizeOf(dtype);
  if (values.empty()) {
    values.resize(piece);
    ToCache(normal.data(), dtype == DType::kF8E4M3 ? 0.01f : 1, dtype, values.data(),
            std::ssize(normal));
  }
  for (int64_t done = 0; done < buffer.size_bytes(); done += piece) {
    Must(CopyAsync(buffer.as<char>() + done, values.data(),
                   std::min(piece, buffer.size_bytes() - done), nullptr));
  }
  Must(Synchronize(nullptr));
}

// Requests alike, each `query_len` rows at the end of `seq_len` tokens.
class Case {
 public:
  Case(Heads heads, int64_t requests, int64_t query_len, int64_t seq_len,
       CudaAttentionWorkspace::Options options, CudaPrefill prefill, DType kv_dtype,
       CudaStream stream)
      : heads_(heads), kv_dtype_(kv_dtype), stream_(stream), rng_(1) {
    const int64_t max_blocks = (seq_len + kBlockSize - 1) / kBlockSize;
    const int64_t blocks = requests * max_blocks;
    const int64_t rows = requests * query_len;
    std::vector<int32_t> tables(blocks);
    std::iota(tables.begin(), tables.end(), 0);
    std::shuffle(tables.begin(), tables.end(), rng_);
    std::vector<int32_t> query_start_loc(requests + 1);
    for (int64_t b = 0; b <= requests; ++b)
      query_start_loc[b] = static_cast<int32_t>(b * query_len);
    arrays_.push_back(ToDevice(query_start_loc));
    arrays_.push_back(ToDevice(std::vector<int32_t>(requests, static_cast<int32_t>(seq_len))));
    arrays_.push_back(ToDevice(tables));
    batch_ = {.query_start_loc = arrays_[0].as<int32_t>(),
              .seq_lens = arrays_[1].as<int32_t>(),
              .block_tables = arrays_[2].as<int32_t>(),
              .max_blocks = max_blocks,
              .block_size = kBlockSize,
              .num_requests = requests,
              .num_tokens = rows,
              .may_have_decode = query_len == 1,
              .may_have_prefill = query_len > 1};
    const int64_t cache_bytes = blocks * heads.kv * kBlockSize * heads.dim * SizeOf(kv_dtype);
    num_caches_ = std::clamp<int64_t>(kL2Bytes / (2 * cache_bytes) + 1, 2, 160);
    // Prefill's calls are long enough to stand alone.
    layers_ = query_len > 1 ? num_caches_ : std::max(num_caches_, kLeastLayers);
    for (int64_t i = 0; i < 2 * num_caches_; ++i) {
      caches_.push_back(Allocate(cache_bytes));
      FillRandom(caches_.back(), kv_dtype, rng_);
    }
    num_blocks_ = blocks;
    query_ = Allocate(rows * heads.query * heads.dim * 2);
    FillRandom(query_, DType::kBF16, rng_);
    out_ = Allocate(rows * heads.query * heads.dim * 2);
    AttentionGeometry geometry = {.num_query_heads = heads.query,
                                  .num_kv_heads = heads.kv,
                                  .head_dim = heads.dim,
                                  .kv_groups = {},
                                  .scale = 0.088f};
    for (int64_t h = 0; h < heads.kv; ++h) {
      geometry.kv_groups.push_back({h * heads.query / heads.kv, (h + 1) * heads.query / heads.kv});
    }
    layer_ = Must(CudaAttentionLayer::Create(geometry, DType::kBF16, kv_dtype, prefill));
    options.max_num_requests = requests;
    options.max_num_tokens = rows;
    options.max_model_len = std::max<int64_t>(seq_len, 32768);
    options.num_query_heads = heads.query;
    options.num_kv_heads = heads.kv;
    options.head_dim = heads.dim;
    workspace_ = Must(CudaAttentionWorkspace::Create(options, stream));
    Must(workspace_.PlanStep(batch_, stream));
    Must(Synchronize(stream));
  }

  // Median seconds of one layer's Forward, over 30 replays.
  double Time() {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int64_t i = 0; i < layers_; ++i) Must(Forward(i));
    Check(cudaStreamEndCapture(stream_, &graph));
    Check(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t events[2];
    for (cudaEvent_t& event : events) Check(cudaEventCreate(&event));
    std::vector<double> seconds;
    for (int i = 0; i < 33; ++i) {
      Check(cudaEventRecord(events[0], stream_));
      Check(cudaGraphLaunch(exec, stream_));
      Check(cudaEventRecord(events[1], stream_));
      Check(cudaEventSynchronize(events[1]));
      float ms = 0;
      Check(cudaEventElapsedTime(&ms, events[0], events[1]));
      if (i >= 3) seconds.push_back(ms * 1e-3 / static_cast<double>(layers_));
    }
    for (cudaEvent_t event : events) Check(cudaEventDestroy(event));
    Check(cudaGraphExecDestroy(exec));
    Check(cudaGraphDestroy(graph));
    std::nth_element(seconds.begin(), seconds.begin() + 15, seconds.end());
    return seconds[15];
  }

 private:
  static void Check(cudaError_t code) { Must(CudaStatus(code, "benchmark")); }

  absl::Status Forward(int64_t layer) {
    const int64_t i = layer % num_caches_;
    const KvCacheView cache = {.keys = caches_[2 * i].data(),
                               .values = caches_[2 * i + 1].data(),
                               .dtype = kv_dtype_,
                               .num_blocks = num_blocks_,
                               .num_kv_heads = heads_.kv,
                               .block_size = kBlockSize,
                               .head_dim = heads_.dim,
                               .k_scale = kv_dtype_ == DType::kF8E4M3 ? 0.01f : 1,
                               .v_scale = kv_dtype_ == DType::kF8E4M3 ? 0.01f : 1};
    const int64_t width = heads_.query * heads_.dim;
    return layer_.Forward(
        batch_, workspace_, {.data = query_.data(), .dtype = DType::kBF16, .row_stride = width},
        cache, {.data = out_.data(), .dtype = DType::kBF16, .row_stride = width}, stream_);
  }

  Heads heads_;
  DType kv_dtype_;
  CudaStream stream_;
  std::mt19937 rng_;
  int64_t num_caches_ = 0;
  int64_t layers_ = 0;  // calls in the graph
  int64_t num_blocks_ = 0;
  std::vector<DeviceBuffer> arrays_;
  std::vector<DeviceBuffer> caches_;  // keys and values of each layer
  DeviceBuffer query_;
  DeviceBuffer out_;
  CudaAttentionBatch batch_;
  CudaAttentionLayer layer_;
  CudaAttentionWorkspace workspace_;
};

void Decode(Heads heads, int64_t requests, int64_t seq_len,
            const CudaAttentionWorkspace::Options& options, CudaStream stream,
            DType kv_dtype = DType::kBF16) {
  Case c(heads, requests, 1, seq_len, options, CudaPrefill::kMma, kv_dtype, stream);
  const double seconds = c.Time();
  const double bytes =
      static_cast<double>(2 * heads.kv * heads.dim * SizeOf(kv_dtype) * requests * seq_len);
  std::printf(
      "decode  %s %2ld/%ld heads D=%3ld B=%3ld ctx=%5ld splits>=%ld<=%ld pdl=%d: %8.2f us  %7.1f "
      "GB/s"
      "  %4.1f%% of %.2f TB/s\n",
      kv_dtype == DType::kF8E4M3 ? "fp8 " : "bf16", heads.query, heads.kv, heads.dim, requests,
      seq_len, options.min_split_keys, options.max_splits, options.programmatic_launch ? 1 : 0,
      seconds * 1e6, bytes / seconds * 1e-9, 100 * bytes / seconds / kBandwidth,
      kBandwidth * 1e-12);
}

void Prefill(Heads heads, int64_t requests, int64_t query_len, int64_t seq_len, CudaStream stream,
             const std::vector<std::pair<DType, CudaPrefill>>& kinds) {
  const double pairs = static_cast<double>(query_len * (seq_len - query_len)) +
                       0.5 * static_cast<double>(query_len * (query_len + 1));
  const double flop = 4 * static_cast<double>(heads.query * heads.dim * requests) * pairs;
  for (const auto& [kv_dtype, prefill] : kinds) {
    Case c(heads, requests, query_len, seq_len, {}, prefill, kv_dtype, stream);
    const double seconds = c.Time();
    std::printf(
        "prefill %s %2ld/%ld heads D=%3ld B=%3ld rows=%5ld ctx=%5ld %s: %8.1f us  %6.1f TFLOP/s\n",
        kv_dtype == DType::kF8E4M3 ? "fp8 " : "bf16", heads.query, heads.kv, heads.dim, requests,
        query_len, seq_len, prefill == CudaPrefill::kMma ? "mma      " : "warpgroup", seconds * 1e6,
        flop / seconds * 1e-12);
  }
}

// "32,1024,512,1,fp8" or "32,1024,512,1,fp8,28,4,128"; false for anything else.
bool DecodeAsWritten(const std::string& text, CudaStream stream) {
  long requests = 0, seq_len = 0, part = 0, programmatic = 0, query = 28, kv = 4, dim = 128;
  char cache[5] = "";
  const int read = std::sscanf(text.c_str(), "%ld,%ld,%ld,%ld,%4[a-z0-9],%ld,%ld,%ld", &requests,
                               &seq_len, &part, &programmatic, cache, &query, &kv, &dim);
  if (read != 5 && read != 8) return false;
  Decode({.query = query, .kv = kv, .dim = dim}, requests, seq_len,
         {.min_split_keys = part, .programmatic_launch = programmatic != 0}, stream,
         std::string(cache) == "fp8" ? DType::kF8E4M3 : DType::kBF16);
  return true;
}

void Run(const std::vector<std::string>& what) {
  CudaDeviceInfo device = Must(SelectCudaDevice(0));
  std::printf("%s\n", device.name.c_str());
  const OwnedCudaStream stream = Must(OwnedCudaStream::Create());
  for (const std::string& text : what) DecodeAsWritten(text, stream.get());
  const auto wanted = [&](const char* name) {
    return what.empty() || std::find(what.begin(), what.end(), name) != what.end();
  };
  if (wanted("decode")) {
    for (const int64_t requests : {1, 32, 256}) {
      for (const int64_t seq_len : {512, 1024, 8192}) {
        Decode({}, requests, seq_len, {}, stream.get());
      }
    }
    Decode({.query = 14, .kv = 2}, 1, 1024, {}, stream.get());  // of 2 ranks
    Decode({.query = 32, .kv = 8}, 64, 2048, {}, stream.get());
    Decode({.query = 14, .kv = 2, .dim = 64}, 64, 2048, {}, stream.get());
    Decode({.query = 8, .kv = 4, .dim = 256}, 32, 2048, {}, stream.get());
  }
  if (wanted("chain")) {
    for (const auto& [requests, seq_len] :
         std::vector<std::pair<int64_t, int64_t>>{{1, 512}, {32, 1024}, {256, 1024}}) {
      for (const int64_t min_split : {64, 128, 256, 512}) {
        for (const bool programmatic : {false, true}) {
          Decode({}, requests, seq_len,
                 {.min_split_keys = min_split, .programmatic_launch = programmatic}, stream.get());
        }
      }
    }
  }
  if (wanted("splits")) {
    for (const auto& [requests, seq_len] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 512}, {1, 8192}, {32, 1024}, {256, 512}, {256, 8192}}) {
      for (const int64_t min_split : {64, 128, 256, 512}) {
        Decode({}, requests, seq_len, {.min_split_keys = min_split, .max_splits = 32},
               stream.get());
      }
      for (const int64_t max_splits : {16, 64}) {
        Decode({}, requests, seq_len, {.min_split_keys = 128, .max_splits = max_splits},
               stream.get());
      }
    }
  }
  if (wanted("fp8")) {
    for (const auto& [requests, seq_len] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 512}, {1, 8192}, {32, 1024}, {256, 1024}, {256, 8192}}) {
      for (const DType kv_dtype : {DType::kBF16, DType::kF8E4M3}) {
        Decode({}, requests, seq_len, {.programmatic_launch = true}, stream.get(), kv_dtype);
      }
    }
    for (const int64_t rows : {2048, 8192}) {
      Prefill({}, 1, rows, 8192, stream.get(),
              {{DType::kBF16, Must(DefaultCudaPrefill(DType::kBF16))},
               {DType::kF8E4M3, Must(DefaultCudaPrefill(DType::kF8E4M3))}});
    }
  }
  if (wanted("prefill")) {
    std::vector<std::pair<DType, CudaPrefill>> kinds = {
        {DType::kBF16, Must(DefaultCudaPrefill(DType::kBF16))}};
    if (kinds[0].second != CudaPrefill::kMma) kinds.emplace_back(DType::kBF16, CudaPrefill::kMma);
    Prefill({}, 1, 8192, 8192, stream.get(), kinds);
    Prefill({}, 4, 2048, 2048, stream.get(), kinds);
    Prefill({}, 1, 2048, 16384, stream.get(), kinds);
    Prefill({}, 16, 64, 2048, stream.get(), kinds);
    Prefill({.query = 14, .kv = 2, .dim = 64}, 1, 8192, 8192, stream.get(), kinds);
    Prefill({.query = 32, .kv = 32, .dim = 80}, 1, 4096, 4096, stream.get(), kinds);
    Prefill({.query = 8, .kv = 4, .dim = 256}, 1, 8192, 8192, stream.get(), kinds);
  }
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::Run({argv + 1, argv + argc});
  return 0;
}
