#include "parallel/mpi_communicator.h"

#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "parallel/launcher_guard.h"
#include "parallel/local_communicator.h"
#include "parallel/mpi_collectives.h"
#include "parallel/mpi_status.h"
#include "parallel/shared_collectives.h"
#include "parallel/shared_mapping.h"
#include "runtime/core/log.h"

namespace lockstep {
namespace {

// Whether this process has ranks on other hosts: what it cannot reach does not keep the job from
// ending.
std::atomic<bool> ranks_elsewhere = false;
// The launcher needs 3 s where all hosts can be reached.
constexpr std::chrono::seconds kLauncherPatience(5);

// The ranks of this rank's host: those that MPI finds to share its memory.
struct HostRanks {
  int count = 0;
  int first = 0;  // the lowest
};

class MpiCommunicator : public Communicator {
 public:
  // After MPI_Init.
  static absl::StatusOr<std::unique_ptr<Communicator>> Create();
  ~MpiCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string host() const override { return host_; }
  int ranks_on_host() const override { return host_ranks_.count; }
  int first_rank_on_host() const override { return host_ranks_.first; }

  absl::Status AllReduceSum(float* data, int64_t count) override {
    return Done(shared_ ? shared_->AllReduceSum(data, count) : mpi_.AllReduceSum(data, count));
  }
  absl::Status AllGather(const void* send, int64_t bytes, void* recv) override {
    return AllGatherV(send, std::vector<int64_t>(size_, bytes), recv);
  }
  absl::Status AllGatherV(const void* send, std::span<const int64_t> bytes_per_rank,
                          void* recv) override {
    return Done(shared_ ? shared_->AllGatherV(send, bytes_per_rank, recv)
                        : mpi_.AllGatherV(send, bytes_per_rank, recv));
  }
  absl::Status GatherV(const void* send, std::span<const int64_t> bytes_per_rank, void* recv,
                       int root) override {
    return Done(shared_ ? shared_->GatherV(send, bytes_per_rank, recv, root)
                        : mpi_.GatherV(send, bytes_per_rank, recv, root));
  }
  absl::Status Broadcast(void* data, int64_t bytes, int root) override {
    return Done(shared_ ? shared_->Broadcast(data, bytes, root)
                        : mpi_.Broadcast(data, bytes, root));
  }
  absl::Status Barrier() override { return Done(shared_ ? shared_->Barrier() : mpi_.Barrier()); }

  bool shares_memory() const { return shared_.has_value(); }

 private:
  MpiCommunicator(int rank, int size, const HostRanks& host_ranks, const std::string& host)
      : rank_(rank),
        size_(size),
        host_ranks_(host_ranks),
        host_(host),
        mpi_(MPI_COMM_WORLD, rank, size) {}

  absl::Status Done(absl::Status status) {
    if (!status.ok()) broken_ = true;
    return status;
  }
  absl::Status TellHosts();
  absl::Status ShareMemory();
  absl::Status MapBlock();

