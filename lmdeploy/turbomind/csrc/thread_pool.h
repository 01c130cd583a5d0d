// The threads of one engine: pinned, spinning during a step, parked when idle.
//
// Knows nothing of models. The caller of `run` is thread 0. Works in a child after fork: the workers are started
// again there. Which cpus to use is decided by the caller.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace lmdeploy {

class ThreadPool {
 public:
  // One thread per entry, the first being the caller; an entry is the cpu to run on, or -1 for any.
  explicit ThreadPool(std::vector<int> cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(cpus_.size()); }

  // Calls f(thread) on every thread and returns when all have returned. f must not throw.
  template <class F>
  void run(F& f) {
    run([](void* arg, int thread) { (*static_cast<F*>(arg))(thread); }, &f);
  }

  // Waits until all threads of the region have come here; what they wrote before is visible after.
  void barrier();

 private:
  using Function = void (*)(void*, int);
  void run(Function function, void* arg);
  void start();
  void work(int thread);
  void move_caller() const;
  bool wait_for_work(uint32_t seen);

  std::vector<int> cpus_;
  std::vector<std::thread>* threads_ = nullptr;  // leaked on purpose when a fork took them away
  Function function_ = nullptr;
  void* arg_ = nullptr;
  uint32_t fork_count_ = 0;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<int> parked_{0};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> sense_{0};
};

}  // namespace lmdeploy
