#include "parallel/communicator.h"

#include <vector>

namespace lockstep {
namespace {

struct RankError {
  absl::StatusCode code;
  std::string host;
  std::string message;
};

// Every rank's status; message and host travel as "host\0message".
absl::StatusOr<std::vector<RankError>> GatherErrors(Communicator& communicator,
                                                    std::span<const int64_t> codes,
                                                    const absl::Status& mine) {
  std::string text = communicator.host();
  text.push_back('\0');
  text.append(mine.message().data(), mine.message().size());
  const int64_t text_bytes = static_cast<int64_t>(text.size());
  std::vector<int64_t> bytes(communicator.size());
  LOCKSTEP_RETURN_IF_ERROR(communicator.AllGather(&text_bytes, sizeof(int64_t), bytes.data()));
  int64_t total = 0;
  for (int64_t b : bytes) total += b;
  std::string all(total, '\0');
  LOCKSTEP_RETURN_IF_ERROR(communicator.AllGatherV(text.data(), bytes, all.data()));
  std::vector<RankError> errors;
  size_t offset = 0;
  for (int rank = 0; rank < communicator.size(); ++rank) {
    const std::string one = all.substr(offset, bytes[rank]);
    const size_t split = one.find('\0');
    errors.push_back(
        {static_cast<absl::StatusCode>(codes[rank]), one.substr(0, split), one.substr(split + 1)});
    offset += bytes[rank];
  }
  return errors;
}

}  // namespace

absl::Status Agree(Communicator& communicator, const absl::Status& mine) {
  if (communicator.size() == 1) return mine;
  const int64_t code = static_cast<int64_t>(mine.code());
  std::vector<int64_t> codes(communicator.size());
  LOCKSTEP_RETURN_IF_ERROR(communicator.AllGather(&code, sizeof(code), codes.data()));
  int first_failed = 0;
  while (first_failed < communicator.size() && codes[first_failed] == 0) ++first_failed;
  if (first_failed == communicator.size()) return absl::OkStatus();

  LOCKSTEP_ASSIGN_OR_RETURN(const std::vector<RankError> errors,
                            GatherErrors(communicator, codes, mine));
  const RankError& first = errors[first_failed];
  bool all_alike = true;
  for (const RankError& error : errors) {
    all_alike = all_alike && error.code == first.code && error.message == first.message;
  }
  if (all_alike) return absl::Status(first.code, first.message);
  return absl::Status(first.code,
                      absl::StrFormat("rank %d (%s): %s", first_failed, first.host, first.message));
}

}  // namespace lockstep
