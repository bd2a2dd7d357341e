// Any bytes as what a client sends: requests in turn on one connection. The first byte says into
// which parts the rest is cut as it comes; the parts must not change what is understood.
#include <optional>
#include <string>
#include <vector>

#include "launch/http/http_message.h"
#include "launch/http/http_request_parser.h"
#include "runtime/core/log.h"

namespace lockstep {
namespace {

constexpr HttpRequestLimits kLimits = {2000, 4000};

struct Understood {
  std::vector<HttpRequest> requests;
  int refusal = 0;
};

// A line that is too long may be so only while its end has not come: 431 depends on the parts. So
// does when another fault is seen, at once or at the header's end, but not what came before it.
bool Agree(const Understood& a, const Understood& b) {
  if (a.refusal == 431 || b.refusal == 431) return true;
  if (a.requests.size() != b.requests.size()) return false;
  for (size_t i = 0; i < a.requests.size(); ++i) {
    const HttpRequest &x = a.requests[i], &y = b.requests[i];
    if (x.method != y.method || x.path != y.path || x.query != y.query || x.headers != y.headers ||
        x.body != y.body) {
      return false;
    }
  }
  return true;
}

void Check(const HttpRequest& request) {
  LOCKSTEP_CHECK(!request.path.empty() && (request.path[0] == '/' || request.path == "*"));
  LOCKSTEP_CHECK(static_cast<int64_t>(request.body.size()) <= kLimits.body_bytes);
  int64_t header_bytes = 0;
  for (const auto& [name, value] : request.headers) {
    LOCKSTEP_CHECK(!name.empty() &&
                   value.find_first_of(std::string("\r\n\0", 3)) == std::string::npos);
    header_bytes += static_cast<int64_t>(name.size() + value.size());
  }
  LOCKSTEP_CHECK(header_bytes <= kLimits.header_bytes);
}

// The bytes come `part` at a time, as in HttpConnection::ParseInput.
Understood Understand(const std::string& bytes, size_t part,
                      const std::shared_ptr<HttpOutbox>& outbox) {
  Understood result;
  std::optional<HttpRequestParser> parser;
  parser.emplace(kLimits, HttpReservation(outbox));
  size_t begin = 0;
  for (size_t end = 0; end < bytes.size() && result.refusal == 0;) {
    end = std::min(bytes.size(), end + part);
    while (begin < end && result.refusal == 0) {
      const bool had_header = parser->header_done();
      const size_t read = parser->Feed(bytes.data() + begin, end - begin);
      LOCKSTEP_CHECK(read <= end - begin);
      begin += read;
      result.refusal = parser->error_status();
      if (result.refusal == 0 && parser->done()) {
        (void)parser->keep_alive();
        (void)parser->expects_continue();
        result.requests.push_back(parser->TakeRequest());
        Check(result.requests.back());
        parser.emplace(kLimits, HttpReservation(outbox));
      } else if (read == 0 && had_header == parser->header_done()) {
        break;
      }
    }
    // What is held back is bounded.
    LOCKSTEP_CHECK(result.refusal != 0 ||
                   static_cast<int64_t>(end - begin) <= kLimits.header_bytes);
  }
  return result;
}

}  // namespace
}  // namespace lockstep

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  lockstep::SilenceLog();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  static const auto outbox = *lockstep::HttpOutbox::Create(1 << 20);
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const lockstep::Understood by_byte = lockstep::Understand(bytes, 1, outbox);
  const lockstep::Understood by_part = lockstep::Understand(bytes, data[0] + size_t{2}, outbox);
  LOCKSTEP_CHECK(lockstep::Agree(by_byte, by_part));
  return 0;
}
