#include "model/tokenizer/bpe.h"

#include <algorithm>
#include <bit>

#include "model/tokenizer/byte_level.h"
#include "model/tokenizer/utf8.h"

namespace lockstep {

namespace {

constexpr uint32_t kNoMerge = ~uint32_t{0};
constexpr size_t kMaxScannedSymbols = 32;

}  // namespace

void MergeTable::Build(const std::vector<Merge>& merges) {
  const size_t size = std::bit_ceil(std::max<size_t>(merges.size() + merges.size() / 2, 2));
  entries_.assign(size, Entry{});
  mask_ = size - 1;
  shift_ = 64 - std::countr_zero(size);
  for (const Merge& merge : merges) {
    const uint64_t key = Key(merge.left, merge.right);
    size_t i = Slot(key);
    while (entries_[i].key != kEmpty && entries_[i].key != key) i = (i + 1) & mask_;
    entries_[i] = {key, merge.rank, merge.result};
  }
}

absl::StatusOr<BpeModel> BpeModel::Create(const Vocabulary* vocabulary,
                                          const std::vector<Merge>& merges,
                                          const BpeOptions& options, const std::string& where) {
  BpeModel model;
  model.vocabulary_ = vocabulary;
  model.options_ = options;
  if (!options.unk_token.empty()) {
    model.unk_id_ = vocabulary->Find(options.unk_token);
    if (model.unk_id_ < 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: the unk_token \"%s\" is not in the vocabulary", where, options.unk_token));
    }
  }
  model.IndexSymbols();
  model.MeasureTokens();
  model.merges_.Build(merges);
  model.IndexBorders(merges);
  return model;
}

void BpeModel::IndexSymbols() {
  for (int32_t id = 0; id < vocabulary_->size(); ++id) {
    const std::string& token = vocabulary_->Token(id);
    if (!vocabulary_->Has(id) || token.empty()) continue;
    int length;
    const char32_t c = FirstCharacter(token, &length);
    if (token.size() != static_cast<size_t>(length)) continue;
    if (c >= character_ids_.size()) character_ids_.resize(c + 1, -1);
    character_ids_[c] = id;
  }
  for (int byte = 0; byte < 256; ++byte) {
    if (options_.pieces_are_bytes) byte_ids_.push_back(vocabulary_->Find(ByteLevelCharacter(byte)));
    if (options_.byte_fallback)
      fallback_ids_.push_back(vocabulary_->Find(absl::StrFormat("<0x%02X>", byte)));
  }
}

void BpeModel::MeasureTokens() {
  const std::vector<int32_t>& bytes = options_.pieces_are_bytes ? byte_ids_ : fallback_ids_;
  if (bytes.empty() || std::count(bytes.begin(), bytes.end(), -1) > 0) return;
  for (int32_t id = 0; id < vocabulary_->size(); ++id) {
    const std::string& token = vocabulary_->Token(id);
    // In byte-level spelling a character is a byte.
    const auto starts_character = [](char c) { return (c & 0xC0) != 0x80; };
    const size_t size =
        options_.pieces_are_bytes
            ? static_cast<size_t>(std::count_if(token.begin(), token.end(), starts_character))
            : token.size();
    if (vocabulary_->Has(id)) longest_token_ = std::max(longest_token_, size);
  }
}

void BpeModel::IndexBorders(const std::vector<Merge>& merges) {
  // ignore_merges makes a piece's ids depend on its ends, so pieces are not cut then.
  split_at_borders_ = !options_.ignore_merges;
  std::vector<bool> is_fallback(vocabulary_->size());
  for (const int32_t id : fallback_ids_) {
    if (id >= 0) is_fallback[id] = true;
  }
  std::vector<Merge> borders;
  borders.reserve(merges.size());
  const auto symbol = [&](std::string_view character) {
    int length;
    const char32_t c = FirstCharacter(character, &length);
    return c < character_ids_.size() ? character_ids_[c] : -1;
  };
  for (const Merge& merge : merges) {
    for (const int32_t id : {merge.left, merge.right}) {
      if (vocabulary_->Token(id).empty() || id == unk_id_ || is_fallback[id]) {
        split_at_borders_ =
            false;  // such a token is a first symbol though its spelling has several characters
        return;
      }
    }
    std::string_view left = vocabulary_->Token(merge.left);
    size_t last = left.size() - 1;
    while ((left[last] & 0xC0) == 0x80) --last;
    const Merge border{symbol(left.substr(last)), symbol(vocabulary_->Token(merge.right)), 0, 0};
    // A token with a character that is no token never comes about, nor does its merge.
    if (border.left >= 0 && border.right >= 0) borders.push_back(border);
  }
  crossed_borders_.Build(borders);
}

