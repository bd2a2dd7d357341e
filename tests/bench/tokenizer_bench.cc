// Throughput of a tokenizer on one thread.
//   tokenizer_bench TOKENIZER_JSON TEXT_FILE [REPEATS]
// Prints medians: load time, encode of the whole text, encode in requests of 4 KB, decode. MB are
// 10^6 bytes of UTF-8. CPU time of the thread is measured, so that other work on the machine
// disturbs little.

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string_view>
#include <vector>

#include "model/tokenizer/tokenizer.h"
#include "runtime/core/file.h"

namespace lockstep {
namespace {

double CpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double MedianSeconds(int repeats, const std::function<void()>& body) {
  std::vector<double> seconds;
  for (int i = 0; i < repeats; ++i) {
    const double start = CpuSeconds();
    body();
    seconds.push_back(CpuSeconds() - start);
  }
  std::nth_element(seconds.begin(), seconds.begin() + repeats / 2, seconds.end());
  return seconds[repeats / 2];
}

// The text in pieces of about `size` bytes that end with a line.
std::vector<std::string_view> Requests(std::string_view text, size_t size) {
  std::vector<std::string_view> requests;
  while (!text.empty()) {
    size_t end = text.size() <= size ? std::string_view::npos : text.find('\n', size);
    end = end == std::string_view::npos ? text.size() : end + 1;
    requests.push_back(text.substr(0, end));
    text.remove_prefix(end);
  }
  return requests;
}

absl::Status Run(const std::string& tokenizer_path, const std::string& text_path, int repeats) {
  LOCKSTEP_ASSIGN_OR_RETURN(const std::unique_ptr<Tokenizer> tokenizer,
                            Tokenizer::Load(tokenizer_path));
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string text, ReadFile(text_path));
  LOCKSTEP_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer->Encode(text, false));
  const double load = MedianSeconds(3, [&] { Tokenizer::Load(tokenizer_path).IgnoreError(); });
  const double whole =
      MedianSeconds(repeats, [&] { tokenizer->Encode(text, false).IgnoreError(); });
  const double requests = MedianSeconds(repeats, [&] {
    for (const std::string_view request : Requests(text, 4096))
      tokenizer->Encode(request, false).IgnoreError();
  });
  const double decode =
      MedianSeconds(repeats, [&] { tokenizer->Decode(ids, false).IgnoreError(); });
  const double megabytes = static_cast<double>(text.size()) * 1e-6;
  std::printf("%s: %.2f MB, %zu ids\n", tokenizer_path.c_str(), megabytes, ids.size());
  std::printf("load          %8.3f s\n", load);
  std::printf("encode        %8.1f MB/s\n", megabytes / whole);
  std::printf("encode 4 KB   %8.1f MB/s\n", megabytes / requests);
  std::printf("decode        %8.1f MB/s\n", megabytes / decode);
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: tokenizer_bench TOKENIZER_JSON TEXT_FILE [REPEATS]\n");
    return 2;
  }
  const int repeats = argc > 3 ? std::max(1, std::atoi(argv[3])) : 9;
  const absl::Status status = lockstep::Run(argv[1], argv[2], repeats);
  if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
