// The arrays of a step on the GPU: what was uploaded stands there, padded, with the last tokens in
// their places, while the host fills the memory of the next steps.
#include "model/cuda_inputs.h"

#include <algorithm>

#include "tests/model/cuda_test_util.h"

namespace lockstep {
namespace {

class CudaInputsTest : public CudaTest {
 protected:
  template <typename T>
  std::vector<T> Host(const T* device, int64_t count) {
    std::vector<T> host(static_cast<size_t>(count));
    EXPECT_STATUS_OK(
        CopyAsync(host.data(), device, count * static_cast<int64_t>(sizeof(T)), stream()));
    EXPECT_STATUS_OK(Synchronize(stream()));
    return host;
  }
};

// A batch of `count` requests of one token each; request b has slot 2 * b.
struct DecodeStep {
  DecodeStep(int32_t count, int32_t step, int32_t num_unknown) {
    starts.push_back(0);
    for (int32_t b = 0; b < count; ++b) {
      ids.push_back(b < num_unknown ? -1 - 2 * b : 100 * step + b);
      positions.push_back(1000 * step + b);
      slots.push_back((int64_t{1} << 33) + step * 16 + b);
      starts.push_back(b + 1);
      lengths.push_back(positions.back() + 1);
      rows.push_back(2 * b);
      logits_rows.push_back(b);
    }
    batch.token_ids = ids;
    batch.positions = positions;
    batch.logits_rows = logits_rows;
    batch.attention.query_start_loc = starts;
    batch.attention.seq_lens = lengths;
    batch.attention.slot_mapping = slots;
    batch.attention.table_rows = rows;
    batch.table_changes.emplace();
  }
  std::vector<int32_t> ids, positions, starts, lengths, rows, logits_rows;
  std::vector<int64_t> slots;
  ForwardBatch batch;
};

template <typename T>
std::vector<T> Padded(std::vector<T> values, int64_t size, T padding) {
  values.resize(static_cast<size_t>(size), padding);
  return values;
}

TEST_F(CudaInputsTest, StepsFollowEachOther) {
  constexpr int32_t kSlots = 700;
  const CudaInputLimits limits{.max_tokens = 400,
                               .max_requests = 400,
                               .max_logits_rows = 400,
                               .max_blocks = 3,
                               .num_slots = kSlots,
                               .rotary_dim = 0};
  auto created = CudaInputs::Create(limits, stream());
  ASSERT_TRUE(created.ok()) << created.status();
  CudaInputs inputs = *std::move(created);
  std::vector<int32_t> last(kSlots);
  for (int32_t s = 0; s < kSlots; ++s) last[s] = 7000 + s;
  EXPECT_STATUS_OK(CopyAsync(inputs.last_tokens(), last.data(), kSlots * 4, stream()));
  EXPECT_STATUS_OK(Synchronize(stream()));
  int32_t step = 0;
  for (const int32_t count : {1, 3, 300, 129, 2}) {
    for (const int32_t padding : {0, 5}) {
      // Others before it, which nobody waits for: more than there are staging buffers.
      for (int i = 0; i < 4; ++i) {
        const DecodeStep other(count, ++step, count);
        EXPECT_STATUS_OK(inputs.BeginStep());
        EXPECT_STATUS_OK(inputs.Upload(other.batch, count, count, count, stream()));
      }
      const int32_t num_unknown = (count + 1) / 2;
      const DecodeStep made(count, ++step, num_unknown);
      const int64_t size = count + padding;
      EXPECT_STATUS_OK(inputs.BeginStep());
      EXPECT_STATUS_OK(inputs.Upload(made.batch, size, size, size, stream()));
      std::vector<int32_t> ids = made.ids;
      for (int32_t b = 0; b < num_unknown; ++b) ids[b] = 7000 + 2 * b;
      EXPECT_EQ(Host(inputs.token_ids(), size), Padded(ids, size, 0));
      EXPECT_EQ(Host(inputs.positions(), size), Padded(made.positions, size, 0));
      EXPECT_EQ(Host(inputs.logits_rows(), size), Padded(made.logits_rows, size, 0));
      const CudaAttentionBatch batch = inputs.attention(size, size, 16);
      EXPECT_EQ(Host(batch.slot_mapping, size), Padded<int64_t>(made.slots, size, -1));
      EXPECT_EQ(Host(batch.seq_lens, size), Padded(made.lengths, size, 0));
      EXPECT_EQ(Host(batch.table_rows, size), Padded(made.rows, size, kSlots));
      std::vector<int32_t> starts(static_cast<size_t>(size) + 1);
      for (size_t b = 0; b < starts.size(); ++b) starts[b] = static_cast<int32_t>(b);
      EXPECT_EQ(Host(batch.query_start_loc, size + 1), starts);
    }
  }
}

}  // namespace
}  // namespace lockstep
