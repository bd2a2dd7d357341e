#include "runtime/core/json.h"

#include "gtest/gtest.h"

namespace lockstep {
namespace {

TEST(JsonTest, DeepNestingIsRefusedNotRecursedInto) {
  const std::string deep(2000000, '[');
  const auto parsed = ParseJson(deep, "body");
  ASSERT_FALSE(parsed.ok());
  EXPECT_NE(std::string(parsed.status().message()).find("deeper than 256"), std::string::npos);
  EXPECT_TRUE(ParseJson("[\"" + std::string(1000, '[') + "\"]", "body").ok());
}

TEST(JsonTest, BadUtf8IsRefusedOnReadAndReplacedOnWrite) {
  EXPECT_FALSE(ParseJson("\"\xff\"", "body").ok());
  EXPECT_EQ(DumpJson(Json("a\xf0\x9f")), "\"a\xef\xbf\xbd\"");
}

TEST(JsonTest, OrderedKeepsKeyOrder) {
  EXPECT_EQ(DumpJson(*ParseOrderedJson(R"({"b":1,"a":2})", "body")), R"({"b":1,"a":2})");
}

TEST(JsonTest, ANulIsNoEnd) {
  for (const std::string& text : {std::string("{\"a\": 1}\0{}", 11), std::string("\0", 1)}) {
    const auto json = ParseJson(text, "line 7");
    ASSERT_FALSE(json.ok());
    EXPECT_NE(std::string(json.status().message()).find("line 7: not valid JSON: a NUL"),
              std::string::npos)
        << json.status();
  }
}

}  // namespace
}  // namespace lockstep
