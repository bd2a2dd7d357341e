#include "tests/parallel/collectives_checks.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <random>
#include <thread>
#include <vector>

namespace lockstep {
namespace {

// Values of very different sizes, so that another order of the sum gives other bits.
float Value(int rank, int64_t i, uint32_t seed) {
  uint32_t h = (static_cast<uint32_t>(i) * 2654435761u) ^ (rank * 0x9e3779b9u) ^ (seed * 40503u);
  h ^= h >> 15;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  const float mantissa = static_cast<float>(h & 0xffffff) / 16777216.0f - 0.5f;
  return std::ldexp(mantissa, static_cast<int>(h >> 28));
}

absl::Status CheckSum(Communicator& communicator, int64_t count, uint32_t seed) {
  std::vector<float> data(count);
  for (int64_t i = 0; i < count; ++i) data[i] = Value(communicator.rank(), i, seed);
  LOCKSTEP_RETURN_IF_ERROR(communicator.AllReduceSum(data.data(), count));
  for (int64_t i = 0; i < count; ++i) {
    float expected = Value(0, i, seed);
    for (int r = 1; r < communicator.size(); ++r) expected += Value(r, i, seed);
    if (std::bit_cast<uint32_t>(data[i]) != std::bit_cast<uint32_t>(expected)) {
      return absl::InternalError(absl::StrFormat("sum of %d values: [%d] is %.9g, expected %.9g",
                                                 count, i, data[i], expected));
    }
  }
  return absl::OkStatus();
}

uint8_t Byte(int rank, int64_t i, uint32_t seed) {
  return static_cast<uint8_t>((i * 131 + (i >> 8) * 7 + rank * 29 + seed * 3) & 0xff);
}

std::vector<uint8_t> Bytes(int rank, int64_t count, uint32_t seed) {
  std::vector<uint8_t> bytes(count);
  for (int64_t i = 0; i < count; ++i) bytes[i] = Byte(rank, i, seed);
  return bytes;
}

absl::Status CheckGathered(const std::vector<uint8_t>& recv, std::span<const int64_t> bytes,
                           uint32_t seed, const char* what) {
  int64_t at = 0;
  for (size_t r = 0; r < bytes.size(); ++r) {
    for (int64_t i = 0; i < bytes[r]; ++i, ++at) {
      if (recv[at] != Byte(static_cast<int>(r), i, seed)) {
        return absl::InternalError(absl::StrFormat("%s: byte %d of rank %d is wrong", what, i, r));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckAllGatherV(Communicator& communicator, std::span<const int64_t> bytes,
                             uint32_t seed) {
  int64_t total = 0;
  for (int64_t b : bytes) total += b;
  const std::vector<uint8_t> send = Bytes(communicator.rank(), bytes[communicator.rank()], seed);
  std::vector<uint8_t> recv(total);
  LOCKSTEP_RETURN_IF_ERROR(communicator.AllGatherV(send.data(), bytes, recv.data()));
  LOCKSTEP_RETURN_IF_ERROR(CheckGathered(recv, bytes, seed, "AllGatherV"));
  const int root = static_cast<int>(seed) % communicator.size();
  std::vector<uint8_t> at_root(communicator.rank() == root ? total : 0);
  LOCKSTEP_RETURN_IF_ERROR(communicator.GatherV(send.data(), bytes, at_root.data(), root));
  if (communicator.rank() != root) return absl::OkStatus();
  return CheckGathered(at_root, bytes, seed, "GatherV");
}

absl::Status CheckOneBroadcast(Communicator& communicator, int64_t count, uint32_t seed) {
  const int root = static_cast<int>(seed) % communicator.size();
  std::vector<uint8_t> data(count);
  if (communicator.rank() == root) data = Bytes(root, count, seed);
  LOCKSTEP_RETURN_IF_ERROR(communicator.Broadcast(data.data(), count, root));
  if (data != Bytes(root, count, seed)) {
    return absl::InternalError(absl::StrFormat("broadcast of %d bytes from %d", count, root));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckAllReduceSum(Communicator& communicator) {
  uint32_t seed = 0;
  for (const int64_t count : {0, 1, 2, 3, 15, 17, 576, 2048, 4096, 5001, 65536, 65537, 300000}) {
    LOCKSTEP_RETURN_IF_ERROR(CheckSum(communicator, count, ++seed));
  }
  return absl::OkStatus();
}

absl::Status CheckGathers(Communicator& communicator) {
  const int size = communicator.size();
  uint32_t seed = 0;
  for (const int64_t base : {0, 1, 1000, 262144, 700001}) {
    std::vector<int64_t> bytes(size);
    for (int r = 0; r < size; ++r) bytes[r] = r == 1 ? 0 : base + 37 * r;
    LOCKSTEP_RETURN_IF_ERROR(CheckAllGatherV(communicator, bytes, ++seed));
    const std::vector<uint8_t> send = Bytes(communicator.rank(), base, seed);
    std::vector<uint8_t> recv(base * size);
    LOCKSTEP_RETURN_IF_ERROR(communicator.AllGather(send.data(), base, recv.data()));
    LOCKSTEP_RETURN_IF_ERROR(
        CheckGathered(recv, std::vector<int64_t>(size, base), seed, "AllGather"));
  }
  return absl::OkStatus();
}

absl::Status CheckBroadcast(Communicator& communicator) {
  uint32_t seed = 0;
  for (const int64_t count : {0, 1, 256, 8192, 262144, 262145, 1000003}) {
    for (int repeat = 0; repeat < 3; ++repeat) {  // another root each time
      LOCKSTEP_RETURN_IF_ERROR(CheckOneBroadcast(communicator, count, ++seed));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckMixture(Communicator& communicator) {
  std::mt19937 shared(7);                        // alike on all ranks: which collective comes
  std::mt19937 own(1000 + communicator.rank());  // how late this rank is
  const uint32_t steps = std::max(60, 600 / communicator.size());
  for (uint32_t step = 0; step < steps; ++step) {
    if (own() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
    const uint32_t kind = shared() % 8;
    const int64_t count = shared() % (kind == 0 ? 100000 : 3000);
    if (kind < 4) {
      LOCKSTEP_RETURN_IF_ERROR(CheckSum(communicator, count, step));
    } else if (kind < 6) {
      LOCKSTEP_RETURN_IF_ERROR(CheckOneBroadcast(communicator, count, step));
    } else if (kind == 6) {
      std::vector<int64_t> bytes(communicator.size());
      for (int64_t& b : bytes) b = shared() % 2000;
      LOCKSTEP_RETURN_IF_ERROR(CheckAllGatherV(communicator, bytes, step));
    } else {
      LOCKSTEP_RETURN_IF_ERROR(communicator.Barrier());
    }
  }
  return absl::OkStatus();
}

absl::Status CheckAgree(Communicator& communicator) {
  const int last = communicator.size() - 1;
  const auto expect = [](const absl::Status& got, const absl::Status& want) {
    if (got == want) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat("Agree gave \"", got.ToString(), "\", not \"", want.ToString(), "\""));
  };
  LOCKSTEP_RETURN_IF_ERROR(expect(Agree(communicator, absl::OkStatus()), absl::OkStatus()));
  // One rank alone fails.
  const absl::Status lonely = absl::NotFoundError("no such file: x");
  const absl::Status mine = communicator.rank() == last ? lonely : absl::OkStatus();
  const std::string prefix =
      last == 0 ? "" : absl::StrFormat("rank %d (%s): ", last, communicator.host());
  LOCKSTEP_RETURN_IF_ERROR(
      expect(Agree(communicator, mine), absl::NotFoundError(prefix + "no such file: x")));
  // All fail alike.
  const absl::Status alike = absl::InvalidArgumentError("bad config");
  LOCKSTEP_RETURN_IF_ERROR(expect(Agree(communicator, alike), alike));
  // All fail differently: the lowest rank's.
  const absl::Status own =
      absl::InvalidArgumentError(absl::StrCat("fault of rank ", communicator.rank()));
  const std::string zero = last == 0 ? "" : absl::StrFormat("rank 0 (%s): ", communicator.host());
  return expect(Agree(communicator, own), absl::InvalidArgumentError(zero + "fault of rank 0"));
}

}  // namespace lockstep
