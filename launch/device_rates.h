// What a GPU (or a CPU rank) and its links reach, for predictions: a few numbers, each measured or
// read off a data sheet by whoever writes the description.
#pragma once

#include <string>

#include "runtime/core/json.h"
#include "runtime/core/status.h"

namespace lockstep {

struct DeviceRates {
  std::string name;
  double memory_bytes = 0;
  // Reached by whole steps, not peaks: they hold what kernels lose at their ends.
  double weight_bytes_per_second = 0;  // weights streamed by decode's products
  double kv_bytes_per_second = 0;      // keys and values read by decode's attention
  double product_flops = 0;            // a second, of products of thousands of rows
  double attention_flops = 0;          // a second, of prefill's attention
  // A sum over ranks takes sum_seconds + 2 (N - 1) / N * bytes / link_bytes_per_second.
  double sum_seconds = 0;
  double link_bytes_per_second = 0;
  double step_seconds = 0;  // of every step: embedding, sampling, launches, norms
};

// One of the descriptions that are built in (`h200`), or a JSON file with the members' names as its
// keys, all of them. InvalidArgument names what is missing, and the descriptions there are.
absl::StatusOr<DeviceRates> ReadDeviceRates(const std::string& name_or_file);

OrderedJson DeviceRatesJson(const DeviceRates& rates);

}  // namespace lockstep
