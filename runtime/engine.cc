#include "runtime/engine.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "model/attention_selection.h"
#include "model/cuda_decoder.h"
#include "model/cuda_row_step.h"
#include "model/cuda_sum.h"
#include "model/kv_scales.h"
#include "model/null_decoder.h"
#include "parallel/rank_links.h"
#include "runtime/core/log.h"
#include "runtime/engine_loop.h"
#include "runtime/host_memory.h"
#include "runtime/kv_budget.h"

namespace lockstep {

namespace {

// For a sum beside products. What NCCL takes by itself of an H100 for a large one over NVLink
// (NCCL_DEBUG=INFO says it: 24 coll channels): a block a channel, a multiprocessor a block.
constexpr int kSumMultiprocessors = 24;

absl::Status CheckOption(const char* name, int64_t value, int64_t min) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (value >= min && value <= kMax) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is %d: it must be %d to %d", name, value, min, kMax));
}

absl::Status CheckNullOptions(const EngineOptions& options) {
  if (!(options.null_step_seconds >= 0) || !(options.null_step_seconds <= 3600)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "null_step_seconds is %g: it must be 0 to 3600", options.null_step_seconds));
  }
  if (!options.null_model) {
    if (options.null_step_seconds == 0) return absl::OkStatus();
    return absl::InvalidArgumentError("--null-step-ms needs --load-format null");
  }
  const auto excludes = [](const char* what) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--load-format null computes nothing and runs on the CPU: it does not go "
                        "with %s",
                        what));
  };
  if (options.device == DeviceKind::kCuda) return excludes("--device cuda");
  if (options.check_tp_steps > 0) return excludes("--check-tp");
  if (options.check_attention) return excludes("--check-attention");
  if (!options.attention_backend.empty()) return excludes("--attention-backend");
  return absl::OkStatus();
}

absl::Status CheckEmulation(const EngineOptions& options) {
  if (options.null_model) {
    return absl::InvalidArgumentError(
        "--emulate-tp measures a rank's arithmetic, and --load-format null has none");
  }
  if (options.check_tp_steps > 0) {
    return absl::InvalidArgumentError(
        "--check-tp compares ranks with each other: it does not go with --emulate-tp");
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const EngineOptions& options, int num_ranks) {
  LOCKSTEP_RETURN_IF_ERROR(CheckOption("max_model_len", options.max_model_len, 0));
  LOCKSTEP_RETURN_IF_ERROR(CheckOption("max_num_seqs", options.max_num_seqs, 1));
  LOCKSTEP_RETURN_IF_ERROR(
      CheckOption("max_num_batched_tokens", options.max_num_batched_tokens, 1));
  LOCKSTEP_RETURN_IF_ERROR(CheckOption("block_size", options.block_size, 1));
  LOCKSTEP_RETURN_IF_ERROR(CheckOption("num_threads", options.num_threads, 1));
  LOCKSTEP_RETURN_IF_ERROR(
      CheckOption("num_gpu_blocks_override", options.num_gpu_blocks_override, 0));
  LOCKSTEP_RETURN_IF_ERROR(CheckOption("check_tp_steps", options.check_tp_steps, 0));
  if (options.overlap_min_tokens != 0) {  // one row cannot be cut
    LOCKSTEP_RETURN_IF_ERROR(CheckOption("overlap_min_tokens", options.overlap_min_tokens, 2));
  }
  if (options.sum_multiprocessors < 0 ||
      options.sum_multiprocessors > NcclCommunicator::kMaxBlocks) {
    return absl::InvalidArgumentError(
        absl::StrFormat("sum_multiprocessors is %d: it must be 1 to %d (0: NCCL's choice)",
                        options.sum_multiprocessors, NcclCommunicator::kMaxBlocks));
  }
  if (options.emulated.tp_size > 0) LOCKSTEP_RETURN_IF_ERROR(CheckEmulation(options));
  if (options.check_tp_steps > 0) LOCKSTEP_RETURN_IF_ERROR(CheckTpNeedsRanks(num_ranks));
  if (options.steps_in_flight < 0 || options.steps_in_flight > 2) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "steps_in_flight is %d: it must be 1 or 2 (0: automatic)", options.steps_in_flight));
  }
  if (!(options.heartbeat_seconds > 0) || !(options.heartbeat_seconds <= 3600)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "heartbeat_seconds is %g: it must be above 0 and at most 3600", options.heartbeat_seconds));
  }
  if (!(options.gpu_memory_utilization > 0) || !(options.gpu_memory_utilization <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("gpu_memory_utilization is %g: it must be above 0 and at most 1",
                        options.gpu_memory_utilization));
  }
  if (options.kv_cache_memory_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("kv_cache_memory_bytes is %d: it must be at least 0 (0: automatic)",
                        options.kv_cache_memory_bytes));
  }
  return CheckNullOptions(options);
}

