// Whole steps of the decoder beside what the cores can do, measured in the same run.
//
//   decoder_bench [--model=PATH] [flags of Google Benchmark]
//
// PATH: a Hugging Face folder or a .gguf file; without it, weights are made up in the shape of
// SmolLM2-135M (30 layers, E 576, F 1536, 9 query and 3 KV heads of 64, V 49152, tied). Ranks are
// threads of this process; each has `threads` compute threads. Weights, products and KV cache are
// `dtype` (0: float32, 2: bfloat16).
//
// Decode: GB/s = bytes of weights that one step reads once, over all ranks / median time of a step.
//   KV is read on top and not counted. share = GB/s / read bandwidth.
// Prefill: GFLOP/s = (2 * T * weights of the layers + 2 * weights of the head (1 row of logits)
//   + 4 * Hq * D * T * (T + 1) / 2 * L of attention) / median time. share = GFLOP/s / peak.
// The ceiling is measured between any two steps, with as many threads as all ranks have together,
// so both medians saw the same neighbours.
#include <benchmark/benchmark.h>

#include <cstring>
#include <numeric>

#include "cache/block_table.h"
#include "model/attention_selection.h"
#include "model/checkpoint/dummy.h"
#include "model/decoder.h"
#include "parallel/local_communicator.h"
#include "tests/bench/ceilings.h"

namespace lockstep {
namespace {

constexpr int64_t kBlockSize = 16;
constexpr int64_t kReadBytes = int64_t{256} << 20;  // more than the last-level cache

std::string& ModelPath() {
  static std::string path;
  return path;
}

ModelConfig SmolLM2() {
  ModelConfig config;
  config.model_type = "llama";
  config.hidden_size = 576;
  config.intermediate_size = 1536;
  config.num_layers = 30;
  config.num_query_heads = 9;
  config.num_kv_heads = 3;
  config.head_dim = 64;
  config.vocab_size = 49152;
  config.max_position_embeddings = 8192;
  config.rms_norm_eps = 1e-5;
  config.tie_word_embeddings = true;
  config.layer_windows.assign(config.num_layers, 0);
  config.rope.theta = 100000;
  return config;
}

const ModelSource& Source() {
  static const ModelSource source = [] {
    if (!ModelPath().empty()) {
      absl::StatusOr<ModelSource> opened = OpenModel(ModelPath(), LoadFormat::kAuto, false);
      if (!opened.ok()) {
        std::fprintf(stderr, "%s\n", std::string(opened.status().message()).c_str());
        std::exit(2);
      }
      return *std::move(opened);
    }
    ModelSource dummy;
    dummy.path = "SmolLM2-135M's shape";
    dummy.config = SmolLM2();
    dummy.checkpoint = MakeDummyCheckpoint(dummy.path, dummy.config);
    return dummy;
  }();
  return source;
}

struct Setup {
  int ranks;
  int threads;       // a rank
  int64_t requests;  // B
  int64_t query;     // new tokens of each
  int64_t context;   // length of each with the new tokens
  DType dtype;
};

// A step that can be run again and again: `query` tokens at the end of `context`, logits of each
// request's last.
class Step {
 public:
  explicit Step(const Setup& setup) {
    max_blocks_ = BlocksForTokens(setup.context, kBlockSize);
    for (int64_t b = 0; b < setup.requests; ++b) {
      std::vector<int32_t> table(max_blocks_);
      std::iota(table.begin(), table.end(), static_cast<int32_t>(b * max_blocks_));
      tables_.insert(tables_.end(), table.begin(), table.end());
      const int64_t first = setup.context - setup.query;
      slots_.resize(slots_.size() + setup.query);
      FillSlotMapping(table, kBlockSize, first, setup.query,
                      slots_.data() + slots_.size() - setup.query);
      for (int64_t i = 0; i < setup.query; ++i) {
        ids_.push_back(static_cast<int32_t>((b * 37 + i * 101 + 11) % Source().config.vocab_size));
        positions_.push_back(static_cast<int32_t>(first + i));
      }
      rows_.push_back(static_cast<int32_t>(ids_.size()) - 1);
      starts_.push_back(static_cast<int32_t>(ids_.size()));
      seq_lens_.push_back(static_cast<int32_t>(setup.context));
    }
    rope_lengths_.assign(ids_.size(), static_cast<int32_t>(setup.context));
  }

  int64_t num_blocks() const { return static_cast<int64_t>(tables_.size()); }
  ForwardBatch Batch() const {
    ForwardBatch batch;
    batch.token_ids = ids_;
    batch.positions = positions_;
    batch.rope_lengths = rope_lengths_;
    batch.logits_rows = rows_;
    batch.attention = {starts_, seq_lens_, tables_, max_blocks_, slots_};
    return batch;
  }

