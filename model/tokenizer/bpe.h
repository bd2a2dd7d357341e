// Byte-pair encoding of one piece of text (Sennrich et al., 2016): starting from single characters
// (or bytes), the merge of the lowest rank is applied until none is left.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/tokenizer/vocabulary.h"
#include "model/tokenizer/word_cache.h"
#include "runtime/core/status.h"

namespace lockstep {

struct BpeOptions {
  bool pieces_are_bytes =
      false;  // pieces are raw bytes, the vocabulary is written in byte-level characters
  bool byte_fallback =
      false;              // a character outside the vocabulary becomes its bytes' tokens <0xAB>
  std::string unk_token;  // or else this token; empty: it is left out, as the reference does
  bool fuse_unk = false;  // neighbouring unknown characters become one unk_token
  bool ignore_merges =
      false;  // a piece that is itself a token is that token, whatever the merges say
};

// Buffers that are kept between calls.
struct BpeScratch {
  struct Symbol {
    int32_t id;
    int32_t previous, next;  // indices, -1: none
    uint32_t rank;           // of the merge with the next symbol
    int32_t merged;          // its result
  };
  WordCache cache;
  std::vector<Symbol> symbols;
  std::vector<uint64_t> heap;  // rank << 32 | index of the left symbol
};

// A set of pairs of ids, with the merge of each. Open addressing.
class MergeTable {
 public:
  struct Entry {
    uint64_t key = kEmpty;
    uint32_t rank = 0;
    int32_t result = 0;
  };
  void Build(
      const std::vector<Merge>& merges);  // of equal pairs the last one counts, as in the reference
  // Null when the pair does not merge.
  const Entry* Find(int32_t left, int32_t right) const {
    const uint64_t key = Key(left, right);
    for (size_t i = Slot(key);; i = (i + 1) & mask_) {
      if (entries_[i].key == key) return &entries_[i];
      if (entries_[i].key == kEmpty) return nullptr;
    }
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  static uint64_t Key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  size_t Slot(uint64_t key) const { return (key * 0x9E3779B97F4A7C15u) >> shift_; }

  std::vector<Entry> entries_ = std::vector<Entry>(2);
  size_t mask_ = 1;
  int shift_ = 63;
};

// Immutable; thread-safe, each thread with its own scratch.
class BpeModel {
 public:
  // InvalidArgument when options name tokens that the vocabulary lacks. The vocabulary must outlive
  // the model.
  static absl::StatusOr<BpeModel> Create(const Vocabulary* vocabulary,
                                         const std::vector<Merge>& merges,
                                         const BpeOptions& options, const std::string& where);

  // Appends the ids of `piece` (valid UTF-8 unless pieces_are_bytes; not empty). The time is n log
  // n.
  void Encode(std::string_view piece, BpeScratch* scratch, std::vector<int32_t>* ids) const;
  // At least so many ids has a piece of `bytes` bytes, whatever they are. 0 where characters
  // without a token may be left out or become one.
  int64_t MinTokens(size_t bytes) const {
    return longest_token_ == 0 ? 0 : static_cast<int64_t>(bytes / longest_token_);
  }

 private:
  BpeModel() = default;
  void IndexSymbols();
  void MeasureTokens();
  void IndexBorders(const std::vector<Merge>& merges);
  int32_t FirstSymbol(std::string_view text, int* length) const;
  std::string_view SymbolText(std::string_view text) const;
  void EncodeWord(std::string_view word, BpeScratch* scratch, std::vector<int32_t>* ids) const;
  void MergeWord(std::string_view word, BpeScratch* scratch, std::vector<int32_t>* ids) const;
  void MakeSymbols(std::string_view word, std::vector<BpeScratch::Symbol>* symbols) const;
  bool AddByteTokens(std::string_view character, std::vector<BpeScratch::Symbol>* symbols) const;
  void MergeByScanning(std::vector<BpeScratch::Symbol>* symbols) const;
  void MergeByHeap(BpeScratch* scratch) const;
  void UpdatePair(int32_t left, BpeScratch* scratch) const;

  const Vocabulary* vocabulary_ = nullptr;
  BpeOptions options_;
  int32_t unk_id_ = -1;
  std::vector<int32_t> byte_ids_;  // pieces_are_bytes: the token of each byte, -1: none
  std::vector<int32_t>
      character_ids_;  // the token of each character up to the largest that has one, -1: none
  std::vector<int32_t> fallback_ids_;  // byte_fallback: <0x00> ... <0xFF>, -1: none
  MergeTable merges_;
  size_t longest_token_ = 0;  // the bytes of a piece that one token may stand for; 0: any number
  // Pairs of first symbols across which some merge reaches. No merge ever crosses another border,
  // so what lies on its two sides is encoded apart: long pieces (SentencePiece models have no
  // pre-tokenizer) fall into words that the cache knows.
  bool split_at_borders_ = false;
  MergeTable crossed_borders_;
};

}  // namespace lockstep
