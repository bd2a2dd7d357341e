#include "launch/http/http_message.h"

#include <algorithm>
#include <array>
#include <random>

namespace lockstep {
namespace {

char Lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char lower = Lower(c);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

std::optional<std::string> PercentDecode(std::string_view text) {
  std::string decoded;
  decoded.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      decoded.push_back(text[i]);
      continue;
    }
    if (i + 2 >= text.size()) return std::nullopt;
    const int high = HexDigit(text[i + 1]), low = HexDigit(text[i + 2]);
    if (high < 0 || low < 0) return std::nullopt;
    decoded.push_back(static_cast<char>(high * 16 + low));
    i += 2;
  }
  return decoded;
}

std::string_view Trim(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

const char* Reason(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 201:
      return "Created";
    case 202:
      return "Accepted";
    case 204:
      return "No Content";
    case 301:
      return "Moved Permanently";
    case 302:
      return "Found";
    case 304:
      return "Not Modified";
    case 307:
      return "Temporary Redirect";
    case 308:
      return "Permanent Redirect";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 406:
      return "Not Acceptable";
    case 408:
      return "Request Timeout";
    case 409:
      return "Conflict";
    case 411:
      return "Length Required";
    case 413:
      return "Content Too Large";
    case 415:
      return "Unsupported Media Type";
    case 417:
      return "Expectation Failed";
    case 422:
      return "Unprocessable Content";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 504:
      return "Gateway Timeout";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "Status";
  }
}

// Those that say how the message is framed, or that every response has from here.
bool IsOwnHeader(std::string_view name) {
  constexpr std::array<std::string_view, 7> kOwn = {
      "connection", "content-length",    "date",        "keep-alive",
      "server",     "transfer-encoding", "x-request-id"};
  return std::any_of(kOwn.begin(), kOwn.end(),
                     [name](std::string_view own) { return SameHeaderName(own, name); });
}

void AppendHeaders(const HttpHeaders& headers, std::string& text) {
  const auto append = [&text](const std::string& part) {
    for (const char c : part) {
      const auto byte = static_cast<unsigned char>(c);
      text.push_back((byte < 0x20 && c != '\t') || byte == 0x7f ? ' ' : c);
    }
  };
  for (const auto& [name, value] : headers) {
    if (name.empty() || IsOwnHeader(name)) continue;
    append(name);
    text += ": ";
    append(value);
    text += "\r\n";
  }
}

}  // namespace

const std::string* HttpRequest::Header(const std::string& name) const {
  for (const auto& [other, value] : headers) {
    if (SameHeaderName(name, other)) return &value;
  }
  return nullptr;
}

bool SameHeaderName(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](char x, char y) { return Lower(x) == Lower(y); });
}

bool ListHolds(std::string_view value, std::string_view token) {
  while (true) {
    const size_t comma = value.find(',');
    if (SameHeaderName(Trim(value.substr(0, comma)), token)) return true;
    if (comma == std::string_view::npos) return false;
    value.remove_prefix(comma + 1);
  }
}

std::optional<HttpTarget> ParseTarget(std::string_view method, std::string_view target) {
  if (target == "*" && method == "OPTIONS") return HttpTarget{"*", ""};
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (!SameHeaderName(target.substr(0, scheme.size()), scheme)) continue;
    const size_t end = target.find_first_of("/?", scheme.size());
    target = end == std::string_view::npos ? "/" : target.substr(end);
    if (target[0] == '?') {
      return HttpTarget{"/", std::string(target.substr(1))};
    }
    break;
  }
  if (target.empty() || target[0] != '/') return std::nullopt;
  const size_t question = target.find('?');
  std::optional<std::string> path = PercentDecode(target.substr(0, question));
  if (!path.has_value()) return std::nullopt;
  HttpTarget result{*std::move(path), ""};
  if (question != std::string_view::npos) result.query = target.substr(question + 1);
  return result;
}

std::string ChooseRequestId(const std::string* sent) {
  constexpr std::string_view kAllowed =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/+=@";
  if (sent != nullptr && !sent->empty() && sent->size() <= 128 &&
      sent->find_first_not_of(kAllowed) == std::string::npos) {
    return *sent;
  }
  thread_local std::mt19937_64 random = [] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }();
  constexpr char kDigits[] = "0123456789abcdef";
  std::string id(32, '0');
  for (size_t half = 0; half < 2; ++half) {
    uint64_t bits = random();
    for (size_t i = 0; i < 16; ++i, bits >>= 4) id[half * 16 + i] = kDigits[bits & 15];
  }
  return id;
}

bool HasNoBody(int status) { return status < 200 || status == 204 || status == 304; }

std::string FormatHead(const HttpResponseHead& head, const HttpHeaders& common_headers,
                       const std::string& request_id, std::time_t now) {
  std::string text = "HTTP/1.1 ";
  text += std::to_string(head.status);
  text += ' ';
  text += Reason(head.status);
  text += "\r\nDate: ";
  text += HttpDate(now);
  text += "\r\nServer: lockstep\r\nx-request-id: ";
  text += request_id;
  text += "\r\n";
  AppendHeaders(common_headers, text);
  AppendHeaders(head.headers, text);
  if (head.framing == HttpFraming::kLength) {
    text += "Content-Length: " + std::to_string(head.length) + "\r\n";
  } else if (head.framing == HttpFraming::kChunked) {
    text += "Transfer-Encoding: chunked\r\n";
  }
  if (!head.keep_alive) {
    text += "Connection: close\r\n";
  } else if (head.http10) {
    text += "Connection: keep-alive\r\n";
  }
  text += "\r\n";
  return text;
}

std::string HttpDate(std::time_t now) {
  // Not strftime's names, which follow the locale.
  constexpr const char* kDays[] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
  constexpr const char* kMonths[] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                     "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  std::tm utc = {};
  gmtime_r(&now, &utc);
  return absl::StrFormat("%s, %02d %s %04d %02d:%02d:%02d GMT", kDays[utc.tm_wday], utc.tm_mday,
                         kMonths[utc.tm_mon], utc.tm_year + 1900, utc.tm_hour, utc.tm_min,
                         utc.tm_sec);
}

}  // namespace lockstep
