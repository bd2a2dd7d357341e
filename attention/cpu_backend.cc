#include "attention/cpu_backend.h"

#include <algorithm>
#include <cstring>

#include "attention/batch_check.h"

namespace lockstep {
namespace {

// Rows of one request computed together. 32 rows of a group of 3 heads make 96 query vectors a key
// tile: unpacking the tile then costs about a tenth of the products.
constexpr int64_t kRowTile = 32;

// Items of at most so many rows (one decode token of a group) are bound by reading keys and values.
constexpr int64_t kStreamRows = 16;

struct RowTile {
  int64_t request;
  int64_t first_row;
  int64_t num_rows;
  int64_t first_position;  // of first_row in its request
};

class CpuMetadata : public AttentionMetadata {
 public:
  AttentionBatch batch;
  int64_t block_size = 0;
  int32_t largest_block = -1;
  std::vector<RowTile> tiles;
};

// A row tile times a KV head: the unit of ownership. Key tiles [first_tile, last_tile).
struct Item {
  const RowTile* rows;
  int64_t kv_head;
  int64_t first_tile;
  int64_t last_tile;
  double cost = 0;
  int64_t shared_offset = -1;  // where its partials are, in floats, when several threads share it
};

// A place in the list of work: before key tile `tile` of item `item`.
struct Cut {
  int64_t item = 0;
  int64_t tile = 0;
};

int64_t RoundUp(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// First key the query at `position` sees.
int64_t FirstVisible(int64_t position, int64_t window) {
  return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
}

// Forward of one layer: the plan, then what each thread does of it.
class Job {
 public:
  Job(const CpuKernels& kernels, const AttentionGeometry& geometry, const CpuMetadata& metadata,
      const MatrixView& query, const KvCacheView& cache, const MatrixView& out);

  // Lists the items and cuts them into `num_threads` parts of about the same cost.
  void Plan(int64_t num_threads);
  int64_t ScratchFloats() const;
  int64_t SharedFloats() const { return shared_floats_; }

  // Part `part` of the plan. Items that were cut leave partials in `shared`.
  void RunPart(int64_t part, float* scratch, float* shared) const;
  // Folds what the parts left in `shared`; after all parts.
  void FinishShared(float* shared) const;

 private:
  int64_t GroupSize(const Item& item) const { return geometry_.kv_groups[item.kv_head].size(); }
  int64_t NumRows(const Item& item) const { return item.rows->num_rows * GroupSize(item); }
  int64_t StateFloats(int64_t rows) const { return RoundUp(rows * (2 + padded_dim_), kRowPadding); }
  SoftmaxState StateAt(float* memory, int64_t rows) const {
    return {.max = memory + rows * padded_dim_,
            .sum = memory + rows * (padded_dim_ + 1),
            .acc = memory};
  }
  void ListItems();
  void CutItems(int64_t num_threads, double total_cost);
  void ScaleQuery(const Item& item, float* scaled) const;
  void FillOffsets(const Item& item, int64_t first_key, int64_t begin, int64_t end,
                   int64_t* offsets) const;
  // The keys of a tile that some row of the item sees, as [begin, end) within the tile.
  static int64_t InTile(int64_t tile, int64_t key) {
    return std::clamp<int64_t>(key - tile * kKeyTile, 0, kKeyTile);
  }
  Range KeysOf(const Item& item, int64_t tile) const {
    const int64_t first = item.rows->first_position;
    return {InTile(tile, FirstVisible(first, geometry_.sliding_window)),
            InTile(tile, first + item.rows->num_rows)};
  }
  // `next`: the place of the tile that the same thread works on afterwards.
  void AttendTile(const Item& item, int64_t tile, const Cut& next, float* scratch,
                  const SoftmaxState& partial) const;
  void RunItem(const Item& item, int64_t first_tile, int64_t last_tile, const Cut& next,
               float* scratch, float* shared) const;
  void WriteOut(const Item& item, const SoftmaxState& state) const;

  const CpuKernels& kernels_;
  const AttentionGeometry& geometry_;
  const CpuMetadata& metadata_;
  const MatrixView& query_;
  const KvCacheView& cache_;
  const MatrixView& out_;
  const int64_t padded_dim_;
  int64_t max_rows_ = 0;  // of any item
  int64_t shared_floats_ = 0;
  std::vector<Item> items_;
  std::vector<Cut> cuts_;
};

Job::Job(const CpuKernels& kernels, const AttentionGeometry& geometry, const CpuMetadata& metadata,
         const MatrixView& query, const KvCacheView& cache, const MatrixView& out)
    : kernels_(kernels),
      geometry_(geometry),
      metadata_(metadata),
      query_(query),
      cache_(cache),
      out_(out),
      padded_dim_(RoundUp(geometry.head_dim, kRowPadding)) {}

void Job::ListItems() {
  items_.reserve(metadata_.tiles.size() * geometry_.num_kv_heads);
  for (const RowTile& rows : metadata_.tiles) {
    const int64_t begin = FirstVisible(rows.first_position, geometry_.sliding_window);
    const int64_t end = rows.first_position + rows.num_rows;
    for (int64_t head = 0; head < geometry_.num_kv_heads; ++head) {
      Item item = {.rows = &rows,
                   .kv_head = head,
                   .first_tile = begin / kKeyTile,
                   .last_tile = (end + kKeyTile - 1) / kKeyTile};
      if (GroupSize(item) == 0) continue;
      // Reading and unpacking a key costs about as much as using it for a few rows.
      constexpr double kUnpackCost = 6;
      item.cost =
          static_cast<double>(end - begin) * (kUnpackCost + static_cast<double>(NumRows(item)));
      max_rows_ = std::max(max_rows_, NumRows(item));
      items_.push_back(item);
    }
  }
}

void Job::CutItems(int64_t num_threads, double total_cost) {
  const int64_t num_items = static_cast<int64_t>(items_.size());
  cuts_.assign(num_threads + 1, Cut{.item = num_items, .tile = 0});
  cuts_[0] = {.item = 0, .tile = items_.empty() ? 0 : items_[0].first_tile};
  int64_t i = 0;
  double before = 0;  // cost of the items before i
  for (int64_t part = 1; part < num_threads; ++part) {
    const double target = total_cost * static_cast<double>(part) / static_cast<double>(num_threads);
    while (i < num_items && before + items_[i].cost <= target) before += items_[i++].cost;
    if (i == num_items) break;
    const Item& item = items_[i];
    const int64_t tiles = item.last_tile - item.first_tile;
    const int64_t taken =
        static_cast<int64_t>((target - before) / item.cost * static_cast<double>(tiles) + 0.5);
    cuts_[part] = {.item = i, .tile = item.first_tile + taken};
    if (taken == tiles) {
      cuts_[part] = {.item = i + 1, .tile = i + 1 < num_items ? items_[i + 1].first_tile : 0};
    }
  }
}

void Job::Plan(int64_t num_threads) {
  ListItems();
  double total_cost = 0;
  for (const Item& item : items_) total_cost += item.cost;
  CutItems(num_threads, total_cost);
  for (const Cut& cut : cuts_) {
    if (cut.item == static_cast<int64_t>(items_.size())) continue;
    Item& item = items_[cut.item];
    if (cut.tile == item.first_tile || item.shared_offset >= 0) continue;
    item.shared_offset = shared_floats_;
    shared_floats_ += (item.last_tile - item.first_tile) * StateFloats(NumRows(item));
  }
}

// Scratch of a thread, in order: scaled query, visible ranges, offsets of this tile and of the
// next, logits, unpacked keys, unpacked values, state, partial.
int64_t Job::ScratchFloats() const {
  return RoundUp(max_rows_ * geometry_.head_dim, kRowPadding) +
         RoundUp(2 * max_rows_, kRowPadding) + 4 * kKeyTile + max_rows_ * kKeyTile +
         geometry_.head_dim * kKeyStrip + kKeyStrip * padded_dim_ + 2 * StateFloats(max_rows_);
}

void Job::ScaleQuery(const Item& item, float* scaled) const {
  const Range group = geometry_.kv_groups[item.kv_head];
  const int64_t width = group.size() * geometry_.head_dim;
  for (int64_t row = 0; row < item.rows->num_rows; ++row) {
    const float* source =
        query_.row<const float>(item.rows->first_row + row) + group.begin * geometry_.head_dim;
    for (int64_t i = 0; i < width; ++i) scaled[row * width + i] = source[i] * geometry_.scale;
  }
}

void Job::FillOffsets(const Item& item, int64_t first_key, int64_t begin, int64_t end,
                      int64_t* offsets) const {
  const int64_t block_size = metadata_.block_size;
  const int32_t* table = metadata_.batch.BlockTable(item.rows->request);
  for (int64_t k = begin; k < end;) {
    const int64_t position = first_key + k;
    const int64_t in_block = position % block_size;
    const int64_t count = std::min(end - k, block_size - in_block);
    const int64_t base = cache_.Offset(table[position / block_size], item.kv_head, in_block);
    for (int64_t i = 0; i < count; ++i) offsets[k + i] = base + i * geometry_.head_dim;
    k += count;
  }
}

void Job::AttendTile(const Item& item, int64_t tile, const Cut& next_tile, float* scratch,
                     const SoftmaxState& partial) const {
  const int64_t group_size = GroupSize(item);
  const int64_t first_key = tile * kKeyTile;
  const auto in_tile = [&](int64_t key) { return static_cast<int32_t>(InTile(tile, key)); };
  float* next = scratch;
  const auto take = [&next](int64_t floats) {
    float* const taken = next;
    next += RoundUp(floats, kRowPadding);
    return taken;
  };
  KeyTileTask task = {};
  task.keys = cache_.keys;
  task.values = cache_.values;
  task.dtype = cache_.dtype;
  task.head_dim = geometry_.head_dim;
  task.padded_dim = padded_dim_;
  task.num_rows = NumRows(item);
  task.logit_softcap = geometry_.logit_softcap;
  task.query = take(max_rows_ * geometry_.head_dim);
  int32_t* const visible = reinterpret_cast<int32_t*>(take(2 * max_rows_));
  int64_t* const offsets = reinterpret_cast<int64_t*>(take(2 * kKeyTile));
  int64_t* const next_offsets = reinterpret_cast<int64_t*>(take(2 * kKeyTile));
  task.logits = take(max_rows_ * kKeyTile);
  task.packed_keys = take(geometry_.head_dim * kKeyStrip);
  task.unpacked_values = take(kKeyStrip * padded_dim_);
  task.visible_begin = visible;
  task.visible_end = visible + max_rows_;
  task.offsets = offsets;
  for (int64_t row = 0; row < item.rows->num_rows; ++row) {
    const int64_t position = item.rows->first_position + row;
    const int64_t first = FirstVisible(position, geometry_.sliding_window);
    std::fill_n(visible + row * group_size, group_size, in_tile(first));
    std::fill_n(visible + max_rows_ + row * group_size, group_size, in_tile(position + 1));
  }
  // Rows ascend, and so do both ends of what they see.
  task.key_begin = visible[0];
  task.key_end = visible[max_rows_ + task.num_rows - 1];
  FillOffsets(item, first_key, task.key_begin, task.key_end, offsets);
  if (next_tile.item < static_cast<int64_t>(items_.size())) {
    const Item& next = items_[next_tile.item];
    const Range keys = KeysOf(next, next_tile.tile);
    // With many rows a tile's keys and values are read once for all of them: nothing to gain.
    if (NumRows(next) <= kStreamRows && keys.begin < keys.end) {
      FillOffsets(next, next_tile.tile * kKeyTile, keys.begin, keys.end, next_offsets);
      task.next_offsets = next_offsets;
      task.next_begin = keys.begin;
      task.next_end = keys.end;
    }
  }
  kernels_.attend_key_tile(task, partial);
}

void Job::RunItem(const Item& item, int64_t first_tile, int64_t last_tile, const Cut& next,
                  float* scratch, float* shared) const {
  const int64_t index = &item - items_.data();
  const auto after = [&](int64_t tile) {
    return tile + 1 < last_tile ? Cut{.item = index, .tile = tile + 1} : next;
  };
  ScaleQuery(item, scratch);
  const int64_t rows = NumRows(item);
  const int64_t state_floats = StateFloats(rows);
  if (item.shared_offset >= 0) {
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
      float* const memory = shared + item.shared_offset + (tile - item.first_tile) * state_floats;
      AttendTile(item, tile, after(tile), scratch, StateAt(memory, rows));
    }
    return;
  }
  float* const states = scratch + ScratchFloats() - 2 * StateFloats(max_rows_);
  const SoftmaxState state = StateAt(states, rows);
  const SoftmaxState partial = StateAt(states + StateFloats(max_rows_), rows);
  AttendTile(item, first_tile, after(first_tile), scratch, state);
  for (int64_t tile = first_tile + 1; tile < last_tile; ++tile) {
    AttendTile(item, tile, after(tile), scratch, partial);
    kernels_.fold(rows, padded_dim_, partial, state);
  }
  WriteOut(item, state);
}

void Job::WriteOut(const Item& item, const SoftmaxState& state) const {
  const Range group = geometry_.kv_groups[item.kv_head];
  for (int64_t row = 0; row < item.rows->num_rows; ++row) {
    float* out = out_.row<float>(item.rows->first_row + row);
    for (int64_t i = 0; i < group.size(); ++i) {
      const int64_t r = row * group.size() + i;
      kernels_.normalize(state.acc + r * padded_dim_, state.sum[r], geometry_.head_dim,
                         out + (group.begin + i) * geometry_.head_dim);
    }
  }
}

void Job::RunPart(int64_t part, float* scratch, float* shared) const {
  const Cut begin = cuts_[part];
  const Cut end = cuts_[part + 1];
  for (int64_t i = begin.item; i <= end.item && i < static_cast<int64_t>(items_.size()); ++i) {
    const Item& item = items_[i];
    const int64_t first_tile = i == begin.item ? begin.tile : item.first_tile;
    const int64_t last_tile = i == end.item ? end.tile : item.last_tile;
    if (first_tile >= last_tile) continue;
    const bool last = i + 1 == static_cast<int64_t>(items_.size()) || i + 1 > end.item ||
                      (i + 1 == end.item && end.tile <= items_[i + 1].first_tile);
    const Cut next = last ? Cut{.item = static_cast<int64_t>(items_.size())}
                          : Cut{.item = i + 1, .tile = items_[i + 1].first_tile};
    RunItem(item, first_tile, last_tile, next, scratch, shared);
  }
}

void Job::FinishShared(float* shared) const {
  for (const Item& item : items_) {
    if (item.shared_offset < 0) continue;
    const int64_t rows = NumRows(item);
    float* memory = shared + item.shared_offset;
    const SoftmaxState state = StateAt(memory, rows);
    for (int64_t tile = item.first_tile + 1; tile < item.last_tile; ++tile) {
      memory += StateFloats(rows);
      kernels_.fold(rows, padded_dim_, StateAt(memory, rows), state);
    }
    WriteOut(item, state);
  }
}

float* Grown(Buffer& buffer, int64_t floats) {
  const int64_t bytes = floats * static_cast<int64_t>(sizeof(float));
  if (buffer.size_bytes() < bytes) {
    auto grown = Buffer::Create(bytes, "scratch memory of attention");
    LOCKSTEP_CHECK(grown.ok());
    buffer = *std::move(grown);
  }
  return buffer.as<float>();
}

}  // namespace

const AttentionCapabilities& CpuBackend::Capabilities() {
  static const AttentionCapabilities capabilities = {
      .activation_dtypes = {DType::kF32},
      .kv_dtypes = {DType::kF32, DType::kBF16, DType::kF16},
      .max_head_dim = 512,
      .sliding_window = true,
      .logit_softcap = true,
      .deterministic = true,
  };
  return capabilities;
}

CpuBackend::CpuBackend(ThreadPool& pool, const CpuKernels& kernels)
    : pool_(pool), kernels_(kernels), scratch_(pool.num_threads() + 1) {}

std::unique_ptr<CpuBackend> CpuBackend::Create(ThreadPool& pool, const CpuKernels* kernels) {
  if (kernels == nullptr) kernels = UsableCpuKernels().begin[0];
  return std::unique_ptr<CpuBackend>(new CpuBackend(pool, *kernels));
}

absl::StatusOr<std::unique_ptr<AttentionMetadata>> CpuBackend::BuildMetadata(
    const AttentionBatch& batch, int64_t block_size) const {
  LOCKSTEP_RETURN_IF_ERROR(CheckBatch(batch, block_size));
  auto metadata = std::make_unique<CpuMetadata>();
  metadata->batch = batch;
  metadata->block_size = block_size;
  metadata->largest_block = LargestBlock(batch, block_size);
  for (int64_t b = 0; b < batch.num_requests(); ++b) {
    const int64_t end = batch.query_start_loc[b + 1];
    for (int64_t row = batch.query_start_loc[b]; row < end; row += kRowTile) {
      metadata->tiles.push_back({.request = b,
                                 .first_row = row,
                                 .num_rows = std::min(kRowTile, end - row),
                                 .first_position = batch.seq_lens[b] - (end - row)});
    }
  }
  return metadata;
}

void CpuBackend::WriteKv(const MatrixView& keys, const MatrixView& values,
                         std::span<const int64_t> slots, const KvCacheView& cache) const {
  CheckWriteArguments(keys, values, slots, cache);
  const int64_t dim = cache.head_dim;
  const int64_t size = SizeOf(cache.dtype);
  // A thread is worth waking for some 10,000 elements.
  const int64_t grain = std::max<int64_t>(1, 10000 / std::max<int64_t>(1, keys.cols));
  pool_.ParallelFor(keys.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (slots[t] == kNoSlot) continue;
      for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
        const int64_t offset =
            size * cache.Offset(slots[t] / cache.block_size, head, slots[t] % cache.block_size);
        Convert(DType::kF32, keys.row<const float>(t) + head * dim, cache.dtype,
                static_cast<char*>(cache.keys) + offset, dim);
        Convert(DType::kF32, values.row<const float>(t) + head * dim, cache.dtype,
                static_cast<char*>(cache.values) + offset, dim);
      }
    }
  });
}

