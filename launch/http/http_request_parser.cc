// With http_response_parser.cc the only translation unit that sees Boost: its headers are slow to
// compile.
#include "launch/http/http_request_parser.h"

// Beast asserts that the line of the last chunk has five bytes when it looks at it again; a client
// that sends "0\r\n\r" and then "\n" would end a build with assertions. Without them it is read
// rightly: tests/fuzz/http_request_fuzz.cc compares.
#define BOOST_DISABLE_ASSERTS
#include <boost/beast/http/basic_parser.hpp>
#include <boost/beast/http/error.hpp>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "launch/http/http_message.h"

namespace lockstep {
namespace {

namespace beast = boost::beast;
namespace http = boost::beast::http;

// An answer of its own for what Beast has one error code for, or none.
struct Refusal {
  int status = 0;
  std::string message;
};

std::string ToString(beast::string_view text) { return std::string(text.data(), text.size()); }

// "GET / HTTP/2.0"
bool NamesOtherVersion(std::string_view request) {
  constexpr std::string_view kName = " HTTP/";
  const std::string_view line = request.substr(0, request.find_first_of("\r\n"));
  const size_t at = line.find(kName);
  if (at == std::string_view::npos) return false;
  const std::string_view version = line.substr(at + kName.size());
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  return version.size() == 3 && is_digit(version[0]) && version[1] == '.' && is_digit(version[2]) &&
         version != "1.0" && version != "1.1";
}

}  // namespace

class HttpRequestParser::Impl final : public http::basic_parser<true> {
 public:
  Impl(const HttpRequestLimits& limits, HttpReservation reservation)
      : limits_(limits), reservation_(std::move(reservation)) {
    // Our own count is of the whole header; Beast's starts anew where it has read some of it.
    header_limit(std::numeric_limits<uint32_t>::max());
    body_limit(static_cast<uint64_t>(limits.body_bytes));
  }

  size_t Feed(const char* data, size_t size);
  void Refuse(int status, std::string message) {
    if (refusal_.status == 0) refusal_ = {status, std::move(message)};
  }

  HttpRequest request_;
  std::string target_;
  int version_ = 11;
  Refusal refusal_;
  const HttpRequestLimits limits_;
  HttpReservation reservation_;

 private:
  using Error = beast::error_code;

  // Beast stops at any error; what counts is the refusal.
  void Stop(Error& ec, int status, std::string message) {
    Refuse(status, std::move(message));
    ec = http::error::bad_value;
  }
  void OnBeastError(const Error& ec, std::string_view rest);
  void CheckHeader(Error& ec);
  size_t AppendBody(beast::string_view part, Error& ec);

  void on_request_impl(http::verb /*verb*/, beast::string_view method, beast::string_view target,
                       int version, Error& ec) override {
    ec = {};
    request_.method = ToString(method);
    target_ = ToString(target);
    version_ = version;
  }
  void on_response_impl(int /*status*/, beast::string_view /*reason*/, int /*version*/,
                        Error& ec) override {
    ec = {};
  }
  void on_field_impl(http::field /*field*/, beast::string_view name, beast::string_view value,
                     Error& ec) override {
    ec = {};
    if (is_header_done()) return;  // a trailer, before Boost 1.90
    request_.headers.emplace_back(ToString(name), ToString(value));
  }
  // Since Boost 1.90 trailers come here, by a pure virtual function that is not there before.
  void on_trailer_field_impl(http::field /*field*/, beast::string_view /*name*/,
                             beast::string_view /*value*/, Error& ec) /* override */ {
    ec = {};
  }
  void on_header_impl(Error& ec) override {
    ec = {};
    CheckHeader(ec);
  }
  void on_body_init_impl(const boost::optional<uint64_t>& /*length*/, Error& ec) override {
    ec = {};
  }
  size_t on_body_impl(beast::string_view part, Error& ec) override { return AppendBody(part, ec); }
  void on_chunk_header_impl(uint64_t /*size*/, beast::string_view /*extensions*/,
                            Error& ec) override {
    ec = {};
  }
  size_t on_chunk_body_impl(uint64_t /*remain*/, beast::string_view part, Error& ec) override {
    return AppendBody(part, ec);
  }
  void on_finish_impl(Error& ec) override { ec = {}; }

