#include "thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

namespace lmdeploy {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kParkAfter = std::chrono::microseconds(100);
// About 10 us; then another process probably wants the core, and gets it. Sleeping on a futex from there on was tried:
// with 4 and 16 threads on 2 cores a token took 50 and 150 ms instead of 17 and 60.
constexpr int kSpins = 512;

std::atomic<uint32_t> forks{0};

void watch_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });
  (void)registered;
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, nullptr, nullptr, 0);
}

void pin(int cpu) {
  if (cpu < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);  // a refused cpu leaves the thread where it was
}

template <class Done>
void spin_until(Done done) {
  for (int i = 0; !done(); ++i) {
    if (i < kSpins) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace

ThreadPool::ThreadPool(std::vector<int> cpus) : cpus_(std::move(cpus)) {
  watch_forks();
  start();
}

ThreadPool::~ThreadPool() {
  if (fork_count_ != forks.load()) return;  // the threads exist in the parent only
  stop_.store(true);
  epoch_.fetch_add(1);
  futex(&epoch_, FUTEX_WAKE_PRIVATE, INT32_MAX);
  for (auto& thread : *threads_) thread.join();
  delete threads_;
}

void ThreadPool::start() {
  fork_count_ = forks.load();
  parked_.store(0);
  arrived_.store(0);
  threads_ = new std::vector<std::thread>;
  threads_->reserve(cpus_.size());
  for (int i = 1; i < size(); ++i)
    threads_->emplace_back([this, i, seen = epoch_.load()] {
      pin(cpus_[i]);
      for (uint32_t last = seen; wait_for_work(last); ++last) work(i);
    });
}

void ThreadPool::work(int thread) {
  function_(arg_, thread);
  barrier();
}

// Returns false when the pool ends.
bool ThreadPool::wait_for_work(uint32_t seen) {
  auto idle = [&] { return epoch_.load(std::memory_order_acquire) == seen; };
  auto deadline = Clock::now() + kParkAfter;
  while (idle() && Clock::now() < deadline) {
    for (int i = 0; i < 64 && idle(); ++i) pause();
  }
  if (idle()) {
    parked_.fetch_add(1);
    while (epoch_.load() == seen) futex(&epoch_, FUTEX_WAIT_PRIVATE, seen);
    parked_.fetch_sub(1);
  }
  return !stop_.load();
}

// The caller is never pinned: its affinity is inherited by all it starts. It is only moved, once, when it sits on
// the cpu of a worker that could not go elsewhere.
void ThreadPool::move_caller() const {
  int here = sched_getcpu();
  for (int i = 1; i < size(); ++i) {
    if (cpus_[i] != here) continue;
    cpu_set_t before;
    if (sched_getaffinity(0, sizeof before, &before) != 0) return;
    pin(cpus_[0]);
    sched_setaffinity(0, sizeof before, &before);
    return;
  }
}

void ThreadPool::run(Function function, void* arg) {
  if (fork_count_ != forks.load(std::memory_order_relaxed)) start();
  if (size() == 1) return function(arg, 0);
  move_caller();
  function_ = function;
  arg_ = arg;
  epoch_.fetch_add(1);
  if (parked_.load() > 0) futex(&epoch_, FUTEX_WAKE_PRIVATE, INT32_MAX);
  work(0);
}

void ThreadPool::barrier() {
  if (size() == 1) return;
  uint32_t sense = sense_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size() - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    sense_.store(sense + 1, std::memory_order_release);
    return;
  }
  spin_until([&] { return sense_.load(std::memory_order_acquire) != sense; });
}

}  // namespace lmdeploy
