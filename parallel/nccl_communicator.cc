#include "parallel/nccl_communicator.h"

#include <cuda_runtime.h>
#include <nccl.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "parallel/cuda_ranks.h"
#include "runtime/core/cuda_errors.h"

namespace lockstep {

namespace {

constexpr char kNetworkHint[] =
    "; between hosts, NCCL_SOCKET_IFNAME=eth0 in the environment names the network to use";
constexpr int64_t kWarmUpBytes = int64_t{16} << 20;  // the largest message that is tried

std::string VersionText(int version) {
  return absl::StrFormat("%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
}

// NCCL keeps the buffers between processes of a host there; containers start with 64 MB.
std::string SharedMemoryText() {
  struct statvfs shm = {};
  if (statvfs("/dev/shm", &shm) != 0) return "there is no /dev/shm";
  const double mib = static_cast<double>(shm.f_frsize) / 1048576.0;
  return absl::StrFormat("/dev/shm has %.0f MiB, %.0f MiB of them free",
                         mib * static_cast<double>(shm.f_blocks),
                         mib * static_cast<double>(shm.f_bavail));
}

absl::Status NcclStatus(ncclResult_t code, const char* call, ncclComm* comm) {
  if (code == ncclSuccess || code == ncclInProgress) return absl::OkStatus();
  const char* last = ncclGetLastError(comm);
  return absl::InternalError(absl::StrFormat(
      "NCCL %s: %s: %s%s%s (%s; in a container give it more, --shm-size=1g; NCCL_DEBUG=INFO in the "
      "environment tells more)",
      NcclCommunicator::Version(), call, ncclGetErrorString(code),
      last != nullptr && *last != 0 ? ": " : "", last == nullptr ? "" : last, SharedMemoryText()));
}

#define LOCKSTEP_NCCL(call, comm) LOCKSTEP_RETURN_IF_ERROR(NcclStatus((call), #call, (comm)))

ncclDataType_t NcclType(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return ncclFloat16;
    case DType::kBF16:
      return ncclBfloat16;
    case DType::kF32:
      return ncclFloat32;
    case DType::kF8E4M3:
      break;
  }
  LOCKSTEP_CHECK(false);
}

// The GPU of this process, which must be the selected one.
absl::StatusOr<CudaRank> MyRank(const Communicator& host, int device) {
  int selected = -1;
  LOCKSTEP_CUDA(cudaGetDevice(&selected));
  if (selected != device) {
    return absl::FailedPreconditionError(
        absl::StrFormat("device %d is selected, not device %d", selected, device));
  }
  LOCKSTEP_ASSIGN_OR_RETURN(const CudaDeviceInfo info, SelectCudaDevice(device));
  return CudaRank{host.host(), info.uuid, NumCudaDevices()};
}

// What waits for all ranks, and where one of them has failed in it perhaps for ever, gets a thread
// of its own. It is left behind when time is up: the process ends then. `call` keeps what it uses.
absl::Status RunWithin(bool one_host, const char* what, std::function<absl::Status()> call) {
  const std::chrono::seconds limit(one_host ? 25 : 120);
  const auto result = std::make_shared<std::promise<absl::Status>>();
  std::future<absl::Status> done = result->get_future();
  std::thread([result, call = std::move(call)] { result->set_value(call()); }).detach();
  if (done.wait_for(limit) == std::future_status::ready) return done.get();
  return absl::DeadlineExceededError(absl::StrFormat(
      "NCCL %s: %s still waits for the other ranks after %d s (%s%s; NCCL_DEBUG=INFO in the "
      "environment tells more)",
      NcclCommunicator::Version(), what, limit.count(), SharedMemoryText(),
      one_host ? "" : kNetworkHint));
}

bool OnOneHost(const Communicator& host) { return host.ranks_on_host() == host.size(); }

absl::StatusOr<ncclComm*> InitRank(int size, int rank, const ncclUniqueId& id, int max_blocks,
                                   bool one_host) {
  int device = 0;
  LOCKSTEP_CUDA(cudaGetDevice(&device));
  const auto comm = std::make_shared<ncclComm*>(nullptr);
  LOCKSTEP_RETURN_IF_ERROR(RunWithin(one_host, "ncclCommInitRankConfig", [=]() -> absl::Status {
    LOCKSTEP_CUDA(cudaSetDevice(device));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (max_blocks > 0) config.maxCTAs = max_blocks;
    return NcclStatus(ncclCommInitRankConfig(comm.get(), size, id, rank, &config),
                      "ncclCommInitRankConfig", nullptr);
  }));
  return *comm;
}

// The error of the rank that failed before that of those that waited for it.
absl::Status AgreeOnCause(Communicator& host, const absl::Status& mine) {
  const bool waited = absl::IsDeadlineExceeded(mine);
  LOCKSTEP_RETURN_IF_ERROR(Agree(host, waited ? absl::OkStatus() : mine));
  return Agree(host, mine);
}

}  // namespace

std::string NcclCommunicator::Version() {
  int version = 0;
  return ncclGetVersion(&version) == ncclSuccess ? VersionText(version) : "of unknown version";
}

absl::StatusOr<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Create(Communicator& host,
                                                                           int device,
                                                                           int max_blocks) {
  LOCKSTEP_CHECK(max_blocks >= 0 && max_blocks <= kMaxBlocks);
  std::unique_ptr<NcclCommunicator> communicator(new NcclCommunicator(host.rank(), host.size()));
  const absl::StatusOr<CudaRank> mine = MyRank(host, device);
  LOCKSTEP_RETURN_IF_ERROR(Agree(host, mine.status()));
  LOCKSTEP_ASSIGN_OR_RETURN(const std::vector<CudaRank> ranks, GatherCudaRanks(host, *mine));
  LOCKSTEP_RETURN_IF_ERROR(CheckOneGpuPerRank(ranks));
  if (host.size() == 1) return communicator;
  // Multicast through the switches stays off unless the environment asks for it: a job that dies in
  // it may take the host's GPUs with it.
  setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/0);
  LOCKSTEP_RETURN_IF_ERROR(communicator->Connect(host, max_blocks));
  const absl::Status warm = communicator->WarmUp(host);
  if (warm.ok()) return communicator;
  communicator.release();  // the thread of a sum that never ends may still use it
  return warm;
}