 private:
  int64_t max_blocks_;
  std::vector<int32_t> ids_, positions_, rope_lengths_, rows_, starts_ = {0}, seq_lens_, tables_;
  std::vector<int64_t> slots_;
};

// Everything of one rank.
struct Rank {
  std::unique_ptr<ThreadPool> threads;
  std::unique_ptr<AttentionBackend> backend;
  std::unique_ptr<Decoder> decoder;
  KvPool pool;
  Buffer logits;
  int64_t local_vocab = 0;

  absl::Status Create(const Setup& setup, const Step& step, Communicator& communicator) {
    const ModelSource& source = Source();
    LOCKSTEP_ASSIGN_OR_RETURN(const std::vector<RankPartition> partition,
                              PartitionModel(source.config.Dims(), communicator.size()));
    threads = std::make_unique<ThreadPool>(setup.threads);
    LOCKSTEP_ASSIGN_OR_RETURN(
        BackendSelection selection,
        SelectAttention(source.config, setup.dtype, kBlockSize, "", *threads));
    backend = std::move(selection.backend);
    const DecoderOptions options = {setup.dtype, setup.requests * setup.query, setup.context};
    LOCKSTEP_ASSIGN_OR_RETURN(
        decoder, Decoder::Load(source, partition, options, *backend, communicator, *threads));
    const AttentionGeometry& geometry = decoder->Geometry(0);
    LOCKSTEP_ASSIGN_OR_RETURN(pool, KvPool::Create({source.config.num_layers, geometry.num_kv_heads,
                                                    geometry.head_dim, kBlockSize, setup.dtype},
                                                   step.num_blocks()));
    // The context is not computed: zeros cost what keys and values cost.
    for (int64_t layer = 0; layer < source.config.num_layers; ++layer) {
      const KvCacheView view = pool.Layer(layer);
      const int64_t bytes =
          view.num_blocks * view.num_kv_heads * kBlockSize * view.head_dim * SizeOf(setup.dtype);
      std::memset(view.keys, 0, bytes);
      std::memset(view.values, 0, bytes);
    }
    local_vocab = partition[communicator.rank()].vocab.size();
    LOCKSTEP_ASSIGN_OR_RETURN(logits, Buffer::Create(setup.requests * local_vocab * 4, "logits"));
    return absl::OkStatus();
  }

  absl::Status Run(const Step& step) {
    const ForwardBatch batch = step.Batch();
    const int64_t rows = static_cast<int64_t>(batch.logits_rows.size());
    return decoder->Forward(batch, pool,
                            {logits.data(), DType::kF32, rows, local_vocab, local_vocab});
  }
};

struct Timed {
  std::vector<double> steps;     // seconds
  std::vector<double> ceilings;  // a second
  int64_t weight_bytes = 0;      // over all ranks
};

// Rank 0 owns the clock; a broadcast tells the others whether there is another step, as the
// engine's plan does.
absl::Status RunRank(const Setup& setup, const Step& step, Communicator& communicator,
                     benchmark::State& state, const std::function<double()>& ceiling,
                     Timed& timed) {
  Rank rank;
  LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, rank.Create(setup, step, communicator)));
  std::vector<int64_t> bytes(communicator.size());
  const int64_t mine = rank.decoder->weight_bytes();
  LOCKSTEP_RETURN_IF_ERROR(communicator.AllGather(&mine, sizeof(mine), bytes.data()));
  LOCKSTEP_RETURN_IF_ERROR(rank.Run(step));  // scratch memory grows in the first step
  const auto timed_step = [&](int32_t go) -> absl::Status {
    LOCKSTEP_RETURN_IF_ERROR(communicator.Broadcast(&go, sizeof(go), 0));
    return go != 0 ? rank.Run(step) : absl::OkStatus();
  };
  if (communicator.rank() != 0) {
    for (int32_t go = 1; go != 0;) {
      LOCKSTEP_RETURN_IF_ERROR(communicator.Broadcast(&go, sizeof(go), 0));
      if (go != 0) LOCKSTEP_RETURN_IF_ERROR(rank.Run(step));
    }
    return absl::OkStatus();
  }
  timed.weight_bytes = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
  for (auto _ : state) {
    timed.ceilings.push_back(ceiling());
    const double start = NowSeconds();
    LOCKSTEP_RETURN_IF_ERROR(timed_step(1));
    timed.steps.push_back(NowSeconds() - start);
    state.SetIterationTime(timed.steps.back());
  }
  return timed_step(0);
}

