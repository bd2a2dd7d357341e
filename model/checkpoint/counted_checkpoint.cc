#include "model/checkpoint/counted_checkpoint.h"

#include <algorithm>
#include <utility>

namespace lockstep {

namespace {

// A second or two of a slow network file system.
constexpr int64_t kPieceBytes = 16 << 20;

class CountedCheckpoint : public Checkpoint {
 public:
  CountedCheckpoint(std::unique_ptr<Checkpoint> inner, std::function<void(int64_t)> count)
      : inner_(std::move(inner)), count_(std::move(count)) {}

  std::string description() const override { return inner_->description(); }
  const TensorInfo* Find(const std::string& name) const override { return inner_->Find(name); }
  std::vector<std::string> Names() const override { return inner_->Names(); }
  std::optional<MadeUpTensor> FindMadeUp(const std::string& name) const override {
    return inner_->FindMadeUp(name);
  }

  absl::Status Read(const std::string& name, Range rows, Range cols,
                    const MatrixView& dst) const override {
    const int64_t row_bytes = std::max<int64_t>(1, cols.size() * SizeOf(dst.dtype));
    const int64_t piece = std::max<int64_t>(1, kPieceBytes / row_bytes);
    int64_t row = rows.begin;
    do {
      const Range part = {row, std::min(row + piece, rows.end)};
      MatrixView to = dst;
      to.rows = part.size();
      to.data = static_cast<char*>(dst.data) + (row - rows.begin) * dst.stride * SizeOf(dst.dtype);
      LOCKSTEP_RETURN_IF_ERROR(inner_->Read(name, part, cols, to));
      count_(part.size() * row_bytes);
      row = part.end;
    } while (row < rows.end);
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<Checkpoint> inner_;
  const std::function<void(int64_t)> count_;
};

}  // namespace

std::unique_ptr<Checkpoint> CountReadBytes(std::unique_ptr<Checkpoint> inner,
                                           std::function<void(int64_t bytes)> count) {
  return std::make_unique<CountedCheckpoint>(std::move(inner), std::move(count));
}

}  // namespace lockstep