// The id of the first character (or byte) of `text`, or -1 when no token has it; `*length` is its
// size in bytes.
int32_t BpeModel::FirstSymbol(std::string_view text, int* length) const {
  if (options_.pieces_are_bytes) {
    *length = 1;
    return byte_ids_[static_cast<uint8_t>(text[0])];
  }
  const char32_t c = FirstCharacter(text, length);
  return c < character_ids_.size() ? character_ids_[c] : -1;
}

void BpeModel::Encode(std::string_view piece, BpeScratch* scratch,
                      std::vector<int32_t>* ids) const {
  if (piece.size() <= WordCache::kMaxWordBytes || !split_at_borders_)
    return EncodeWord(piece, scratch, ids);
  size_t begin = 0;
  int length;
  int32_t left = FirstSymbol(piece, &length);
  for (size_t at = length; at < piece.size(); at += length) {
    const int32_t right = FirstSymbol(piece.substr(at), &length);
    // Beside an unknown character nothing is cut: unknown ones may be fused.
    if (left >= 0 && right >= 0 && crossed_borders_.Find(left, right) == nullptr) {
      EncodeWord(piece.substr(begin, at - begin), scratch, ids);
      begin = at;
    }
    left = right;
  }
  EncodeWord(piece.substr(begin), scratch, ids);
}

void BpeModel::EncodeWord(std::string_view word, BpeScratch* scratch,
                          std::vector<int32_t>* ids) const {
  if (word.size() > WordCache::kMaxWordBytes) return MergeWord(word, scratch, ids);
  const WordCache::Key key = WordCache::MakeKey(word);
  const std::span<const int32_t> known = scratch->cache.Find(key);
  for (const int32_t id : known) ids->push_back(id);
  if (!known.empty()) return;
  const size_t first = ids->size();
  MergeWord(word, scratch, ids);
  scratch->cache.Insert(key, std::span(*ids).subspan(first));
}

void BpeModel::MergeWord(std::string_view word, BpeScratch* scratch,
                         std::vector<int32_t>* ids) const {
  if (options_.ignore_merges) {
    std::string mapped;
    if (options_.pieces_are_bytes) AppendByteLevel(word, &mapped);
    const int32_t whole =
        vocabulary_->Find(options_.pieces_are_bytes ? std::string_view(mapped) : word);
    if (whole >= 0) return ids->push_back(whole);
  }
  MakeSymbols(word, &scratch->symbols);
  if (scratch->symbols.size() <= kMaxScannedSymbols) {
    MergeByScanning(&scratch->symbols);
    for (const BpeScratch::Symbol& symbol : scratch->symbols) ids->push_back(symbol.id);
  } else {
    MergeByHeap(scratch);
    for (int32_t i = 0; i >= 0; i = scratch->symbols[i].next)
      ids->push_back(scratch->symbols[i].id);
  }
}

// False, and nothing added, when a byte has no token.
bool BpeModel::AddByteTokens(std::string_view character,
                             std::vector<BpeScratch::Symbol>* symbols) const {
  if (!options_.byte_fallback) return false;
  for (const char byte : character) {
    if (fallback_ids_[static_cast<uint8_t>(byte)] < 0) return false;
  }
  for (const char byte : character)
    symbols->push_back({fallback_ids_[static_cast<uint8_t>(byte)], -1, -1, kNoMerge, -1});
  return true;
}

