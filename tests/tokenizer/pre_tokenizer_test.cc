#include "model/tokenizer/pre_tokenizer.h"

#include "tests/tokenizer/tokenizer_fixtures.h"

namespace lockstep {
namespace {

using Strings = std::vector<std::string>;

Json Bytes(const char* pattern) { return Steps({SplitStep(pattern), ByteLevelStep(false)}); }

TEST(PreTokenizerTest, TheLastSpaceOfARunJoinsTheNextPiece) {
  for (const Json& rule : {ByteLevelStep(true), Bytes(kLlama3Pattern), Bytes(kQwen2Pattern)}) {
    EXPECT_EQ(Pieces(rule, "Hello  World"), (Strings{"Hello", " ", " World"}));
    EXPECT_EQ(Pieces(rule, "tail   "), (Strings{"tail", "   "}));
  }
}

TEST(PreTokenizerTest, Digits) {
  EXPECT_EQ(Pieces(ByteLevelStep(true), "x 12345"), (Strings{"x", " 12345"}));
  EXPECT_EQ(Pieces(Bytes(kLlama3Pattern), "12345"), (Strings{"123", "45"}));
  EXPECT_EQ(Pieces(Bytes(kQwen2Pattern), "12345"), (Strings{"1", "2", "3", "4", "5"}));
  EXPECT_EQ(Pieces({{"type", "Digits"}, {"individual_digits", true}}, "a12½"),
            (Strings{"a", "1", "2", "½"}));
  EXPECT_EQ(Pieces({{"type", "Digits"}, {"individual_digits", false}}, "a12½b"),
            (Strings{"a", "12½", "b"}));
}

TEST(PreTokenizerTest, PunctuationAndCode) {
  EXPECT_EQ(Pieces(Bytes(kQwen2Pattern), "->"), (Strings{"->"}));
  EXPECT_EQ(Pieces(Bytes(kQwen2Pattern), "(x):\n"), (Strings{"(x", "):\n"}));
  EXPECT_EQ(Pieces(ByteLevelStep(true), "(x):\n"), (Strings{"(", "x", "):", "\n"}));
  EXPECT_EQ(Pieces(Bytes(kLlama3Pattern), "    return x\n"),
            (Strings{"   ", " return", " x", "\n"}));
  EXPECT_EQ(Pieces(ByteLevelStep(true), "    return x\n"), (Strings{"   ", " return", " x", "\n"}));
  EXPECT_EQ(Pieces(ByteLevelStep(true), "I'm HE'LL"), (Strings{"I", "'m", " HE", "'", "LL"}));
  EXPECT_EQ(Pieces(Bytes(kLlama3Pattern), "HE'LL"), (Strings{"HE", "'LL"}));
}

// Punctuation, ByteLevel, Digits and Split in one sequence: after ByteLevel the later steps see its
// characters.
TEST(PreTokenizerTest, SequenceInWhichByteLevelIsNotLast) {
  const Json rule = Steps({{{"type", "Punctuation"}, {"behavior", "Contiguous"}},
                           ByteLevelStep(true),
                           {{"type", "Digits"}, {"individual_digits", false}},
                           SplitStep("[0-9][0-9][0-9]")});
  EXPECT_EQ(Pieces(rule, "Hello  World"), (Strings{"Hello", "Ġ", "ĠWorld"}));
  EXPECT_EQ(Pieces(rule, "a->12345!!"), (Strings{"a", "->", "123", "45", "!!"}));
  EXPECT_EQ(Pieces(rule, "é"), (Strings{"Ã©"}));
}

TEST(PreTokenizerTest, FiveBehaviorsAndInvert) {
  const auto split = [](const char* behavior, bool invert) {
    return Pieces(SplitStep("-", behavior, invert), "-a--b-");
  };
  EXPECT_EQ(split("Removed", false), (Strings{"a", "b"}));
  EXPECT_EQ(split("Isolated", false), (Strings{"-", "a", "-", "-", "b", "-"}));
  EXPECT_EQ(split("MergedWithPrevious", false), (Strings{"-", "a-", "-", "b-"}));
  EXPECT_EQ(split("MergedWithNext", false), (Strings{"-a", "-", "-b", "-"}));
  EXPECT_EQ(split("Contiguous", false), (Strings{"-", "a", "--", "b", "-"}));
  EXPECT_EQ(split("Removed", true), (Strings{"-", "-", "-", "-"}));
}

TEST(PreTokenizerTest, StringPatternIsNoRegex) {
  Json rule = SplitStep("", "Isolated");
  rule["pattern"] = {{"String", "a.c"}};
  EXPECT_EQ(Pieces(rule, "abca.c"), (Strings{"abc", "a.c"}));
}

TEST(PreTokenizerTest, EmptyMatchesCutAndAdvance) {
  EXPECT_EQ(Pieces(SplitStep("(?=[A-Z])"), "fooBarBaz"), (Strings{"foo", "Bar", "Baz"}));
  EXPECT_EQ(Pieces(SplitStep("x*"), "aé"), (Strings{"a", "é"}));
}

TEST(PreTokenizerTest, Whitespace) {
  EXPECT_EQ(Pieces({{"type", "WhitespaceSplit"}}, " a,b \u3000c\n"), (Strings{"a,b", "c"}));
  EXPECT_EQ(Pieces({{"type", "Whitespace"}}, " a,b!? c"), (Strings{"a", ",", "b", "!?", "c"}));
}

TEST(PreTokenizerTest, Metaspace) {
  const auto rule = [](const char* scheme, bool split) {
    return Json{
        {"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", scheme}, {"split", split}};
  };
  EXPECT_EQ(Pieces(rule("always", true), "a  b"), (Strings{"▁a", "▁", "▁b"}));
  EXPECT_EQ(Pieces(rule("always", true), " a"), (Strings{"▁a"}));
  EXPECT_EQ(Pieces(rule("never", true), "a b"), (Strings{"a", "▁b"}));
  EXPECT_EQ(Pieces(rule("always", false), "a b"), (Strings{"▁a▁b"}));
  EXPECT_EQ(
      Pieces({{"type", "Metaspace"}, {"replacement", "▁"}, {"add_prefix_space", false}}, "a b"),
      (Strings{"a", "▁b"}));
  const auto first = PreTokenizer::Create(rule("first", true), "test");
  ASSERT_TRUE(first.ok());
  Strings pieces;
  for (const bool at_start : {true, false}) {
    ASSERT_TRUE(
        first->Split("a", at_start, [&](std::string_view piece) { pieces.emplace_back(piece); })
            .ok());
  }
  EXPECT_EQ(pieces, (Strings{"▁a", "a"}));
}

TEST(PreTokenizerTest, AddPrefixSpace) {
  const Json rule = {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"use_regex", true}};
  EXPECT_EQ(Pieces(rule, "a b"), (Strings{" a", " b"}));
  EXPECT_EQ(Pieces(rule, " a"), (Strings{" a"}));
}

TEST(PreTokenizerTest, UnknownPartsAreRefusedByName) {
  const auto error = [](const Json& json) {
    const auto result = PreTokenizer::Create(json, "dir/tokenizer.json: pre_tokenizer");
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(result.status().message().find("dir/tokenizer.json"), absl::string_view::npos);
    return std::string(result.status().message());
  };
  EXPECT_NE(error({{"type", "UnicodeScripts"}}).find("UnicodeScripts"), std::string::npos);
  EXPECT_NE(error(Steps({{{"type", "BertPreTokenizer"}}})).find("BertPreTokenizer"),
            std::string::npos);
  EXPECT_NE(error(SplitStep("a", "Sideways")).find("Sideways"), std::string::npos);
  EXPECT_NE(error(SplitStep("(")).find("\"(\""), std::string::npos);
  EXPECT_NE(error(SplitStep("[a&&b]")).find("&&"), std::string::npos);
  EXPECT_NE(error({{"type", "Split"}, {"pattern", {{"Glob", "*"}}}, {"behavior", "Isolated"}})
                .find("pattern"),
            std::string::npos);
  EXPECT_NE(
      error({{"type", "Metaspace"}, {"add_prefix_space", false}, {"prepend_scheme", "always"}})
          .find("Metaspace"),
      std::string::npos);
}

}  // namespace
}  // namespace lockstep
