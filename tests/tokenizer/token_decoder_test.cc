// Decoding whole sequences and streams.

#include "model/tokenizer/token_decoder.h"

#include <random>

#include "model/tokenizer/utf8.h"
#include "tests/tokenizer/tokenizer_fixtures.h"

namespace lockstep {
namespace {

std::string Stream(const Tokenizer& tokenizer, const Ids& ids, bool skip_special_tokens,
                   std::vector<std::string>* events = nullptr) {
  StreamDecoder decoder(&tokenizer, skip_special_tokens);
  std::string text;
  for (const int32_t id : ids) {
    const std::string event = decoder.Push(id);
    EXPECT_EQ(FindInvalidUtf8(event), std::string_view::npos);
    if (events != nullptr) events->push_back(event);
    text += event;
  }
  text += decoder.Finish();
  return text;
}

using Strings = std::vector<std::string>;

TEST(StreamDecoderTest, ByteLevelHoldsAnUnfinishedCharacter) {
  const auto tokenizer = Make(Fixture("byte_level.json"));
  EXPECT_EQ(Encode(*tokenizer, "🦙"), (Ids{8582, 99, 247}));
  Strings events;
  EXPECT_EQ(Stream(*tokenizer, {15496, 8582, 99, 247, 2159}, false, &events), "Hello🦙 World");
  EXPECT_EQ(events, (Strings{"Hello", "", "", "🦙", " World"}));
  // A forced end after one, two and three tokens.
  EXPECT_EQ(Stream(*tokenizer, {8582}, false), "\uFFFD");
  EXPECT_EQ(Stream(*tokenizer, {8582, 99}, false), "\uFFFD");
  EXPECT_EQ(Stream(*tokenizer, {8582, 99, 247}, false), "🦙");
  // A character that another token breaks off.
  events.clear();
  EXPECT_EQ(Stream(*tokenizer, {8582, 15496}, false, &events), "\uFFFDHello");
  EXPECT_EQ(events, (Strings{"", "\uFFFDHello"}));
}

TEST(StreamDecoderTest, ByteFallbackAndSpaces) {
  const auto tokenizer = Make(Fixture("byte_fallback.json"));
  EXPECT_EQ(Encode(*tokenizer, "🦙"), (Ids{29871, 243, 162, 169, 156}));
  EXPECT_EQ(Stream(*tokenizer, {29871, 243, 162, 169, 156}, false), "🦙");
  EXPECT_EQ(Stream(*tokenizer, {29871, 243}, false), "\uFFFD");
  EXPECT_EQ(Stream(*tokenizer, {29871, 243, 162}, false),
            "\uFFFD\uFFFD");  // one a byte token, as the reference has it
  EXPECT_EQ(Stream(*tokenizer, {243, 162, 169, 156, 243}, false), "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD");
  // Every ▁ but the first of the text is a space.
  const Ids ids = Encode(*tokenizer, "the world cat the");
  Strings events;
  EXPECT_EQ(Stream(*tokenizer, ids, false, &events), "the world cat the");
  EXPECT_EQ(events, (Strings{"the", " world", " cat", " the"}));
}

TEST(StreamDecoderTest, EqualsTheWholeDecodeOnRandomIds) {
  std::mt19937 rng(3);
  for (const char* name : {"byte_level.json", "byte_fallback.json"}) {
    Json document = Fixture(name);
    for (const Json& decoder :
         {document["decoder"], Json(nullptr),
          Json{{"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "always"}},
          Json{{"type", "Sequence"},
               {"decoders",
                {{{"type", "ByteFallback"}},
                 {{"type", "Fuse"}},
                 {{"type", "Replace"}, {"pattern", {{"String", "▁▁"}}}, {"content", "<>"}},
                 {{"type", "Strip"}, {"content", "e"}, {"start", 2}, {"stop", 2}}}}}}) {
      document["decoder"] = decoder;
      const auto tokenizer = Make(document);
      Ids known;
      for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) {
        if (tokenizer->HasToken(id)) known.push_back(id);
      }
      for (int round = 0; round < 400; ++round) {
        Ids ids;
        for (size_t i = rng() % 12; i > 0; --i) ids.push_back(known[rng() % known.size()]);
        const bool skip = round % 2 == 0;
        ASSERT_EQ(Stream(*tokenizer, ids, skip), Decode(*tokenizer, ids, skip)) << decoder;
      }
    }
  }
}

TEST(StreamDecoderTest, CopiesGoOnApart) {
  const auto tokenizer = Make(Fixture("byte_level.json"));
  StreamDecoder one(tokenizer.get(), false);
  EXPECT_EQ(one.Push(8582), "");
  StreamDecoder two = one;
  EXPECT_EQ(one.Push(99), "");
  EXPECT_EQ(one.Push(247), "🦙");
  EXPECT_EQ(two.Finish(), "\uFFFD");
  EXPECT_EQ(two.Push(15496), "Hello");  // as new after Finish
  EXPECT_EQ(one.Push(1 << 20), "");     // padding of the model's vocabulary
}

TEST(DecoderTest, SkipsSpecialTokens) {
  const auto tokenizer = Make(Fixture("byte_fallback.json"));
  const Ids ids = Encode(*tokenizer, "Hello</s>", true);
  EXPECT_EQ(ids, (Ids{1, 29871, 271, 2}));
  EXPECT_EQ(Decode(*tokenizer, ids, false), "<s> Hello</s>");
  EXPECT_EQ(Decode(*tokenizer, ids, true), "Hello");
}

std::string DecodeAll(const Json& json, const Strings& tokens) {
  const auto decoder = TokenDecoder::Create(json, "test");
  EXPECT_TRUE(decoder.ok()) << decoder.status();
  TokenDecoderState state = decoder->NewState();
  std::string text;
  for (const std::string& token : tokens) decoder->Push(token, &state, &text);
  decoder->Finish(&state, &text);
  return text;
}

TEST(DecoderTest, EveryKind) {
  const auto sequence = [](const std::vector<Json>& steps) {
    return Json{{"type", "Sequence"}, {"decoders", steps}};
  };
  const Json strip = {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 2}};
  EXPECT_EQ(DecodeAll(nullptr, {"a", "b"}), "a b");
  EXPECT_EQ(DecodeAll({{"type", "ByteLevel"}}, {"ĠÃ", "©", "世"}), " é世");
  EXPECT_EQ(DecodeAll(strip, {"  a   ", " b"}), " a b");  // on each token
  EXPECT_EQ(DecodeAll(sequence({{{"type", "Fuse"}}, strip}), {"  a ", "   ", " b  ", "  "}),
            " a     b  ");
  EXPECT_EQ(DecodeAll({{"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "always"}},
                      {"▁a", "▁b"}),
            "a b");
  EXPECT_EQ(DecodeAll({{"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "never"}},
                      {"▁a", "▁b"}),
            " a b");
  const Json replace = {{"type", "Replace"}, {"pattern", {{"String", "ab"}}}, {"content", "X"}};
  EXPECT_EQ(DecodeAll(replace, {"a", "bab"}), "abX");
  EXPECT_EQ(DecodeAll(sequence({{{"type", "Fuse"}}, replace}), {"a", "bab", "a"}), "XXa");
  const auto unknown = TokenDecoder::Create({{"type", "WordPiece"}}, "f.json: decoder");
  EXPECT_NE(unknown.status().message().find("\"WordPiece\" is not supported"),
            absl::string_view::npos);
}

TEST(TokenDecoderTest, TheBytesOfOneTokenNeedBeNoCharacters) {
  const auto bytes = [](const Json& decoder, std::string_view token) {
    return TokenDecoder::Create(decoder, "test")->TokenBytes(token);
  };
  const Json llama = Json::parse(R"({"type": "Sequence", "decoders": [
      {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
      {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})");
  EXPECT_EQ(bytes(llama, "▁cat▁"), " cat ");
  EXPECT_EQ(bytes(llama, "<0xF0>"), "\xF0");
  EXPECT_EQ(bytes({{"type", "ByteLevel"}}, "Ġworld"), " world");
  EXPECT_EQ(bytes({{"type", "ByteLevel"}}, "ðŁ"), "\xF0\x9F");
  EXPECT_EQ(bytes({{"type", "Metaspace"}, {"replacement", "▁"}}, "▁a"), " a");
  EXPECT_EQ(bytes(nullptr, "a"), " a");
}

}  // namespace
}  // namespace lockstep
