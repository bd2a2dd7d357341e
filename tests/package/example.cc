// Lockstep as a library: answers one prompt to its end, and another until it is cancelled.
//
//   example MODEL                  one rank
//   mpirun -np 2 example MODEL     two
//
// MODEL is a folder in Hugging Face's layout or a .gguf file; with --dummy before it, a folder with
// a config.json alone, whose weights are made up. Prompts and answers are token ids: see
// model/tokenizer/tokenizer.h and runtime/text_output.h for text.
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "model/checkpoint/checkpoint.h"
#include "parallel/mpi_communicator.h"
#include "runtime/engine.h"

namespace {

using lockstep::Agree;
using lockstep::Communicator;
using lockstep::Engine;
using lockstep::FinishReason;
using lockstep::ModelSource;
using lockstep::Request;
using lockstep::RequestEvent;
using lockstep::RequestId;

// The tokens of a request as they come. The engine's thread adds, a client waits.
class Answer {
 public:
  // Request::on_event. True: go on.
  bool Add(const RequestEvent& event) {
    const std::lock_guard lock(mutex_);
    if (event.token.has_value()) tokens_.push_back(*event.token);
    finish_ = event.finish;
    changed_.notify_all();
    return true;
  }

  // Returns when there are so many tokens, or no more will come.
  void WaitForTokens(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return tokens_.size() >= count || finish_ != FinishReason::kNone; });
  }
  FinishReason WaitForEnd() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return finish_ != FinishReason::kNone; });
    return finish_;
  }
  // After the end.
  const std::vector<int32_t>& tokens() const { return tokens_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int32_t> tokens_;
  FinishReason finish_ = FinishReason::kNone;
};

const char* Name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kLength:
      return "length";
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kCancelled:
      return "cancelled";
    default:
      return "error";
  }
}

Request GreedyRequest(std::vector<int32_t> prompt, int64_t max_tokens, Answer& answer) {
  Request request;
  request.prompt = std::move(prompt);
  request.sampling.temperature = 0;
  request.sampling.max_tokens = max_tokens;
  request.sampling.ignore_eos = true;
  request.on_event = [&answer](const RequestEvent& event) { return answer.Add(event); };
  return request;
}

// Any thread of rank 0 may submit and cancel while another runs the engine.
absl::Status AskQuestions(Engine& engine) {
  Answer whole, cut;
  const absl::StatusOr<RequestId> first = engine.Submit(GreedyRequest({1, 2, 3}, 8, whole));
  if (!first.ok()) return first.status();
  // More than will be waited for.
  const int64_t many = engine.max_model_len() - 3;
  const absl::StatusOr<RequestId> second = engine.Submit(GreedyRequest({4, 5, 6}, many, cut));
  if (second.ok()) {
    cut.WaitForTokens(3);
    engine.Cancel(*second);
    std::printf("second request: %s\n", Name(cut.WaitForEnd()));
  }
  std::printf("first request: %s:", Name(whole.WaitForEnd()));
  for (const int32_t id : whole.tokens()) std::printf(" %d", static_cast<int>(id));
  std::printf("\n");
  return second.status();
}

// Rank 0: a client on a thread of its own, the engine on this one.
absl::Status Lead(Engine& engine) {
  absl::Status asked;
  std::thread client([&] {
    asked = AskQuestions(engine);
    engine.RequestStop();
  });
  const absl::Status ran = engine.Run();
  client.join();
  if (!ran.ok()) return ran;
  if (const absl::Status stopped = engine.Stop(); !stopped.ok()) return stopped;
  return asked;
}

absl::Status RunOnThisRank(Communicator& communicator, const std::string& path,
                           lockstep::LoadFormat format) {
  // Every rank opens the model itself; when one cannot, all learn why.
  absl::StatusOr<ModelSource> source = lockstep::OpenModel(path, format);
  if (const absl::Status all = Agree(communicator, source.status()); !all.ok()) return all;
  lockstep::EngineOptions options;
  options.kv_cache_memory_bytes = 64 << 20;
  absl::StatusOr<std::unique_ptr<Engine>> engine = Engine::Create(*source, options, communicator);
  if (!engine.ok()) return engine.status();
  const absl::Status status = communicator.rank() == 0 ? Lead(**engine) : (*engine)->Follow();
  if (!status.ok()) {  // the other ranks may be waiting for this one
    std::fprintf(stderr, "rank %d: %s\n", communicator.rank(), status.ToString().c_str());
    lockstep::AbortJob(1);
  }
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  const bool dummy = argc > 2 && std::string(argv[1]) == "--dummy";
  if (argc != (dummy ? 3 : 2)) {
    std::fprintf(stderr, "usage: example [--dummy] MODEL\n");
    return 2;
  }
  const auto format = dummy ? lockstep::LoadFormat::kDummy : lockstep::LoadFormat::kAuto;
  const absl::StatusOr<std::unique_ptr<Communicator>> communicator =
      lockstep::CreateMpiCommunicator();
  const absl::Status status = communicator.ok()
                                  ? RunOnThisRank(**communicator, argv[argc - 1], format)
                                  : communicator.status();
  if (status.ok()) return 0;
  if (!communicator.ok() || (*communicator)->rank() == 0) {
    std::fprintf(stderr, "example: %s\n", status.ToString().c_str());
  }
  return 2;
}
