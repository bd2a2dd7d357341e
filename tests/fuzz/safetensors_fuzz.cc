// Any bytes as a safetensors file: opened, and every tensor read.
#include "model/checkpoint/safetensors.h"
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/read_tensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const lockstep::MemoryFile file(data, size);
  const auto checkpoint = lockstep::OpenSafetensors(file.path());
  if (checkpoint.ok()) lockstep::ReadTensors(**checkpoint);
  return 0;
}
