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

TEST(PythonTextTest, ReprChoosesQuotesAndEscapes) {
  EXPECT_EQ(PythonRepr("it's"), "\"it's\"");
  EXPECT_EQ(PythonRepr("'\""), "'\\'\"'");
  EXPECT_EQ(PythonRepr("\x01\n\xc2\xa0\xc3\xa9"), "'\\x01\\n\\xa0\xc3\xa9'");
}

}  // namespace
}  // namespace lockstep
