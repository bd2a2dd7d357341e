#include "model/tokenizer/tokenizer.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "model/tokenizer/tokenizer_parts.h"
#include "model/tokenizer/utf8.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {

// What one Encode works with. The word cache inside makes it worth keeping.
struct Scratch {
  int64_t max_tokens = 0;
  bool too_long = false;
  BpeScratch bpe;
  std::string normalized;
  std::vector<Segment> segments;
  std::vector<Segment> inner_segments;
};

// Hands out scratches, each to one call at a time.
class ScratchPool {
 public:
  std::unique_ptr<Scratch> Take() {
    {
      std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        std::unique_ptr<Scratch> scratch = std::move(free_.back());
        free_.pop_back();
        return scratch;
      }
    }
    return std::make_unique<Scratch>();
  }

  void Return(std::unique_ptr<Scratch> scratch) {
    // A long text leaves buffers behind that are too big to keep.
    if (scratch->normalized.capacity() > kMaxKeptElements) scratch->normalized = {};
    if (scratch->bpe.symbols.capacity() > kMaxKeptElements) scratch->bpe.symbols = {};
    if (scratch->bpe.heap.capacity() > kMaxKeptElements) scratch->bpe.heap = {};
    std::lock_guard lock(mutex_);
    if (free_.size() < kMaxFree) free_.push_back(std::move(scratch));
  }

 private:
  static constexpr size_t kMaxKeptElements = size_t{1} << 16;
  static constexpr size_t kMaxFree = 16;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Scratch>> free_;
};

}  // namespace

struct Tokenizer::State {
  TokenizerParts parts;
  std::unique_ptr<BpeModel> model;
  AddedTokenMatcher raw_matcher;         // tokens found in the text as it is
  AddedTokenMatcher normalized_matcher;  // tokens found in the normalised text
  std::unordered_map<int32_t, AddedToken> added_by_id;
  std::unordered_map<std::string, int32_t> added_by_content;
  int32_t vocab_size = 0;
  ScratchPool scratches;

  absl::Status IndexAddedTokens(const std::string& where);
  absl::Status EncodeSegment(std::string_view text, bool at_start, Scratch* scratch,
                             std::vector<int32_t>* ids) const;
  absl::Status EncodeText(std::string_view text, Scratch* scratch, std::vector<int32_t>* ids) const;
};

absl::Status Tokenizer::State::IndexAddedTokens(const std::string& where) {
  vocab_size = parts.vocabulary.size();
  // Of equal patterns the special token counts.
  std::vector<AddedToken>& tokens = parts.added_tokens;
  std::stable_partition(tokens.begin(), tokens.end(),
                        [](const AddedToken& token) { return token.special; });
  for (AddedToken& token : tokens) {
    if (token.content.empty()) continue;
    const int32_t known = parts.vocabulary.Find(token.content);
    if (known >= 0 && known != token.id) {
      LogWarning(absl::StrFormat(
          "%s: added token \"%s\" has the id %d, but the vocabulary has it at %d; %d is used",
          where, token.content, token.id, known, known));
      token.id = known;
    } else if (known < 0 && parts.vocabulary.Has(token.id)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: added token \"%s\" has the id %d, which is token \"%s\"", where,
                          token.content, token.id, parts.vocabulary.Token(token.id)));
    }
    const auto [other, is_new] = added_by_id.emplace(token.id, token);
    if (!is_new && other->second.content != token.content) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: the added tokens \"%s\" and \"%s\" share the id %d", where,
                          other->second.content, token.content, token.id));
    }
    added_by_content.emplace(token.content, token.id);
    vocab_size = std::max(vocab_size, token.id + 1);
    std::string pattern = token.content;
    bool ignored = false;
    if (token.normalized) LOCKSTEP_RETURN_IF_ERROR(parts.normalizer.Apply(&pattern, &ignored));
    (token.normalized ? normalized_matcher : raw_matcher).Add(token, pattern);
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::State::EncodeSegment(std::string_view text, bool at_start, Scratch* scratch,
                                             std::vector<int32_t>* ids) const {
  return parts.pre_tokenizer.Split(text, at_start, [&](std::string_view piece) {
    const int64_t room = scratch->max_tokens - std::ssize(*ids);
    scratch->too_long = scratch->too_long || room < 0 || model->MinTokens(piece.size()) > room;
    if (!scratch->too_long) model->Encode(piece, &scratch->bpe, ids);
  });
}

