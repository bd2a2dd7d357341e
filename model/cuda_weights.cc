#include "model/cuda_weights.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <deque>
#include <mutex>

#include "model/cuda_weight_ops.h"
#include "runtime/core/cuda_errors.h"
#include "runtime/core/progress.h"

namespace lockstep {

namespace {

// Page-locked memory of the ring: two slots a thread, so that one is copied while the other is
// filled. A thread reads some 6 GB/s from the page cache, the bus takes 50: pieces of 2 to 8 MB are
// a millisecond of either, against the 10 us that a read and a copy cost by themselves.
constexpr int64_t kRingBytes = int64_t{128} << 20;
constexpr int64_t kMinPieceBytes = int64_t{2} << 20;
constexpr int64_t kMaxPieceBytes = int64_t{8} << 20;

struct Slot {
  PinnedBuffer staging;
  DeviceBuffer stored;           // for a type that is converted on the device; else empty
  cudaEvent_t copied = nullptr;  // what was read into it is on the device
};

// The type that a tensor is read as: on the way to float16 the host looks for values that do not
// fit.
DType ReadType(const Checkpoint& checkpoint, const std::string& name, DType wanted) {
  const TensorInfo* const info = checkpoint.Find(name);
  if (info == nullptr || wanted == DType::kF16) return wanted;
  return StoredDType(*info).value_or(wanted);
}

}  // namespace

struct DeviceWeightLoader::Piece {
  Rectangle from;
  DType read_type = DType::kF32;
  DType dtype = DType::kF32;
  char* to = nullptr;

  int64_t count() const { return from.rows.size() * from.cols.size(); }
  int64_t read_bytes() const { return count() * SizeOf(read_type); }
};

// Used by all threads of the pool.
class DeviceWeightLoader::Transfer {
 public:
  Transfer(const Checkpoint& checkpoint, CudaStream stream, int64_t total_bytes)
      : checkpoint_(checkpoint), stream_(stream), progress_("reading weights", total_bytes) {}
  ~Transfer() {
    for (const Slot& slot : slots_) {
      if (slot.copied != nullptr) cudaEventDestroy(slot.copied);
    }
  }

  absl::Status Create(int num_slots, int64_t slot_bytes, bool converts) {
    LOCKSTEP_CUDA(cudaGetDevice(&device_));
    slots_.resize(static_cast<size_t>(num_slots));
    for (Slot& slot : slots_) {
      LOCKSTEP_ASSIGN_OR_RETURN(slot.staging, PinnedBuffer::Create(slot_bytes, "reading weights"));
      if (converts) {
        LOCKSTEP_ASSIGN_OR_RETURN(slot.stored,
                                  DeviceBuffer::Create(slot_bytes, "converting weights"));
      }
      LOCKSTEP_CUDA(
          cudaEventCreateWithFlags(&slot.copied, cudaEventDisableTiming | cudaEventBlockingSync));
      free_.push_back(&slot);
    }
    return absl::OkStatus();
  }

  // Does nothing once a piece has failed.
  void Run(const Piece& piece) {
    Slot* const slot = Take();
    if (slot == nullptr) return;
    const absl::Status status = Move(piece, *slot);
    progress_.Add(piece.read_bytes());
    const std::lock_guard lock(mutex_);
    free_.push_back(slot);
    if (first_error_.ok()) first_error_ = status;
  }

  const absl::Status& status() const { return first_error_; }

 private:
  // The slot that has been copying for longest; a thread has one at a time, and there are more than
  // threads. Null after an error.
  Slot* Take() {
    const std::lock_guard lock(mutex_);
    if (!first_error_.ok()) return nullptr;
    LOCKSTEP_CHECK(!free_.empty());
    Slot* const slot = free_.front();
    free_.pop_front();
    return slot;
  }

  absl::Status Move(const Piece& piece, Slot& slot) {
    LOCKSTEP_CUDA(cudaSetDevice(device_));  // of this thread
    LOCKSTEP_CUDA(cudaEventSynchronize(slot.copied));
    const int64_t cols = piece.from.cols.size();
    LOCKSTEP_RETURN_IF_ERROR(checkpoint_.Read(
        piece.from.name, piece.from.rows, piece.from.cols,
        {slot.staging.data(), piece.read_type, piece.from.rows.size(), cols, cols}));
    if (piece.read_type == piece.dtype) {
      LOCKSTEP_RETURN_IF_ERROR(
          CopyAsync(piece.to, slot.staging.data(), piece.read_bytes(), stream_));
    } else {
      // Two calls that belong together; the next piece of this slot comes behind both.
      LOCKSTEP_RETURN_IF_ERROR(
          CopyAsync(slot.stored.data(), slot.staging.data(), piece.read_bytes(), stream_));
      LOCKSTEP_RETURN_IF_ERROR(ConvertOnCuda(piece.read_type, slot.stored.data(), piece.dtype,
                                             piece.to, piece.count(), stream_));
    }
    LOCKSTEP_CUDA(cudaEventRecord(slot.copied, stream_));
    return absl::OkStatus();
  }

