// Whole tokenizers from small files.

#include <random>
#include <thread>

#include "tests/tokenizer/tokenizer_fixtures.h"

namespace lockstep {
namespace {

TEST(TokenizerTest, PiecesBecomeThePublishedIds) {
  const auto gpt2 = Make(Fixture("byte_level.json"));
  EXPECT_EQ(Encode(*gpt2, "Hello  World"), (Ids{15496, 220, 2159}));
  EXPECT_EQ(Encode(*gpt2, "12345"), (Ids{10163, 2231}));
  EXPECT_EQ(Decode(*gpt2, {15496, 220, 2159}), "Hello  World");

  Json llama3 = Fixture("byte_level.json");
  llama3["pre_tokenizer"] = Steps({SplitStep(kLlama3Pattern), ByteLevelStep(false)});
  EXPECT_EQ(Encode(*Make(llama3), "12345"), (Ids{10163, 2231}));
  EXPECT_EQ(Encode(*Make(llama3), "Hello  World"), (Ids{15496, 220, 2159}));

  Json qwen2 = Fixture("byte_level.json");
  qwen2["pre_tokenizer"] = Steps({SplitStep(kQwen2Pattern), ByteLevelStep(false)});
  AddWord(&qwen2, {"-", ">"}, 405);
  AddWord(&qwen2, {"(", "x"}, 2075);
  AddWord(&qwen2, {")", ":", "Ċ"}, 982);
  EXPECT_EQ(Encode(*Make(qwen2), "->"), (Ids{405}));
  EXPECT_EQ(Encode(*Make(qwen2), "(x):\n"), (Ids{2075, 982}));
  EXPECT_EQ(Encode(*Make(qwen2), "12345"), (Ids{16, 17, 18, 19, 20}));

  Json falcon = Fixture("byte_level.json");
  falcon["pre_tokenizer"] = Steps({{{"type", "Punctuation"}, {"behavior", "Contiguous"}},
                                   ByteLevelStep(true),
                                   {{"type", "Digits"}, {"individual_digits", false}},
                                   SplitStep("[0-9][0-9][0-9]")});
  EXPECT_EQ(Encode(*Make(falcon), "Hello  World12345"), (Ids{15496, 220, 2159, 10163, 2231}));
}

// Lines of words, digits and odd characters of the fixture's kind.
std::vector<std::string> Corpus(int lines) {
  const std::vector<std::string> words = {"Hello", " World", " the", "  ",   "123", "45", "é",
                                          "🦙",  " x",     "\t",   "世界", "He",  "th"};
  std::mt19937 rng(11);
  std::vector<std::string> corpus;
  for (int i = 0; i < lines; ++i) {
    std::string line;
    for (size_t k = 1 + rng() % 12; k > 0; --k) line += words[rng() % words.size()];
    corpus.push_back(line);
  }
  return corpus;
}

TEST(MergesTest, StringsAndPairsAreEqual) {
  for (const char* name : {"byte_level.json", "byte_fallback.json"}) {
    Json document = Fixture(name);
    const auto strings = Make(document);
    for (Json& merge : document["model"]["merges"]) {
      const std::string text = merge.get<std::string>();
      const size_t space = text.find(' ');
      merge = {text.substr(0, space), text.substr(space + 1)};
    }
    const auto pairs = Make(document);
    for (const std::string& line : Corpus(1000)) {
      const Ids ids = Encode(*strings, line);
      ASSERT_EQ(ids, Encode(*pairs, line)) << line;
      ASSERT_EQ(Decode(*strings, ids), line);
    }
  }
}

Json SpacedDocument() {
  return {{"model",
           {{"type", "BPE"},
            {"vocab", {{"a", 0}, {" ", 1}, {"b", 2}, {"a ", 3}, {"a b", 4}}},
            {"merges", Json::array({Json::array({"a", " "}), Json::array({"a ", "b"})})}}}};
}

TEST(MergesTest, APairMayHoldSpaces) {
  EXPECT_EQ(Encode(*Make(SpacedDocument()), "a ba"), (Ids{4, 0}));
}

TEST(MergesTest, BadEntriesAreNamedByNumber) {
  Json document = SpacedDocument();
  document["model"]["merges"].push_back(Json::array({"a", "zz"}));
  EXPECT_NE(ErrorOf(document).find("merges[2] (\"a\" + \"zz\") names \"zz\""), std::string::npos);
  document["model"]["merges"][2] = Json::array({"b", "a"});  // both are tokens, "ba" is not
  EXPECT_NE(ErrorOf(document).find("merges[2] (\"b\" + \"a\") names \"ba\""), std::string::npos);
  document["model"]["merges"][2] = "a  b";
  EXPECT_NE(ErrorOf(document).find("merges[2]"), std::string::npos);
  document["model"]["merges"][2] = 7;
  EXPECT_NE(ErrorOf(document).find("merges[2]"), std::string::npos);
}

TEST(MergesTest, AnEmptyListWarns) {
  Json document = SpacedDocument();
  testing::internal::CaptureStderr();
  Make(document);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  document["model"]["merges"] = Json::array();
  testing::internal::CaptureStderr();
  const auto tokenizer = Make(document);
  const std::string warning = testing::internal::GetCapturedStderr();
  EXPECT_NE(warning.find("merges are empty"), std::string::npos) << warning;
  EXPECT_EQ(Encode(*tokenizer, "a b"), (Ids{0, 1, 2}));
}

TEST(ModelTest, UnknownCharacters) {
  Json document = SpacedDocument();
  Json& model = document["model"];
  EXPECT_EQ(Encode(*Make(document), "aéb"),
            (Ids{0, 2}));  // no unk_token: left out, as the reference does
  model["unk_token"] = "<unk>";
  EXPECT_NE(ErrorOf(document).find("unk_token \"<unk>\""), std::string::npos);
  model["vocab"]["<unk>"] = 9;
  EXPECT_EQ(Encode(*Make(document), "aéeb"), (Ids{0, 9, 9, 2}));
  model["fuse_unk"] = true;
  EXPECT_EQ(Encode(*Make(document), "aéeb"), (Ids{0, 9, 2}));
  model["byte_fallback"] = true;
  model["vocab"]["<0xC3>"] = 10;
  EXPECT_EQ(Encode(*Make(document), "aéb"),
            (Ids{0, 9, 2}));  // a byte without a token: unk for the whole character
  model["vocab"]["<0xA9>"] = 11;
  EXPECT_EQ(Encode(*Make(document), "aéb"), (Ids{0, 10, 11, 2}));
}

TEST(ModelTest, IgnoreMergesTakesWholePieces) {
  Json document = SpacedDocument();
  document["model"]["vocab"]["bb"] = 7;  // no merge leads to it
  EXPECT_EQ(Encode(*Make(document), "bb"), (Ids{2, 2}));
  document["model"]["ignore_merges"] = true;
  EXPECT_EQ(Encode(*Make(document), "bb"), (Ids{7}));
  EXPECT_EQ(Encode(*Make(document), "bba"), (Ids{2, 2, 0}));
}

Json AddedToken(int id, const char* content, Json options = Json::object()) {
  Json token = {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
                {"rstrip", false}, {"normalized", false}, {"special", false}};
  token.update(options);
  return token;
}

Ids EncodeWithAdded(const std::vector<Json>& tokens, std::string_view text,
                    const Json& normalizer = nullptr) {
  Json document = Fixture("byte_level.json");
  document["normalizer"] = normalizer;
  for (const Json& token : tokens) document["added_tokens"].push_back(token);
  return Encode(*Make(document), text);
}

TEST(AddedTokensTest, LeftmostThenLongest) {
  const std::vector<Json> tokens = {AddedToken(60001, "<a"), AddedToken(60002, "<a>"),
                                    AddedToken(60003, "a><b")};
  EXPECT_EQ(EncodeWithAdded(tokens, "<a><b"), (Ids{60002, 27, 65}));
  EXPECT_EQ(EncodeWithAdded(tokens, "<a<a>"), (Ids{60001, 60002}));
  EXPECT_EQ(EncodeWithAdded(tokens, "12345<|endoftext|>"), (Ids{10163, 2231, 50256}));
}

TEST(AddedTokensTest, StripsAndWords) {
  EXPECT_EQ(EncodeWithAdded({AddedToken(60001, "<m>", {{"lstrip", true}})}, "x \n<m> x"),
            (Ids{87, 60001, 220, 87}));
  EXPECT_EQ(EncodeWithAdded({AddedToken(60001, "<m>", {{"rstrip", true}})}, "x <m> \nx"),
            (Ids{87, 220, 60001, 87}));
  const std::vector<Json> word = {AddedToken(60001, "xx", {{"single_word", true}})};
  EXPECT_EQ(EncodeWithAdded(word, "xx, xxx"), (Ids{60001, 11, 220, 87, 87, 87}));
}

TEST(AddedTokensTest, NormalizedOnesAreFoundInTheNormalText) {
  const Json lowercase = {{"type", "Lowercase"}};
  const Json normalized = {{"normalized", true}};
  EXPECT_EQ(EncodeWithAdded({AddedToken(60001, "<M>", normalized)}, "<m><M>", lowercase),
            (Ids{60001, 60001}));
  EXPECT_EQ(EncodeWithAdded({AddedToken(60001, "<M>")}, "<m><M>", lowercase),
            (Ids{27, 76, 29, 60001}));
}

TEST(AddedTokensTest, ManyTokensAreFound) {
  std::vector<Json> tokens;
  std::string text;
  Ids want;
  for (int i = 0; i < 3000; ++i) {
    const std::string content = absl::StrFormat("<|reserved_%d|>", i);
    tokens.push_back(AddedToken(70000 + i, content.c_str()));
    text += content;
    want.push_back(70000 + i);
  }
  EXPECT_EQ(EncodeWithAdded(tokens, text), want);
}

TEST(AddedTokensTest, IdsAndNames) {
  Json document = Fixture("byte_level.json");
  document["added_tokens"].push_back(AddedToken(70000, "<tool>"));
  const auto tokenizer = Make(document);
  EXPECT_EQ(tokenizer->vocab_size(), 70001);
  EXPECT_EQ(tokenizer->TokenToId("<tool>"), 70000);
  EXPECT_EQ(tokenizer->TokenToId("Hello"), 15496);
  EXPECT_EQ(tokenizer->TokenToId("nothing"), std::nullopt);
  EXPECT_EQ(tokenizer->IdToToken(2159), "ĠWorld");
  EXPECT_TRUE(tokenizer->IsSpecial(50256));
  EXPECT_FALSE(tokenizer->IsSpecial(70000));
  EXPECT_FALSE(tokenizer->IsSpecial(-1));
  for (const int32_t id : {-1, 69999, 70001}) {
    const auto text = tokenizer->Decode(Ids{15496, id}, false);
    EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(text.status().message().find(absl::StrFormat("id %d", id)), absl::string_view::npos);
  }
  document["added_tokens"].push_back(AddedToken(15496, "<other>"));
  EXPECT_NE(ErrorOf(document).find("which is token \"Hello\""), std::string::npos);
}

TEST(PostProcessorTest, TemplatesNest) {
  Json document = Fixture("byte_fallback.json");
  EXPECT_EQ(Encode(*Make(document), "the", true), (Ids{1, 262}));
  EXPECT_EQ(Encode(*Make(document), "the", false), (Ids{262}));
  const Json inner = document["post_processor"];
  document["post_processor"] = {
      {"type", "Sequence"},
      {"processors",
       {inner,
        {{"type", "ByteLevel"}},
        {{"type", "RobertaProcessing"}, {"cls", {"<unk>", 0}}, {"sep", {"</s>", 2}}}}}};
  EXPECT_EQ(Encode(*Make(document), "the", true), (Ids{0, 1, 262, 2}));
  document["post_processor"] = inner;
  document["post_processor"]["special_tokens"]["<s>"]["ids"] = {777777};
  EXPECT_NE(ErrorOf(document).find("777777"), std::string::npos);
}

TEST(TokenizerTest, InvalidUtf8IsRefusedWithItsOffset) {
  const auto tokenizer = Make(Fixture("byte_level.json"));
  const auto ids = tokenizer->Encode("Hello \xE4\xB8", false);
  EXPECT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(ids.status().message().find("byte 6"), absl::string_view::npos);
  EXPECT_TRUE(Encode(*tokenizer, "").empty());
}

TEST(TokenizerTest, UnsupportedPartsAreRefusedByName) {
  const auto error = [](const char* section, const Json& value) {
    Json document = Fixture("byte_level.json");
    document[section] = value;
    return ErrorOf(document);
  };
  EXPECT_NE(error("model", {{"type", "Unigram"}, {"vocab", Json::array()}}).find("\"Unigram\""),
            std::string::npos);
  EXPECT_NE(error("model", {{"type", "WordPiece"}}).find("\"WordPiece\""), std::string::npos);
  EXPECT_NE(error("normalizer", {{"type", "BertNormalizer"}}).find("BertNormalizer"),
            std::string::npos);
  EXPECT_NE(error("pre_tokenizer", {{"type", "CharDelimiterSplit"}}).find("CharDelimiterSplit"),
            std::string::npos);
  EXPECT_NE(error("decoder", {{"type", "CTC"}}).find("CTC"), std::string::npos);
  EXPECT_NE(error("post_processor", {{"type", "Mystery"}}).find("Mystery"), std::string::npos);
  for (const auto& [key, value] : {std::pair<const char*, Json>{"dropout", 0.1},
                                   {"continuing_subword_prefix", "##"},
                                   {"end_of_word_suffix", "</w>"}}) {
    Json document = Fixture("byte_level.json");
    document["model"][key] = value;
    EXPECT_NE(ErrorOf(document).find(key), std::string::npos);
  }
  Json document = Fixture("byte_level.json");
  document["model"]["vocab"]["x"] = 15496;
  EXPECT_NE(ErrorOf(document).find("share the id 15496"), std::string::npos);
  document["model"]["vocab"]["x"] = -3;
  EXPECT_NE(ErrorOf(document).find("-3"), std::string::npos);
  EXPECT_EQ(Tokenizer::Load("/nonexistent/tokenizer.json").status().code(),
            absl::StatusCode::kNotFound);
}

TEST(TokenizerTest, TruncationAndPaddingAreIgnored) {
  Json document = Fixture("byte_level.json");
  document["truncation"] = {
      {"max_length", 1}, {"strategy", "LongestFirst"}, {"stride", 0}, {"direction", "Right"}};
  EXPECT_EQ(Encode(*Make(document), "Hello  World").size(), 3u);
}

TEST(TokenizerTest, LongRunsEndInTime) {
  const auto bytes = Make(Fixture("byte_level.json"));
  const auto fallback = Make(Fixture("byte_fallback.json"));
  EXPECT_EQ(Encode(*bytes, std::string(1000000, 'a')).size(), 1000000u);
  EXPECT_EQ(Encode(*bytes, std::string(200000, ' ')).size(), 100000u);
  EXPECT_EQ(Encode(*fallback, std::string(199999, ' ')).size(),
            100000u);  // with the ▁ put in front
  EXPECT_EQ(Encode(*fallback, std::string(1000000, 'z')).size(), 1000001u);
}

TEST(TokenizerTest, TextsBeyondALimitAreNotEncoded) {
  Json leaves_out = Fixture("byte_fallback.json");  // characters without a token
  leaves_out["model"]["byte_fallback"] = false;
  leaves_out["model"].erase("unk_token");
  for (const Json& document :
       {Fixture("byte_level.json"), Fixture("byte_fallback.json"), leaves_out}) {
    const auto tokenizer = Make(document);
    std::vector<std::string> texts = Corpus(200);
    texts.push_back(std::string(3000, '\x01'));
    for (const std::string& text : texts) {
      const Ids want = Encode(*tokenizer, text);
      for (const bool special : {false, true}) {
        const Ids whole = *tokenizer->Encode(text, special);
        const absl::StatusOr<Ids> fits = tokenizer->Encode(text, special, std::ssize(whole));
        ASSERT_TRUE(fits.ok()) << text;
        EXPECT_EQ(*fits, whole);
        if (whole.empty()) continue;
        for (const int64_t limit : {std::ssize(whole) - 1, std::ssize(whole) / 2, int64_t{0}}) {
          const absl::Status status = tokenizer->Encode(text, special, limit).status();
          EXPECT_TRUE(absl::IsOutOfRange(status))
              << limit << " of " << whole.size() << ": " << text;
        }
      }
    }
  }
}

TEST(TokenizerTest, ThreadsMayShareOne) {
  const auto tokenizer = Make(Fixture("byte_level.json"));
  const std::vector<std::string> corpus = Corpus(300);
  std::vector<Ids> want;
  for (const std::string& line : corpus) want.push_back(Encode(*tokenizer, line));
  std::vector<int> wrong(4);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < corpus.size(); ++i)
        wrong[t] += Encode(*tokenizer, corpus[i]) != want[i];
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, (std::vector<int>{0, 0, 0, 0}));
}

}  // namespace
}  // namespace lockstep
