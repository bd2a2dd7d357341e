#include "launch/command_specs.h"

#include "launch/option_setters.h"

namespace lockstep {

CommandSpec ScoreSpec(ScoreOptions* options) {
  CommandSpec spec = {
      "score",
      "MODEL",
      "log-probability of every token of a text",
      "Prints one JSON object: num_tokens, token_logprobs (natural logarithm, null for\n"
      "the first token) and perplexity (null for one token).\n",
      {{"Input (one of them)",
        {{"--ids", "ID,ID,...", "Token ids, used as they are.", "", false, StoreIds(&options->ids)},
         {"--text-file", "FILE", "The file's text, encoded with the special tokens a prompt gets.",
          "", false, StoreText(&options->text_file)}}},
       {"Output",
        {{"--logits-out", "FILE",
          "Also write a safetensors file with `logits`, F32 [num_tokens, vocabulary]. A file "
          "that is there is replaced.",
          "", false, StoreText(&options->logits_out)},
         Flag("--json", "Output is JSON in any case; accepted for symmetry.", &options->json)}},
       ModelGroup(&options->engine)},
      absl::StrCat("Examples:\n"
                   "  lockstep score model.gguf --text-file article.txt\n"
                   "  mpirun -np 2 lockstep score ./Llama --ids 1,15043,3186 --dtype float32\n\n",
                   kExitStatuses),
      &options->engine.model};
  for (OptionGroup& group : EngineGroups(&options->engine)) {
    spec.groups.push_back(std::move(group));
  }
  return spec;
}

absl::Status CheckScoreOptions(const ScoreOptions& options) {
  if (options.ids.empty() != options.text_file.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(options.ids.empty()
                                        ? "no input: give --ids or --text-file"
                                        : "--ids and --text-file exclude each other");
}

CommandSpec TokenizeSpec(TokenizeOptions* options) {
  return {
      "tokenize",
      "MODEL",
      "text to token ids and back, chat templates",
      "Reads one JSON value a line from stdin and writes one a line to stdout: for a\n"
      "string its token ids. Needs the model's tokenizer files only, no weights, no MPI.\n",
      {{"Options",
        {Flag("--decode", "Input lines are lists of ids, output lines are strings.",
              &options->decode),
         Flag("--skip-special-tokens", "With --decode: leave special tokens out of the text.",
              &options->skip_special_tokens),
         Flag("--add-special-tokens",
              "Add what the tokenizer adds to a prompt, a leading <s> for instance.",
              &options->add_special_tokens),
         Flag("--chat",
              "Input lines are objects for the chat template: {\"messages\": [...], \"tools\": "
              "[...], \"add_generation_prompt\": true, ...}.",
              &options->chat),
         Flag("--render",
              "With --chat: output the template's text instead of ids; tokenizer_config.json or "
              "chat_template.jinja is enough for it.",
              &options->render)}}},
      absl::StrCat("Examples:\n"
                   "  echo '\"Hello  World\"' | lockstep tokenize ./Llama\n"
                   "  echo '[9906, 220, 4435]' | lockstep tokenize ./Llama --decode\n"
                   "  echo '{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}' |\n"
                   "      lockstep tokenize model.gguf --chat --render\n\n",
                   kExitStatuses),
      &options->model};
}

absl::Status CheckTokenizeOptions(const TokenizeOptions& options) {
  if (options.decode && (options.chat || options.add_special_tokens)) {
    return absl::InvalidArgumentError(
        "--decode goes neither with --chat nor with --add-special-tokens");
  }
  if (options.skip_special_tokens && !options.decode) {
    return absl::InvalidArgumentError("--skip-special-tokens needs --decode");
  }
  if (options.render && !options.chat) {
    return absl::InvalidArgumentError("--render needs --chat");
  }
  if (options.render && options.add_special_tokens) {
    return absl::InvalidArgumentError("--render prints text: --add-special-tokens adds nothing");
  }
  return absl::OkStatus();
}

CommandSpec PlanSpec(PlanOptions* options) {
  return {
      "plan",
      "MODEL",
      "how a model is split over N ranks, without loading it",
      "Prints what each rank holds: query heads, KV heads, rows of the feed-forward layers\n"
      "and of the vocabulary, bytes of weights, KV bytes a token, and the tokens that fit.\n"
      "MODEL needs its configuration only. No MPI.\n",
      {{"Options",
        {{"--tp", "N", "Number of ranks, 1 up to the model's query heads.", "1", false,
          StoreInt(&options->tp_size, 1, 65536)},
         {"--memory-gib", "X", kPlanMemoryHelp, "", false,
          StoreNumber(
              &options->memory_gib, [](double x) { return x > 0; }, "above 0")},
         {"--kv-cache-memory", "BYTES", kPlanKvMemoryHelp, "", false,
          StoreByteSize(&options->kv_cache_memory_bytes)},
         {"--block-size", "TOKENS", "Token slots in a KV block, P: a power of two, 1 to 256.",
          absl::StrCat(options->block_size), false, StoreBlockSize(&options->block_size)},
         {"--kv-cache-dtype", "TYPE", "auto (that of --dtype), float32, float16, bfloat16 or fp8.",
          "auto", false, StoreKvCacheDType(&options->kv_cache_dtype)},
         {"--dtype", "TYPE", "auto, float32 or bfloat16, for weights.", "auto", false,
          StoreChoice(
              &options->dtype,
              OptionChoices<std::optional<DType>>{
                  {"auto", std::nullopt}, {"float32", DType::kF32}, {"bfloat16", DType::kBF16}})},
         Flag("--json", kPlanJsonHelp, &options->json)}},
       {"Prediction",
        {{"--predict", "GPU",
          "Instead of the plan: a table of memory and speed on 1 to 16 GPUs, estimated. h200, or a "
          "JSON file with the GPU's name and, in bytes, seconds and operations a second: "
          "memory_bytes, weight_bytes_per_second, kv_bytes_per_second, product_flops, "
          "attention_flops, sum_seconds, link_bytes_per_second, step_seconds.",
          "", false, StoreText(&options->predict.device)},
         {"--batch-size", "B", "Requests of the second decode step.", "32", false,
          StoreInt(&options->predict.batch_size, 1, 1 << 20)},
         {"--context", "TOKENS", "Tokens of each request at a decode step.", "1024", false,
          StoreInt(&options->predict.context, 1, 1 << 30)},
         {"--prompt-len", "TOKENS", "Tokens of the prefill step.", "8192", false,
          StoreInt(&options->predict.prompt, 1, 1 << 30)}}}},
      absl::StrCat("Examples:\n"
                   "  lockstep plan ./Llama-3.1-70B --tp 8 --memory-gib 80\n"
                   "  lockstep plan ./Llama-3.1-70B --predict h200 --batch-size 64\n"
                   "  lockstep plan ./Qwen2.5-7B --tp 3 --json\n\n",
                   kExitStatuses),
      &options->model};
}

CommandSpec ReportSpec(ReportOptions* options) {
  return {"report",
          "DIR",
          "a report on how a model scales, from benchmarks' results",
          "Reads the results that launch/scaling.sh has left in DIR, and writes report.html (one\n"
          "page with charts that needs no network), report.csv and report.json beside them:\n"
          "speed-up and efficiency over ranks, where a step's time goes, all-reduces, latency\n"
          "against throughput, and whether all numbers of ranks give the same answers. Reports\n"
          "that are there are replaced. No model, no MPI.\n",
          {},
          absl::StrCat("Example:\n"
                       "  bash launch/scaling.sh ./Llama --ranks 1,2 --out results\n"
                       "  lockstep report results\n\n",
                       kExitStatuses),
          &options->folder};
}

CommandSpec VersionSpec(VersionOptions* options) {
  return {"version",
          "",
          "version and what is built in",
          "Prints the version, what is built in, and the processor features in use.\n",
          {{"Options", {Flag("--json", "One JSON object.", &options->json)}}},
          "",
          nullptr};
}

}  // namespace lockstep
