#include "launch/launch_check.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "model/checkpoint/shorten.h"
#include "runtime/core/file.h"
#include "runtime/core/hash.h"
#include "runtime/core/json.h"

namespace lockstep {

namespace {

// Name and value, as a message shows them, in an order that is the same on all ranks.
using Facts = std::vector<std::pair<std::string, std::string>>;

bool Holds(const Facts& facts, const std::string& name) {
  return std::any_of(facts.begin(), facts.end(),
                     [&](const auto& fact) { return fact.first == name; });
}

// "NAME is X here and Y on rank 0", of the first fact that is not the same.
std::string FirstDifference(const Facts& mine, const Facts& rank0) {
  const std::string missing = "missing";
  const auto [here, there] = std::mismatch(mine.begin(), mine.end(), rank0.begin(), rank0.end());
  const auto tell = [](const std::string& name, const std::string& value,
                       const std::string& value0) {
    return absl::StrFormat("%s is %s here and %s on rank 0", Shortened(name), Shortened(value),
                           Shortened(value0));
  };
  if (here == mine.end()) return tell(there->first, missing, there->second);
  if (there == rank0.end()) return tell(here->first, here->second, missing);
  if (here->first == there->first) return tell(here->first, here->second, there->second);
  return Holds(mine, there->first) ? tell(here->first, here->second, missing)
                                   : tell(there->first, missing, there->second);
}

// COLLECTIVE.
absl::Status CompareWithRank0(const Facts& facts, Communicator& communicator) {
  const std::string mine = DumpJson(Json(facts));
  std::string rank0 = mine;
  int64_t bytes = static_cast<int64_t>(mine.size());
  LOCKSTEP_RETURN_IF_ERROR(communicator.Broadcast(&bytes, sizeof(bytes), 0));
  rank0.resize(static_cast<size_t>(bytes));
  LOCKSTEP_RETURN_IF_ERROR(communicator.Broadcast(rank0.data(), bytes, 0));
  absl::Status status;
  if (rank0 != mine) {
    const absl::StatusOr<Json> theirs = ParseJson(rank0, "what rank 0 was started with");
    status = !theirs.ok()
                 ? theirs.status()
                 : absl::FailedPreconditionError(FirstDifference(facts, theirs->get<Facts>()) +
                                                 "; all ranks must be started alike");
  }
  return Agree(communicator, status);
}

absl::StatusOr<std::string> DescribeProgram() {
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string bytes, ReadFile("/proc/self/exe"));
  return absl::StrFormat("lockstep %s of %d bytes with digest %016x", LOCKSTEP_VERSION,
                         bytes.size(), HashBytes(bytes.data(), bytes.size(), 0));
}

absl::StatusOr<Facts> LaunchFacts(const EngineFlags& flags) {
  LOCKSTEP_ASSIGN_OR_RETURN(std::string program, DescribeProgram());
  Facts facts = {{"the program", std::move(program)}, {"the command", flags.command}};
  facts.insert(facts.end(), flags.given.begin(), flags.given.end());
  return facts;
}

// A digest of the tensor's middle row: the first is often that of a token which no text holds.
absl::StatusOr<uint64_t> DigestOfRow(const Checkpoint& checkpoint, const std::string& name,
                                     const TensorInfo& info) {
  std::vector<float> values(static_cast<size_t>(info.cols()));
  const int64_t row = info.rows() / 2;
  const MatrixView view = {values.data(), DType::kF32, 1, info.cols(), info.cols()};
  LOCKSTEP_RETURN_IF_ERROR(checkpoint.Read(name, {row, row + 1}, {0, info.cols()}, view));
  return HashBytes(values.data(), values.size() * sizeof(float), 0);
}

absl::StatusOr<Facts> ModelFacts(const ModelSource& source) {
  Facts facts;
  for (const auto& [name, value] : source.stated) facts.emplace_back("the model's " + name, value);
  const Checkpoint& checkpoint = *source.checkpoint;
  std::vector<std::string> names = checkpoint.Names();
  std::sort(names.begin(), names.end());
  const size_t stride = names.size() / kSampledTensors + 1;
  for (size_t i = 0; i < names.size(); ++i) {
    const TensorInfo& info = *checkpoint.Find(names[i]);
    std::string value =
        absl::StrFormat("%s [%s], %d bytes at %d", info.stored_type,
                        absl::StrJoin(info.shape, ", "), info.stored_bytes, info.stored_offset);
    const bool is_matrix = info.readable && info.shape.size() <= 2 && info.stored_bytes > 0;
    if (i % stride == 0 && is_matrix) {
      LOCKSTEP_ASSIGN_OR_RETURN(const uint64_t digest, DigestOfRow(checkpoint, names[i], info));
      absl::StrAppend(&value, absl::StrFormat(", values with digest %016x", digest));
    }
    facts.emplace_back("tensor " + names[i], std::move(value));
  }
  return facts;
}

// COLLECTIVE.
absl::Status CheckSame(const absl::StatusOr<Facts>& facts, Communicator& communicator) {
  LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, facts.status()));
  return CompareWithRank0(*facts, communicator);
}

}  // namespace

absl::Status CheckSameLaunch(const EngineFlags& flags, Communicator& communicator) {
  if (communicator.size() == 1) return absl::OkStatus();
  return CheckSame(LaunchFacts(flags), communicator);
}

absl::Status CheckSameModel(const ModelSource& source, Communicator& communicator) {
  if (communicator.size() == 1) return absl::OkStatus();
  return CheckSame(ModelFacts(source), communicator);
}

}  // namespace lockstep