  const int rank_;
  const int size_;
  const HostRanks host_ranks_;
  const std::string host_;
  bool broken_ = false;
  MpiCollectives mpi_;
  SharedMapping block_;
  std::optional<SharedCollectives> shared_;  // in block_; absent: through MPI
};

// COLLECTIVE.
absl::StatusOr<HostRanks> FindHostRanks(int rank) {
  MPI_Comm host_comm;
  LOCKSTEP_RETURN_IF_MPI_ERROR(
      MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host_comm));
  HostRanks ranks;
  LOCKSTEP_RETURN_IF_MPI_ERROR(MPI_Comm_size(host_comm, &ranks.count));
  LOCKSTEP_RETURN_IF_MPI_ERROR(MPI_Allreduce(&rank, &ranks.first, 1, MPI_INT, MPI_MIN, host_comm));
  LOCKSTEP_RETURN_IF_MPI_ERROR(MPI_Comm_free(&host_comm));
  return ranks;
}

absl::StatusOr<std::unique_ptr<Communicator>> MpiCommunicator::Create() {
  LOCKSTEP_RETURN_IF_MPI_ERROR(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
  int rank = 0, size = 0, name_length = 0;
  char name[MPI_MAX_PROCESSOR_NAME] = {};
  LOCKSTEP_RETURN_IF_MPI_ERROR(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
  LOCKSTEP_RETURN_IF_MPI_ERROR(MPI_Comm_size(MPI_COMM_WORLD, &size));
  LOCKSTEP_RETURN_IF_MPI_ERROR(MPI_Get_processor_name(name, &name_length));
  LOCKSTEP_ASSIGN_OR_RETURN(const HostRanks host_ranks, FindHostRanks(rank));
  std::unique_ptr<MpiCommunicator> communicator(
      new MpiCommunicator(rank, size, host_ranks, std::string(name, name_length)));
  ranks_elsewhere = host_ranks.count < size;
  LOCKSTEP_RETURN_IF_ERROR(communicator->TellHosts());
  LOCKSTEP_RETURN_IF_ERROR(communicator->ShareMemory());
  return communicator;
}

MpiCommunicator::~MpiCommunicator() {
  shared_.reset();  // ranks that still wait for this one are told
  // Finalising waits for all ranks. After a failed collective some may never come; a rank that ends
  // without it makes the launcher end the job.
  if (!broken_) MPI_Finalize();
}

// COLLECTIVE. Who runs where, when that is more than one host.
absl::Status MpiCommunicator::TellHosts() {
  char mine[MPI_MAX_PROCESSOR_NAME] = {};
  host_.copy(mine, sizeof(mine) - 1);
  std::vector<char> all(sizeof(mine) * size_);
  LOCKSTEP_RETURN_IF_ERROR(AllGather(mine, sizeof(mine), all.data()));
  std::vector<std::pair<std::string, int>> hosts;  // in the order of their first ranks
  for (int rank = 0; rank < size_; ++rank) {
    const std::string host = &all[sizeof(mine) * rank];
    const auto known =
        std::find_if(hosts.begin(), hosts.end(), [&](const auto& h) { return h.first == host; });
    if (known == hosts.end()) {
      hosts.emplace_back(host, 1);
    } else {
      ++known->second;
    }
  }
  if (rank_ != 0 || hosts.size() == 1) return absl::OkStatus();
  const auto format = [](std::string* out, const auto& host) {
    absl::StrAppend(out, host.first, " ", host.second);
  };
  LogInfo(absl::StrFormat("%d ranks on %d hosts (%s): plans, and sums on CPUs, go through MPI",
                          size_, hosts.size(), absl::StrJoin(hosts, ", ", format)));
  return absl::OkStatus();
}

// COLLECTIVE. Uses shared memory when all ranks can; otherwise all go through MPI.
absl::Status MpiCommunicator::ShareMemory() {
  const char* env = std::getenv("LOCKSTEP_COLLECTIVES");
  const std::string choice = env == nullptr ? "auto" : env;
  absl::Status status;
  if (choice != "auto" && choice != "mpi") {
    status = absl::InvalidArgumentError(
        absl::StrFormat("LOCKSTEP_COLLECTIVES=%s is unknown: use auto or mpi", choice));
  }
  LOCKSTEP_RETURN_IF_ERROR(Agree(*this, status));
  // A rank may have another environment, and ranks of one host see only their own.
  const int64_t mine = choice == "auto" && host_ranks_.count == size_;
  std::vector<int64_t> wanted(size_);
  LOCKSTEP_RETURN_IF_ERROR(AllGather(&mine, sizeof(mine), wanted.data()));
  if (size_ == 1 || std::count(wanted.begin(), wanted.end(), 1) != size_) return absl::OkStatus();

  const absl::Status mapped = Agree(*this, MapBlock());
  if (broken_) return mapped;
  if (!mapped.ok()) {
    block_ = SharedMapping();
    if (rank_ == 0) {
      LogWarning(absl::StrFormat(
          "ranks of this host cannot share memory, sums go through MPI and are slower: %s",
          std::string(mapped.message())));
    }
    return absl::OkStatus();
  }
  shared_.emplace(block_.data(), rank_, size_);
  return absl::OkStatus();
}

// COLLECTIVE; fails on some ranks only.
absl::Status MpiCommunicator::MapBlock() {
  SharedMappingHandle handle;
  absl::Status status;
  if (rank_ == 0) {
    absl::StatusOr<SharedMapping> created =
        SharedMapping::Create(SharedCollectives::BlockBytes(size_));
    status = created.status();
    if (created.ok()) {
      block_ = std::move(*created);
      handle = block_.handle();
      SharedCollectives::InitBlock(block_.data(), size_);
    }
  }
  LOCKSTEP_RETURN_IF_ERROR(Broadcast(&handle, sizeof(handle), 0));
  if (rank_ == 0) return status;
  if (handle.fd < 0) return absl::OkStatus();  // rank 0 tells why
  LOCKSTEP_ASSIGN_OR_RETURN(block_, SharedMapping::Attach(handle));
  return absl::OkStatus();
}

// Refuses a rank that is alone although several were meant: each would do the whole job, and all
// write the same outputs. The first variable that is there is that of the innermost launcher.
absl::Status CheckAloneOnPurpose() {
  for (const char* name :
       {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}) {
    const char* processes = std::getenv(name);
    if (processes == nullptr) continue;
    if (std::atoi(processes) <= 1) break;
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s is %s, but this process was started without knowing of others: start the ranks with "
        "mpirun -np N, or srun --mpi=pmix -n N, also where N is 1",
        name, processes));
  }
  return absl::OkStatus();
}

}  // namespace

