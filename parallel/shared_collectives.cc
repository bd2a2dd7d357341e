#include "parallel/shared_collectives.h"

#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>

#include "parallel/rank_order_sum.h"

namespace lockstep {
namespace {

// Of no bytes, either pointer may be null: an empty vector has no memory.
void CopyBytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

constexpr int64_t kCacheLine = 64;
constexpr int kSpins = 50;
constexpr int kMaxRanks = 1024;
constexpr timespec kAliveCheckInterval = {.tv_sec = 1, .tv_nsec = 0};

// The generation word: bit 0 says that a rank has left; the rest counts barriers, so one barrier
// adds 2 (and the count may wrap).
constexpr uint32_t kLeftBit = 1;
constexpr uint32_t kOneBarrier = 2;

// From this message size on, with 3 ranks or more, each rank sums its part of the message for all
// instead of the whole message for itself.
constexpr int64_t kSplitSumBytes = 16 << 10;

void FutexWait(std::atomic<uint32_t>* word, uint32_t expected) {
  // Without FUTEX_PRIVATE_FLAG: the sleepers are different processes.
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &kAliveCheckInterval, nullptr, 0);
}

void FutexWakeAll(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// A process that is gone, or is a zombie its parent has not waited for.
bool IsDead(pid_t pid) {
  if (kill(pid, 0) != 0) return errno == ESRCH;
  FILE* file = fopen(absl::StrFormat("/proc/%d/stat", pid).c_str(), "r");
  if (file == nullptr) return false;
  char text[512] = {};
  const size_t length = fread(text, 1, sizeof(text) - 1, file);
  fclose(file);
  // "pid (name) S ...": the name may itself hold parentheses.
  const char* name_end = length > 0 ? strrchr(text, ')') : nullptr;
  return name_end != nullptr && strlen(name_end) > 2 && (name_end[2] == 'Z' || name_end[2] == 'X');
}

// Slots of 256 KB keep a round in L2; many ranks get smaller ones so that the block stays small.
int64_t SlotDataBytes(int size) { return size <= 16 ? 256 << 10 : 64 << 10; }

}  // namespace

struct SharedCollectives::Control {
  alignas(kCacheLine) std::atomic<uint32_t> generation;
  alignas(kCacheLine) std::atomic<uint32_t> arrived;
  alignas(kCacheLine) std::atomic<uint32_t> sleepers;
  alignas(kCacheLine) std::atomic<int32_t> left_rank;        // the first rank that left, or -1
  alignas(kCacheLine) std::atomic<int32_t> pids[kMaxRanks];  // 0 until the rank attaches
};

// In front of a slot's data, on a cache line of its own.
struct SharedCollectives::SlotHeader {
  alignas(kCacheLine) uint64_t round;
  Op op;
  int64_t bytes;
};

int64_t SharedCollectives::BlockBytes(int size) {
  return sizeof(Control) + 2 * size * (sizeof(SlotHeader) + SlotDataBytes(size));
}

void SharedCollectives::InitBlock(void* block, int size) {
  LOCKSTEP_CHECK(size >= 1 && size <= kMaxRanks);
  static_assert(std::atomic<uint32_t>::is_always_lock_free);
  Control* control = new (block) Control();
  control->left_rank.store(-1);
}

SharedCollectives::SharedCollectives(void* block, int rank, int size)
    : control_(static_cast<Control*>(block)),
      slots_(static_cast<uint8_t*>(block) + sizeof(Control)),
      rank_(rank),
      size_(size),
      slot_bytes_(SlotDataBytes(size)) {
  control_->pids[rank].store(getpid());
}

SharedCollectives::~SharedCollectives() {
  int32_t nobody = -1;
  control_->left_rank.compare_exchange_strong(nobody, rank_);
  control_->generation.fetch_or(kLeftBit);
  FutexWakeAll(&control_->generation);
}

SharedCollectives::SlotHeader* SharedCollectives::Slot(int rank) const {
  const int64_t index = 2 * rank + static_cast<int64_t>(round_ & 1);
  return reinterpret_cast<SlotHeader*>(slots_ +
                                       index * (int64_t{sizeof(SlotHeader)} + slot_bytes_));
}

uint8_t* SharedCollectives::SlotData(int rank) const {
  return reinterpret_cast<uint8_t*>(Slot(rank) + 1);
}

void SharedCollectives::BeginRound(Op op, int64_t bytes) {
  ++round_;
  SlotHeader* slot = Slot(rank_);
  slot->round = round_;
  slot->op = op;
  slot->bytes = bytes;
}

absl::Status SharedCollectives::Meet() {
  LOCKSTEP_RETURN_IF_ERROR(WaitForOthers());
  return CheckSameRound();
}

absl::Status SharedCollectives::WaitForOthers() {
  std::atomic<uint32_t>& generation = control_->generation;
  // Cannot move on before this rank arrives.
  const uint32_t before = generation.load(std::memory_order_acquire);
  if (control_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 ==
      static_cast<uint32_t>(size_)) {
    control_->arrived.store(0, std::memory_order_relaxed);
    generation.fetch_add(kOneBarrier);
    // Either a sleeper is counted by now, or it sees the new generation before it sleeps: both
    // sides use sequentially consistent operations on the two words.
    if (control_->sleepers.load() != 0) FutexWakeAll(&generation);
    return absl::OkStatus();
  }
  const auto passed = [before](uint32_t now) { return ((now ^ before) & ~kLeftBit) != 0; };
  for (int spin = 0; spin < kSpins; ++spin) {
    if (passed(generation.load(std::memory_order_acquire))) return absl::OkStatus();
    CpuRelax();
  }
  absl::Status status;
  control_->sleepers.fetch_add(1);
  while (status.ok()) {
    const uint32_t now = generation.load();
    if (passed(now)) break;
    if ((now & kLeftBit) != 0) {
      status = absl::AbortedError(absl::StrFormat("rank %d left the job while others waited for it",
                                                  control_->left_rank.load()));
      break;
    }
    FutexWait(&generation, now);
    if (generation.load() == now) status = CheckPeersAlive();
  }
  control_->sleepers.fetch_sub(1);
  return status;
}

absl::Status SharedCollectives::CheckSameRound() const {
  const SlotHeader* mine = Slot(rank_);
  for (int r = 0; r < size_; ++r) {
    const SlotHeader* theirs = Slot(r);
    if (theirs->round == mine->round && theirs->op == mine->op && theirs->bytes == mine->bytes) {
      continue;
    }
    return absl::InternalError(absl::StrFormat(
        "ranks %d and %d are not in the same collective: kind %d of %d bytes against kind %d of %d "
        "bytes",
        rank_, r, static_cast<int>(mine->op), mine->bytes, static_cast<int>(theirs->op),
        theirs->bytes));
  }
  return absl::OkStatus();
}

absl::Status SharedCollectives::CheckPeersAlive() const {
  for (int r = 0; r < size_; ++r) {
    const pid_t pid = control_->pids[r].load();
    if (pid == 0 || !IsDead(pid)) continue;
    // Others will name the rank that died, not this one, which leaves because of it.
    int32_t nobody = -1;
    control_->left_rank.compare_exchange_strong(nobody, r);
    return absl::AbortedError(absl::StrFormat("rank %d (process %d) died", r, pid));
  }
  return absl::OkStatus();
}

absl::Status SharedCollectives::AllReduceSum(float* data, int64_t count) {
  if (size_ == 1) return absl::OkStatus();
  const int64_t round_count = slot_bytes_ / int64_t{sizeof(float)};
  int64_t begin = 0;
  do {
    const int64_t n = std::min(round_count, count - begin);
    LOCKSTEP_RETURN_IF_ERROR(SumRound(data + begin, n));
    begin += n;
  } while (begin < count);
  return absl::OkStatus();
}

absl::Status SharedCollectives::SumRound(float* data, int64_t count) {
  BeginRound(Op::kAllReduce, count * int64_t{sizeof(float)});
  CopyBytes(SlotData(rank_), data, count * sizeof(float));
  LOCKSTEP_RETURN_IF_ERROR(Meet());
  const float* parts[kMaxRanks];
  for (int r = 0; r < size_; ++r) parts[r] = reinterpret_cast<const float*>(SlotData(r));
  if (size_ == 2 || count * int64_t{sizeof(float)} < kSplitSumBytes) {
    SumInRankOrder({parts, static_cast<size_t>(size_)}, data, count);
    return absl::OkStatus();
  }
  // Rank r sums part r, whose borders are cache lines, over all slots into its own slot: no one
  // else reads that part of it before the second barrier.
  constexpr int64_t kLineFloats = kCacheLine / sizeof(float);
  const int64_t lines = (count + kLineFloats - 1) / kLineFloats;
  const auto border = [&](int r) { return std::min(lines * r / size_ * kLineFloats, count); };
  const int64_t begin = border(rank_);
  for (int r = 0; r < size_; ++r) parts[r] += begin;
  SumInRankOrder({parts, static_cast<size_t>(size_)},
                 reinterpret_cast<float*>(SlotData(rank_)) + begin, border(rank_ + 1) - begin);
  LOCKSTEP_RETURN_IF_ERROR(WaitForOthers());
  for (int r = 0; r < size_; ++r) {
    const int64_t part = border(r);
    CopyBytes(data + part, reinterpret_cast<const float*>(SlotData(r)) + part,
              (border(r + 1) - part) * sizeof(float));
  }
  return absl::OkStatus();
}

absl::Status SharedCollectives::GatherRound(Op op, const void* send,
                                            std::span<const int64_t> bytes_per_rank, int64_t offset,
                                            void* recv) {
  const auto piece = [&](int r) {
    return std::clamp<int64_t>(bytes_per_rank[r] - offset, 0, slot_bytes_);
  };
  int64_t total = 0;
  for (int64_t bytes : bytes_per_rank) total += bytes;
  BeginRound(op, total);
  if (const int64_t n = piece(rank_); n > 0) {
    std::memcpy(SlotData(rank_), static_cast<const uint8_t*>(send) + offset, n);
  }
  LOCKSTEP_RETURN_IF_ERROR(Meet());
  if (recv == nullptr) return absl::OkStatus();
  uint8_t* out = static_cast<uint8_t*>(recv) + offset;
  for (int r = 0; r < size_; ++r) {
    CopyBytes(out, SlotData(r), piece(r));
    out += bytes_per_rank[r];
  }
  return absl::OkStatus();
}

absl::Status SharedCollectives::AllGatherV(const void* send,
                                           std::span<const int64_t> bytes_per_rank, void* recv) {
  const int64_t longest = *std::max_element(bytes_per_rank.begin(), bytes_per_rank.end());
  int64_t offset = 0;
  do {
    LOCKSTEP_RETURN_IF_ERROR(GatherRound(Op::kAllGather, send, bytes_per_rank, offset, recv));
    offset += slot_bytes_;
  } while (offset < longest);
  return absl::OkStatus();
}

absl::Status SharedCollectives::GatherV(const void* send, std::span<const int64_t> bytes_per_rank,
                                        void* recv, int root) {
  const int64_t longest = *std::max_element(bytes_per_rank.begin(), bytes_per_rank.end());
  void* const out = rank_ == root ? recv : nullptr;
  int64_t offset = 0;
  do {
    LOCKSTEP_RETURN_IF_ERROR(GatherRound(Op::kGather, send, bytes_per_rank, offset, out));
    offset += slot_bytes_;
  } while (offset < longest);
  return absl::OkStatus();
}

absl::Status SharedCollectives::Broadcast(void* data, int64_t bytes, int root) {
  if (size_ == 1) return absl::OkStatus();
  int64_t offset = 0;
  do {
    const int64_t n = std::min(slot_bytes_, bytes - offset);
    BeginRound(Op::kBroadcast, bytes);
    uint8_t* piece = static_cast<uint8_t*>(data) + offset;
    if (rank_ == root) CopyBytes(SlotData(root), piece, n);
    LOCKSTEP_RETURN_IF_ERROR(Meet());
    if (rank_ != root) CopyBytes(piece, SlotData(root), n);
    offset += n;
  } while (offset < bytes);
  return absl::OkStatus();
}

absl::Status SharedCollectives::Barrier() {
  BeginRound(Op::kBarrier, 0);
  return Meet();
}

}  // namespace lockstep