// COLLECTIVE. Agree, after what the ranks do together on their GPUs: one that failed alone has left
// the others in a sum, from where they never come to agree.
absl::Status AgreeOrFailAlone(Communicator& communicator, const absl::Status& mine,
                              const WatchedRank* watched) {
  static constexpr std::chrono::seconds kLimit(10);
  if (mine.ok() || watched == nullptr || !watched->fail) return Agree(communicator, mine);
  std::promise<void> agreed;
  std::thread timer([&mine, watched, waits = agreed.get_future()] {
    if (waits.wait_for(kLimit) == std::future_status::timeout) watched->fail(mine);
  });
  const absl::Status all = Agree(communicator, mine);
  agreed.set_value();
  timer.join();
  return all;
}

RankLinks* LinksOf(const EngineOptions& options) {
  return options.watched == nullptr ? nullptr : &options.watched->links;
}

// What the CUDA path cannot do yet, by name and before work.
absl::Status CheckCudaOptions(const EngineOptions& options) {
  if (options.check_attention && options.dtype == DType::kF32) {
    return absl::InvalidArgumentError(
        "--check-attention: on cuda, float32 runs in the plain arithmetic that the others are "
        "compared with; use --dtype bfloat16");
  }
  return absl::OkStatus();
}

// This rank's weights on its GPU. Not a collective.
absl::Status LoadCudaParts(const ModelSource& source, const EngineOptions& options,
                           const std::vector<RankPartition>& partition, int64_t max_model_len,
                           Communicator& communicator, EngineParts& parts) {
  parts.threads = std::make_unique<ThreadPool>(options.num_threads);
  // The decoder calls the chosen backend's launchers itself, so that graphs capture them.
  LOCKSTEP_ASSIGN_OR_RETURN(const SelectionReport report,
                            ChooseBackend(RequirementsOf(source.config, "cuda", options.dtype,
                                                         options.kv_dtype(), options.block_size),
                                          options.attention_backend));
  if (communicator.rank() == 0) LogInfo(report.ToString());
  // Of the steps that graphs replay, each request has one token.
  const bool can_replay = report.graph_support != GraphSupport::kNever;
  if (options.cuda_graphs && !can_replay && communicator.rank() == 0) {
    LogInfo(absl::StrCat("decode steps are launched kernel by kernel: attention backend ",
                         report.chosen, " runs in no CUDA graph"));
  }
  const CudaDecoderOptions decoder_options{
      .dtype = options.dtype,
      .kv_dtype = options.kv_dtype(),
      .max_num_batched_tokens = options.max_num_batched_tokens,
      .max_num_seqs = options.max_num_seqs,
      .max_logits_rows = MaxLogitsRows(options.max_num_batched_tokens, options.max_num_seqs,
                                       source.config.vocab_size),
      .max_model_len = max_model_len,
      .block_size = options.block_size,
      .graphs = options.cuda_graphs && can_replay,
      .overlap_min_tokens = options.overlap_min_tokens,
      .overlap_spare_multiprocessors =
          options.sum_multiprocessors > 0 ? options.sum_multiprocessors : kSumMultiprocessors,
      .check_attention = options.check_attention};
  const CudaRankContext context{.stream = parts.cuda->stream.get(),
                                .nccl = parts.cuda->nccl.get(),
                                .peers = parts.cuda->peers.get(),
                                .info = parts.cuda->binding.info};
  LOCKSTEP_ASSIGN_OR_RETURN(parts.decoder,
                            LoadCudaDecoder(source, partition, communicator.rank(), decoder_options,
                                            context, *parts.threads));
  return absl::OkStatus();
}

// The ids that end an answer, of all files of the model, ascending.
std::vector<int32_t> EndTokenIds(const ModelSource& source) {
  std::vector<int32_t> ends = source.config.eos_token_ids;
  ends.insert(ends.end(), source.generation.eos_token_ids.begin(),
              source.generation.eos_token_ids.end());
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  // An id that the model cannot give ends nothing.
  std::erase_if(ends, [&](int32_t id) { return id < 0 || id >= source.config.vocab_size; });
  return ends;
}

