#include "parallel/cuda_ranks.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <string_view>
#include <utility>

namespace lockstep {

namespace {

// What ranks exchange: a CudaRank of fixed size. Longer names are cut, alike on all ranks.
struct WireRank {
  char host[256];
  char uuid[64];
  int64_t num_devices;
  char gpu_name[256];
  int64_t num_multiprocessors;
  int64_t first_rank_on_host;
};

bool OnSameHost(const CudaRank& a, const CudaRank& b) {
  return a.first_rank_on_host == b.first_rank_on_host && a.host == b.host;
}

void CopyText(const std::string& text, std::span<char> to) {
  const size_t length = std::min(text.size(), to.size() - 1);
  std::memcpy(to.data(), text.data(), length);
  std::memset(to.data() + length, 0, to.size() - length);
}

}  // namespace

absl::StatusOr<std::vector<CudaRank>> GatherCudaRanks(Communicator& communicator,
                                                      const CudaRank& mine) {
  WireRank send;
  CopyText(mine.host, send.host);
  CopyText(mine.uuid, send.uuid);
  send.num_devices = mine.num_devices;
  CopyText(mine.gpu_name, send.gpu_name);
  send.num_multiprocessors = mine.num_multiprocessors;
  send.first_rank_on_host = mine.first_rank_on_host;
  std::vector<WireRank> received(communicator.size());
  LOCKSTEP_RETURN_IF_ERROR(communicator.AllGather(&send, sizeof(send), received.data()));
  std::vector<CudaRank> ranks;
  ranks.reserve(received.size());
  for (const WireRank& rank : received) {
    ranks.push_back({rank.host, rank.uuid, rank.num_devices, rank.gpu_name,
                     rank.num_multiprocessors, rank.first_rank_on_host});
  }
  return ranks;
}

int LocalRank(std::span<const CudaRank> ranks, int rank) {
  return static_cast<int>(
      std::count_if(ranks.begin(), ranks.begin() + rank,
                    [&](const CudaRank& other) { return OnSameHost(other, ranks[rank]); }));
}

int DeviceIndex(int local_rank, int64_t num_devices) {
  if (num_devices == 1) return 0;
  return local_rank < num_devices ? local_rank : -1;
}

absl::Status CheckOneGpuPerRank(std::span<const CudaRank> ranks) {
  for (const CudaRank& first : ranks) {
    std::set<std::string> gpus;
    std::string members;
    int64_t count = 0, without = 0, visible = 0;
    for (size_t r = 0; r < ranks.size(); ++r) {
      if (!OnSameHost(ranks[r], first)) continue;
      ++count;
      absl::StrAppend(&members, members.empty() ? "" : ", ", r);
      if (ranks[r].uuid.empty())
        ++without;
      else
        gpus.insert(ranks[r].uuid);
      visible = std::max(visible, ranks[r].num_devices);
    }
    const int64_t distinct = static_cast<int64_t>(gpus.size());
    if (without == 0 && distinct == count) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("host %s runs %d ranks (%s) but %s: each rank needs a GPU of its own. "
                        "Start at most one rank "
                        "a GPU, and show each rank all GPUs of its host or one that is its own "
                        "(CUDA_VISIBLE_DEVICES)",
                        first.host, count, members,
                        without > 0 ? absl::StrFormat("a rank sees %d GPUs", visible)
                                    : absl::StrFormat("they share %d distinct GPUs", distinct)));
  }
  return absl::OkStatus();
}

absl::Status CheckSameKindOfGpu(std::span<const CudaRank> ranks) {
  const auto kind = [](const CudaRank& rank) {
    return std::pair(std::string_view(rank.gpu_name), rank.num_multiprocessors);
  };
  const auto other = std::find_if(ranks.begin(), ranks.end(), [&](const CudaRank& rank) {
    return kind(rank) != kind(ranks[0]);
  });
  if (other == ranks.end()) return absl::OkStatus();
  const auto describe = [&](const CudaRank& rank) {
    return absl::StrFormat("rank %d (host %s) has %s, %d multiprocessors", &rank - ranks.data(),
                           rank.host, rank.gpu_name, rank.num_multiprocessors);
  };
  return absl::InvalidArgumentError(absl::StrFormat(
      "the ranks' GPUs are of different kinds: %s; %s. All ranks need GPUs of one kind: choose "
      "hosts, or GPUs with CUDA_VISIBLE_DEVICES, that have it",
      describe(ranks[0]), describe(*other)));
}

absl::StatusOr<CudaBinding> BindCudaDevice(Communicator& communicator) {
  CudaRank mine = {.host = communicator.host(),
                   .uuid = "",
                   .num_devices = NumCudaDevices(),
                   .first_rank_on_host = communicator.first_rank_on_host()};
  LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, FindCudaDevice()));
  LOCKSTEP_ASSIGN_OR_RETURN(std::vector<CudaRank> ranks, GatherCudaRanks(communicator, mine));
  CudaBinding binding;
  binding.local_rank = LocalRank(ranks, communicator.rank());
  binding.device = DeviceIndex(binding.local_rank, mine.num_devices);
  // A rank without one leaves its place empty, which all ranks then read. Looking makes no context:
  // a GPU that another rank has, and that is for one process alone, is told as what it is.
  absl::Status seen;
  if (binding.device >= 0) {
    const absl::StatusOr<CudaDeviceInfo> info = DescribeCudaDevice(binding.device);
    seen = info.status();
    if (info.ok()) {
      mine.uuid = info->uuid;
      mine.gpu_name = info->name;
      mine.num_multiprocessors = info->num_multiprocessors;
    }
  }
  LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, seen));
  LOCKSTEP_ASSIGN_OR_RETURN(ranks, GatherCudaRanks(communicator, mine));
  LOCKSTEP_RETURN_IF_ERROR(CheckOneGpuPerRank(ranks));
  LOCKSTEP_RETURN_IF_ERROR(CheckSameKindOfGpu(ranks));
  absl::StatusOr<CudaDeviceInfo> selected = SelectCudaDevice(binding.device);
  LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, selected.status()));
  binding.info = *std::move(selected);
  return binding;
}

}  // namespace lockstep
