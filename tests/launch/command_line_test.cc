#include "launch/command_line.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "runtime/core/cuda_device.h"

namespace lockstep {
namespace {

using Args = std::vector<std::string>;

template <typename Options>
Options Parse(const Args& args) {
  const absl::StatusOr<Command> command = ParseCommandLine(args);
  EXPECT_TRUE(command.ok()) << command.status();
  if (!command.ok() || !std::holds_alternative<Options>(*command)) {
    ADD_FAILURE() << "not the command expected";
    return Options();
  }
  return std::get<Options>(*command);
}

std::string Refusal(const Args& args) {
  const absl::StatusOr<Command> command = ParseCommandLine(args);
  return command.ok() ? "accepted" : std::string(command.status().message());
}

// The first line of the refusal when `extra` follows a valid generate command.
std::string GenerateRefusal(const Args& extra) {
  Args args = {"generate", "model", "--prompt", "x"};
  args.insert(args.end(), extra.begin(), extra.end());
  const std::string message = Refusal(args);
  return message.substr(0, message.find('\n'));
}

TEST(CommandLine, GenerateDefaults) {
  const auto options = Parse<GenerateOptions>({"generate", "model", "--prompt", "x"});
  EXPECT_EQ(options.engine.model, "model");
  EXPECT_EQ(options.engine.load_format, LoadFormat::kAuto);
  EXPECT_FALSE(options.engine.dtype.has_value());
  EXPECT_EQ(options.engine.engine.num_threads, 0);
  EXPECT_EQ(options.engine.engine.block_size, 16);
  EXPECT_FALSE(options.sampling.temperature.has_value());
  EXPECT_FALSE(options.sampling.seed.has_value());
  EXPECT_FALSE(options.sampling.max_tokens.has_value());
  EXPECT_TRUE(options.engine.engine.enable_prefix_caching);
  EXPECT_FALSE(options.engine.engine.poison_freed_blocks);
  EXPECT_TRUE(options.engine.use_generation_config);
  EXPECT_FALSE(options.json);
}

TEST(CommandLine, Watchdog) {
  const auto seconds = [](const Args& extra) {
    Args args = {"serve", "model"};
    args.insert(args.end(), extra.begin(), extra.end());
    return Parse<ServeOptions>(args).engine.watchdog_seconds;
  };
  EXPECT_EQ(seconds({}), 60);
  EXPECT_EQ(seconds({"--watchdog-seconds", "0"}), 0);
  EXPECT_EQ(seconds({"--watchdog-seconds", "2.5"}), 2.5);
  EXPECT_NE(GenerateRefusal({"--watchdog-seconds", "0.5"}).find("--watchdog-seconds"),
            std::string::npos);
  EXPECT_NE(GenerateRefusal({"--watchdog-seconds", "nan"}).find("--watchdog-seconds"),
            std::string::npos);
  // Ranks that would wait for each other for different times are refused.
  EXPECT_EQ(Parse<ServeOptions>({"serve", "model", "--watchdog-seconds", "7"})
                .engine.given.at("--watchdog-seconds"),
            "7");
}

TEST(CommandLine, GenerateTakesEveryOption) {
  const auto options = Parse<GenerateOptions>({"generate",  "--max-tokens=5",
                                               "model",     "--ids",
                                               "1, 2,3",    "--temperature",
                                               "0.5",       "--top-p=1",
                                               "--top-k",   "7",
                                               "--seed",    "18446744073709551615",
                                               "--stop",    "a",
                                               "--stop=b",  "--ignore-eos",
                                               "--dtype",   "bfloat16",
                                               "--threads", "3",
                                               "--json",    "--max-model-len",
                                               "64",        "--max-num-seqs",
                                               "4",         "--max-num-batched-tokens",
                                               "7",         "--block-size",
                                               "32",        "--load-format",
                                               "dummy",     "--generation-config",
                                               "none",      "--kv-cache-memory",
                                               "2M",        "--attention-backend",
                                               "cpu",       "--device",
                                               "cpu",       "--log-level",
                                               "debug",     "--tp",
                                               "2"});
  EXPECT_EQ(options.prompts.at(0).ids, (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(options.sampling.max_tokens, 5);
  EXPECT_EQ(options.sampling.temperature, 0.5);
  EXPECT_EQ(options.sampling.top_p, 1.0);
  EXPECT_EQ(options.sampling.top_k, 7);
  EXPECT_EQ(options.sampling.seed, UINT64_MAX);
  EXPECT_EQ(options.sampling.stop, (Args{"a", "b"}));
  EXPECT_TRUE(options.sampling.ignore_eos);
  EXPECT_EQ(options.engine.dtype, DType::kBF16);
  EXPECT_EQ(options.engine.engine.num_threads, 3);
  EXPECT_TRUE(options.json);
  EXPECT_EQ(options.engine.engine.max_model_len, 64);
  EXPECT_EQ(options.engine.engine.max_num_seqs, 4);
  EXPECT_EQ(options.engine.engine.max_num_batched_tokens, 7);
  EXPECT_EQ(options.engine.engine.block_size, 32);
  EXPECT_EQ(options.engine.load_format, LoadFormat::kDummy);
  EXPECT_FALSE(options.engine.use_generation_config);
  EXPECT_EQ(options.engine.engine.kv_cache_memory_bytes, 2 << 20);
  EXPECT_EQ(options.engine.engine.attention_backend, "cpu");
  EXPECT_EQ(options.engine.log_level, LogLevel::kDebug);
  EXPECT_EQ(options.engine.tp, 2);
}

TEST(CommandLine, ServeDefaultsAndOptions) {
  const auto defaults = Parse<ServeOptions>({"serve", "model/"});
  EXPECT_EQ(defaults.engine.model, "model");
  EXPECT_EQ(defaults.host, "127.0.0.1");
  EXPECT_EQ(defaults.port, 8000);
  EXPECT_TRUE(defaults.served_model_names.empty());
  EXPECT_TRUE(defaults.api_keys.empty());
  EXPECT_EQ(defaults.request_timeout_seconds, 0);
  EXPECT_EQ(defaults.drain_seconds, 30);
  EXPECT_TRUE(defaults.engine.use_generation_config);

  const auto options = Parse<ServeOptions>({"serve",
                                            "m",
                                            "--host",
                                            "::",
                                            "--port=0",
                                            "--api-key",
                                            "k1",
                                            "--api-key=k2",
                                            "--max-queue",
                                            "0",
                                            "--served-model-name",
                                            "a",
                                            "--served-model-name",
                                            "b",
                                            "--chat-template",
                                            "t.jinja",
                                            "--request-timeout",
                                            "1.5",
                                            "--drain-seconds",
                                            "0",
                                            "--load-format",
                                            "null",
                                            "--null-step-ms",
                                            "2.5",
                                            "--max-num-seqs",
                                            "9",
                                            "--generation-config",
                                            "none"});
  EXPECT_EQ(options.host, "::");
  EXPECT_EQ(options.port, 0);
  EXPECT_EQ(options.api_keys, (Args{"k1", "k2"}));
  EXPECT_EQ(options.served_model_names, (Args{"a", "b"}));
  EXPECT_EQ(options.chat_template, "t.jinja");
  EXPECT_EQ(options.max_queue, 0);
  EXPECT_EQ(options.request_timeout_seconds, 1.5);
  EXPECT_EQ(options.drain_seconds, 0);
  EXPECT_EQ(options.engine.load_format, LoadFormat::kNull);
  EXPECT_EQ(options.engine.null_step_ms, 2.5);
  EXPECT_EQ(options.engine.engine.max_num_seqs, 9);
  EXPECT_FALSE(options.engine.use_generation_config);

  for (const Args& bad : {Args{"--port", "65536"}, Args{"--api-key", ""}, Args{"--max-queue", "-1"},
                          Args{"--drain-seconds", "nan"}, Args{"--request-timeout", "-1"}}) {
    EXPECT_NE(Refusal({"serve", "m", bad[0], bad[1]}).find(bad[0]), std::string::npos) << bad[0];
  }
}

TEST(CommandLine, SuperviseTakesWhatFollowsTheDashes) {
  EXPECT_EQ(Parse<SuperviseOptions>({"supervise", "--", "x"}).max_restarts, 3);
  const auto options = Parse<SuperviseOptions>(
      {"supervise", "--restarts", "7", "--", "mpirun", "-np", "2", "lockstep", "--help", "--"});
  EXPECT_EQ(options.max_restarts, 7);
  EXPECT_EQ(options.command, (Args{"mpirun", "-np", "2", "lockstep", "--help", "--"}));
  const std::string usage = "lockstep supervise [options] -- COMMAND [ARG...]";
  EXPECT_EQ(Parse<HelpOptions>({"help", "supervise"}).text.find("Usage: " + usage), 0u);
  const std::string hint = "\nTry 'lockstep help supervise'.";
  EXPECT_EQ(Refusal({"supervise"}), "nothing follows --: " + usage + hint);
  EXPECT_EQ(Refusal({"supervise", "--", ""}), "nothing follows --: " + usage + hint);
  EXPECT_EQ(Refusal({"supervise", "a", "--", "b"}),
            "unexpected argument 'a' in front of --: " + usage + hint);
  EXPECT_EQ(Refusal({"supervise", "--restarts", "-1", "--", "b"}).find("--restarts -1: "), 0u);
  EXPECT_EQ(Refusal({"serve", "m", "--restarts", "4"}),
            "--restarts 4: ranks cannot be started again from within: write bash launch/run.sh -n "
            "RANKS serve MODEL ... --restarts 4, or lockstep supervise --restarts 4 -- mpirun -np "
            "RANKS lockstep serve MODEL ...\nTry 'lockstep help serve'.");
}

TEST(CommandLine, GenerateTakesEverySamplingAndEngineOption) {
  const auto options = Parse<GenerateOptions>({"generate",
                                               "m",
                                               "--prompts",
                                               "-",
                                               "--min-p",
                                               "0.25",
                                               "--presence-penalty",
                                               "-2",
                                               "--frequency-penalty=2",
                                               "--repetition-penalty",
                                               "1.5",
                                               "--logit-bias",
                                               "{\"7\": -100, \"12\": 2.5}",
                                               "--stop-token-ids",
                                               "3,4",
                                               "--min-tokens",
                                               "9",
                                               "--n",
                                               "1024",
                                               "--logprobs",
                                               "0",
                                               "--prompt-logprobs",
                                               "128",
                                               "--json",
                                               "--no-enable-prefix-caching",
                                               "--num-gpu-blocks-override",
                                               "12",
                                               "--poison-freed-blocks",
                                               "--step-log",
                                               "s"});
  EXPECT_EQ(options.prompts.at(0).kind, PromptInput::Kind::kLines);
  EXPECT_EQ(options.sampling.min_p, 0.25);
  EXPECT_EQ(options.sampling.presence_penalty, -2.0);
  EXPECT_EQ(options.sampling.frequency_penalty, 2.0);
  EXPECT_EQ(options.sampling.repetition_penalty, 1.5);
  using Bias = std::vector<std::pair<int32_t, double>>;
  ASSERT_TRUE(options.sampling.logit_bias.has_value());
  Bias bias = *options.sampling.logit_bias;
  std::sort(bias.begin(), bias.end());
  EXPECT_EQ(bias, (Bias{{7, -100}, {12, 2.5}}));
  EXPECT_EQ(options.sampling.stop_token_ids, (std::vector<int32_t>{3, 4}));
  EXPECT_EQ(options.sampling.min_tokens, 9);
  EXPECT_EQ(options.sampling.n, 1024);
  EXPECT_EQ(options.sampling.num_logprobs, 0);
  EXPECT_EQ(options.sampling.num_prompt_logprobs, 128);
  EXPECT_FALSE(options.engine.engine.enable_prefix_caching);
  EXPECT_EQ(options.engine.engine.num_gpu_blocks_override, 12);
  EXPECT_TRUE(options.engine.engine.poison_freed_blocks);
  EXPECT_EQ(options.engine.engine.step_log, "s");
  EXPECT_TRUE(Parse<ScoreOptions>({"score", "m", "--ids", "1", "--no-enable-prefix-caching",
                                   "--enable-prefix-caching"})
                  .engine.engine.enable_prefix_caching);
}

TEST(CommandLine, PromptsKeepOrderAndBytes) {
  const auto options = Parse<GenerateOptions>({"generate", "m", "--prompt", "[a, b]", "--ids", "4",
                                               "--prompt-file", "f", "--prompt={}", "--prompt",
                                               "-1", "--prompt=--json", "--prompt", " \"x\"=\n"});
  ASSERT_EQ(options.prompts.size(), 7u);
  EXPECT_EQ(options.prompts[0].text, "[a, b]");
  EXPECT_EQ(options.prompts[1].kind, PromptInput::Kind::kIds);
  EXPECT_EQ(options.prompts[2].kind, PromptInput::Kind::kFile);
  EXPECT_EQ(options.prompts[3].text, "{}");
  EXPECT_EQ(options.prompts[4].text, "-1");
  EXPECT_EQ(options.prompts[5].text, "--json");
  EXPECT_EQ(options.prompts[6].text, " \"x\"=\n");
  EXPECT_FALSE(options.json);
}

TEST(CommandLine, LastValueCounts) {
  const auto options =
      Parse<GenerateOptions>({"generate", "m", "--prompt", "x", "--max-tokens", "3",
                              "--max-tokens=9", "--dtype", "float32", "--dtype", "auto"});
  EXPECT_EQ(options.sampling.max_tokens, 9);
  EXPECT_FALSE(options.engine.dtype.has_value());
}

TEST(CommandLine, TopKIsOffWithZeroAndMinusOne) {
  for (const char* off : {"0", "-1"}) {
    const auto options = Parse<GenerateOptions>({"generate", "m", "--prompt", "x", "--top-k", off});
    EXPECT_EQ(options.sampling.top_k, 0);
  }
}

TEST(CommandLine, TrailingSlashesOfTheModelAreDropped) {
  EXPECT_EQ(Parse<GenerateOptions>({"generate", "a/b//", "--prompt", "x/"}).engine.model, "a/b");
  EXPECT_EQ(Parse<GenerateOptions>({"generate", "a/b//", "--prompt", "x/"}).prompts[0].text, "x/");
  EXPECT_EQ(Parse<ScoreOptions>({"score", "./m/", "--ids", "1"}).engine.model, "./m");
  EXPECT_EQ(Parse<TokenizeOptions>({"tokenize", "m/"}).model, "m");
  EXPECT_EQ(Parse<PlanOptions>({"plan", "/m/"}).model, "/m");
  EXPECT_EQ(Parse<PlanOptions>({"plan", "//"}).model, "/");
}

TEST(CommandLine, ValuesOutOfRangeAreNamed) {
  EXPECT_EQ(GenerateRefusal({"--max-tokens", "0"}), "--max-tokens 0: it must be 1 or more");
  EXPECT_EQ(GenerateRefusal({"--max-tokens", "9223372036854775808"}),
            "--max-tokens 9223372036854775808: it must be 1 or more");
  EXPECT_EQ(GenerateRefusal({"--max-tokens=2.5"}),
            "--max-tokens 2.5: not an integer; it must be 1 or more");
  EXPECT_EQ(GenerateRefusal({"--temperature", "-0.1"}), "--temperature -0.1: it must be 0 or more");
  EXPECT_EQ(GenerateRefusal({"--temperature", "nan"}), "--temperature nan: not a finite number");
  EXPECT_EQ(GenerateRefusal({"--temperature", "inf"}), "--temperature inf: not a finite number");
  EXPECT_EQ(GenerateRefusal({"--temperature", "1e999"}),
            "--temperature 1e999: not a finite number");
  EXPECT_EQ(GenerateRefusal({"--temperature", "warm"}), "--temperature warm: not a number");
  EXPECT_EQ(GenerateRefusal({"--top-p", "0"}), "--top-p 0: it must be above 0 and at most 1");
  EXPECT_EQ(GenerateRefusal({"--top-p", "1.01"}), "--top-p 1.01: it must be above 0 and at most 1");
  EXPECT_EQ(GenerateRefusal({"--top-k", "-2"}), "--top-k -2: it must be -1 or more");
  EXPECT_EQ(GenerateRefusal({"--seed", "18446744073709551616"}),
            "--seed 18446744073709551616: it must be an integer between 0 and 2^64 - 1");
  EXPECT_EQ(GenerateRefusal({"--seed", "-1"}),
            "--seed -1: it must be an integer between 0 and 2^64 - 1");
  EXPECT_EQ(GenerateRefusal({"--min-p", "1.1"}), "--min-p 1.1: it must be between 0 and 1");
  EXPECT_EQ(GenerateRefusal({"--repetition-penalty", "0"}),
            "--repetition-penalty 0: it must be between 1e-6 and 1e6");
  for (const std::string name : {"--presence-penalty", "--frequency-penalty"}) {
    EXPECT_EQ(GenerateRefusal({name, "2.1"}), name + " 2.1: it must be between -2 and 2");
  }
  EXPECT_EQ(GenerateRefusal({"--n", "0"}), "--n 0: it must be between 1 and 1024");
  EXPECT_EQ(GenerateRefusal({"--n", "1025"}), "--n 1025: it must be between 1 and 1024");
  for (const std::string name : {"--logprobs", "--prompt-logprobs"}) {
    EXPECT_EQ(GenerateRefusal({"--json", name, "129"}),
              name + " 129: it must be between 0 and 128");
    EXPECT_EQ(GenerateRefusal({name, "1"}), name + " needs --json: plain text has no place for it");
  }
  EXPECT_EQ(GenerateRefusal({"--min-tokens", "-1"}), "--min-tokens -1: it must be 0 or more");
  EXPECT_EQ(GenerateRefusal({"--min-tokens", "129"}),
            "--min-tokens 129 is more than --max-tokens 128");
  EXPECT_EQ(GenerateRefusal({"--logit-bias="}).find("--logit-bias '': the value: not valid JSON"),
            0u);
  EXPECT_EQ(GenerateRefusal({"--logit-bias", "[1]"}),
            "--logit-bias [1]: it must be a JSON object: {\"ID\": BIAS, ...}");
  EXPECT_EQ(GenerateRefusal({"--logit-bias", "{\"x\": 1}"}),
            "--logit-bias {\"x\": 1}: the key 'x' is no token id: an integer of 0 or more");
  for (const std::string bias : {"100.5", "\"1\"", "null"}) {
    EXPECT_EQ(GenerateRefusal({"--logit-bias={\"1\": " + bias + "}"}),
              "--logit-bias {\"1\": " + bias + "}: the bias of id 1 is " + bias +
                  ": it must be a number between -100 and 100");
  }
  EXPECT_EQ(GenerateRefusal({"--logit-bias", "{\"1\": 1, \"01\": 1}"}),
            "--logit-bias {\"1\": 1, \"01\": 1}: id 1 is there twice");
  EXPECT_EQ(GenerateRefusal({"--num-gpu-blocks-override", "0"}),
            "--num-gpu-blocks-override 0: it must be between 1 and 2147483647");
  EXPECT_EQ(GenerateRefusal({"--threads", "0"}), "--threads 0: it must be between 1 and 1024");
  EXPECT_EQ(GenerateRefusal({"--block-size", "24"}),
            "--block-size 24: it must be a power of two between 1 and 256");
  EXPECT_EQ(
      GenerateRefusal({"--kv-cache-memory", "0"}),
      "--kv-cache-memory 0: it must be a positive number of bytes, such as 536870912, 512M or "
      "8G");
  EXPECT_EQ(GenerateRefusal({"--kv-cache-memory", "9000000T"}),
            "--kv-cache-memory 9000000T: it must be a positive number of bytes, such as 536870912, "
            "512M or 8G");
  EXPECT_EQ(GenerateRefusal({"--kv-cache-dtype", "int8"}),
            "--kv-cache-dtype int8: it must be one of: auto, float32, float16, bfloat16, fp8, "
            "fp8_e4m3");
  EXPECT_EQ(GenerateRefusal({"--dtype", "float16"}),
            "--dtype float16: it must be one of: auto, float32, bfloat16");
  EXPECT_EQ(GenerateRefusal({"--device", "cuda"}),
            BuiltWithCuda() ? "accepted" : "--device cuda: this lockstep was built without CUDA");
  EXPECT_EQ(GenerateRefusal({"--prompt", ""}), "--prompt '': it is an empty string");
  EXPECT_EQ(
      GenerateRefusal({"--ids", "1,2,x"}),
      "--ids 1,2,x: entry 3 is 'x'; token ids are integers of 0 or more, separated by commas: "
      "1,2,3");
  EXPECT_EQ(GenerateRefusal({"--ids", "7,"}).substr(0, 22), "--ids 7,: entry 2 is '");
  EXPECT_EQ(GenerateRefusal({"--ids", "2147483648"}).substr(0, 40),
            "--ids 2147483648: entry 1 is '2147483648");
}

TEST(CommandLine, UnknownNamesGetTheNearest) {
  EXPECT_EQ(GenerateRefusal({"--max-token", "5"}),
            "generate has no option --max-token; did you mean --max-tokens?");
  EXPECT_EQ(GenerateRefusal({"--max_tokens=5"}),
            "generate has no option --max_tokens; did you mean --max-tokens?");
  EXPECT_EQ(GenerateRefusal({"--tmperature", "5"}),
            "generate has no option --tmperature; did you mean --temperature?");
  EXPECT_EQ(GenerateRefusal({"--zzzzzzzzz"}), "generate has no option --zzzzzzzzz");
  EXPECT_EQ(GenerateRefusal({"-n", "5"}), "generate has no option -n; did you mean --n?");
  EXPECT_EQ(Refusal({"genrate"}),
            "there is no command 'genrate'; did you mean generate?\nTry 'lockstep help'.");
  EXPECT_EQ(Refusal({"help", "scor"}),
            "there is no command 'scor'; did you mean score?\nTry 'lockstep help'.");
}

TEST(CommandLine, MissingAndSurplusPieces) {
  EXPECT_EQ(Refusal({}), "no command given\nTry 'lockstep help'.");
  EXPECT_EQ(Refusal({"generate", "--prompt", "x"}),
            "MODEL is missing: lockstep generate MODEL [options]\nTry 'lockstep help generate'.");
  EXPECT_EQ(
      Refusal({"generate", "m"}),
      "no prompt: give --prompt, --prompt-file, --ids or --prompts\nTry 'lockstep help generate'.");
  EXPECT_EQ(GenerateRefusal({"more"}), "unexpected argument 'more'; MODEL is already 'model'");
  EXPECT_EQ(GenerateRefusal({"--", "--json"}),
            "unexpected argument '--json'; did you mean --json?");
  EXPECT_EQ(GenerateRefusal({"--max-tokens"}), "--max-tokens needs a value: --max-tokens N");
  EXPECT_EQ(GenerateRefusal({"--prompt", "--json"}),
            "--prompt needs a value, but the option --json follows; if that is the value, write "
            "--prompt=--json");
  EXPECT_EQ(GenerateRefusal({"--json=1"}), "--json takes no value");
  EXPECT_EQ(GenerateRefusal({"--chat", "--ids", "1"}),
            "--chat and --ids exclude each other: ids are used as they are");
  EXPECT_EQ(GenerateRefusal({"--prompts", "-", "--prompts", "-"}),
            "--prompts - is there twice: stdin can be read once");
  // A line of the file may allow more tokens.
  EXPECT_EQ(GenerateRefusal({"--prompts", "f", "--min-tokens", "129"}), "accepted");
  EXPECT_EQ(Refusal({"plan", "m", "--memory-gib", "1", "--kv-cache-memory", "1G"}),
            "--memory-gib, which holds the weights too, and --kv-cache-memory exclude each "
            "other\nTry 'lockstep help plan'.");
  EXPECT_EQ(Refusal({"score", "m"}),
            "no input: give --ids or --text-file\nTry 'lockstep help score'.");
  EXPECT_EQ(Refusal({"score", "m", "--ids", "1", "--text-file", "f"}),
            "--ids and --text-file exclude each other\nTry 'lockstep help score'.");
  EXPECT_EQ(Refusal({"version", "x"}),
            "unexpected argument 'x'; version takes options alone\nTry 'lockstep help version'.");
}

TEST(CommandLine, HelpNamesEveryOption) {
  const std::string general = Parse<HelpOptions>({"help"}).text;
  EXPECT_EQ(Parse<HelpOptions>({"--help"}).text, general);
  for (const char* command :
       {"generate", "score", "supervise", "tokenize", "plan", "version", "help"}) {
    EXPECT_NE(general.find(command), std::string::npos) << command;
    const std::string help = Parse<HelpOptions>({"help", command}).text;
    EXPECT_EQ(help.find("Usage: lockstep " + std::string(command)), 0u) << help;
    EXPECT_EQ(Parse<HelpOptions>({command, "--nonsense", "--help"}).text, help);
  }
  const std::string help = Parse<HelpOptions>({"help", "generate"}).text;
  for (const char* piece : {"--prompt TEXT",
                            "--prompt-file FILE",
                            "--ids",
                            "--chat",
                            "--max-tokens N",
                            "[default: 128]",
                            "--temperature X",
                            "--top-p X",
                            "--top-k N",
                            "--seed S",
                            "--stop TEXT",
                            "--ignore-eos",
                            "--dtype TYPE",
                            "--threads T",
                            "--json",
                            "finish_reason: stop, length,",
                            "(without the end token",
                            "--max-model-len",
                            "--max-num-seqs",
                            "--max-num-batched-tokens",
                            "--block-size",
                            "--load-format",
                            "--generation-config",
                            "--kv-cache-memory",
                            "--prompts FILE",
                            "--logit-bias JSON",
                            "--no-enable-prefix-caching",
                            "--step-log FILE",
                            "mpirun -np 2",
                            "Exit status"}) {
    EXPECT_NE(help.find(piece), std::string::npos) << piece;
  }
  size_t begin = 0;
  for (size_t end = help.find('\n'); end != std::string::npos; end = help.find('\n', begin)) {
    EXPECT_LE(end - begin, 84u) << help.substr(begin, end - begin);
    begin = end + 1;
  }
}

TEST(CommandLine, BenchKinds) {
  const auto latency =
      Parse<BenchOptions>({"bench", "latency", "m/", "--batch-size=4", "--dtype", "float32"});
  EXPECT_STREQ(latency.kind->name, "latency");
  EXPECT_TRUE(latency.kind->takes_ranks);
  EXPECT_EQ(latency.latency.engine.model, "m");
  EXPECT_EQ(latency.latency.engine.command, "bench latency");
  EXPECT_EQ(latency.latency.engine.dtype, DType::kF32);
  EXPECT_EQ(latency.latency.batch_size, 4);

  const auto throughput = Parse<BenchOptions>(
      {"bench", "throughput", "m", "--length-distribution", "uniform:0.5", "--num-prompts", "7"});
  EXPECT_TRUE(throughput.kind->takes_ranks);
  EXPECT_EQ(throughput.throughput.num_prompts, 7);
  EXPECT_EQ(throughput.throughput.random.distribution.spread, 0.5);

  // One option with several values, as vLLM's command takes them.
  const auto serve = Parse<BenchOptions>({"bench", "serve", "--base-url", "http://h:1", "--goodput",
                                          "ttft:100", "tpot:20.5", "--request-rate=inf"});
  EXPECT_FALSE(serve.kind->takes_ranks);
  EXPECT_EQ(serve.serve.server->port, 1);
  EXPECT_EQ(serve.serve.goodput_ms, (std::map<std::string, double>{{"ttft", 100}, {"tpot", 20.5}}));
}

TEST(CommandLine, BenchHelpAndRefusals) {
  const std::string kinds = Parse<HelpOptions>({"help", "bench"}).text;
  EXPECT_EQ(Parse<HelpOptions>({"bench", "--help"}).text, kinds);
  EXPECT_NE(Parse<HelpOptions>({"help"}).text.find("bench"), std::string::npos);
  for (const char* kind : {"latency", "throughput", "serve"}) {
    EXPECT_NE(kinds.find(kind), std::string::npos);
    EXPECT_EQ(Parse<HelpOptions>({"bench", kind, "--help"}).text.find("Usage: lockstep bench "),
              0u);
  }
  EXPECT_EQ(Refusal({"bench", "throuhgput"}),
            "there is no benchmark 'throuhgput', did you mean throughput?; known: latency, "
            "throughput, serve, collectives\nTry 'lockstep help bench'.");
  EXPECT_EQ(Refusal({"bench", "serve", "x"}),
            "unexpected argument 'x'; bench serve takes options alone\nTry 'lockstep bench serve "
            "--help'.");
  EXPECT_EQ(Refusal({"bench", "latency", "m", "--batch-size", "300"}),
            "--batch-size 300 is more than --max-num-seqs 256: they would not run side by side\n"
            "Try 'lockstep bench latency --help'.");
}

TEST(CommandLine, HelpIsNotTakenForAValue) {
  EXPECT_EQ(Parse<HelpOptions>({"generate", "m", "--prompt", "--help"}).text,
            Parse<HelpOptions>({"help", "generate"}).text);
}

}  // namespace
}  // namespace lockstep
