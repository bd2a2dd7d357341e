// Copies of a cache's pages by Hopper's copy engine ("TMA"; CUDA Driver API, "Tensor Map Object
// Management"; PTX ISA, "cp.async.bulk.tensor"): what the host prepares. The kernel's side is
// cuda_page_copy.cuh. No CUDA header.
//
// A block's rows of one KV head lie together, so a layer's keys, or values, are one matrix
// [num_blocks * Hkv * P, D], in which row (block * Hkv + head) * P begins a page. One thread copies
// a box of its rows, and the box arrives in shared memory as
//
//   [box rows / 8][panels][8 rows][128 bytes]
//
// where a panel is 128 bytes of a row (64 numbers of 2 bytes) and the 16-byte pieces of a row are
// permuted by its number ("128-byte swizzle"): piece c of row r lies at c ^ r % 8. That is what
// wgmma reads, and ldmatrix reads it without bank conflicts. What is beyond D arrives as zeros.
#pragma once

#include <cstdint>

#include "cache/kv_view.h"
#include "runtime/core/status.h"

namespace lockstep {

// A CUtensorMap: how to copy boxes of one matrix. A kernel takes it within a __grid_constant__
// parameter. It holds the matrix's address and size and no handle, so it is valid for as long as
// the memory is, in a captured graph, too, and making one is host arithmetic.
struct alignas(128) PageMap {
  unsigned char bytes[128];
};

struct PageMaps {
  PageMap keys;
  PageMap values;
};

inline constexpr int kPanelBytes = 128;  // of a row
// Rows that a box is made of, so what P must be a multiple of.
inline constexpr int kPageRowMultiple = 8;

// Bytes of a row of the cache, without padding.
inline int64_t CacheRowBytes(const KvCacheView& cache) {
  return cache.head_dim * SizeOf(cache.dtype);
}
// Whether boxes of `rows` rows can be copied: P a multiple of `rows`, which is one of 8 and at most
// 256; rows of the cache of a multiple of 16 bytes.
bool CanCopyPages(const KvCacheView& cache, int64_t rows);
// Whether a box can hold all panels of its rows, as 128-byte panels follow each other in memory.
inline bool PanelsAreWhole(const KvCacheView& cache) {
  return CacheRowBytes(cache) % kPanelBytes == 0;
}

// For boxes of `rows` rows and `panels` panels (up to 8; 1 unless PanelsAreWhole). InvalidArgument
// where such boxes cannot be copied, Internal where the driver refuses.
absl::StatusOr<PageMaps> MakePageMaps(const KvCacheView& cache, int64_t rows, int64_t panels);

}  // namespace lockstep