  const Checkpoint& checkpoint_;
  const CudaStream stream_;
  int device_ = 0;
  ProgressLine progress_;
  std::vector<Slot> slots_;
  std::mutex mutex_;  // of the fields below
  std::deque<Slot*> free_;
  absl::Status first_error_;
};

DeviceWeightLoader::DeviceWeightLoader(const Checkpoint& checkpoint, ThreadPool& threads,
                                       CudaStream stream)
    : checkpoint_(checkpoint),
      threads_(threads),
      stream_(stream),
      start_(std::chrono::steady_clock::now()),
      piece_bytes_(
          std::clamp(kRingBytes / (2 * threads.num_threads()), kMinPieceBytes, kMaxPieceBytes)) {}
DeviceWeightLoader::~DeviceWeightLoader() = default;

absl::StatusOr<DeviceMatrix> DeviceWeightLoader::Load(const std::vector<Rectangle>& parts,
                                                      DType dtype) {
  DeviceMatrix matrix;
  if (parts.empty()) return matrix;
  int64_t rows = 0;
  for (const Rectangle& part : parts) {
    LOCKSTEP_CHECK(part.cols.size() == parts[0].cols.size());
    rows += part.rows.size();
  }
  const int64_t cols = parts[0].cols.size();
  LOCKSTEP_ASSIGN_OR_RETURN(matrix.storage,
                            DeviceBuffer::Create(rows * cols * SizeOf(dtype), parts[0].name));
  matrix.view = {matrix.storage.data(), dtype, rows, cols, cols};
  char* to = matrix.storage.as<char>();
  for (const Rectangle& part : parts) {
    LOCKSTEP_RETURN_IF_ERROR(LoadPart(part, dtype, to));
    to += part.rows.size() * cols * SizeOf(dtype);
  }
  return matrix;
}

absl::StatusOr<DeviceMatrix> DeviceWeightLoader::LoadVector(const std::vector<Rectangle>& parts,
                                                            DType dtype) {
  DeviceMatrix vector;
  if (parts.empty()) return vector;
  int64_t size = 0;
  for (const Rectangle& part : parts) size += part.cols.size();
  LOCKSTEP_ASSIGN_OR_RETURN(vector.storage,
                            DeviceBuffer::Create(size * SizeOf(dtype), parts[0].name));
  vector.view = {vector.storage.data(), dtype, 1, size, size};
  char* to = vector.storage.as<char>();
  for (const Rectangle& part : parts) {
    LOCKSTEP_RETURN_IF_ERROR(LoadPart(part, dtype, to));
    to += part.cols.size() * SizeOf(dtype);
  }
  return vector;
}

absl::Status DeviceWeightLoader::LoadPart(const Rectangle& part, DType dtype, char* to) {
  const int64_t cols = part.cols.size();
  if (const auto made_up = checkpoint_.FindMadeUp(part.name)) {
    made_up_bytes_ += part.rows.size() * cols * SizeOf(dtype);
    return MakeUpWeights(*made_up, part.rows, part.cols, {to, dtype, part.rows.size(), cols, cols},
                         stream_);
  }
  const DType read_type = ReadType(checkpoint_, part.name, dtype);
  const int64_t row_bytes = cols * std::max(SizeOf(read_type), SizeOf(dtype));
  if (row_bytes > piece_bytes_) {
    return absl::UnimplementedError(absl::StrFormat("%s: a row of %d bytes", part.name, row_bytes));
  }
  if (cols == 0) return absl::OkStatus();
  const int64_t rows_a_piece = piece_bytes_ / row_bytes;
  for (int64_t row = part.rows.begin; row < part.rows.end; row += rows_a_piece) {
    const Range rows{row, std::min(row + rows_a_piece, part.rows.end)};
    pieces_.push_back({{part.name, rows, part.cols}, read_type, dtype, to});
    read_bytes_ += pieces_.back().read_bytes();
    to += rows.size() * cols * SizeOf(dtype);
  }
  return absl::OkStatus();
}

absl::Status DeviceWeightLoader::Finish() {
  if (!pieces_.empty()) {
    const bool converts = std::any_of(pieces_.begin(), pieces_.end(), [](const Piece& piece) {
      return piece.read_type != piece.dtype;
    });
    const int64_t num_pieces = static_cast<int64_t>(pieces_.size());
    const int64_t num_slots = std::min<int64_t>(2 * threads_.num_threads(), num_pieces);
    Transfer transfer(checkpoint_, stream_, read_bytes_);
    // Few and small pieces need no large slots.
    int64_t slot_bytes = 0;
    for (const Piece& piece : pieces_) slot_bytes = std::max(slot_bytes, piece.read_bytes());
    LOCKSTEP_RETURN_IF_ERROR(transfer.Create(static_cast<int>(num_slots), slot_bytes, converts));
    threads_.ParallelFor(num_pieces, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) transfer.Run(pieces_[static_cast<size_t>(i)]);
    });
    // Before the ring goes.
    const absl::Status copied = Synchronize(stream_);
    LOCKSTEP_RETURN_IF_ERROR(transfer.status());
    LOCKSTEP_RETURN_IF_ERROR(copied);
    pieces_.clear();
  }
  LOCKSTEP_RETURN_IF_ERROR(Synchronize(stream_));
  seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  return absl::OkStatus();
}

std::string DeviceWeightLoader::Summary() const {
  const double gb = static_cast<double>(read_bytes_ + made_up_bytes_) / 1e9;
  if (read_bytes_ == 0) return absl::StrFormat("%.2f GB made up in %.2f s", gb, seconds_);
  return absl::StrFormat("%.2f GB in %.2f s, %.1f GB/s, %d threads", gb, seconds_, gb / seconds_,
                         threads_.num_threads());
}

}  // namespace lockstep