absl::Status Tokenizer::State::EncodeText(std::string_view text, Scratch* scratch,
                                          std::vector<int32_t>* ids) const {
  raw_matcher.Split(text, &scratch->segments);
  for (const Segment& segment : scratch->segments) {
    if (segment.id >= 0) {
      ids->push_back(segment.id);
      continue;
    }
    bool at_start = segment.text.data() == text.data();
    std::string_view normalized = segment.text;
    if (!parts.normalizer.empty()) {
      scratch->normalized = segment.text;
      bool start_removed = false;
      LOCKSTEP_RETURN_IF_ERROR(parts.normalizer.Apply(&scratch->normalized, &start_removed));
      at_start &= !start_removed;
      normalized = scratch->normalized;
    }
    normalized_matcher.Split(normalized, &scratch->inner_segments);
    for (const Segment& inner : scratch->inner_segments) {
      if (inner.id >= 0) {
        ids->push_back(inner.id);
      } else {
        LOCKSTEP_RETURN_IF_ERROR(EncodeSegment(inner.text, at_start, scratch, ids));
      }
      at_start = false;
    }
  }
  return absl::OkStatus();
}

Tokenizer::Tokenizer(std::unique_ptr<State> state) : state_(std::move(state)) {}
Tokenizer::~Tokenizer() = default;

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromParts(TokenizerParts parts,
                                                                const std::string& where) {
  auto state = std::make_unique<State>();
  state->parts = std::move(parts);
  TokenizerParts& own = state->parts;
  own.bpe.pieces_are_bytes = own.pre_tokenizer.pieces_are_bytes();
  LOCKSTEP_RETURN_IF_ERROR(state->IndexAddedTokens(where));
  LOCKSTEP_ASSIGN_OR_RETURN(BpeModel model,
                            BpeModel::Create(&own.vocabulary, own.merges, own.bpe, where));
  state->model = std::make_unique<BpeModel>(std::move(model));
  own.merges = {};
  for (const std::vector<int32_t>* ids : {&own.prefix, &own.suffix}) {
    for (const int32_t id : *ids) {
      if (own.vocabulary.Has(id) || state->added_by_id.count(id) != 0) continue;
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: the post-processor adds the id %d, which no token has", where, id));
    }
  }
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(state)));
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(std::string_view utf8,
                                                       bool add_special_tokens,
                                                       int64_t max_tokens) const {
  if (const size_t bad = FindInvalidUtf8(utf8); bad != std::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the text is not valid UTF-8 at byte %d", bad));
  }
  std::vector<int32_t> ids;
  ids.reserve(static_cast<size_t>(
      std::min<int64_t>(static_cast<int64_t>(utf8.size() / 4), max_tokens / 2) + 8));
  if (add_special_tokens) ids = state_->parts.prefix;
  std::unique_ptr<Scratch> scratch = state_->scratches.Take();
  scratch->max_tokens = max_tokens;
  scratch->too_long = false;
  const absl::Status status = state_->EncodeText(utf8, scratch.get(), &ids);
  const bool too_long = scratch->too_long;
  state_->scratches.Return(std::move(scratch));
  LOCKSTEP_RETURN_IF_ERROR(status);
  if (add_special_tokens)
    ids.insert(ids.end(), state_->parts.suffix.begin(), state_->parts.suffix.end());
  if (too_long || std::ssize(ids) > max_tokens) {
    return absl::OutOfRangeError(absl::StrFormat("the text has more than %d tokens", max_tokens));
  }
  return ids;
}

absl::StatusOr<std::string> Tokenizer::Decode(std::span<const int32_t> ids,
                                              bool skip_special_tokens) const {
  const TokenDecoder& decoder = state_->parts.decoder;
  TokenDecoderState running = decoder.NewState();
  std::string text;
  for (const int32_t id : ids) {
    const std::string_view token = IdToToken(id);
    if (!HasToken(id)) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "id %d: no token has it (the tokenizer's ids are 0 to %d)", id, vocab_size() - 1));
    }
    if (skip_special_tokens && IsSpecial(id)) continue;
    decoder.Push(token, &running, &text);
  }
  decoder.Finish(&running, &text);
  return text;
}

int32_t Tokenizer::vocab_size() const { return state_->vocab_size; }

bool Tokenizer::HasToken(int32_t id) const {
  return state_->parts.vocabulary.Has(id) || state_->added_by_id.count(id) != 0;
}

std::optional<int32_t> Tokenizer::TokenToId(std::string_view token) const {
  if (const auto it = state_->added_by_content.find(std::string(token));
      it != state_->added_by_content.end()) {
    return it->second;
  }
  const int32_t id = state_->parts.vocabulary.Find(token);
  return id < 0 ? std::nullopt : std::optional(id);
}

std::string_view Tokenizer::IdToToken(int32_t id) const {
  if (state_->parts.vocabulary.Has(id)) return state_->parts.vocabulary.Token(id);
  const auto it = state_->added_by_id.find(id);
  return it == state_->added_by_id.end() ? std::string_view()
                                         : std::string_view(it->second.content);
}

std::string Tokenizer::TokenBytes(int32_t id) const {
  return HasToken(id) ? decoder().TokenBytes(IdToToken(id)) : std::string();
}

bool Tokenizer::IsSpecial(int32_t id) const {
  const auto it = state_->added_by_id.find(id);
  return it != state_->added_by_id.end() && it->second.special;
}

const TokenDecoder& Tokenizer::decoder() const { return state_->parts.decoder; }

}  // namespace lockstep
