// Load on `lockstep serve MODEL --served-model-name m --step-log FILE`, best with --load-format
// null and --null-step-ms: streaming clients, and what lies between the landing of a step and the
// arrival of its tokens.
//
//   serve_load --port P --step-log FILE [--clients 256] [--tokens 1000] [--prompt 32] [--idle 0]
//              [--pid RANK0]
//
// For a model without tokenizer, where each token is an event of its own. Once a client's prompt is
// computed it gets a token from every step, so its token k came from step k + c, where c is such
// that no token arrives before its step has landed and the most punctual one after less than a
// step. The step log has the time when a step landed, before its events are delivered, and before
// the line itself is made: some tenths of a millisecond of the latency are the log's. --idle opens
// so many connections more, which have asked for /health once and must still answer at the end.
// With --pid, the time on a core of each of the server's threads while all clients were receiving.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace {

// What comes before is start-up: prompts and connections.
constexpr size_t kWarmTokens = 50;

// The clock of the step log.
double Now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "serve_load: %s: %s\n", what.c_str(), std::strerror(errno));
  std::exit(1);
}

struct Arguments {
  std::map<std::string, double> values = {{"port", 8000}, {"clients", 256}, {"tokens", 1000},
                                          {"prompt", 32}, {"idle", 0},      {"pid", 0}};
  std::string step_log;

  Arguments(int argc, char** argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
      if (std::strcmp(argv[i], "--step-log") == 0) {
        step_log = argv[i + 1];
        continue;
      }
      const auto found = values.find(argv[i] + (std::strncmp(argv[i], "--", 2) == 0 ? 2 : 0));
      if (found == values.end()) Fail(std::string("unknown option ") + argv[i]);
      found->second = std::atof(argv[i + 1]);
    }
  }
  double operator[](const char* name) const { return values.at(name); }
};

int Connect(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    Fail("connect");
  }
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return fd;
}

void Send(int fd, const std::string& text) {
  if (send(fd, text.data(), text.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(text.size())) {
    Fail("send");
  }
}

std::string Completion(size_t client, const Arguments& arguments) {
  std::string ids;
  for (int i = 0; i < static_cast<int>(arguments["prompt"]); ++i) {
    ids +=
        (i > 0 ? "," : "") + std::to_string((client * 31 + static_cast<size_t>(i) * 7) % 300 + 3);
  }
  std::ostringstream body;
  body << R"({"model":"m","stream":true,"temperature":0,"ignore_eos":true,"max_tokens":)"
       << static_cast<int>(arguments["tokens"]) << R"(,"prompt":[)" << ids << "]}";
  std::ostringstream request;
  request << "POST /v1/completions HTTP/1.1\r\nHost: l\r\nContent-Type: application/json\r\n"
          << "Content-Length: " << body.str().size() << "\r\n\r\n"
          << body.str();
  return request.str();
}

// One stream: arrival of each event that is a JSON object.
struct Client {
  int fd = -1;
  std::vector<double> arrivals;
  std::string line;
  bool ended = false;

  // Lines of chunk sizes lie between those of events.
  void Read(const char* data, size_t size, double now, size_t max_tokens) {
    for (size_t i = 0; i < size; ++i) {
      if (data[i] != '\n') {
        if (line.size() < 16) line += data[i];
        continue;
      }
      if (line.rfind("data: {\"err", 0) == 0) Fail("an error event");
      if (line.rfind("HTTP/1.1 ", 0) == 0 && line.rfind("HTTP/1.1 200", 0) != 0) Fail(line);
      if (line.rfind("data: {", 0) == 0 && arrivals.size() < max_tokens) arrivals.push_back(now);
      if (line.rfind("data: [DONE]", 0) == 0) ended = true;
      line.clear();
    }
  }
};

// Seconds on a core since its start, by thread.
std::map<int, double> ThreadSeconds(int pid) {
  std::map<int, double> seconds;
  if (pid == 0) return seconds;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task", error)) {
    double nanoseconds = 0;
    std::ifstream(entry.path() / "schedstat") >> nanoseconds;
    seconds[std::atoi(entry.path().filename().c_str())] = nanoseconds * 1e-9;
  }
  return seconds;
}

// One GET on a kept connection; false when it is no longer there.
bool AskHealth(int fd) {
  Send(fd, "GET /health HTTP/1.1\r\nHost: l\r\n\r\n");
  char buffer[4096];
  const ssize_t size = recv(fd, buffer, sizeof(buffer), 0);
  return size > 12 && std::memcmp(buffer, "HTTP/1.1 200", 12) == 0;
}

double Percentile(std::vector<double>& sorted, double share) {
  return sorted.empty() ? 0 : sorted[static_cast<size_t>(share * (sorted.size() - 1))];
}

void Print(const char* what, std::vector<double> values) {
  std::sort(values.begin(), values.end());
  std::printf("%s: p50 %.2f ms, p90 %.2f, p99 %.2f, p99.9 %.2f, max %.2f\n", what,
              1e3 * Percentile(values, 0.5), 1e3 * Percentile(values, 0.9),
              1e3 * Percentile(values, 0.99), 1e3 * Percentile(values, 0.999),
              1e3 * Percentile(values, 1));
}

// The window in which all clients receive.
struct Window {
  double begin = 0;
  double end = 0;
  std::map<int, double> threads_begin;
  std::map<int, double> threads_end;
};