absl::Status LoadNullParts(const ModelSource& source, const EngineOptions& options,
                           const std::vector<RankPartition>& partition, int64_t /*max_model_len*/,
                           Communicator& communicator, EngineParts& parts) {
  parts.threads = std::make_unique<ThreadPool>(options.num_threads);
  parts.decoder =
      MakeNullDecoder({.vocab = partition[static_cast<size_t>(communicator.rank())].vocab,
                       .vocab_size = source.config.vocab_size,
                       .end_token_ids = EndTokenIds(source),
                       .step_seconds = options.null_step_seconds,
                       .mark = [watched = options.watched] {
                         if (watched != nullptr) watched->progress.Mark(1);
                       }});
  if (communicator.rank() == 0) {
    LogInfo("null model: tokens come from a hash of the prompt, no weight is read");
  }
  return CheckNullPool({.head_dim = source.config.head_dim, .dtype = options.kv_dtype()});
}

// This rank's backend and weights. Not a collective.
absl::Status LoadParts(const ModelSource& source, const EngineOptions& options,
                       const std::vector<RankPartition>& partition, int64_t max_model_len,
                       Communicator& communicator, EngineParts& parts) {
  const ModelConfig& config = source.config;
  parts.threads = std::make_unique<ThreadPool>(options.num_threads);
  LOCKSTEP_ASSIGN_OR_RETURN(BackendSelection selection,
                            SelectAttention(config, options.kv_dtype(), options.block_size,
                                            options.attention_backend, *parts.threads));
  if (communicator.rank() == 0) LogInfo(selection.report.ToString());
  parts.attention = std::move(selection.backend);
  if (options.check_attention) {
    auto checked = CheckedBackend::Create(std::move(parts.attention));
    if (!checked.ok()) return Annotate(checked.status(), "--check-attention");
    parts.checked_attention = checked->get();
    parts.attention = *std::move(checked);
  }
  const DecoderOptions decoder_options{.dtype = options.dtype,
                                       .max_num_batched_tokens = options.max_num_batched_tokens,
                                       .max_model_len = max_model_len};
  LOCKSTEP_ASSIGN_OR_RETURN(parts.decoder,
                            Decoder::Load(source, partition, decoder_options, *parts.attention,
                                          communicator, *parts.threads));
  return absl::OkStatus();
}

// What ranks exchange.
struct LocalKvMemory {
  int64_t num_blocks = 0;
  int64_t free_bytes = 0;  // of the GPU, or of the host
};

// COLLECTIVE. Every rank's number of blocks. The weights are loaded everywhere, so the free memory
// is what they left. `bytes_per_block`: on CUDA, of all pools on this rank's GPU. `all`: by rank.
absl::StatusOr<KvBudget> AgreeOnBudget(const EngineOptions& options, int64_t wanted_model_len,
                                       int64_t bytes_per_block, const CudaSeat* cuda,
                                       Communicator& communicator,
                                       std::vector<LocalKvMemory>& all) {
  LocalKvMemory mine;
  if (cuda != nullptr) {
    const auto free_bytes = FreeCudaBytes();
    LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, free_bytes.status()));
    mine.free_bytes = *free_bytes;
    mine.num_blocks =
        LocalNumCudaBlocks(options, bytes_per_block, *free_bytes, cuda->binding.info.total_bytes);
  } else {
    mine.free_bytes = AvailableHostMemoryBytes();
    mine.num_blocks = LocalNumBlocks(options, wanted_model_len, bytes_per_block, mine.free_bytes,
                                     communicator.ranks_on_host());
  }
  all.resize(static_cast<size_t>(communicator.size()));
  LOCKSTEP_RETURN_IF_ERROR(communicator.AllGather(&mine, sizeof(mine), all.data()));
  std::vector<int64_t> blocks;
  for (const LocalKvMemory& rank : all) {  // block ids are int32
    blocks.push_back(std::min<int64_t>(rank.num_blocks, std::numeric_limits<int32_t>::max()));
  }
  return MakeKvBudget(options, wanted_model_len, blocks);
}

