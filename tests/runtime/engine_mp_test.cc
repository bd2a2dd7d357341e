// The engine over MPI processes as ranks gives the ids of an engine of one rank. Runs under mpirun.
#include <gtest/gtest.h>

#include <cstdio>
#include <random>

#include "parallel/mpi_communicator.h"
#include "tests/runtime/engine_test_util.h"

namespace lockstep {
namespace {

Communicator* job = nullptr;

// Scored, greedy and seeded requests; prompts of 60 tokens a request make plans of two broadcasts.
absl::Status RunRequests(Engine& engine, std::vector<Result>& results) {
  std::mt19937 random(5);
  for (size_t i = 0; i < results.size(); ++i) {
    std::vector<int32_t> prompt(i == 1 ? 3 : 60);
    for (int32_t& t : prompt) t = static_cast<int32_t>(random() % 101);
    SamplingParams sampling;
    sampling.temperature = i % 2 == 0 ? 0 : 0.2;
    sampling.top_p = i % 3 == 0 ? 0.9 : 1;
    sampling.seed = i;
    sampling.max_tokens = 30;
    Request request =
        i == 2 ? Scored(prompt, 101, &results[i]) : Recorded(prompt, sampling, &results[i]);
    LOCKSTEP_RETURN_IF_ERROR(engine.Submit(std::move(request)).status());
  }
  return engine.RunUntilIdle();
}

absl::Status RunOverMpi(const EngineOptions& options, std::vector<Result>& results) {
  const ModelSource source = TinySource(TinyConfig());
  LOCKSTEP_ASSIGN_OR_RETURN(auto engine, Engine::Create(source, options, *job));
  if (job->rank() != 0) return engine->Follow();
  LOCKSTEP_RETURN_IF_ERROR(RunRequests(*engine, results));
  return engine->Stop();
}

TEST(EngineMpTest, IdsEqualThoseOfOneRank) {
  EngineOptions options;
  options.kv_cache_memory_bytes = 1 << 20;
  options.block_size = 4;
  for (const int64_t chunk : {2048, 7}) {
    options.max_num_batched_tokens = chunk;
    std::vector<Result> results(8);
    if (const absl::Status status = RunOverMpi(options, results); !status.ok()) {
      std::fprintf(stderr, "rank %d: %s\n", job->rank(), status.ToString().c_str());
      AbortJob(1);  // others may wait in a collective
    }
    if (job->rank() != 0) continue;
    std::vector<Result> expected(8);
    ExpectOk(RunEngine(TinyConfig(), options, 1,
                       [&](Engine& engine) { return RunRequests(engine, expected); }));
    for (size_t i = 0; i < results.size(); ++i) {
      EXPECT_EQ(results[i].tokens, expected[i].tokens) << "request " << i << ", chunk " << chunk;
      EXPECT_EQ(results[i].finish, FinishReason::kLength);
      ASSERT_EQ(results[i].logits.size(), expected[i].logits.size());
      for (size_t j = 0; j < results[i].logits.size(); ++j) {
        ASSERT_NEAR(results[i].logits[j], expected[i].logits[j], 1e-5);
      }
    }
  }
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  auto communicator = lockstep::CreateMpiCommunicator();
  if (!communicator.ok()) {
    std::fprintf(stderr, "%s\n", communicator.status().ToString().c_str());
    return 1;
  }
  lockstep::job = communicator->get();
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  if (lockstep::job->rank() != 0) delete listeners.Release(listeners.default_result_printer());
  const int failed = RUN_ALL_TESTS();
  // A rank that left first would have mpirun kill the one that prints.
  if (!lockstep::job->Barrier().ok()) return 1;
  return failed;
}