bool StartedByLauncher() {
  return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr || std::getenv("PMIX_RANK") != nullptr;
}

absl::StatusOr<std::unique_ptr<Communicator>> CreateMpiCommunicator() {
  if (!StartedByLauncher()) {
    // Without a launcher MPI_Init starts a daemon first (0.35 s) and kills the process where there
    // is no network interface: one rank does without MPI.
    LOCKSTEP_RETURN_IF_ERROR(CheckAloneOnPurpose());
    return std::move(CreateLocalCommunicators(1)[0]);
  }
  int initialized = 0;
  LOCKSTEP_RETURN_IF_MPI_ERROR(MPI_Initialized(&initialized));
  if (initialized != 0) return absl::FailedPreconditionError("MPI is already initialised");
  int provided = 0;
  LOCKSTEP_RETURN_IF_MPI_ERROR(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided));
  if (provided < MPI_THREAD_SERIALIZED) {
    return absl::FailedPreconditionError("this MPI library does not offer MPI_THREAD_SERIALIZED");
  }
  LOCKSTEP_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> communicator, MpiCommunicator::Create());
  // A launcher of another MPI, or of another version, whose words this one does not understand.
  if (communicator->size() == 1) LOCKSTEP_RETURN_IF_ERROR(CheckAloneOnPurpose());
  return communicator;
}

std::string_view TransportOf(const Communicator& communicator) {
  const auto* const mpi = dynamic_cast<const MpiCommunicator*>(&communicator);
  return mpi != nullptr && !mpi->shares_memory() ? "mpi" : "shared memory";
}

void AbortJob(int exit_status) {
  LOCKSTEP_CHECK(exit_status >= 1 && exit_status <= 255);
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized != 0 && finalized == 0) {
    if (ranks_elsewhere) KillLauncherLater(kLauncherPatience);
    MPI_Abort(MPI_COMM_WORLD, exit_status);
  }
  std::_Exit(exit_status);
}

}  // namespace lockstep
