#include "attention/cuda_page_copy.h"

#include <cstring>

#include "runtime/core/cuda_tensor_map.h"

namespace lockstep {
namespace {

static_assert(sizeof(PageMap) == sizeof(CUtensorMap) && alignof(PageMap) >= alignof(CUtensorMap));

// Dimensions, fastest first: columns (of a panel where a box holds several, else of the row), the
// rows of a group of 8, panels, groups. Columns are pairs of bytes, whatever the dtype is: nothing
// but zeros beyond the row depends on it.
absl::StatusOr<PageMap> MakePageMap(const void* matrix, const KvCacheView& cache, int64_t rows,
                                    int64_t panels) {
  const int64_t row_bytes = CacheRowBytes(cache);
  const int64_t matrix_rows = cache.num_blocks * cache.num_kv_heads * cache.block_size;
  const bool several = panels > 1;
  LOCKSTEP_ASSIGN_OR_RETURN(
      const CUtensorMap map,
      EncodeTensorMap(
          matrix, DType::kBF16,
          {{.size = (several ? kPanelBytes : row_bytes) / 2, .box = kPanelBytes / 2},
           {.size = kPageRowMultiple, .stride_bytes = row_bytes, .box = kPageRowMultiple},
           {.size = several ? row_bytes / kPanelBytes : 1,
            .stride_bytes = kPanelBytes,
            .box = static_cast<int>(panels)},
           {.size = matrix_rows / kPageRowMultiple,
            .stride_bytes = kPageRowMultiple * row_bytes,
            .box = static_cast<int>(rows / kPageRowMultiple)}},
          TensorMapSwizzle::k128Bytes));
  PageMap page_map;
  std::memcpy(&page_map, &map, sizeof(map));
  return page_map;
}

}  // namespace

bool CanCopyPages(const KvCacheView& cache, int64_t rows) {
  return rows >= kPageRowMultiple && rows <= 256 && rows % kPageRowMultiple == 0 &&
         cache.block_size % rows == 0 && CacheRowBytes(cache) % 16 == 0;
}

absl::StatusOr<PageMaps> MakePageMaps(const KvCacheView& cache, int64_t rows, int64_t panels) {
  if (!CanCopyPages(cache, rows) || panels < 1 || panels > 8 ||
      (panels > 1 && !PanelsAreWhole(cache))) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "CUDA attention: boxes of %d rows and %d panels of a cache with blocks of %d rows of %d "
        "bytes",
        rows, panels, cache.block_size, CacheRowBytes(cache)));
  }
  PageMaps maps = {};
  if (cache.num_blocks == 0) return maps;  // nothing to copy
  LOCKSTEP_ASSIGN_OR_RETURN(maps.keys, MakePageMap(cache.keys, cache, rows, panels));
  LOCKSTEP_ASSIGN_OR_RETURN(maps.values, MakePageMap(cache.values, cache, rows, panels));
  return maps;
}

}  // namespace lockstep
