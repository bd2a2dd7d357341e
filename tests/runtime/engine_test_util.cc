#include "tests/runtime/engine_test_util.h"

#include <gtest/gtest.h>

#include <utility>

#include "model/checkpoint/dummy.h"
#include "parallel/local_communicator.h"

namespace lockstep {

ModelConfig TinyConfig() {
  ModelConfig config;
  config.model_type = "llama";
  config.hidden_size = 48;
  config.intermediate_size = 80;
  config.num_layers = 2;
  config.num_query_heads = 6;
  config.num_kv_heads = 3;
  config.head_dim = 8;
  config.vocab_size = 101;
  config.max_position_embeddings = 160;
  config.layer_windows = {0, 0};
  config.rope.original_max_position_embeddings = 160;
  config.dtype = DType::kF32;
  return config;
}

ModelSource TinySource(const ModelConfig& config) {
  ModelSource source;
  source.path = "tiny";
  source.config = config;
  source.checkpoint = MakeDummyCheckpoint(source.path, config);
  return source;
}

Request Recorded(std::vector<int32_t> prompt, SamplingParams sampling, Result* result) {
  EXPECT_EQ(sampling.n, 1);
  return RecordedChoices(std::move(prompt), std::move(sampling), result);
}

Request RecordedChoices(std::vector<int32_t> prompt, SamplingParams sampling, Result* results) {
  Request request;
  request.prompt = std::move(prompt);
  request.sampling = std::move(sampling);
  request.on_event = [results](const RequestEvent& event) {
    Result& result = results[event.choice];
    EXPECT_EQ(result.num_final_events, 0) << "an event after the last";
    if (event.token.has_value()) result.tokens.push_back(*event.token);
    if (event.logprobs.has_value()) result.logprobs.push_back(*event.logprobs);
    if (event.finish != FinishReason::kNone) ++result.num_final_events;
    result.finish = event.finish;
    result.stop_token = event.stop_token;
    result.error = event.error;
    return true;
  };
  request.on_prompt_logprobs = [results](int64_t first_position,
                                         std::span<const PositionLogprobs> logprobs) {
    std::vector<PositionLogprobs>& all = results[0].prompt_logprobs;
    EXPECT_EQ(first_position, std::ssize(all) + 1);
    all.insert(all.end(), logprobs.begin(), logprobs.end());
  };
  return request;
}

Request Scored(std::vector<int32_t> prompt, int64_t vocab_size, Result* result) {
  Request request = Recorded(std::move(prompt), {}, result);
  request.on_prompt_logits = [result, vocab_size](int64_t first_position, int64_t rows,
                                                  const float* logits) {
    EXPECT_EQ(first_position * vocab_size, static_cast<int64_t>(result->logits.size()));
    result->logits.insert(result->logits.end(), logits, logits + rows * vocab_size);
  };
  return request;
}

std::vector<absl::Status> RunEngine(const ModelConfig& config, const EngineOptions& options,
                                    int num_ranks,
                                    const std::function<absl::Status(Engine&)>& lead) {
  return RunLocalRanks(num_ranks, [&](Communicator& communicator) -> absl::Status {
    const ModelSource source = TinySource(config);
    LOCKSTEP_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                              Engine::Create(source, options, communicator));
    if (communicator.rank() != 0) return engine->Follow();
    LOCKSTEP_RETURN_IF_ERROR(lead(*engine));
    return engine->Stop();
  });
}

void ExpectOk(const std::vector<absl::Status>& statuses) {
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    EXPECT_TRUE(statuses[rank].ok()) << "rank " << rank << ": " << statuses[rank];
  }
}

}  // namespace lockstep
