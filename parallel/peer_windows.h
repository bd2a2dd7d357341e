// Memory that the GPUs of one host read and write of each other: what a kernel that sums over ranks
// needs.
//
// Every rank has kNumWindows windows for its partial sums, and counters by which the blocks of such
// a kernel meet: block b of every rank, once or twice a sum.
//
// - One-shot: the blocks meet, then each rank reads all parts of all rows from all windows.
// - Two-shot: the blocks meet; each rank reads all parts of the rows that are dealt to it, and
//   writes the result of each into every rank's memory; the blocks meet again before they end.
//
// The rules, and why they make it safe:
//
// - All ranks make the same sums in the same order, each with the same path, place and number of
//   blocks, on one stream a rank, or on several that events keep in that order. The counters then
//   say the same on all ranks.
// - What writes a window, and what sums, begins when the kernel before it in the stream has ended.
//   So in the first meeting a rank learns of each peer that all its kernels before this sum have
//   ended: its part is there, and nothing that it launched before uses a window any more. (One of
//   its blocks is enough: any block of a sum begins after they have ended.)
// - One-shot, nobody tells when he has read. But who has met the others in the next sum knows that
//   they have ended the one before, and may write the window of that again. Hence a sum that
//   follows a one-shot sum, of whichever path, uses another window. There are three, because the
//   next step begins with window 0 and a step may have an odd number of sums.
// - A sum of some rows has to do with those rows of the windows alone. So sums that share the rows
//   of one between them may follow each other in its window, and other kernels may use the other
//   rows meanwhile. For what comes next they are one sum, which the last of them ends.
// - Two-shot, row t of every window is its own rank's up to the first meeting, then up to the
//   second that of the rank which t is dealt to, and its own rank's again from there. Only the
//   dealt rank reads the parts of t, and so it may put the result in their place, which costs no
//   memory. A block arrives at the second meeting with all that its threads have read and written
//   behind it (a release of system scope behind a barrier, and an acquire where it is awaited). A
//   kernel ends when all its blocks have met their peers: these are then done with this rank's
//   memory. So the kernel behind it sees all rows, and whoever comes next may write the window,
//   even for the very next sum.
// - Two-shot results may stand elsewhere: chosen rows, closed up, cannot take the place of parts
//   that another rank may not have read yet. They go into another window, any: from the first
//   meeting on, as said, nobody uses it. Its own rank writes it again behind its own reader.
// - The residual stream is each rank's own. Two-shot, a rank keeps the rows dealt to it alone, and
//   none is ever exchanged.
// - Abort ends both waits, with wrong results in all windows; nothing is written outside of them.
#pragma once

#include <cstdint>
#include <memory>

#include "parallel/communicator.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/status.h"

namespace lockstep {

inline constexpr int kMaxPeers = 8;
inline constexpr int kMaxPeerBlocks = 128;

// Passed to kernels by value. Device addresses, valid on this rank's GPU.
struct PeerAddresses {
  int rank = 0;
  int size = 0;
  char* windows[kMaxPeers] = {};       // the first window of each rank
  uint32_t* arrivals[kMaxPeers] = {};  // of each rank: [kMaxPeers][kMaxPeerBlocks], by who arrived
  uint32_t* meetings = nullptr;        // [kMaxPeerBlocks]: how often each block has met its peers
  // Of each rank, for kernels whose ranks hand each other words instead of meeting: zeros at first.
  uint32_t* words[kMaxPeers] = {};
  const uint32_t* abort = nullptr;  // page-locked host memory; not 0: wait no more
  int64_t window_bytes = 0;
  int64_t words_bytes = 0;
};

class PeerWindows {
 public:
  static constexpr int kNumWindows = 3;

  // COLLECTIVE. For the selected device. Errors are the same on all ranks: InvalidArgument when the
  // ranks are on several hosts or more than kMaxPeers, else that of the GPU that cannot give or
  // reach memory. One rank has windows, too.
  static absl::StatusOr<std::unique_ptr<PeerWindows>> Create(Communicator& host,
                                                             int64_t window_bytes,
                                                             int64_t words_bytes = 0);
  // When no rank's kernel uses them any more: after a Barrier of the host's communicator behind an
  // idle stream. Skipped where the job ends in an error: the memory is then the driver's to free.
  absl::Status Close(Communicator& host);
  ~PeerWindows();
  PeerWindows(const PeerWindows&) = delete;
  PeerWindows& operator=(const PeerWindows&) = delete;

  // This rank's window, 256-byte aligned; index in [0, kNumWindows).
  void* window(int index) const;
  int64_t window_bytes() const { return addresses_.window_bytes; }
  // The most blocks that a kernel whose blocks wait may have: as many as every rank's GPU has
  // multiprocessors, for all must be there at once. At most kMaxPeerBlocks.
  int max_blocks() const { return max_blocks_; }
  int64_t words_bytes() const { return addresses_.words_bytes; }
  const PeerAddresses& addresses() const { return addresses_; }

  // Kernels that wait for peers end, with wrong results. From any thread.
  void Abort();

 private:
  PeerWindows() = default;
  absl::Status Allocate(int rank, int size, int64_t window_bytes, int64_t words_bytes);
  absl::Status Open(Communicator& host);
  void Unmap();

  void* own_ = nullptr;  // windows, arrivals, meetings: one allocation
  PinnedBuffer abort_;
  PeerAddresses addresses_;
  int max_blocks_ = kMaxPeerBlocks;
};

}  // namespace lockstep