void BpeModel::MakeSymbols(std::string_view word, std::vector<BpeScratch::Symbol>* symbols) const {
  symbols->clear();
  // The reference adds an unknown token only when the next known character, another unknown one
  // that is not fused, or the end comes.
  bool pending_unk = false;
  const auto flush_unk = [&] {
    if (pending_unk) symbols->push_back({unk_id_, -1, -1, kNoMerge, -1});
    pending_unk = false;
  };
  while (!word.empty()) {
    int length;
    const int32_t id = FirstSymbol(word, &length);
    const std::string_view raw = word.substr(0, length);
    word.remove_prefix(length);
    if (id >= 0) {
      flush_unk();
      symbols->push_back({id, -1, -1, kNoMerge, -1});
      continue;
    }
    const std::string_view character =
        options_.pieces_are_bytes ? ByteLevelCharacter(static_cast<uint8_t>(raw[0])) : raw;
    if (AddByteTokens(character, symbols) || unk_id_ < 0) continue;
    if (!options_.fuse_unk) flush_unk();
    pending_unk = true;
  }
  flush_unk();
}

// For short words: looking through all pairs for the next merge is cheaper than keeping a heap.
void BpeModel::MergeByScanning(std::vector<BpeScratch::Symbol>* symbols) const {
  size_t count = symbols->size();
  BpeScratch::Symbol* const s = symbols->data();
  const auto update = [&](size_t left) {
    const MergeTable::Entry* merge =
        left + 1 < count ? merges_.Find(s[left].id, s[left + 1].id) : nullptr;
    s[left].rank = merge == nullptr ? kNoMerge : merge->rank;
    s[left].merged = merge == nullptr ? -1 : merge->result;
  };
  for (size_t i = 0; i < count; ++i) update(i);
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i < count; ++i) {
      if (s[i].rank < s[best].rank) best = i;
    }
    if (s[best].rank == kNoMerge) break;
    s[best].id = s[best].merged;
    std::copy(s + best + 2, s + count, s + best + 1);
    --count;
    update(best);
    if (best > 0) update(best - 1);
  }
  symbols->resize(count);
}

// Looks up the merge of symbol `left` with its next one, and queues it.
void BpeModel::UpdatePair(int32_t left, BpeScratch* scratch) const {
  BpeScratch::Symbol& symbol = scratch->symbols[left];
  symbol.rank = kNoMerge;
  if (symbol.next < 0) return;
  const MergeTable::Entry* merge = merges_.Find(symbol.id, scratch->symbols[symbol.next].id);
  if (merge == nullptr) return;
  symbol.rank = merge->rank;
  symbol.merged = merge->result;
  scratch->heap.push_back(static_cast<uint64_t>(merge->rank) << 32 | static_cast<uint32_t>(left));
}

void BpeModel::MergeByHeap(BpeScratch* scratch) const {
  std::vector<BpeScratch::Symbol>& symbols = scratch->symbols;
  std::vector<uint64_t>& heap = scratch->heap;
  heap.clear();
  const auto count = static_cast<int32_t>(symbols.size());
  for (int32_t i = 0; i < count; ++i) {
    symbols[i].previous = i - 1;
    symbols[i].next = i + 1 < count ? i + 1 : -1;
    UpdatePair(i, scratch);
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  const auto update = [&](int32_t left) {
    const size_t before = heap.size();
    UpdatePair(left, scratch);
    if (heap.size() > before) std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const uint64_t top = heap.back();
    heap.pop_back();
    const auto index = static_cast<int32_t>(top & 0xFFFFFFFFu);
    BpeScratch::Symbol& left = symbols[index];
    if (left.rank != top >> 32) continue;  // the pair has changed since
    BpeScratch::Symbol& right = symbols[left.next];
    left.id = left.merged;
    left.next = right.next;
    right.rank = kNoMerge;
    if (left.next >= 0) symbols[left.next].previous = index;
    update(index);
    if (left.previous >= 0) update(left.previous);
  }
}

}  // namespace lockstep
