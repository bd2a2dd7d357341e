// usage: make_seeds FOLDER
//
// Writes FOLDER/<target>/ for every fuzz target: small valid inputs from which the fuzzer starts.
#include <cstdio>
#include <cstdlib>

#include "runtime/core/dtype.h"
#include "tests/checkpoint/gguf_builder.h"
#include "tests/fuzz/plan_sequence.h"

namespace lockstep {
namespace {

class SeedFolder {
 public:
  SeedFolder(const std::string& root, const std::string& target) : path_(root + "/" + target) {
    std::filesystem::create_directories(path_);
  }
  void Add(const std::string& bytes) {
    WriteFile(path_ + "/seed" + std::to_string(next_++), bytes);
  }

 private:
  std::string path_;
  int next_ = 0;
};

std::string TestData(const std::string& name) {
  return ReadAll(std::string(LOCKSTEP_SOURCE_DIR) + "/tests/data/" + name);
}

// --- step plans

std::string Encoded(const StepPlan& plan) {
  PlanBuffer buffer;
  const int64_t bytes = EncodePlan(plan, buffer);
  return std::string(reinterpret_cast<const char*>(buffer.data()), static_cast<size_t>(bytes));
}

// The rows of one request: tokens [begin, end) of the sequence in `slot`, whose block i is
// blocks[i]. Every token id is `token`.
void AddRows(StepPlan& plan, int32_t slot, int32_t begin, int32_t end,
             const std::vector<int32_t>& blocks, int32_t block_size, int32_t token,
             StepOutput output) {
  if (plan.query_start_loc.empty()) plan.query_start_loc.push_back(0);
  for (int32_t position = begin; position < end; ++position) {
    const auto row = static_cast<int32_t>(plan.token_ids.size());
    plan.token_ids.push_back(token);
    plan.positions.push_back(position);
    plan.slot_mapping.push_back(int64_t{blocks[static_cast<size_t>(position / block_size)]} *
                                    block_size +
                                position % block_size);
    if (WantsAllLogits(output) || (Samples(output) && position == end - 1)) {
      plan.logits_rows.push_back(row);
    }
    if (WantsPromptLogprobs(output)) {
      plan.logprob_targets.push_back(Samples(output) && position == end - 1 ? -1 : token);
    }
  }
  plan.request_slots.push_back(slot);
  plan.outputs.push_back(output);
  plan.seq_lens.push_back(end);
  plan.query_start_loc.push_back(static_cast<int32_t>(plan.token_ids.size()));
}

// A request with every adjustment in slot 3, another with prompt logprobs in slot 0; then a decode
// step whose tokens rank 0 does not know yet; then one slot is freed and taken again.
std::string PlanSequence(const PlanLimits& limits) {
  const auto block_size = static_cast<int32_t>(limits.block_size);
  std::string bytes = LimitsToBytes(limits);
  StepPlan plan;
  plan.step = 1;
  plan.new_requests = {{.seed = 99,
                        .temperature = 0.5,
                        .top_p = 0.9,
                        .min_p = 0.01,
                        .repetition_penalty = 1.1,
                        .frequency_penalty = 0.5,
                        .presence_penalty = -0.5,
                        .top_k = 40,
                        .slot = 3,
                        .prompt_length = 6,
                        .banned_below = 9,
                        .num_logprobs = 2,
                        .num_history = 6,
                        .num_bias = 2,
                        .num_banned = 1},
                       {.slot = 0, .prompt_length = 3, .num_prompt_logprobs = 1}};
  plan.history = {5, 5, 5, 5, 5, 5};
  plan.logit_bias = {{.bias = 2.5, .id = 40}, {.bias = -100, .id = 50}};
  plan.banned_ids = {60};
  plan.block_runs = {{.slot = 3, .first_index = 0, .count = 2},
                     {.slot = 0, .first_index = 0, .count = 2}};
  plan.blocks = {3, 1, 7, 8};
  plan.poisoned_blocks = {11};
  AddRows(plan, 3, 0, 6, {3, 1}, block_size, 5, StepOutput::kSample);
  AddRows(plan, 0, 0, 3, {7, 8}, block_size, 9, StepOutput::kPromptLogprobsAndSample);
  bytes += Encoded(plan);

  plan.Clear();
  plan.step = 2;
  plan.block_copies = {{.source = 8, .target = 9}};
  plan.block_runs = {{.slot = 0, .first_index = 1, .count = 1}};
  plan.blocks = {9};
  AddRows(plan, 3, 6, 7, {3, 1}, block_size, kLastSampledToken, StepOutput::kSample);
  AddRows(plan, 0, 3, 4, {7, 9}, block_size, kLastSampledToken, StepOutput::kSample);
  bytes += Encoded(plan);

  plan.Clear();
  plan.step = 3;
  plan.freed_slots = {3};
  plan.new_requests = {{.temperature = 1, .slot = 3, .prompt_length = 5, .num_computed = 2}};
  plan.block_runs = {{.slot = 3, .first_index = 0, .count = 2}};
  plan.blocks = {7, 20};
  AddRows(plan, 3, 2, 5, {7, 20}, block_size, 1, StepOutput::kScore);
  bytes += Encoded(plan);

  plan.Clear();
  plan.step = 4;
  plan.kind = StepKind::kHeartbeat;
  bytes += Encoded(plan);
  plan.kind = StepKind::kStop;
  return bytes + Encoded(plan);
}

void AddPlans(SeedFolder seeds) {
  PlanLimits limits = {.max_num_batched_tokens = 64,
                       .max_num_seqs = 4,
                       .max_model_len = 40,
                       .block_size = 4,
                       .num_blocks = 30,
                       .vocab_size = 97,
                       .max_logits_rows = 32};
  seeds.Add(PlanSequence(limits));
  limits.block_size = 8;
  limits.max_num_seqs = 16;
  seeds.Add(PlanSequence(limits));
}

// --- weight files and configs

void AddSafetensors(SeedFolder seeds) {
  const std::string zeros(32, '\0');
  seeds.Add(SafetensorsBytes({{"a", {"F32", {2, 4}, zeros}},
                              {"b", {"F16", {3, 2}, zeros.substr(0, 12)}},
                              {"c", {"BF16", {4}, zeros.substr(0, 8)}}}));
  seeds.Add(SafetensorsBytes({{"a", {"F8_E4M3", {2, 4}, zeros.substr(0, 8)}},
                              {"b", {"BF16", {2, 2, 2}, zeros.substr(0, 16)}},
                              {"c", {"F32", {}, zeros.substr(0, 4)}},
                              {"d", {"F32", {0, 4}, ""}}}));
}

// The least a reader asks for, with the tensors of `type`, whose rows of 256 values take
// `row_bytes`.
GgufBuilder TinyGguf(const std::string& arch, uint32_t type, size_t row_bytes) {
  GgufBuilder g;
  g.Set("general.architecture", Str(arch));
  g.Set("general.alignment", U32(32));
  for (const auto& [key, value] : {std::pair("embedding_length", 256),
                                   {"feed_forward_length", 4},
                                   {"block_count", 1},
                                   {"attention.head_count", 2},
                                   {"attention.head_count_kv", 1},
                                   {"context_length", 64},
                                   {"attention.key_length", 2},
                                   {"attention.value_length", 2},
                                   {"rope.dimension_count", 2}}) {
    g.Set(arch + "." + key, U32(static_cast<uint32_t>(value)));
  }
  g.Set(arch + ".attention.layer_norm_rms_epsilon", F32(1e-5f));
  const std::string row(row_bytes, '\1');
  const std::string rows = row + row + row + row;
  g.Add("token_embd.weight", {8, 256}, type, rows + rows);
  g.Add("blk.0.attn_q.weight", {4, 256}, type, rows);
  g.Add("blk.0.attn_k.bias", {2}, 0, std::string(8, '\0'));
  return g;
}

void AddGguf(SeedFolder seeds) {
  GgufBuilder g = TinyGguf("llama", 0, 1024);
  g.Set("llama.rope.scaling.type", Str("yarn"));
  g.Set("llama.rope.scaling.factor", F32(4));
  g.Set("llama.rope.scaling.original_context_length", U32(16));
  g.Set("tokenizer.ggml.model", Str("llama"));
  g.Set("tokenizer.ggml.tokens", StrArray({"<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "▁a"}));
  g.Set("tokenizer.ggml.scores", F32Array({0, 0, 0, 0, -1, -2, -3}));
  g.Set("tokenizer.ggml.token_type", I32Array({2, 3, 3, 6, 1, 1, 1}));
  g.Set("tokenizer.ggml.bos_token_id", U32(1));
  g.Set("tokenizer.ggml.add_bos_token", Bool(true));
  g.Set("tokenizer.chat_template", Str("{{ messages }}"));
  seeds.Add(g.Build());
  g = TinyGguf("qwen2", 1, 512);
  g.Set("tokenizer.ggml.model", Str("gpt2"));
  g.Set("tokenizer.ggml.pre", Str("qwen2"));
  g.Set("tokenizer.ggml.tokens", StrArray({"a", "b", "ab", "Ġ", "<|end|>"}));
  g.Set("tokenizer.ggml.token_type", I32Array({1, 1, 1, 1, 3}));
  g.Set("tokenizer.ggml.merges", StrArray({"a b"}));
  g.Set("tokenizer.ggml.eos_token_id", U32(4));
  seeds.Add(g.Build());
  // Type number and bytes of 256 values.
  for (const auto& [type, bytes] : std::vector<std::pair<uint32_t, size_t>>{{2, 144},
                                                                            {3, 160},
                                                                            {6, 176},
                                                                            {7, 192},
                                                                            {8, 272},
                                                                            {12, 144},
                                                                            {13, 176},
                                                                            {14, 210},
                                                                            {30, 512},
                                                                            {20, 144}}) {
    seeds.Add(TinyGguf("llama", type, bytes).Build());
  }
}

void AddConfigs(SeedFolder seeds) {
  seeds.Add(TestData("tiny-llama/config.json"));
  seeds.Add(TinyQwen3().dump());
  for (const char* rope :
       {R"({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64})",
        R"({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32,
            "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": false})",
        R"({"rope_type": "dynamic", "factor": 2.0})", R"({"type": "linear", "factor": 2.0})"}) {
    Json config = TinyQwen3();
    config["rope_scaling"] = Json::parse(rope);
    config["partial_rotary_factor"] = 0.5;
    config["sliding_window"] = 16;
    config["use_sliding_window"] = true;
    config["max_window_layers"] = 1;
    config["eos_token_id"] = {1, 2};
    seeds.Add(config.dump());
  }
  seeds.Add(R"({"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.05, "do_sample": true,
                "repetition_penalty": 1.1, "eos_token_id": [1, 2]})");
}

// --- text

void AddTokenizers(SeedFolder seeds) {
  const std::string text = std::string(1, '\0') + "a b  Hello, 42 straße\n<s>🦙";
  const Json byte_level = Json::parse(TestData("tokenizer/byte_level.json"));
  const Json byte_fallback = Json::parse(TestData("tokenizer/byte_fallback.json"));
  seeds.Add(byte_level.dump() + text);
  seeds.Add(byte_fallback.dump() + text);
  const auto with = [&](const char* key, const Json& value) {
    Json json = byte_level;
    json[key] = value;
    seeds.Add(json.dump() + text);
  };
  for (const char* type : {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"}) {
    with("normalizer", {{"type", type}});
  }
  const Json strip = {{"type", "Strip"}, {"strip_left", true}, {"strip_right", true}};
  const Json replace = {{"type", "Replace"}, {"pattern", {{"Regex", "\\s+"}}}, {"content", " "}};
  with("normalizer", {{"type", "Sequence"}, {"normalizers", {strip, replace}}});
  for (const char* behavior :
       {"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"}) {
    with("pre_tokenizer", {{"type", "Split"},
                           {"pattern", {{"Regex", "\\p{L}+|\\d{1,3}|\\s+(?!\\S)|\\b\\w"}}},
                           {"behavior", behavior},
                           {"invert", true}});
  }
  with("pre_tokenizer", {{"type", "WhitespaceSplit"}});
  with("pre_tokenizer", {{"type", "Whitespace"}});
  const Json digits = {{"type", "Digits"}, {"individual_digits", true}};
  const Json punctuation = {{"type", "Punctuation"}, {"behavior", "Isolated"}};
  const Json metaspace = {
      {"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "first"}, {"split", true}};
  with("pre_tokenizer",
       {{"type", "Sequence"}, {"pretokenizers", {digits, punctuation, metaspace}}});
  const Json sep = Json::array({"<|endoftext|>", 50256});
  with("post_processor", {{"type", "RobertaProcessing"},
                          {"sep", sep},
                          {"cls", sep},
                          {"trim_offsets", true},
                          {"add_prefix_space", false}});
  with("decoder", metaspace);
}

void AddTemplates(SeedFolder seeds) {
  const Json snippets = Json::parse(TestData("chat/snippets.json"));
  for (const Json& snippet : snippets.at("templates")) {
    seeds.Add(snippet.at("template").get<std::string>());
  }
}

// --- HTTP requests, behind a byte that says how they come

void AddRequests(SeedFolder folder) {
  const std::string chunked =
      "POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
  folder.Add("\x10GET /a%20b?c=d HTTP/1.1\r\nHost: a\r\nConnection: close, x\r\n\r\n");
  folder.Add(
      "\xffPOST / HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n{}"
      "HEAD http://a:1/?q HTTP/1.1\r\nHost: a\r\nX: folded\r\n line\r\n\r\n");
  folder.Add("\x03" + chunked + "5\r\nhello\r\n00A;x=\"y\"\r\n0123456789\r\n0\r\nT: u\r\n\r\n" +
             chunked + "0\r\n\r\n");
  folder.Add(
      "\x01OPTIONS * HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3, 3\r\n\r\n"
      "abcGET / HTTP/2.0\r\n\r\n");
}

// The first byte is the path: completions, chats, /tokenize, /detokenize.
void AddOpenAiCalls(SeedFolder seeds) {
  const char kPaths[] = {0, 1, 2, 3};
  const auto add = [&](size_t path, const char* body) {
    seeds.Add(std::string(1, kPaths[path]) + body);
  };
  add(0, R"({"model": "tiny", "prompt": "Hello cat 🦙", "max_tokens": 20, "temperature": 0})");
  add(0, R"({"prompt": [5, 269, 243, 162, 169, 156], "n": 2, "logprobs": 2, "echo": true})");
  add(0, R"({"prompt": [[5, 6], [7]], "stream": true, "stream_options": {"include_usage": true},
             "logprobs": 1, "stop": ["lo", "x"], "return_token_ids": true})");
  add(0, R"({"prompt": ["a", "b"], "max_tokens": 0, "echo": true, "logprobs": 0, "seed": -3})");
  add(0, R"({"prompt": "a", "top_p": 0.5, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
             "frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {"5": -100},
             "ignore_eos": true, "min_tokens": 1, "stop_token_ids": [7], "priority": -1,
             "cache_salt": "s", "user": "u", "prompt_logprobs": 1, "skip_special_tokens": false})");
  add(0, R"({"prompt": "a", "best_of": 2, "suffix": "b", "response_format": {"type": "text"}})");
  add(1, R"({"messages": [{"role": "system", "content": "be brief"},
             {"role": "user", "content": [{"type": "text", "text": "hi"}]}], "logprobs": true,
             "top_logprobs": 2, "max_completion_tokens": 9, "stream": true})");
  add(1, R"({"messages": [{"role": "user", "content": "<tool_call>{\"name\": \"f\"}</tool_call>"},
             {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function",
              "function": {"name": "f", "arguments": "{\"x\": [1]}"}}]},
             {"role": "tool", "tool_call_id": "c", "content": "4"}], "parallel_tool_calls": false,
             "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
             "tool_choice": "auto", "chat_template_kwargs": {"a": 1}, "modalities": ["text"]})");
  add(2, R"({"prompt": "Hello", "add_special_tokens": false, "return_token_strs": true})");
  add(2, R"({"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": false})");
  add(3, R"({"tokens": [5, 269]})");
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: make_seeds FOLDER\n");
    return 2;
  }
  using namespace lockstep;
  const std::string root = argv[1];
  AddPlans({root, "step_plan_fuzz"});
  AddSafetensors({root, "safetensors_fuzz"});
  AddGguf({root, "gguf_fuzz"});
  AddConfigs({root, "config_fuzz"});
  AddTokenizers({root, "tokenizer_fuzz"});
  AddTemplates({root, "chat_template_fuzz"});
  AddRequests({root, "http_request_fuzz"});
  AddOpenAiCalls({root, "openai_fuzz"});
  return 0;
}
