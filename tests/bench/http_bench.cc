// What the HTTP server adds to a stream: clients on sockets of this machine, a producer that writes
// a piece to every stream at each step as an engine does, the time from Write to the client's read.
//
//   http_bench [CLIENTS] [PIECES_PER_SECOND] [SECONDS] [IDLE_CONNECTIONS]     default: 256 100 10 0
//
// Clients read on one thread with epoll, so that they take as little as they can of the machine.
// Prints latencies, and what the server's thread and the producer used of a core; then how long it
// takes until the server has seen that a client closed that waits for its answer.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "launch/http/http_server.h"

namespace lockstep {
namespace {

struct Plan {
  int clients = 256;
  int pieces_per_second = 100;
  int seconds = 10;
  int idle_connections = 0;
};

int64_t NowNanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "http_bench: %s: %s\n", what, strerror(errno));
  std::exit(1);
}

int Connect(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    Fail("connect");
  }
  return fd;
}

// User and system seconds of the thread of this process with that name.
struct ThreadTime {
  double user = 0, system = 0;
};
ThreadTime TimeOfThread(const std::string& name) {
  ThreadTime time;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream name_file(task.path() / "comm");
    std::string comm;
    if (!std::getline(name_file, comm) || comm != name) continue;
    std::ifstream stat_file(task.path() / "stat");
    std::stringstream stat;
    stat << stat_file.rdbuf();
    std::string text = stat.str();
    std::istringstream fields(text.substr(text.rfind(')') + 2));
    std::string skipped;
    for (int i = 0; i < 11; ++i) fields >> skipped;
    fields >> time.user >> time.system;
    const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
    time.user /= ticks;
    time.system /= ticks;
  }
  return time;
}

double ThreadSeconds() {
  std::timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Pieces look like an OpenAI chunk in length; each begins with the time it was written.
std::string Piece() {
  char text[64];
  std::snprintf(text, sizeof(text), "data: {\"t\":\"@%019lld\"",
                static_cast<long long>(NowNanoseconds()));
  return text + std::string(180, ' ') + "}\n\n";
}

// Every '@' in what came is a piece.
void AddLatencies(const char* data, size_t size, int64_t now, std::string& kept,
                  std::vector<double>& milliseconds) {
  kept.append(data, size);
  size_t at = 0;
  while (true) {
    const size_t mark = kept.find('@', at);
    if (mark == std::string::npos || mark + 20 > kept.size()) {
      kept.erase(0, mark == std::string::npos ? kept.size() : mark);
      return;
    }
    const int64_t written = std::stoll(kept.substr(mark + 1, 19));
    milliseconds.push_back(1e-6 * static_cast<double>(now - written));
    at = mark + 20;
  }
}

std::vector<double> ReadAll(const std::vector<int>& clients, std::atomic<bool>& stop) {
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
  for (size_t i = 0; i < clients.size(); ++i) {
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.u64 = i;
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, clients[i], &event) != 0) Fail("epoll_ctl");
  }
  std::vector<double> milliseconds;
  std::vector<std::string> kept(clients.size());
  std::vector<epoll_event> events(256);
  std::vector<char> buffer(64 << 10);
  while (!stop) {
    const int count = epoll_wait(epoll, events.data(), static_cast<int>(events.size()), 100);
    for (int i = 0; i < count; ++i) {
      const size_t client = events[static_cast<size_t>(i)].data.u64;
      const ssize_t got = recv(clients[client], buffer.data(), buffer.size(), 0);
      if (got <= 0) Fail("recv");
      AddLatencies(buffer.data(), static_cast<size_t>(got), NowNanoseconds(), kept[client],
                   milliseconds);
    }
  }
  close(epoll);
  return milliseconds;
}

// Seconds of CPU time that writing took.
double Produce(const std::vector<std::shared_ptr<HttpExchange>>& exchanges, const Plan& plan) {
  const double before = ThreadSeconds();
  const auto start = std::chrono::steady_clock::now();
  const int steps = plan.pieces_per_second * plan.seconds;
  for (int step = 0; step < steps; ++step) {
    std::this_thread::sleep_until(
        start + std::chrono::duration<double>(static_cast<double>(step) / plan.pieces_per_second));
    for (const auto& exchange : exchanges) exchange->Write(Piece());
  }
  return ThreadSeconds() - before;
}