void LogBudget(const KvBudget& budget, const EngineOptions& options, int64_t wanted_model_len,
               const KvPoolShape& shape, const RankPartition& limiting, bool on_cuda,
               const std::vector<LocalKvMemory>& memory) {
  KvPoolShape limiting_shape = shape;
  limiting_shape.num_kv_heads = limiting.kv_heads.size();
  const double mib = static_cast<double>(limiting_shape.BytesPerBlock() * budget.num_blocks) /
                     static_cast<double>(1 << 20);
  std::string free_memory;
  for (size_t r = 0; on_cuda && r < memory.size(); ++r) {
    absl::StrAppend(&free_memory, r == 0 ? "; free before it, by rank: " : ", ",
                    absl::StrFormat("%.1f GiB", static_cast<double>(memory[r].free_bytes) /
                                                    static_cast<double>(1 << 30)));
  }
  LogInfo(absl::StrFormat(
      "KV cache: %d blocks of %d tokens = %d tokens, limited by rank %d (%d KV heads, %.1f MiB)%s",
      budget.num_blocks, options.block_size, budget.num_blocks * options.block_size,
      budget.limiting_rank, limiting.kv_heads.size(), mib, free_memory));
  if (on_cuda && options.check_tp_steps > 0) {
    LogInfo("--check-tp: rank 0 holds as many blocks of the whole model beside its own");
  }
  if (budget.max_model_len < wanted_model_len) {
    LogInfo(absl::StrFormat(
        "maximum length: %d tokens, what the KV cache holds, less than the model's %d positions",
        budget.max_model_len, wanted_model_len));
  }
}

// COLLECTIVE.
absl::StatusOr<std::unique_ptr<TpChecker>> MakeTpChecker(
    const ModelSource& source, const EngineOptions& options,
    const std::vector<RankPartition>& partition, int64_t max_model_len, Communicator& communicator,
    const EngineParts& parts) {
  const WholeModelOptions whole{
      .dtype = options.dtype,
      .kv_dtype = options.kv_dtype(),
      .max_num_batched_tokens = options.max_num_batched_tokens,
      .max_num_seqs = options.max_num_seqs,
      .max_logits_rows = MaxLogitsRows(options.max_num_batched_tokens, options.max_num_seqs,
                                       source.config.vocab_size),
      .max_model_len = max_model_len,
      .block_size = options.block_size,
      .attention_backend = options.attention_backend};
  return TpChecker::Create(source, {options.check_tp_steps, whole}, partition, parts.cuda.get(),
                           communicator, *parts.threads);
}

