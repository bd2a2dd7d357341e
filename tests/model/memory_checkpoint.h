// Random weights in memory that remember which rectangles were read.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "model/checkpoint/checkpoint.h"
#include "tests/model/dense_reference.h"

namespace lockstep {

class MemoryCheckpoint : public Checkpoint {
 public:
  struct Rectangle {
    std::string name;
    Range rows;
    Range cols;
    DType dtype;
  };

  // Every tensor the config needs: normal with a deviation that keeps activations near 1, norm
  // weights around 1; values are bfloat16 numbers.
  explicit MemoryCheckpoint(const ModelConfig& config, uint32_t seed = 1);

  std::string description() const override { return "weights of the test"; }
  const TensorInfo* Find(const std::string& name) const override;
  std::vector<std::string> Names() const override;
  absl::Status Read(const std::string& name, Range rows, Range cols,
                    const MatrixView& dst) const override;

  // To alter a tensor before it is loaded; element (r, c) at r * cols + c.
  std::vector<float>& Values(const std::string& name) { return tensors_.at(name).values; }
  DoubleMatrix Tensor(const std::string& name) const;
  void Add(const std::string& name, const std::vector<int64_t>& shape,
           const std::vector<float>& values) {
    Entry& entry = tensors_[name];
    entry.info.shape = shape;
    entry.info.stored_type = "F32";
    entry.info.stored_bytes = 4 * std::ssize(values);
    entry.values = values;
  }
  void Remove(const std::string& name) { tensors_.erase(name); }
  // What the calling thread (one rank) has read so far.
  std::vector<Rectangle> ReadByThisThread() const;

 private:
  struct Entry {
    TensorInfo info;
    std::vector<float> values;
  };
  std::map<std::string, Entry> tensors_;
  mutable std::mutex mutex_;
  mutable std::map<std::thread::id, std::vector<Rectangle>> reads_;
};

// A source of such weights. `checkpoint` (owned by the result) is for reading its records.
ModelSource MakeSource(const ModelConfig& config, MemoryCheckpoint** checkpoint = nullptr);

}  // namespace lockstep