std::vector<double> MeasureCuts(int port, std::atomic<int64_t>& seen) {
  std::vector<double> milliseconds;
  for (int i = 0; i < 200; ++i) {
    const int fd = Connect(port);
    const std::string request = "GET /wait HTTP/1.1\r\nHost: a\r\n\r\n";
    if (send(fd, request.data(), request.size(), 0) < 0) Fail("send");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    seen = 0;
    const int64_t closed = NowNanoseconds();
    close(fd);
    while (seen == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
    milliseconds.push_back(1e-6 * static_cast<double>(seen - closed));
  }
  std::sort(milliseconds.begin(), milliseconds.end());
  return milliseconds;
}

int Run(const Plan& plan) {
  std::mutex mutex;
  std::vector<std::shared_ptr<HttpExchange>> exchanges, waiting;
  std::atomic<int64_t> seen = 0;
  HttpServerOptions options;
  options.port = 0;
  absl::StatusOr<std::unique_ptr<HttpServer>> server = HttpServer::Create(
      options,
      [&](std::shared_ptr<HttpExchange> exchange) {
        if (exchange->request().path == "/wait") {
          exchange->OnGone([&seen] { seen = NowNanoseconds(); });
          waiting.push_back(std::move(exchange));
          return;
        }
        exchange->Begin(200, {{"Content-Type", "text/event-stream"}});
        const std::lock_guard lock(mutex);
        exchanges.push_back(std::move(exchange));
      },
      nullptr);
  if (!server.ok()) {
    std::fprintf(stderr, "http_bench: %s\n", server.status().ToString().c_str());
    return 1;
  }
  std::vector<int> idle, clients;
  for (int i = 0; i < plan.idle_connections; ++i) idle.push_back(Connect((*server)->port()));
  const std::string request = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}";
  for (int i = 0; i < plan.clients; ++i) {
    clients.push_back(Connect((*server)->port()));
    if (send(clients.back(), request.data(), request.size(), 0) < 0) Fail("send");
  }
  while (true) {
    const std::lock_guard lock(mutex);
    if (exchanges.size() == clients.size()) break;
  }
  std::atomic<bool> stop = false;
  std::vector<double> milliseconds;
  std::thread reader([&] { milliseconds = ReadAll(clients, stop); });
  const ThreadTime before = TimeOfThread("lockstep-http");
  const double producer = Produce(exchanges, plan);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const ThreadTime after = TimeOfThread("lockstep-http");
  stop = true;
  reader.join();

  std::sort(milliseconds.begin(), milliseconds.end());
  const auto wanted = static_cast<size_t>(plan.clients) *
                      static_cast<size_t>(plan.pieces_per_second) *
                      static_cast<size_t>(plan.seconds);
  if (milliseconds.size() != wanted) {
    std::fprintf(stderr, "http_bench: %zu pieces came of %zu\n", milliseconds.size(), wanted);
    return 1;
  }
  const auto at = [&](double share) {
    return milliseconds[static_cast<size_t>(share * static_cast<double>(milliseconds.size() - 1))];
  };
  const double seconds = plan.seconds;
  const double user = after.user - before.user, system = after.system - before.system;
  std::printf("%d streams, %d pieces/s each, %d s, %d idle connections beside them\n", plan.clients,
              plan.pieces_per_second, plan.seconds, plan.idle_connections);
  std::printf("from Write to read, ms: p50 %.2f  p99 %.2f  p99.9 %.2f  max %.2f\n", at(0.5),
              at(0.99), at(0.999), at(1));
  std::printf("cores: server %.3f (user %.3f, system %.3f), producer %.3f\n",
              (user + system) / seconds, user / seconds, system / seconds, producer / seconds);
  const std::vector<double> cuts = MeasureCuts((*server)->port(), seen);
  std::printf("from a client's close to OnGone, ms: p50 %.2f  max %.2f\n", cuts[cuts.size() / 2],
              cuts.back());
  return 0;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::Plan plan;
  int* const values[] = {&plan.clients, &plan.pieces_per_second, &plan.seconds,
                         &plan.idle_connections};
  for (int i = 1; i < argc && i <= 4; ++i) *values[i - 1] = std::atoi(argv[i]);
  if (argc > 5 || plan.clients < 1 || plan.pieces_per_second < 1 || plan.seconds < 1 ||
      plan.idle_connections < 0) {
    std::fprintf(stderr, "usage: http_bench [CLIENTS] [PIECES_PER_SECOND] [SECONDS] [IDLE]\n");
    return 2;
  }
  return lockstep::Run(plan);
}
