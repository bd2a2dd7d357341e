// With http_request_parser.cc the only translation unit that sees Boost.
#include "launch/http/http_response_parser.h"

#define BOOST_DISABLE_ASSERTS
#include <boost/beast/http/basic_parser.hpp>
#include <boost/beast/http/error.hpp>
#include <cstdint>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lockstep {
namespace {

namespace beast = boost::beast;
namespace http = boost::beast::http;

// Of status line and headers, and of the line of a chunk's size.
constexpr size_t kMostHeaderBytes = 256 << 10;

}  // namespace

class HttpResponseParser::Impl final : public http::basic_parser<false> {
 public:
  Impl() {
    eager(true);
    header_limit(kMostHeaderBytes);
    // No limit: boost::none is taken for 0 where there is a Content-Length (Boost 1.74).
    body_limit(static_cast<uint64_t>(std::numeric_limits<int64_t>::max()));
  }

  bool Feed(std::string_view bytes);
  bool FeedEnd();

  std::string error_;
  std::string body_;
  int status_ = 0;

 private:
  using Error = beast::error_code;

  void on_request_impl(http::verb /*verb*/, beast::string_view /*method*/,
                       beast::string_view /*target*/, int /*version*/, Error& ec) override {
    ec = {};
  }
  void on_response_impl(int status, beast::string_view /*reason*/, int /*version*/,
                        Error& ec) override {
    ec = {};
    status_ = status;
  }
  void on_field_impl(http::field /*field*/, beast::string_view /*name*/,
                     beast::string_view /*value*/, Error& ec) override {
    ec = {};
  }
  // Since Boost 1.90 a pure virtual function, which is not there before.
  void on_trailer_field_impl(http::field /*field*/, beast::string_view /*name*/,
                             beast::string_view /*value*/, Error& ec) /* override */ {
    ec = {};
  }
  void on_header_impl(Error& ec) override { ec = {}; }
  void on_body_init_impl(const boost::optional<uint64_t>& /*length*/, Error& ec) override {
    ec = {};
  }
  size_t on_body_impl(beast::string_view part, Error& ec) override {
    ec = {};
    body_.append(part.data(), part.size());
    return part.size();
  }
  void on_chunk_header_impl(uint64_t /*size*/, beast::string_view /*extensions*/,
                            Error& ec) override {
    ec = {};
  }
  size_t on_chunk_body_impl(uint64_t /*remain*/, beast::string_view part, Error& ec) override {
    return on_body_impl(part, ec);
  }
  void on_finish_impl(Error& ec) override { ec = {}; }

  std::string unread_;  // a line that has not ended
};

bool HttpResponseParser::Impl::Feed(std::string_view bytes) {
  if (!error_.empty()) return false;
  unread_.append(bytes);
  size_t used = 0;
  while (used < unread_.size() && !is_done()) {
    Error ec;
    const size_t read =
        put(boost::asio::const_buffer(unread_.data() + used, unread_.size() - used), ec);
    used += read;
    if (ec == http::error::need_more || (!ec && read == 0)) break;
    if (ec) {
      error_ = absl::StrCat("malformed response: ", ec.message());
      return false;
    }
  }
  unread_.erase(0, is_done() ? unread_.size() : used);
  if (unread_.size() > kMostHeaderBytes) error_ = "malformed response: a line is too long";
  return error_.empty();
}

bool HttpResponseParser::Impl::FeedEnd() {
  if (!error_.empty()) return false;
  if (is_done()) return true;
  Error ec;
  if (got_some()) put_eof(ec);
  if (!ec && is_done()) return true;
  error_ = is_header_done() ? "the connection ended within the response"
                            : "the connection ended before a response";
  return false;
}

HttpResponseParser::HttpResponseParser() : impl_(std::make_unique<Impl>()) {}
HttpResponseParser::~HttpResponseParser() = default;
HttpResponseParser::HttpResponseParser(HttpResponseParser&&) noexcept = default;
HttpResponseParser& HttpResponseParser::operator=(HttpResponseParser&&) noexcept = default;

bool HttpResponseParser::Feed(std::string_view bytes) { return impl_->Feed(bytes); }
bool HttpResponseParser::FeedEnd() { return impl_->FeedEnd(); }
bool HttpResponseParser::header_done() const { return impl_->is_header_done(); }
bool HttpResponseParser::done() const { return impl_->is_done(); }
const std::string& HttpResponseParser::error() const { return impl_->error_; }
int HttpResponseParser::status() const { return impl_->status_; }
std::string HttpResponseParser::TakeBody() { return std::exchange(impl_->body_, ""); }

}  // namespace lockstep
