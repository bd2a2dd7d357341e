#include <algorithm>
#include <cmath>
#include <iterator>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "launch/bench/serve_bench.h"
#include "launch/command_specs.h"
#include "launch/option_setters.h"

namespace lockstep {

namespace {

constexpr const char* kGoodputMetrics[] = {"ttft", "tpot", "e2el"};

OptionSet StoreUrl(std::optional<BaseUrl>* target) {
  return [target](const std::string& text) {
    LOCKSTEP_ASSIGN_OR_RETURN(*target, ParseBaseUrl(text));
    return absl::OkStatus();
  };
}

OptionSet StoreRate(double* target) {
  return [target](const std::string& text) {
    if (text == "inf") {
      *target = std::numeric_limits<double>::infinity();
      return absl::OkStatus();
    }
    const absl::StatusOr<double> rate = ParseNumber(text);
    if (!rate.ok() || *rate <= 0) {
      return absl::InvalidArgumentError("it must be a number above 0, or inf");
    }
    *target = *rate;
    return absl::OkStatus();
  };
}

absl::Status UnknownMetric(const std::string& name, const std::string& known) {
  return absl::InvalidArgumentError(absl::StrFormat("there is no '%s'; known: %s", name, known));
}

OptionSet StoreMetrics(std::vector<std::string>* target) {
  return [target](const std::string& text) {
    std::vector<std::string> metrics = absl::StrSplit(text, ',');
    for (const std::string& metric : metrics) {
      if (std::find(std::begin(kServeMetrics), std::end(kServeMetrics), metric) ==
          std::end(kServeMetrics)) {
        return UnknownMetric(metric, absl::StrJoin(kServeMetrics, ", "));
      }
    }
    *target = std::move(metrics);
    return absl::OkStatus();
  };
}

OptionSet StorePercentiles(std::vector<double>* target) {
  return [target](const std::string& text) {
    std::vector<double> percentiles;
    for (const std::string& word : std::vector<std::string>(absl::StrSplit(text, ','))) {
      const absl::StatusOr<double> value = ParseNumber(word);
      if (!value.ok() || *value < 0 || *value > 100) {
        return absl::InvalidArgumentError("it must be numbers from 0 to 100 with commas: 50,99.9");
      }
      percentiles.push_back(*value);
    }
    *target = std::move(percentiles);
    return absl::OkStatus();
  };
}

// "ttft:200 tpot:50", also with commas.
OptionSet StoreGoodput(std::map<std::string, double>* target) {
  return [target](const std::string& text) {
    const std::vector<std::string> words =
        absl::StrSplit(text, absl::ByAnyChar(" ,"), absl::SkipEmpty());
    if (words.empty()) return absl::InvalidArgumentError("it names no limit");
    for (const std::string& word : words) {
      const size_t colon = word.find(':');
      const std::string name = word.substr(0, colon);
      if (std::find(std::begin(kGoodputMetrics), std::end(kGoodputMetrics), name) ==
          std::end(kGoodputMetrics)) {
        return UnknownMetric(name, absl::StrJoin(kGoodputMetrics, ", "));
      }
      const absl::StatusOr<double> limit =
          ParseNumber(colon == std::string::npos ? "" : word.substr(colon + 1));
      if (!limit.ok() || *limit < 0) {
        return absl::InvalidArgumentError(
            absl::StrFormat("%s: a limit is METRIC:MILLISECONDS, 0 or more", word));
      }
      (*target)[name] = *limit;
    }
    return absl::OkStatus();
  };
}

OptionGroup ServerGroup(ServeBenchOptions* options) {
  return {
      "Server",
      {{"--base-url", "URL", "http://HOST:PORT, with what stands in front of /v1, if anything.", "",
        false, StoreUrl(&options->server)},
       {"--model", "NAME", "What requests call the model.", "the first that the server lists",
        false, StoreText(&options->model)},
       {"--endpoint", "NAME", "completions or chat.", "completions", false,
        StoreChoice(&options->endpoint,
                    OptionChoices<BenchEndpoint>{{"completions", BenchEndpoint::kCompletions},
                                                 {"chat", BenchEndpoint::kChat},
                                                 {"/v1/completions", BenchEndpoint::kCompletions},
                                                 {"/v1/chat/completions", BenchEndpoint::kChat}})},
       {"--api-key", "KEY",
        "Sent with each request. Other users of the machine see command lines: the environment "
        "variable OPENAI_API_KEY is taken without this option.",
        "", false, StoreText(&options->api_key)},
       {"--connect-timeout", "SECONDS", "How long the server may take to answer at the start.",
        absl::StrCat(options->connect_seconds), false,
        StoreNumber(
            &options->connect_seconds, [](double x) { return x > 0 && x <= 1e6; },
            "above 0 and at most 1000000")},
       Flag("--no-test-request",
            "Send no short request beforehand, which finds out whether requests are answered and "
            "token ids are taken.",
            &options->test_request, false)}};
}

OptionGroup LoadGroup(ServeBenchOptions* options) {
  return {
      "Load",
      {{"--request-rate", "R",
        "Requests a second; inf: all at once. When each is sent is drawn beforehand, and does not "
        "wait for answers.",
        "inf", false, StoreRate(&options->request_rate)},
       {"--burstiness", "B",
        "Shape of the gamma distribution of the time between two requests: 1 is a Poisson process, "
        "less comes in bursts, more is more even.",
        "1", false,
        StoreNumber(
            &options->burstiness, [](double x) { return x >= 0.001 && x <= 1e6; },
            "0.001 to 1000000")},
       {"--max-concurrency", "N",
        "Most requests that are open at once; others wait for a place, and are sent late.",
        "no limit", false, StoreInt(&options->max_concurrency, 1, 1000000)},
       {"--request-timeout", "SECONDS", "A request that takes longer has failed; 0: no limit.",
        absl::StrCat(options->request_seconds), false,
        StoreNumber(
            &options->request_seconds, [](double x) { return x >= 0 && x <= 1e6; },
            "0 to 1000000")}}};
}

OptionGroup PromptGroup(ServeBenchOptions* options) {
  OptionGroup group = {
      "Prompts",
      {{"--prompts", "FILE",
        "A prompt a line, - for stdin, as generate takes them; chats need --endpoint chat.",
        "random prompts", false, StoreText(&options->prompts)},
       {"--num-prompts", "N", "So many random prompts, or the first N of the file.",
        absl::StrCat(options->random.num_prompts, ", or all of the file"), false,
        StoreInt(&options->num_prompts, 1, 100000000)}}};
  for (Option& option : LengthOptions(&options->random.input_len, &options->random.output_len)) {
    group.options.push_back(std::move(option));
  }
  group.options.push_back(DistributionOption(&options->random.distribution));
  group.options.push_back(
      {"--vocab-size", "V",
       "Random prompts are token ids from 3 up to V - 1. Where the server takes no ids, and in "
       "chats, they are words, and --input-len is met roughly.",
       absl::StrCat(options->vocab_size), false, StoreInt(&options->vocab_size, 4, INT32_MAX)});
  group.options.push_back(Flag("--ignore-eos",
                               "Ask for answers that go on behind end tokens. The default of "
                               "random prompts.",
                               &options->ignore_eos));
  group.options.push_back(Flag("--no-ignore-eos", "Do not, for servers that do not know it.",
                               &options->ignore_eos, false));
  group.options.push_back(SeedOption(&options->seed));
  return group;
}

OptionGroup ResultGroup(ServeBenchOptions* options) {
  return {
      "Results",
      {{"--percentile-metrics", "LIST", "Of ttft, tpot, itl and e2el, with commas.",
        "ttft,tpot,itl,e2el", false, StoreMetrics(&options->metrics)},
       {"--metric-percentiles", "LIST", "Which percentiles of them, with commas.", "90,99", false,
        StorePercentiles(&options->percentiles)},
       {"--goodput", "LIMITS",
        "METRIC:MS ...: also count the requests that meet all of these limits, of ttft, tpot and "
        "e2el, in milliseconds.",
        "", false, StoreGoodput(&options->goodput_ms)},
       Flag("--json", "One JSON object instead of a table.", &options->json),
       Flag("--save-result", "Write the JSON object to a file, too.", &options->save_result),
       Flag("--save-detailed",
            "The object holds lists with an entry for each request: input_lens, output_lens, "
            "ttfts, itls, generated_texts, errors, arrival_times, send_times.",
            &options->save_detailed),
       {"--result-dir", "FOLDER", "Where --save-result writes.", "the current folder", false,
        StoreText(&options->result_dir)},
       {"--result-filename", "NAME", "The file's name. A file of that name is replaced.",
        "made from endpoint, rate, model and date", false, StoreText(&options->result_filename)}}};
}

}  // namespace

CommandSpec ServeBenchSpec(ServeBenchOptions* options) {
  return {"bench serve",
          "",
          "an open-loop load on a running server of OpenAI's API",
          "Sends streaming requests to a server, be it Lockstep's or another, and measures here,\n"
          "where the client is: ttft from sending a request (its connection included) to the\n"
          "arrival of its first token; itl between arrivals; e2el to the last; tpot =\n"
          "(e2el - ttft) / (output tokens - 1). Tokens are counted by the server's usage, without\n"
          "it by events. Lateness is from a request's place in the schedule to its sending.\n"
          "Names in the JSON object are those of `vllm bench serve`; its values without a sample\n"
          "are null here. https is not spoken.\n",
          {ServerGroup(options), LoadGroup(options), PromptGroup(options), ResultGroup(options)},
          "Examples:\n"
          "  lockstep bench serve --base-url http://127.0.0.1:8000 --request-rate 4 \\\n"
          "      --num-prompts 100 --input-len 256 --output-len 64 --goodput ttft:500 tpot:50\n"
          "  lockstep bench serve --base-url http://127.0.0.1:8000 --endpoint chat \\\n"
          "      --prompts in.jsonl --max-concurrency 16 --json\n\n"
          "Exit status: 0 done; 2 refused before the load (command line, prompts, no server);\n"
          "1 some requests have failed, after the results were printed.\n",
          nullptr};
}

absl::Status CheckServeBench(const ServeBenchOptions& options) {
  if (!options.server.has_value()) return absl::InvalidArgumentError("--base-url is missing");
  if (options.save_result) return absl::OkStatus();
  if (!options.result_dir.empty() || !options.result_filename.empty()) {
    return absl::InvalidArgumentError("--result-dir and --result-filename need --save-result");
  }
  if (options.save_detailed && !options.json) {
    return absl::InvalidArgumentError("--save-detailed needs --save-result or --json");
  }
  return absl::OkStatus();
}

}  // namespace lockstep
