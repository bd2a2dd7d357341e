#include "launch/http/http_request_parser.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "launch/http/http_message.h"

namespace lockstep {
namespace {

struct Parsed {
  int status = 0;
  bool done = false;
  size_t used = 0;
  HttpRequest request;
};

// Feeds `parts` as a connection does: what is left comes again with the next part behind it.
Parsed Parse(const std::vector<std::string>& parts) {
  const absl::StatusOr<std::shared_ptr<HttpOutbox>> outbox = HttpOutbox::Create(1 << 30);
  EXPECT_TRUE(outbox.ok());
  HttpRequestParser parser({1000, 1000}, HttpReservation(*outbox));
  Parsed parsed;
  std::string input;
  for (const std::string& part : parts) {
    input += part;
    size_t used = 1;
    while (!input.empty() && used > 0 && !parser.done() && parser.error_status() == 0) {
      const bool had_header = parser.header_done();
      used = parser.Feed(input.data(), input.size());
      parsed.used += used;
      input.erase(0, used);
      if (!had_header && parser.header_done()) used = 1;  // stopped for that
    }
  }
  parsed.status = parser.error_status();
  parsed.done = parser.done();
  parsed.request = parser.TakeRequest();
  return parsed;
}

void ExpectSame(const Parsed& whole, const Parsed& split) {
  EXPECT_EQ(whole.status, split.status);
  EXPECT_EQ(whole.done, split.done);
  EXPECT_EQ(whole.request.method, split.request.method);
  EXPECT_EQ(whole.request.path, split.request.path);
  EXPECT_EQ(whole.request.query, split.request.query);
  EXPECT_EQ(whole.request.body, split.request.body);
  EXPECT_EQ(whole.request.headers, split.request.headers);
  if (whole.done) {
    EXPECT_EQ(whole.used, split.used);
  }
}

const char* const kRequests[] = {
    "GET /a%20b?c=d&e HTTP/1.1\r\nHost: h\r\nAccept: */*\r\n\r\n",
    "POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 11\r\nX:  folded\r\n  line \r\n"
    "\r\nhello world",
    "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    "1\r\na\r\n0A;ext=\"q\\\"\";b\r\n0123456789\r\n000\r\nTrailer: t\r\nOther: u\r\n\r\n",
    "POST / HTTP/1.0\r\nContent-Length: 3\r\nConnection: keep-alive\r\n\r\nabc",
    "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: h\r\nBad Name: x\r\n\r\n",
    "GET / HTTP/3.0\r\nHost: h\r\n\r\n",
};

TEST(HttpRequestParserTest, SplitAtEveryByte) {
  for (const std::string request : kRequests) {
    SCOPED_TRACE(request);
    const std::string more = request + "GET /next HTTP/1.1\r\n";
    const Parsed whole = Parse({request});
    EXPECT_TRUE(whole.done || whole.status != 0);
    ExpectSame(whole, Parse({more}));
    for (size_t i = 1; i < request.size(); ++i) {
      SCOPED_TRACE(i);
      ExpectSame(whole, Parse({request.substr(0, i), request.substr(i)}));
      ExpectSame(whole, Parse({request.substr(0, i), more.substr(i)}));
    }
    std::vector<std::string> bytes;
    for (const char byte : request) bytes.emplace_back(1, byte);
    ExpectSame(whole, Parse(bytes));
  }
}

TEST(HttpRequestParserTest, Fields) {
  const Parsed parsed = Parse({kRequests[1]});
  ASSERT_TRUE(parsed.done);
  EXPECT_EQ(parsed.request.method, "POST");
  EXPECT_EQ(parsed.request.path, "/v1/completions");
  EXPECT_EQ(parsed.request.body, "hello world");
  ASSERT_NE(parsed.request.Header("CONTENT-length"), nullptr);
  EXPECT_EQ(*parsed.request.Header("CONTENT-length"), "11");
  EXPECT_EQ(*parsed.request.Header("x"), "folded line");
  EXPECT_EQ(parsed.request.Header("y"), nullptr);
  EXPECT_EQ(Parse({kRequests[0]}).request.path, "/a b");
  EXPECT_EQ(Parse({kRequests[0]}).request.query, "c=d&e");
  EXPECT_EQ(Parse({kRequests[2]}).request.body, "a0123456789");
  EXPECT_EQ(Parse({kRequests[4]}).status, 400);
}

TEST(HttpRequestParserTest, ReservesWhatItHolds) {
  const absl::StatusOr<std::shared_ptr<HttpOutbox>> outbox = HttpOutbox::Create(4);
  ASSERT_TRUE(outbox.ok());
  const std::string request = "POST / HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc";
  const auto parse = [&](HttpRequestParser& parser) {
    size_t used = 0;
    while (!parser.done() && parser.error_status() == 0) {
      used += parser.Feed(request.data() + used, request.size() - used);
    }
    return parser.error_status();
  };
  HttpRequestParser third({1000, 1000}, HttpReservation(*outbox));
  {
    HttpRequestParser first({1000, 1000}, HttpReservation(*outbox));
    EXPECT_EQ(parse(first), 0);
    HttpRequestParser second({1000, 1000}, HttpReservation(*outbox));
    EXPECT_EQ(parse(second), 503);
  }
  EXPECT_EQ(parse(third), 0);
}

TEST(HttpMessageTest, Targets) {
  const auto path = [](const std::string& target) {
    const std::optional<HttpTarget> parsed = ParseTarget("GET", target);
    return parsed.has_value() ? parsed->path + "|" + parsed->query : "none";
  };
  EXPECT_EQ(path("/"), "/|");
  EXPECT_EQ(path("/a%2Fb%3fc?d%20"), "/a/b?c|d%20");
  EXPECT_EQ(path("HTTP://h:1"), "/|");
  EXPECT_EQ(path("http://h?q"), "/|q");
  EXPECT_EQ(path("https://h/a"), "/a|");
  for (const char* bad : {"", "*", "a", "h:80", "/%", "/%1", "/%g0", "ftp://h/a"}) {
    EXPECT_EQ(path(bad), "none") << bad;
  }
  EXPECT_TRUE(ParseTarget("OPTIONS", "*").has_value());
}

TEST(HttpMessageTest, Dates) {
  EXPECT_EQ(HttpDate(784111777), "Sun, 06 Nov 1994 08:49:37 GMT");
  EXPECT_EQ(HttpDate(951782400), "Tue, 29 Feb 2000 00:00:00 GMT");
}

TEST(HttpMessageTest, Lists) {
  EXPECT_TRUE(ListHolds("close", "close"));
  EXPECT_TRUE(ListHolds("x , Close", "close"));
  EXPECT_FALSE(ListHolds("closed, x", "close"));
  EXPECT_FALSE(ListHolds("", "close"));
}

}  // namespace
}  // namespace lockstep
