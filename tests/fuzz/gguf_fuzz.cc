// Any bytes as a GGUF file: config, tensors, vocabulary.
#include "model/checkpoint/gguf.h"
#include "model/checkpoint/validate.h"
#include "runtime/core/log.h"
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/read_tensors.h"

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  lockstep::SilenceLog();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const lockstep::MemoryFile file(data, size);
  const auto model = lockstep::OpenGguf(file.path());
  if (model.ok()) {
    (void)lockstep::ValidateTensors(model->config, *model->checkpoint);
    lockstep::ReadTensors(*model->checkpoint);
  }
  const auto text = lockstep::ReadGgufText(file.path());
  if (!text.ok()) return 0;
  const auto tokenizer = lockstep::TokenizerFromGguf(text->vocab, "vocabulary");
  if (!tokenizer.ok()) return 0;
  const auto ids = (*tokenizer)->Encode(" The straße, 42 🦙\n", true);
  if (ids.ok()) LOCKSTEP_CHECK((*tokenizer)->Decode(*ids, false).ok());
  return 0;
}