// COLLECTIVE.
absl::Status NcclCommunicator::Connect(Communicator& host, int max_blocks) {
  ncclUniqueId id = {};
  absl::Status made;
  if (rank_ == 0) made = NcclStatus(ncclGetUniqueId(&id), "ncclGetUniqueId", nullptr);
  LOCKSTEP_RETURN_IF_ERROR(Agree(host, made));
  LOCKSTEP_RETURN_IF_ERROR(host.Broadcast(&id, sizeof(id), 0));
  const absl::StatusOr<ncclComm*> connected =
      InitRank(size_, rank_, id, max_blocks, OnOneHost(host));
  if (connected.ok()) comm_ = *connected;
  const absl::Status all = AgreeOnCause(host, connected.status());
  if (!all.ok()) Abort();
  return all;
}

// COLLECTIVE. NCCL connects ranks, allocates and loads kernels at the first use of each of its ways
// to do a sum: here, not in a step or while a graph is captured. Sizes meet all of these ways.
absl::Status NcclCommunicator::WarmUp(Communicator& host) {
  absl::StatusOr<DeviceBuffer> data =
      DeviceBuffer::Create(kWarmUpBytes * size_, "first use of NCCL");
  // Nobody begins who has not the memory to go on.
  LOCKSTEP_RETURN_IF_ERROR(Agree(host, data.status()));
  int device = 0;
  LOCKSTEP_RETURN_IF_ERROR(Agree(host, CudaStatus(cudaGetDevice(&device), "cudaGetDevice")));
  const auto kept = std::make_shared<DeviceBuffer>(*std::move(data));
  // Where a rank fails alone the others' sums never end: after time is up nothing here goes away
  // that such a sum, or the thread that waits for it, still uses.
  const absl::Status all =
      AgreeOnCause(host, RunWithin(OnOneHost(host), "its first use",
                                   [this, device, kept] { return UseOnce(device, *kept); }));
  if (!all.ok()) Abort();
  return all;
}

