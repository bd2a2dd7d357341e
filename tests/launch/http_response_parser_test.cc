#include "launch/http/http_response_parser.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

constexpr char kChunked[] =
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\n"
    "Trailer: t\r\n\r\n";

TEST(HttpResponseParser, BytesMayBeCutAnywhere) {
  const std::string chunked = kChunked;
  const std::string plain = "HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\nabc0123456789";
  for (const std::string& whole : {chunked, plain}) {
    for (size_t cut = 0; cut <= whole.size(); ++cut) {
      HttpResponseParser parser;
      ASSERT_TRUE(parser.Feed(whole.substr(0, cut)));
      std::string body = parser.TakeBody();
      ASSERT_TRUE(parser.Feed(whole.substr(cut))) << cut << " " << parser.error();
      body += parser.TakeBody();
      EXPECT_EQ(body, "abc0123456789") << cut;
      EXPECT_TRUE(parser.done());
      EXPECT_EQ(parser.status(), 200);
      EXPECT_TRUE(parser.FeedEnd());
    }
  }
}

TEST(HttpResponseParser, TheEndOfTheConnectionMayEndABody) {
  HttpResponseParser parser;
  ASSERT_TRUE(parser.Feed("HTTP/1.0 503 No\r\n\r\nwait"));
  EXPECT_FALSE(parser.done());
  EXPECT_TRUE(parser.FeedEnd());
  EXPECT_TRUE(parser.done());
  EXPECT_EQ(parser.status(), 503);
  EXPECT_EQ(parser.TakeBody(), "wait");
}

TEST(HttpResponseParser, WhatIsCutShortIsTold) {
  const auto error_after = [](const std::string& bytes) {
    HttpResponseParser parser;
    EXPECT_TRUE(parser.Feed(bytes)) << parser.error();
    EXPECT_FALSE(parser.FeedEnd());
    EXPECT_FALSE(parser.Feed("x"));
    return parser.error();
  };
  EXPECT_EQ(error_after(""), "the connection ended before a response");
  EXPECT_EQ(error_after("HTTP/1.1 200 OK\r\nA: b"), "the connection ended before a response");
  EXPECT_EQ(error_after("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc"),
            "the connection ended within the response");
  EXPECT_EQ(error_after(std::string(kChunked).substr(0, 60)),
            "the connection ended within the response");
}

TEST(HttpResponseParser, WhatIsNoResponseIsRefused) {
  for (const char* bad : {"SSH-2.0-OpenSSH_9\r\n\r\n", "HTTP/1.1 abc\r\n\r\n",
                          "HTTP/1.1 200 OK\r\nno colon\r\n\r\n"}) {
    HttpResponseParser parser;
    EXPECT_FALSE(parser.Feed(bad)) << bad;
    EXPECT_EQ(parser.error().find("malformed response: "), 0u) << parser.error();
  }
  HttpResponseParser endless;
  ASSERT_TRUE(endless.Feed("HTTP/1.1 200 OK\r\n"));
  bool fine = true;
  for (int i = 0; fine && i < 1000; ++i) fine = endless.Feed(std::string(1024, 'a'));
  EXPECT_FALSE(fine);
}

}  // namespace
}  // namespace lockstep
