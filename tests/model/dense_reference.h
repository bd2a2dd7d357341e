// The decoder once more, in double precision with plain loops: no paging, no sharding, no code of
// the product but its config structs. The yardstick of decoder_test.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "model/model_config.h"

namespace lockstep {

using DoubleMatrix = std::vector<std::vector<double>>;

// A tensor by its Hugging Face name; a vector is one row.
using TensorSource = std::function<DoubleMatrix(const std::string& name)>;

// Logits [T][V] of all tokens of one sequence whose first prompt_length tokens are its prompt.
DoubleMatrix DenseLogits(const ModelConfig& config, const TensorSource& tensors,
                         const std::vector<int32_t>& tokens, int64_t prompt_length);

}  // namespace lockstep