bool Run(const Setup& setup, benchmark::State& state, const std::function<double()>& ceiling,
         Timed& timed) {
  const Step step(setup);
  for (const absl::Status& status : RunLocalRanks(setup.ranks, [&](Communicator& communicator) {
         return RunRank(setup, step, communicator, state, ceiling, timed);
       })) {
    if (status.ok()) continue;
    state.SkipWithError(std::string(status.message()).c_str());
    return false;
  }
  return true;
}

// Arguments: ranks, threads a rank, requests, context, dtype.
void BM_Decode(benchmark::State& state) {
  const Setup setup = {.ranks = static_cast<int>(state.range(0)),
                       .threads = static_cast<int>(state.range(1)),
                       .requests = state.range(2),
                       .query = 1,
                       .context = state.range(3),
                       .dtype = static_cast<DType>(state.range(4))};
  static const Buffer memory = [] {
    Buffer buffer = Buffer::Create(kReadBytes, "memory to read").value();
    FillUniform(DType::kF32, buffer);
    return buffer;
  }();
  ThreadPool threads(setup.ranks * setup.threads);
  Timed timed;
  if (!Run(
          setup, state, [&] { return ReadBytesPerSecond(memory, threads); }, timed))
    return;
  const double step = Median(timed.steps);
  const double read = Median(timed.ceilings);
  const double rate = static_cast<double>(timed.weight_bytes) / step;
  state.counters["step_ms"] = step * 1e3;
  state.counters["tokens/s"] = static_cast<double>(setup.requests) / step;
  state.counters["GB/s"] = rate * 1e-9;
  state.counters["read_GB/s"] = read * 1e-9;
  state.counters["share_%"] = 100 * rate / read;
}
BENCHMARK(BM_Decode)
    ->ArgNames({"ranks", "threads", "B", "context", "dtype"})
    ->ArgsProduct({{1}, {1, 2}, {1, 8}, {128}, {2}})
    ->ArgsProduct({{1}, {2}, {1, 8}, {128}, {0}})
    ->ArgsProduct({{1}, {2}, {1, 8}, {1024}, {2}})
    ->ArgsProduct({{2, 4}, {1}, {1, 8}, {128}, {2}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

// Multiply-adds of a prompt's step, times 2; the weights are counted as the decoder stores them.
double PrefillFlops(const Setup& setup) {
  const ModelConfig& c = Source().config;
  const double tokens = static_cast<double>(setup.query);
  const double q = static_cast<double>(c.num_query_heads * c.head_dim);
  const double kv = static_cast<double>(c.num_kv_heads * c.head_dim);
  const double hidden = static_cast<double>(c.hidden_size);
  const double layer = hidden * (2 * q + 2 * kv + 3 * static_cast<double>(c.intermediate_size));
  const double layers = static_cast<double>(c.num_layers);
  return 2 * tokens * layer * layers + 2 * hidden * static_cast<double>(c.vocab_size) +
         2 * q * tokens * (tokens + 1) * layers;
}

// Arguments: ranks, threads a rank, tokens, dtype.
void BM_Prefill(benchmark::State& state) {
  const Setup setup = {.ranks = static_cast<int>(state.range(0)),
                       .threads = static_cast<int>(state.range(1)),
                       .requests = 1,
                       .query = state.range(2),
                       .context = state.range(2),
                       .dtype = static_cast<DType>(state.range(3))};
  ThreadPool threads(setup.ranks * setup.threads);
  Timed timed;
  if (!Run(
          setup, state, [&] { return PeakFlopsPerSecond(setup.dtype, threads); }, timed))
    return;
  const double step = Median(timed.steps);
  const double peak = Median(timed.ceilings);
  const double rate = PrefillFlops(setup) / step;
  state.counters["step_ms"] = step * 1e3;
  state.counters["tokens/s"] = static_cast<double>(setup.query) / step;
  state.counters["GFLOP/s"] = rate * 1e-9;
  state.counters["peak_GFLOP/s"] = peak * 1e-9;
  state.counters["share_%"] = 100 * rate / peak;
}
BENCHMARK(BM_Prefill)
    ->ArgNames({"ranks", "threads", "T", "dtype"})
    ->ArgsProduct({{1}, {1, 2}, {512}, {2}})
    ->ArgsProduct({{1}, {2}, {512}, {0}})
    ->ArgsProduct({{2, 4}, {1}, {512}, {2}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  constexpr char kModelFlag[] = "--model=";
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], kModelFlag, sizeof(kModelFlag) - 1) != 0) {
      std::fprintf(stderr, "decoder_bench: unknown argument %s\n", argv[i]);
      return 2;
    }
    lockstep::ModelPath() = argv[i] + sizeof(kModelFlag) - 1;
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