Window Receive(std::vector<Client>& clients, int epoll, const Arguments& arguments) {
  const auto tokens = static_cast<size_t>(arguments["tokens"]);
  const int pid = static_cast<int>(arguments["pid"]);
  Window window;
  size_t num_ended = 0;
  size_t num_warm = 0;
  std::vector<epoll_event> events(clients.size());
  std::vector<char> buffer(1 << 16);
  while (num_ended < clients.size()) {
    const int count = epoll_wait(epoll, events.data(), static_cast<int>(events.size()), 30000);
    if (count <= 0) Fail("no token for 30 s");
    for (int i = 0; i < count; ++i) {
      Client& client = clients[events[static_cast<size_t>(i)].data.u64];
      const ssize_t size = recv(client.fd, buffer.data(), buffer.size(), 0);
      if (size <= 0) Fail("a stream broke");
      const bool was_warm = client.arrivals.size() >= kWarmTokens;
      client.Read(buffer.data(), static_cast<size_t>(size), Now(), tokens);
      if (!was_warm && client.arrivals.size() >= kWarmTokens && ++num_warm == clients.size()) {
        window.begin = Now();
        window.threads_begin = ThreadSeconds(pid);
      }
      if (!client.ended) continue;
      if (num_ended++ == 0) {
        window.end = Now();
        window.threads_end = ThreadSeconds(pid);
      }
      epoll_ctl(epoll, EPOLL_CTL_DEL, client.fd, nullptr);
    }
  }
  return window;
}

// When each step landed, ascending.
std::vector<double> ReadStepTimes(const std::string& path) {
  std::vector<double> times;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t at = line.find("\"time\":");
    if (at != std::string::npos) times.push_back(std::atof(line.c_str() + at + 7));
  }
  if (times.empty()) Fail("no steps in " + path);
  return times;
}

// From the landing of each token's step to its arrival; see above.
void AddLatencies(const std::vector<double>& arrivals, const std::vector<double>& steps,
                  std::vector<double>& latencies) {
  std::ptrdiff_t shift = std::numeric_limits<std::ptrdiff_t>::max();
  for (size_t k = kWarmTokens; k < arrivals.size(); ++k) {
    const auto after = std::upper_bound(steps.begin(), steps.end(), arrivals[k]);
    shift = std::min(shift, after - steps.begin() - 1 - static_cast<std::ptrdiff_t>(k));
  }
  for (size_t k = kWarmTokens; k < arrivals.size(); ++k) {
    latencies.push_back(arrivals[k] - steps.at(k + static_cast<size_t>(shift)));
  }
}

void Report(const std::vector<Client>& clients, const Window& window, const Arguments& arguments) {
  const std::vector<double> steps = ReadStepTimes(arguments.step_log);
  std::vector<double> latencies;
  std::vector<double> gaps;
  size_t in_window = 0;
  for (const Client& client : clients) {
    AddLatencies(client.arrivals, steps, latencies);
    for (size_t k = kWarmTokens; k < client.arrivals.size(); ++k) {
      if (k > kWarmTokens) gaps.push_back(client.arrivals[k] - client.arrivals[k - 1]);
      in_window += client.arrivals[k] >= window.begin && client.arrivals[k] <= window.end ? 1 : 0;
    }
  }
  std::vector<double> step_gaps;
  for (size_t i = 1; i < steps.size(); ++i) {
    if (steps[i] > window.begin && steps[i] < window.end)
      step_gaps.push_back(steps[i] - steps[i - 1]);
  }
  const double seconds = window.end - window.begin;
  std::printf("%zu clients, window %.1f s: %.0f tokens/s, %.1f a client\n", clients.size(), seconds,
              static_cast<double>(in_window) / seconds,
              static_cast<double>(in_window) / seconds / static_cast<double>(clients.size()));
  Print("from a step's landing to the client", std::move(latencies));
  Print("between tokens", std::move(gaps));
  Print("between steps", std::move(step_gaps));
  double total = 0;
  for (const auto& [thread, end] : window.threads_end) {
    const auto begin = window.threads_begin.find(thread);
    const double used = end - (begin == window.threads_begin.end() ? 0 : begin->second);
    total += used;
    if (used > 0.005 * seconds) {
      std::printf("  thread %d: %.1f%% of a core\n", thread, 100 * used / seconds);
    }
  }
  if (!window.threads_end.empty()) {
    std::printf("server: %.1f%% of a core\n", 100 * total / seconds);
  }
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  std::printf("this client: %.1f s of a core\n",
              static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                  1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec));
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments(argc, argv);
  const int port = static_cast<int>(arguments["port"]);
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);

  std::vector<int> idle(static_cast<size_t>(arguments["idle"]));
  for (int& fd : idle) {
    fd = Connect(port);
    if (!AskHealth(fd)) Fail("/health on a new connection");
  }
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
  std::vector<Client> clients(static_cast<size_t>(arguments["clients"]));
  for (size_t i = 0; i < clients.size(); ++i) {
    clients[i].fd = Connect(port);
    Send(clients[i].fd, Completion(i, arguments));
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.u64 = i;
    epoll_ctl(epoll, EPOLL_CTL_ADD, clients[i].fd, &event);
  }
  const Window window = Receive(clients, epoll, arguments);
  Report(clients, window, arguments);
  const auto alive = std::count_if(idle.begin(), idle.end(), AskHealth);
  if (!idle.empty())
    std::printf("idle connections that still answer: %zd of %zu\n", alive, idle.size());
  return alive == static_cast<std::ptrdiff_t>(idle.size()) ? 0 : 1;
}