  int64_t header_bytes_ = 0;
};

size_t HttpRequestParser::Impl::Feed(const char* data, size_t size) {
  size_t used = 0;
  while (used < size && !is_done() && refusal_.status == 0) {
    const bool in_header = !is_header_done();
    Error ec;
    const size_t read = put(boost::asio::const_buffer(data + used, size - used), ec);
    used += read;
    if (in_header) header_bytes_ += static_cast<int64_t>(read);
    if (ec && ec != http::error::need_more) {
      OnBeastError(ec, std::string_view(data + used, size - used));
      break;
    }
    if (in_header && is_header_done()) break;
    if (ec || read == 0) break;
  }
  if (refusal_.status != 0) return used;
  // What is left is a line that has not ended: of the header, of a chunk's size or of trailers.
  const auto rest = static_cast<int64_t>(size - used);
  const bool too_long = is_header_done() ? used == 0 && rest > limits_.header_bytes
                                         : header_bytes_ + rest > limits_.header_bytes;
  if (too_long || header_bytes_ > limits_.header_bytes) {
    Refuse(431, absl::StrFormat("the request line and headers are longer than %d bytes",
                                limits_.header_bytes));
  }
  return used;
}

void HttpRequestParser::Impl::OnBeastError(const Error& ec, std::string_view rest) {
  if (ec == http::error::body_limit) {
    Refuse(413, absl::StrFormat("the body is longer than %d bytes", limits_.body_bytes));
  } else if (ec == http::error::bad_version && NamesOtherVersion(rest)) {
    Refuse(505, "only HTTP/1.0 and HTTP/1.1 are spoken here");
  } else {
    Refuse(400, absl::StrCat("malformed request: ", ec.message()));
  }
}

// RFC 9112: what would let two servers see different requests in the same bytes is refused.
void HttpRequestParser::Impl::CheckHeader(Error& ec) {
  int hosts = 0;
  for (const auto& [name, value] : request_.headers) {
    if (SameHeaderName(name, "transfer-encoding")) {
      if (version_ == 10) return Stop(ec, 400, "Transfer-Encoding with HTTP/1.0");
      if (!SameHeaderName(value, "chunked")) {
        return Stop(ec, 501, "no Transfer-Encoding but chunked is known here");
      }
    } else if (SameHeaderName(name, "host")) {
      ++hosts;
    } else if (SameHeaderName(name, "expect") && !SameHeaderName(value, "100-continue")) {
      return Stop(ec, 417, "no expectation but 100-continue can be met");
    }
  }
  if (hosts > 1 || (hosts == 0 && version_ == 11)) {
    return Stop(ec, 400, "a request must have one Host header");
  }
  std::optional<HttpTarget> target = ParseTarget(request_.method, target_);
  if (!target.has_value()) return Stop(ec, 400, "the request's target is no path");
  request_.path = std::move(target->path);
  request_.query = std::move(target->query);
}

size_t HttpRequestParser::Impl::AppendBody(beast::string_view part, Error& ec) {
  ec = {};
  // Grows with what comes, not with what Content-Length promises.
  reservation_.Set(static_cast<int64_t>(request_.body.size() + part.size()));
  if (reservation_.full()) {
    Stop(ec, 503, "the server holds as many bytes of requests and responses as it may");
    return 0;
  }
  request_.body.append(part.data(), part.size());
  return part.size();
}

HttpRequestParser::HttpRequestParser(const HttpRequestLimits& limits, HttpReservation body)
    : impl_(std::make_unique<Impl>(limits, std::move(body))) {}
HttpRequestParser::~HttpRequestParser() = default;

size_t HttpRequestParser::Feed(const char* data, size_t size) { return impl_->Feed(data, size); }
bool HttpRequestParser::header_done() const { return impl_->is_header_done(); }
bool HttpRequestParser::done() const { return impl_->is_done(); }
int HttpRequestParser::error_status() const { return impl_->refusal_.status; }
const std::string& HttpRequestParser::error_message() const { return impl_->refusal_.message; }
bool HttpRequestParser::http10() const { return impl_->version_ == 10; }
bool HttpRequestParser::keep_alive() const { return impl_->keep_alive(); }
bool HttpRequestParser::expects_continue() const {
  return impl_->version_ == 11 && impl_->request_.Header("expect") != nullptr;
}
const std::string* HttpRequestParser::Header(const std::string& name) const {
  return impl_->request_.Header(name);
}
const std::string& HttpRequestParser::method() const { return impl_->request_.method; }

HttpRequest HttpRequestParser::TakeRequest() { return std::move(impl_->request_); }
HttpReservation HttpRequestParser::TakeReservation() { return std::move(impl_->reservation_); }

}  // namespace lockstep