absl::Status NcclCommunicator::UseOnce(int device, const DeviceBuffer& data) {
  LOCKSTEP_CUDA(cudaSetDevice(device));  // of this thread
  LOCKSTEP_ASSIGN_OR_RETURN(const OwnedCudaStream stream, OwnedCudaStream::Create());
  LOCKSTEP_RETURN_IF_ERROR(FillBytesAsync(data.data(), 0, data.size_bytes(), stream.get()));
  for (int64_t bytes = 1024; bytes <= kWarmUpBytes; bytes *= 4) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      LOCKSTEP_RETURN_IF_ERROR(
          AllReduceSum(data.data(), bytes / SizeOf(dtype), dtype, stream.get()));
    }
    LOCKSTEP_RETURN_IF_ERROR(
        AllGather(data.as<char>() + rank_ * bytes, bytes, data.data(), stream.get()));
    LOCKSTEP_RETURN_IF_ERROR(Broadcast(data.data(), bytes, 0, stream.get()));
  }
  return Synchronize(stream.get());
}

NcclCommunicator::~NcclCommunicator() {
  ncclComm* comm = comm_.exchange(nullptr);
  if (comm != nullptr) ncclCommDestroy(comm);
}

absl::StatusOr<ncclComm*> NcclCommunicator::Usable() const {
  if (aborted_) return absl::AbortedError("NCCL's communicator was aborted");
  return comm_.load();
}

absl::Status NcclCommunicator::AllReduceSum(void* data, int64_t count, DType dtype,
                                            CudaStream stream) {
  LOCKSTEP_ASSIGN_OR_RETURN(ncclComm* const comm, Usable());
  if (comm == nullptr || count == 0) return absl::OkStatus();
  LOCKSTEP_NCCL(
      ncclAllReduce(data, data, static_cast<size_t>(count), NcclType(dtype), ncclSum, comm, stream),
      comm);
  return absl::OkStatus();
}

absl::Status NcclCommunicator::AllGather(const void* send, int64_t bytes, void* recv,
                                         CudaStream stream) {
  LOCKSTEP_ASSIGN_OR_RETURN(ncclComm* const comm, Usable());
  if (bytes == 0) return absl::OkStatus();
  if (comm == nullptr)
    return send == recv ? absl::OkStatus() : CopyAsync(recv, send, bytes, stream);
  LOCKSTEP_NCCL(ncclAllGather(send, recv, static_cast<size_t>(bytes), ncclInt8, comm, stream),
                comm);
  return absl::OkStatus();
}

absl::Status NcclCommunicator::Broadcast(void* data, int64_t bytes, int root, CudaStream stream) {
  LOCKSTEP_CHECK(root >= 0 && root < size_);
  LOCKSTEP_ASSIGN_OR_RETURN(ncclComm* const comm, Usable());
  if (comm == nullptr || bytes == 0) return absl::OkStatus();
  LOCKSTEP_NCCL(ncclBroadcast(data, data, static_cast<size_t>(bytes), ncclInt8, root, comm, stream),
                comm);
  return absl::OkStatus();
}

absl::Status NcclCommunicator::AsyncError() const {
  ncclComm* const comm = comm_;
  if (comm == nullptr) return absl::OkStatus();
  ncclResult_t error = ncclSuccess;
  LOCKSTEP_NCCL(ncclCommGetAsyncError(comm, &error), comm);
  return NcclStatus(error, "a collective", comm);
}

void NcclCommunicator::Abort() {
  aborted_ = true;
  ncclComm* const comm = comm_.exchange(nullptr);
  if (comm != nullptr) ncclCommAbort(comm);
}

}  // namespace lockstep