EngineLoopOptions LoopOptions(const ModelSource& source, const EngineOptions& options,
                              bool on_cuda) {
  const ModelConfig& config = source.config;
  EngineLoopOptions loop;
  loop.scheduler.enable_prefix_caching = options.enable_prefix_caching;
  loop.scheduler.poison_freed_blocks = options.poison_freed_blocks;
  loop.scheduler.end_token_ids = EndTokenIds(source);
  if (config.rope.type == RopeType::kDynamic) {
    loop.scheduler.max_shared_tokens = config.rope.original_max_position_embeddings;
  }
  loop.steps_in_flight = options.steps_in_flight;
  if (loop.steps_in_flight == 0) loop.steps_in_flight = on_cuda ? 2 : 1;
  loop.heartbeat_seconds = options.heartbeat_seconds;
  loop.step_log = options.step_log;
  loop.emulates_rank = options.emulated.tp_size > 0;
  loop.watched = options.watched;
  return loop;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const ModelSource& source,
                                                       const EngineOptions& options,
                                                       Communicator& communicator,
                                                       PhaseTimes* times) {
  PhaseTimes unseen;
  if (times == nullptr) times = &unseen;
  const auto start = std::chrono::steady_clock::now();
  const ModelConfig& config = source.config;
  // The same verdict on all ranks, before the first collective.
  LOCKSTEP_RETURN_IF_ERROR(CheckOptions(options, communicator.size()));
  LOCKSTEP_ASSIGN_OR_RETURN(const int64_t wanted_model_len, WantedModelLen(options, config));
  LOCKSTEP_ASSIGN_OR_RETURN(const std::vector<RankPartition> partition,
                            PartitionJob(config.Dims(), communicator.size(), options.emulated));
  EngineParts parts;
  DeviceKind device = DeviceKind::kCpu;
  if (!options.null_model) {
    LOCKSTEP_ASSIGN_OR_RETURN(device, ResolveDevice(options.device, communicator));
  }
  const bool on_cuda = device == DeviceKind::kCuda;
  if (on_cuda) {
    LOCKSTEP_RETURN_IF_ERROR(CheckCudaOptions(options));
    const int64_t window_bytes =
        SumWindowBytes(options.max_num_batched_tokens * config.hidden_size * SizeOf(options.dtype));
    const int64_t words_bytes = RowSumBytes(config.hidden_size, communicator.size());
    LOCKSTEP_ASSIGN_OR_RETURN(parts.cuda,
                              OpenCudaRank(communicator, window_bytes, words_bytes,
                                           options.sum_multiprocessors, LinksOf(options), *times));
  }
  KvScales kv_scales;
  const auto load = [&]() -> absl::Status {
    const auto load_parts = options.null_model ? LoadNullParts
                            : on_cuda          ? LoadCudaParts
                                               : LoadParts;
    LOCKSTEP_RETURN_IF_ERROR(
        load_parts(source, options, partition, wanted_model_len, communicator, parts));
    if (options.kv_dtype() != DType::kF8E4M3) return absl::OkStatus();
    LOCKSTEP_ASSIGN_OR_RETURN(kv_scales, ReadKvScales(*source.checkpoint, config.num_layers));
    return absl::OkStatus();
  };
  LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, CatchExhaustion("loading the model", load)));
  times->End("weights");
  if (options.check_tp_steps > 0) {
    LOCKSTEP_ASSIGN_OR_RETURN(
        parts.tp_checker,
        MakeTpChecker(source, options, partition, wanted_model_len, communicator, parts));
    times->End("whole model");
  }

  const KvPoolShape shape{
      .num_layers = config.num_layers,
      .num_kv_heads = partition[static_cast<size_t>(communicator.rank())].kv_heads.size(),
      .head_dim = config.head_dim,
      .block_size = options.block_size,
      .dtype = options.kv_dtype()};
  int64_t bytes_per_block = shape.BytesPerBlock();
  if (parts.tp_checker != nullptr) bytes_per_block += parts.tp_checker->gpu_bytes_per_block();
  std::vector<LocalKvMemory> memory;
  LOCKSTEP_ASSIGN_OR_RETURN(const KvBudget budget,
                            AgreeOnBudget(options, wanted_model_len, bytes_per_block,
                                          parts.cuda.get(), communicator, memory));
  auto pool = on_cuda ? KvPool::CreateOnCuda(shape, budget.num_blocks, parts.cuda->stream.get())
                      : KvPool::Create(shape, budget.num_blocks);
  LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, pool.status()));
  parts.pool = *std::move(pool);
  if (shape.dtype == DType::kF8E4M3) kv_scales.ApplyTo(parts.pool);
  if (parts.tp_checker != nullptr) {
    LOCKSTEP_RETURN_IF_ERROR(parts.tp_checker->CreatePool(budget.num_blocks));
  }
  times->End("KV pool");
  if (options.emulated.tp_size > 0) {
    LogInfo(absl::StrFormat("emulates rank %d of %d: no sums over ranks, answers mean nothing",
                            options.emulated.rank, options.emulated.tp_size));
  }
  if (communicator.rank() == 0) {
    LogBudget(budget, options, wanted_model_len, shape,
              partition[static_cast<size_t>(budget.limiting_rank)], on_cuda, memory);
    if (shape.dtype == DType::kF8E4M3) LogInfo(kv_scales.ToString());
  }
  LOCKSTEP_RETURN_IF_ERROR(
      AgreeOrFailAlone(communicator, parts.decoder->Prepare(parts.pool), options.watched));
  if (on_cuda) times->End("graphs");

  const PlanLimits limits{.max_num_batched_tokens = options.max_num_batched_tokens,
                          .max_num_seqs = options.max_num_seqs,
                          .max_model_len = budget.max_model_len,
                          .block_size = options.block_size,
                          .num_blocks = budget.num_blocks,
                          .vocab_size = config.vocab_size,
                          .max_logits_rows = 0};
  std::vector<Range> vocab_ranges;
  for (const RankPartition& rank : partition) vocab_ranges.push_back(rank.vocab);
  LOCKSTEP_ASSIGN_OR_RETURN(std::unique_ptr<EngineLoop> engine,
                            EngineLoop::Create(limits, LoopOptions(source, options, on_cuda),
                                               vocab_ranges, std::move(parts), communicator));
  times->End("engine");
  engine->set_load_seconds(
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  return std::unique_ptr<Engine>(std::move(engine));
}

}  // namespace lockstep
