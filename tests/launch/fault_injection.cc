// Faults for tests/launch/fault_matrix.py, loaded in front of a rank's libraries (LD_PRELOAD): the
// program itself has no hooks.
//
// SIGRTMIN + 1   the main thread's next allocation, or its next sleep, throws std::bad_alloc
// SIGRTMIN + 2   the process ends with exit status 0, in the middle of whatever it does
// SIGRTMIN + 3   the main thread hangs, the others go on
//
// In the environment: FAULT_PAUSE_SECONDS, how long the first open of a file called config.json
// takes; the file FAULT_PAUSE_MARK.PID is there from the beginning of that pause on.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <new>
#include <string>

namespace {

std::atomic<bool> throw_soon = false;
std::atomic<bool> has_paused = false;

bool InMainThread() { return syscall(SYS_gettid) == getpid(); }

void Hang(int number) {
  if (!InMainThread()) {
    syscall(SYS_tgkill, getpid(), getpid(), number);
    return;
  }
  while (true) pause();
}

void ThrowIfAsked() {
  if (!throw_soon || !InMainThread()) return;
  throw_soon = false;
  throw std::bad_alloc();
}

__attribute__((constructor)) void Install() {
  std::signal(SIGRTMIN + 1, [](int) { throw_soon = true; });
  std::signal(SIGRTMIN + 2, [](int) { _exit(0); });
  std::signal(SIGRTMIN + 3, Hang);
}

void PauseAt(const char* path) {
  const char* const seconds = std::getenv("FAULT_PAUSE_SECONDS");
  const char* const mark = std::getenv("FAULT_PAUSE_MARK");
  if (seconds == nullptr || mark == nullptr || std::strstr(path, "config.json") == nullptr) return;
  if (has_paused.exchange(true)) return;
  const std::string file = std::string(mark).append(".").append(std::to_string(getpid()));
  std::fclose(std::fopen(file.c_str(), "w"));
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  timespec end = now;
  end.tv_sec += std::atoi(seconds);
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, nullptr) == EINTR) continue;
}

using Open = int (*)(const char*, int, ...);

int OpenAfterPause(const char* name, const char* path, int flags, mode_t mode) {
  PauseAt(path);
  return reinterpret_cast<Open>(dlsym(RTLD_NEXT, name))(path, flags, mode);
}

mode_t ModeOf(int flags, va_list more) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? static_cast<mode_t>(va_arg(more, int)) : 0;
}

}  // namespace

extern "C" int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = ModeOf(flags, more);
  va_end(more);
  return OpenAfterPause("open", path, flags, mode);
}

extern "C" int open64(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = ModeOf(flags, more);
  va_end(more);
  return OpenAfterPause("open64", path, flags, mode);
}

// What a step of --null-step-ms waits with.
extern "C" int nanosleep(const timespec* time, timespec* left) {
  ThrowIfAsked();
  const int error = clock_nanosleep(CLOCK_REALTIME, 0, time, left);
  if (error != 0) errno = error;
  return error == 0 ? 0 : -1;
}

void* operator new(size_t size) {
  ThrowIfAsked();
  if (void* const memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
