#include "launch/engine_flags.h"

#include "launch/command_specs.h"
#include "launch/option_setters.h"
#include "parallel/nccl_communicator.h"
#include "runtime/core/cuda_device.h"

namespace lockstep {

namespace {

OptionSet StoreDevice(DeviceKind* device) {
  return [device](const std::string& text) -> absl::Status {
    if (text == "cuda" && !BuiltWithCuda()) {
      return absl::InvalidArgumentError("this lockstep was built without CUDA");
    }
    return StoreChoice(device, OptionChoices<DeviceKind>{{"auto", DeviceKind::kAuto},
                                                         {"cpu", DeviceKind::kCpu},
                                                         {"cuda", DeviceKind::kCuda}})(text);
  };
}

// What ranks may have each in its own way: --tp is checked against their number anyway, threads
// follow the host's cores, and messages and the log of steps are rank 0's.
bool MayDiffer(const std::string& name) {
  return name == "--tp" || name == "--threads" || name == "--log-level" || name == "--step-log";
}

// Keeps in flags->given what the group's options are given.
OptionGroup Kept(OptionGroup group, EngineFlags* flags) {
  for (Option& option : group.options) {
    if (MayDiffer(option.name)) continue;
    option.set = [set = std::move(option.set), name = option.name,
                  flags](const std::string& value) {
      LOCKSTEP_RETURN_IF_ERROR(set(value));
      flags->given[name] = value.empty() ? "given" : value;
      return absl::OkStatus();
    };
  }
  return group;
}

Option DeviceOption(EngineOptions* engine) {
  return {"--device",
          "DEVICE",
          "auto, cpu or cuda. auto takes CUDA where every rank sees a GPU; each rank needs one of "
          "its own.",
          "auto",
          false,
          StoreDevice(&engine->device)};
}

Option WatchdogOption(EngineFlags* flags) {
  return {"--watchdog-seconds",
          "S",
          "A rank that does not answer, or ranks that do not come further, for so long end the "
          "job "
          "with a message that names them; a rank that dies ends it at once. 1 to 86400; 0 turns "
          "the watchdog off.",
          absl::StrCat(flags->watchdog_seconds),
          false,
          StoreNumber(
              &flags->watchdog_seconds, [](double x) { return x == 0 || (x >= 1 && x <= 86400); },
              "1 to 86400, or 0")};
}

Option LogLevelOption(EngineFlags* flags) {
  return {"--log-level",
          "LEVEL",
          "Messages on stderr: debug, info, warning or error.",
          "info",
          false,
          StoreChoice(&flags->log_level, OptionChoices<LogLevel>{{"debug", LogLevel::kDebug},
                                                                 {"info", LogLevel::kInfo},
                                                                 {"warning", LogLevel::kWarning},
                                                                 {"error", LogLevel::kError}})};
}

OptionGroup CudaGroup(EngineOptions* engine) {
  return {
      "CUDA",
      {
          {"--gpu-memory-utilization", "FRACTION",
           "Share of each GPU's memory that the engine takes, weights and KV blocks together: "
           "(0, 1].",
           absl::StrCat(engine->gpu_memory_utilization), false,
           StoreNumber(
               &engine->gpu_memory_utilization, [](double x) { return x > 0 && x <= 1; },
               "above 0 and at most 1")},
          Flag("--enforce-eager", "Decode steps are launched kernel by kernel, not as CUDA graphs.",
               &engine->cuda_graphs, false),
          {"--overlap-sums", "TOKENS",
           "On several ranks, steps of so many tokens or more make their sums over ranks beside "
           "products, of two parts of the rows; at least 2, or 0: no step does.",
           absl::StrCat(engine->overlap_min_tokens), false,
           StoreInt(&engine->overlap_min_tokens, 0, INT32_MAX)},
          {"--sum-multiprocessors", "N",
           "Sums beside products take so many multiprocessors of a GPU, and the products leave "
           "them "
           "so many; NCCL takes no more in any step. 1 to 64.",
           "24, and NCCL what it chooses", false,
           StoreInt(&engine->sum_multiprocessors, 1, NcclCommunicator::kMaxBlocks)},
      }};
}

OptionGroup KvCacheGroup(EngineOptions* engine) {
  return {
      "KV cache",
      {
          {"--block-size", "TOKENS", "Token slots in a KV block: a power of two, 1 to 256.",
           absl::StrCat(engine->block_size), false, StoreBlockSize(&engine->block_size)},
          {"--kv-cache-memory", "BYTES",
           "Memory for the KV blocks: of a host, shared equally by its ranks, or on CUDA of each "
           "GPU; K, M, G and T stand for powers of 1024.",
           "4G, or one longest sequence if that is more, within a quarter of the free memory",
           false, StoreByteSize(&engine->kv_cache_memory_bytes)},
          {"--num-gpu-blocks-override", "N",
           "So many KV blocks, whatever the memory; on CPUs, too. The longest sequence shrinks to "
           "what they hold. Where blocks run out, the latest request is preempted and computed "
           "again.",
           "what the memory holds", false,
           StoreInt(&engine->num_gpu_blocks_override, 1, INT32_MAX)},
          Flag(
              "--enable-prefix-caching",
              "Requests share the KV blocks of equal beginnings, also of requests that have ended. "
              "This is the default.",
              &engine->enable_prefix_caching),
          Flag("--no-enable-prefix-caching", "Every prompt is computed whole.",
               &engine->enable_prefix_caching, false),
      }};
}

}  // namespace

OptionGroup ModelGroup(EngineFlags* flags) {
  OptionGroup model = {
      "Model",
      {
          {"--dtype", "TYPE",
           "Weights and arithmetic: auto, float32 or bfloat16. auto takes what the checkpoint "
           "says; for float16 that is float32 on the CPU.",
           "auto", false,
           StoreChoice(
               &flags->dtype,
               OptionChoices<std::optional<DType>>{
                   {"auto", std::nullopt}, {"float32", DType::kF32}, {"bfloat16", DType::kBF16}})},
          {"--kv-cache-dtype", "TYPE",
           "Keys and values in the KV cache: auto (that of the arithmetic), float32, float16, "
           "bfloat16 or fp8 (E4M3, half the bytes of bfloat16; on cuda, and on the CPU with "
           "--attention-backend reference).",
           "auto", false, StoreKvCacheDType(&flags->engine.kv_cache_dtype)},
          {"--load-format", "FORMAT",
           "auto reads the checkpoint; dummy makes random weights, so that config.json is enough; "
           "null runs the engine without arithmetic, for tests of all around it: the tokens come "
           "from a hash of the prompt.",
           "auto", false,
           StoreChoice(&flags->load_format,
                       OptionChoices<LoadFormat>{{"auto", LoadFormat::kAuto},
                                                 {"dummy", LoadFormat::kDummy},
                                                 {"null", LoadFormat::kNull}})},
          {"--null-step-ms", "MS",
           "With --load-format null: time from the beginning of a step to that of the next, 0 to "
           "60000.",
           "0", false,
           StoreNumber(
               &flags->null_step_ms, [](double x) { return x >= 0 && x <= 60000; }, "0 to 60000")},
          {"--max-model-len", "TOKENS", "Longest prompt plus answer, 1 or more.",
           "the model's own limit, or what the KV memory holds", false,
           StoreInt(&flags->engine.max_model_len, 1)},
      }};
  return Kept(std::move(model), flags);
}

std::vector<OptionGroup> EngineGroups(EngineFlags* flags) {
  EngineOptions* const engine = &flags->engine;
  OptionGroup run = {
      "Engine",
      {
          {"--tp", "N",
           "Number of ranks the command expects. It is refused when mpirun started another number.",
           "as many as mpirun started", false, StoreInt(&flags->tp, 1, 65536)},
          {"--threads", "T", "Compute threads of each rank, 1 to 1024.",
           "cores of the host / ranks on it", false, StoreInt(&engine->num_threads, 1, 1024)},
          DeviceOption(engine),
          {"--attention-backend", "NAME",
           "Attention implementation; an unknown name is answered with the list.",
           "the first that fits", false, StoreText(&engine->attention_backend)},
          {"--max-num-batched-tokens", "TOKENS",
           "Most tokens in one step; a longer prompt is computed in chunks of this size.",
           absl::StrCat(engine->max_num_batched_tokens), false,
           StoreInt(&engine->max_num_batched_tokens, 1, int64_t{1} << 24)},
          {"--max-num-seqs", "N", "Most answers that are computed at once, 1 to 65536.",
           absl::StrCat(engine->max_num_seqs), false, StoreInt(&engine->max_num_seqs, 1, 65536)},
          {"--steps-in-flight", "N",
           "Steps that are planned and sent before the tokens of the first of them are known, 1 or "
           "2.",
           "2 on cuda, 1 on cpu", false, StoreInt(&engine->steps_in_flight, 1, 2)},
          WatchdogOption(flags),
      }};
  OptionGroup debug = {
      "Messages and checks",
      {
          LogLevelOption(flags),
          {"--step-log", "FILE",
           "One JSON object a line and step: step, time, seconds, tokens, prompt_tokens, requests "
           "(a list of {id, choice, position, tokens, prompt_tokens}), waiting, running, "
           "free_blocks, cached_blocks, preemptions, finished. A file that is there is replaced.",
           "", false, StoreText(&engine->step_log)},
          Flag("--poison-freed-blocks",
               "Fill KV blocks with NaN when they are freed: a wrong read becomes an error. Slow.",
               &engine->poison_freed_blocks),
          {"--check-tp", "STEPS",
           "Compare every tensor of the first STEPS steps with what one rank computes, on 2 or "
           "more "
           "ranks: the first layer and tensor that differ are named, with exit status 1. Rank 0 "
           "also loads the whole model.",
           "", false, StoreInt(&engine->check_tp_steps, 1, INT32_MAX)},
          Flag(
              "--check-attention",
              "Compare every attention output with that of the backend \"reference\", on CUDA with "
              "plain float32 arithmetic: the first layer, request and head that differ are named, "
              "with exit status 1. Slow.",
              &engine->check_attention),
      }};
  return {Kept(std::move(run), flags), Kept(KvCacheGroup(engine), flags),
          Kept(CudaGroup(engine), flags), Kept(std::move(debug), flags)};
}

OptionGroup KeptGroup(OptionGroup group, EngineFlags* flags) {
  return Kept(std::move(group), flags);
}

OptionGroup JobGroup(EngineFlags* flags) {
  return Kept({"Job", {DeviceOption(&flags->engine), WatchdogOption(flags), LogLevelOption(flags)}},
              flags);
}

OptionGroup EmulationGroup(EngineFlags* flags) {
  EmulatedRank* const emulated = &flags->engine.emulated;
  return Kept(
      {"Emulation",
       {{"--emulate-tp", "N",
         "One rank, started without others, loads and computes what a rank of N does, on CPUs with "
         "the --threads that it would have there. Sums over ranks are left out, so the time is "
         "that "
         "of its compute alone, and answers mean nothing.",
         "", false, StoreInt(&emulated->tp_size, 1, 65536)},
        {"--rank", "R", "With --emulate-tp: which one, 0 to N - 1.", "0", false,
         StoreInt(&emulated->rank, 0, 65535)}}},
      flags);
}

absl::Status CheckEmulation(const EngineFlags& flags) {
  if (flags.engine.emulated.tp_size > 0 || !flags.given.contains("--rank")) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError("--rank needs --emulate-tp: it says which rank is emulated");
}

}  // namespace lockstep
