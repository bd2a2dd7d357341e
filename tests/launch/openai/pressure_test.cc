// B23: an answer is the same whether its request was preempted or not.
#include <gtest/gtest.h>

#include "runtime/engine.h"
#include "tests/launch/openai/api_harness.h"
#include "tests/runtime/engine_test_util.h"

namespace lockstep {
namespace {

// Six requests of 64 + 64 tokens, streaming, with logprobs. All their answers.
std::vector<Json> AnswersWith(int64_t num_blocks, int64_t* num_preemptions) {
  HarnessOptions options;
  options.config = TinyConfig();
  const ModelSource source = TinySource(options.config);
  options.make_engine = [&](Communicator& communicator) {
    EngineOptions engine;
    engine.num_gpu_blocks_override = num_blocks;
    engine.max_num_seqs = 8;
    engine.max_num_batched_tokens = 128;
    return Engine::Create(source, engine, communicator);
  };
  ApiHarness harness(std::move(options));
  std::vector<ApiHarness::Client> clients;
  for (int i = 0; i < 6; ++i) {
    std::vector<int32_t> prompt;
    for (int j = 0; j < 64; ++j) prompt.push_back((7 * i + j * (i + 1)) % 101);
    Json body = {{"prompt", prompt},
                 {"max_tokens", 64},
                 {"temperature", i % 2 == 0 ? 0 : 1},
                 {"seed", 40 + i},
                 {"logprobs", 2},
                 {"stream", true},
                 {"stream_options", {{"include_usage", true}}}};
    if (i == 2) body["n"] = 2;
    if (i == 3) body["repetition_penalty"] = 1.3;
    clients.push_back(harness.Send("/v1/completions", body));
  }
  std::vector<Json> answers;
  for (size_t i = 0; i < clients.size(); ++i) {
    clients[i]->Wait();
    EXPECT_EQ(clients[i]->status(), 200) << clients[i]->body();
    const std::vector<Json> events = clients[i]->Events();
    for (int64_t c = 0; c < (i == 2 ? 2 : 1); ++c) {
      const StreamedChoice choice = JoinCompletion(events, c);
      size_t num_logprobs = 0;
      for (const Json& part : choice.logprobs) num_logprobs += part.at("tokens").size();
      EXPECT_EQ(num_logprobs, 64) << "of request " << i;
      answers.push_back({choice.text, choice.finish, choice.logprobs});
    }
    answers.push_back(events[events.size() - 2].at("usage"));
  }
  harness.ExpectAllFree();
  *num_preemptions = harness.engine().stats().scheduler.num_preemptions;
  return answers;
}

TEST(OpenAiPressureTest, PreemptionShowsInNoAnswer) {
  int64_t preemptions = 0;
  const std::vector<Json> expected = AnswersWith(/*num_blocks=*/200, &preemptions);
  EXPECT_EQ(preemptions, 0);
  EXPECT_EQ(AnswersWith(/*num_blocks=*/18, &preemptions), expected);
  EXPECT_GT(preemptions, 0);
}

}  // namespace
}  // namespace lockstep