void CpuBackend::Forward(const AttentionGeometry& geometry, const AttentionMetadata& metadata,
                         const MatrixView& query, const KvCacheView& cache,
                         const MatrixView& out) const {
  const auto* cpu_metadata = dynamic_cast<const CpuMetadata*>(&metadata);
  LOCKSTEP_CHECK(cpu_metadata != nullptr);
  const AttentionBatch& batch = cpu_metadata->batch;
  CheckForwardArguments(geometry, query, cache, out, batch.num_tokens());
  LOCKSTEP_CHECK(cache.block_size == cpu_metadata->block_size);
  LOCKSTEP_CHECK(cpu_metadata->largest_block < cache.num_blocks);

  const int64_t num_threads = pool_.num_threads();
  Job job(kernels_, geometry, *cpu_metadata, query, cache, out);
  job.Plan(num_threads);
  for (Buffer& buffer : scratch_) Grown(buffer, job.ScratchFloats());
  float* const shared = Grown(scratch_[num_threads], job.SharedFloats());
  pool_.ParallelFor(num_threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      job.RunPart(part, scratch_[part].as<float>(), shared);
    }
  });
  job.FinishShared(shared);
  for (int64_t t = batch.query_start_loc.back(); t < out.rows; ++t) {
    std::memset(out.row<float>(t), 0, out.cols * sizeof(float));
  }
}

}  // namespace lockstep
