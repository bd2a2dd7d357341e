// The tensor types of GGUF that can be read, and how their blocks turn into floats.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

// Layout of a row: blocks of `block_values` values in `block_bytes` bytes each.
struct GgufType {
  const char* name;
  int64_t block_values;
  int64_t block_bytes;
  // Reads `count` blocks at `src` into count * block_values floats.
  void (*dequantize)(const uint8_t* src, int64_t count, float* dst);
};

// nullptr for a type that cannot be read. `id` is ggml's type number.
const GgufType* FindGgufType(uint32_t id);

// "IQ4_NL", "type 99": for messages, whether the type can be read or not.
std::string GgufTypeName(uint32_t id);

}  // namespace lockstep
