#include "model/chat/python_text.h"

#include "gtest/gtest.h"

namespace lockstep {
namespace {

TEST(PythonTextTest, InvalidBytesCountAsOneCharacterAndSurvive) {
  const std::string text = "a\xff\xf0\x9f\xa6z";  // a stray byte, a llama cut short
  EXPECT_EQ(CountCodePoints(text), 6U);
  std::string copy;
  for (size_t p = 0; p < text.size();) AppendCodePoint(NextCodePoint(text, &p), &copy);
  EXPECT_EQ(copy, text);
  EXPECT_EQ(ByteOffset(text, 2), 2U);
  EXPECT_EQ(ByteOffset(text, 100), text.size());
}

TEST(PythonTextTest, StripsByCharacter) {
  EXPECT_EQ(PythonStripRight("a\xe2\x80\x83\xc2\xa0", nullptr), "a");
  EXPECT_EQ(PythonStripLeft("\xe3\x80\x80 a", nullptr), "a");
  const std::string_view chars = "\xc3\xa9x";
  EXPECT_EQ(PythonStripRight("a\xc3\xa9xx", &chars), "a");
  EXPECT_EQ(PythonStripRight("\x80\x80", nullptr), "\x80\x80");
}

TEST(PythonTextTest, FindsAsStringViewDoes) {
  constexpr size_t kNowhere = std::string_view::npos;
  EXPECT_EQ(FindFirst("", ""), 0U);
  EXPECT_EQ(FindFirst({}, {}), 0U);
  EXPECT_EQ(FindLast({}, {}), 0U);
  EXPECT_EQ(FindFirst({}, "a"), kNowhere);
  EXPECT_EQ(FindFirst("a", "a", 2), kNowhere);
  // Every text of up to 7 letters of two, every part of up to 3, from every place.
  const auto word = [](size_t length, size_t bits) {
    std::string text;
    for (size_t i = 0; i < length; ++i) text += (bits >> i & 1) != 0 ? 'a' : 'b';
    return text;
  };
  for (size_t n = 0; n < (8 << 7); ++n) {
    const std::string text = word(n >> 7, n & 127);
    for (size_t m = 0; m < (4 << 3); ++m) {
      const std::string part = word(m >> 3, m & 7);
      ASSERT_EQ(FindLast(text, part), text.rfind(part)) << text << " " << part;
      for (size_t from = 0; from <= text.size() + 1; ++from)
        ASSERT_EQ(FindFirst(text, part, from), text.find(part, from)) << text << " " << part;
    }
  }
}

TEST(PythonTextTest, ReprChoosesQuotesAndEscapes) {
  EXPECT_EQ(PythonRepr("it's"), "\"it's\"");
  EXPECT_EQ(PythonRepr("'\""), "'\\'\"'");
  EXPECT_EQ(PythonRepr("\x01\n\xc2\xa0\xc3\xa9"), "'\\x01\\n\\xa0\xc3\xa9'");
}

}  // namespace
}  // namespace lockstep
