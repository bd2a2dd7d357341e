#include "model/cuda_weights.h"

#include <algorithm>
#include <mutex>

namespace lockstep {

namespace {
constexpr int64_t kPieceBytes = int64_t{64} << 20;
}  // namespace

absl::StatusOr<DeviceWeightLoader> DeviceWeightLoader::Create(const Checkpoint& checkpoint,
                                                              ThreadPool& threads,
                                                              CudaStream stream) {
  DeviceWeightLoader loader(checkpoint, threads, stream);
  for (PinnedBuffer& staging : loader.staging_) {
    LOCKSTEP_ASSIGN_OR_RETURN(staging, PinnedBuffer::Create(kPieceBytes, "reading weights"));
  }
  return loader;
}

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
  const int64_t row_bytes = part.cols.size() * SizeOf(dtype);
  const int64_t rows_per_piece = std::max<int64_t>(1, kPieceBytes / row_bytes);
  if (row_bytes > kPieceBytes) {
    return absl::UnimplementedError(absl::StrFormat("%s: a row of %d bytes", part.name, row_bytes));
  }
  for (int64_t row = part.rows.begin; row < part.rows.end; row += rows_per_piece) {
    const Range rows{row, std::min(row + rows_per_piece, part.rows.end)};
    PinnedBuffer& staging = staging_[next_];
    next_ = 1 - next_;
    LOCKSTEP_RETURN_IF_ERROR(ReadPiece({part.name, rows, part.cols}, dtype, staging.data()));
    // The copy before this one, from the other buffer, went on while this piece was read.
    LOCKSTEP_RETURN_IF_ERROR(Synchronize(stream_));
    LOCKSTEP_RETURN_IF_ERROR(CopyAsync(to, staging.data(), rows.size() * row_bytes, stream_));
    to += rows.size() * row_bytes;
  }
  return absl::OkStatus();
}

// Rows shared out to the threads: several reads are in flight.
absl::Status DeviceWeightLoader::ReadPiece(const Rectangle& piece, DType dtype, void* to) {
  std::mutex mutex;
  absl::Status first_error;
  const int64_t cols = piece.cols.size();
  threads_.ParallelFor(piece.rows.size(), 1, [&](int64_t begin, int64_t end) {
    const MatrixView view{static_cast<char*>(to) + begin * cols * SizeOf(dtype), dtype, end - begin,
                          cols, cols};
    const absl::Status status = checkpoint_.Read(
        piece.name, {piece.rows.begin + begin, piece.rows.begin + end}, piece.cols, view);
    if (status.ok()) return;
    const std::lock_guard lock(mutex);
    if (first_error.ok()) first_error = status;
  });
  return first_error;
}

}  // namespace lockstep
