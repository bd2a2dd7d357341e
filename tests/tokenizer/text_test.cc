// UTF-8, regular expressions and normal forms.

#include <chrono>

#include "model/tokenizer/normalizer.h"
#include "model/tokenizer/regex.h"
#include "model/tokenizer/utf8.h"
#include "tests/tokenizer/tokenizer_fixtures.h"

namespace lockstep {
namespace {

TEST(Utf8Test, FindsTheFirstInvalidByte) {
  EXPECT_EQ(FindInvalidUtf8("plain, é 世 🦙"), std::string_view::npos);
  const std::pair<const char*, size_t> cases[] = {
      {"ab\xFF", 2},       {"12345678\x80", 8}, {"\xC0\x80", 0},         {"a\xE4\xB8", 1},
      {"\xED\xA0\x80", 0}, {"\xE0\x9F\xBF", 0}, {"\xF4\x90\x80\x80", 0}, {"é\xF0\x9F\xA6", 2}};
  for (const auto& [text, offset] : cases) EXPECT_EQ(FindInvalidUtf8(text), offset) << offset;
}

TEST(Utf8Test, LossyKeepsWhatMayStillBecomeACharacter) {
  std::string out;
  EXPECT_EQ(AppendLossyUtf8("a\xF0\x9F\xA6", false, &out), 1u);
  EXPECT_EQ(out, "a");
  EXPECT_EQ(AppendLossyUtf8("\xF0\x9F\xA6", true, &out), 3u);
  EXPECT_EQ(out, "a\uFFFD");  // one for the whole unfinished part
  out.clear();
  EXPECT_EQ(AppendLossyUtf8("\xE4\xB8X\xFF\x80Y", false, &out), 6u);
  EXPECT_EQ(out, "\uFFFDX\uFFFD\uFFFDY");
}

std::vector<std::string> MatchesOf(const char* pattern, std::string_view text) {
  const auto regex = Regex::Create(pattern, "test");
  EXPECT_TRUE(regex.ok()) << regex.status();
  std::vector<std::string> found;
  Regex::Finder finder(**regex, text);
  for (Match match;;) {
    const auto more = finder.Next(&match);
    EXPECT_TRUE(more.ok());
    if (!*more) return found;
    found.emplace_back(text.substr(match.begin, match.end - match.begin));
  }
}

using Strings = std::vector<std::string>;

TEST(RegexTest, ReadsPatternsAsOnigurumaDoes) {
  EXPECT_EQ(MatchesOf(R"(\s)", "a\u180Eb\u3000c"), (Strings{"\u3000"}));  // U+180E is no whitespace
  EXPECT_EQ(MatchesOf(R"(\w+)", "e\u0301_x-½ ①"), (Strings{"e\u0301_x", "½"}));
  EXPECT_EQ(MatchesOf(R"([\w]+)", "x½"), (Strings{"x"}));
  EXPECT_EQ(MatchesOf(R"(\h+)", "xyz0fG"), (Strings{"0f"}));
  EXPECT_EQ(MatchesOf(R"(^a)", "a\na"), (Strings{"a", "a"}));
  EXPECT_EQ(MatchesOf(R"(\p{Han}+)", "世界、"), (Strings{"世界"}));
  EXPECT_EQ(MatchesOf(R"(\bt)", "to at té"), (Strings{"t", "t"}));
  EXPECT_EQ(MatchesOf(R"((?i:'s))", "'S 'ſ"), (Strings{"'S", "'ſ"}));
  EXPECT_EQ(MatchesOf(R"([[:alpha:]\d]+)", "é1-x"), (Strings{"é1", "x"}));
  EXPECT_EQ(MatchesOf("[\\u4e00-\\u9fa5]+", "a世界b"), (Strings{"世界"}));
}

TEST(RegexTest, RefusesWhatPcreReadsDifferently) {
  for (const char* pattern :
       {R"([a&&b])", R"([a[bc]])", R"(a{2}+)", R"(a{2}?)", R"(a{,3})", R"((?m:.))", R"(\K)",
        R"(\X)", R"([\W])", R"([[:punct:]])", R"((*VERB))", R"(a\)", R"(\p{Nonsense})"}) {
    const auto regex = Regex::Create(pattern, "here");
    EXPECT_EQ(regex.status().code(), absl::StatusCode::kInvalidArgument) << pattern;
    EXPECT_NE(regex.status().message().find("here"), absl::string_view::npos);
  }
}

std::string Normalize(const Json& json, std::string text) {
  const auto normalizer = Normalizer::Create(json, "test");
  EXPECT_TRUE(normalizer.ok()) << normalizer.status();
  bool start_removed = false;
  EXPECT_TRUE(normalizer->Apply(&text, &start_removed).ok());
  return text;
}

TEST(NormalizerTest, EveryKind) {
  EXPECT_EQ(Normalize({{"type", "NFC"}}, "e\u0301 Å ﬁ"), "é Å ﬁ");
  EXPECT_EQ(Normalize({{"type", "NFD"}}, "é각"), "e\u0301\u1100\u1161\u11A8");
  EXPECT_EQ(Normalize({{"type", "NFC"}}, "\u1100\u1161\u11A8"), "각");
  EXPECT_EQ(Normalize({{"type", "NFKC"}}, "ﬁⅧ²"), "fiVIII2");
  EXPECT_EQ(Normalize({{"type", "NFKD"}}, "é½"), "e\u03011\u20442");
  EXPECT_EQ(Normalize({{"type", "NFC"}}, "x\u0301\u0323"), "x\u0323\u0301");  // canonical order
  EXPECT_EQ(Normalize({{"type", "Lowercase"}}, "ÀΣİ"), "àσi\u0307");
  EXPECT_EQ(Normalize({{"type", "Prepend"}, {"prepend", "▁"}}, "a"), "▁a");
  EXPECT_EQ(Normalize({{"type", "Prepend"}, {"prepend", "▁"}}, ""), "");
  EXPECT_EQ(
      Normalize({{"type", "Replace"}, {"pattern", {{"String", "."}}}, {"content", "_"}}, "a.b"),
      "a_b");
  EXPECT_EQ(Normalize({{"type", "Replace"}, {"pattern", {{"Regex", " {2,}"}}}, {"content", " "}},
                      "a   b c"),
            "a b c");
  EXPECT_EQ(
      Normalize({{"type", "Strip"}, {"strip_left", true}, {"strip_right", false}}, "\u3000 a "),
      "a ");
  EXPECT_EQ(Normalize({{"type", "StripAccents"}}, "e\u0301क\u093F"), "eक");
  EXPECT_EQ(Normalize({{"type", "Sequence"},
                       {"normalizers", {{{"type", "NFD"}}, {{"type", "StripAccents"}}}}},
                      "é"),
            "e");
  const auto unknown = Normalizer::Create({{"type", "Precompiled"}}, "f.json: normalizer");
  EXPECT_NE(unknown.status().message().find("f.json: normalizer: normalizer \"Precompiled\""),
            absl::string_view::npos);
}

// 160 KB of alternating marks take utf8proc's own sorting many seconds; the bound here is generous,
// sorting by n log n takes milliseconds.
TEST(NormalizerTest, LongRunsOfMarksAreSortedInTime) {
  std::string text = "a", sorted_low, sorted_high;
  for (int i = 0; i < 40000; ++i) {
    text += "\u0301\u0323";
    sorted_low += "\u0323";
    sorted_high += "\u0301";
  }
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(Normalize({{"type", "NFD"}}, text), "a" + sorted_low + sorted_high);
  EXPECT_EQ(Normalize({{"type", "NFC"}}, text), "ạ" + sorted_low.substr(2) + sorted_high);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

}  // namespace
}  // namespace lockstep
