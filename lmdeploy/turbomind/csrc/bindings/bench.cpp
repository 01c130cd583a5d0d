// Times kernels and the machine's own limits, alternately in one run, for benchmarks/native_kernels.py and
// benchmarks/profile_step.py.
//
// Knows threads and clocks; knows nothing of how kernels work.
#include "bindings/bench.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <stdexcept>
#include <thread>

#include "bindings/buffers.h"
#include "kernels/dispatch.h"
#include "kernels/limits.h"
#include "memory.h"

namespace nb = nanobind;
using namespace lmdeploy;

namespace {

using Work = std::function<void(int)>;

// CPU time of the calling thread: what other processes take from it does not count.
double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

// Threads that spin until the next piece of work, one per core.
class Crew {
 public:
  explicit Crew(int threads) : threads_(threads), seconds_(threads) {
    for (int t = 1; t < threads; ++t) helpers_.emplace_back([this, t] { help(t); });
  }
  ~Crew() {
    stop_ = true;
    round_.fetch_add(1, std::memory_order_release);
    for (auto& helper : helpers_) helper.join();
  }
  // CPU seconds of the slowest thread.
  double run(const Work& work) {
    work_ = &work;
    done_ = 0;
    round_.fetch_add(1, std::memory_order_release);
    timed(0);
    while (done_.load(std::memory_order_acquire) < threads_ - 1) std::this_thread::yield();
    return *std::max_element(seconds_.begin(), seconds_.end());
  }

 private:
  void timed(int thread) {
    const double begin = now();
    (*work_)(thread);
    seconds_[thread] = now() - begin;
  }
  void help(int thread) {
    pin(thread % std::max(1u, std::thread::hardware_concurrency()));
    for (int seen = 0;; ++seen) {
      while (round_.load(std::memory_order_acquire) == seen) std::this_thread::yield();
      if (stop_) return;
      timed(thread);
      done_.fetch_add(1, std::memory_order_release);
    }
  }
  int threads_;
  std::vector<double> seconds_;
  const Work* work_ = nullptr;
  std::atomic<int> round_{0}, done_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> helpers_;
};

const Limits& limits_of(const std::string& name) {
#ifdef LMDEPLOY_X86
  if (name == "avx512") return avx512_limits();
  if (name == "avx2") return avx2_limits();
#endif
  throw std::invalid_argument("no limits are measured for kernels named '" + name + "'");
}

volatile int64_t sink;

// Best seconds of each piece of work, run one after the other `repeats` times.
std::vector<double> alternate(Crew& crew, const std::vector<Work>& works, int repeats) {
  std::vector<double> best(works.size(), 1e30);
  for (int i = 0; i < repeats; ++i)
    for (size_t j = 0; j < works.size(); ++j) best[j] = std::min(best[j], crew.run(works[j]));
  return best;
}

constexpr int64_t kPeakRounds = 200000;

// Seconds for one pass of all matrices over the rows, seconds for a plain read of the same bytes by the same threads,
// and the operations per second of the dot product from registers.
std::tuple<double, double, double> time_matmul(const KernelTable& table,
                                               const std::vector<const PackedMatrix*>& matrices,
                                               const PreparedRows& rows, int threads, int repeats) {
  nb::gil_scoped_release release;
  const Limits& limits = limits_of(table.name);
  const Matrix& first = matrices.at(0)->matrix;
  Buffer out(size_t(rows.view.rows) * first.tiles * kTile * sizeof(float));
  const size_t scratch_bytes = (table.matmul_scratch_bytes(first.k_padded) + 4095) / 4096 * 4096;
  Buffer scratch(scratch_bytes * threads);
  const Work multiply = [&](int t) {
    for (const PackedMatrix* m : matrices) {
      const int begin = m->matrix.tiles * t / threads, end = m->matrix.tiles * (t + 1) / threads;
      if (begin < end)
        table.matmul(m->matrix, rows.view, begin, end, static_cast<float*>(out.data()) + begin * kTile,
                     ptrdiff_t(first.tiles) * kTile, static_cast<char*>(scratch.data()) + scratch_bytes * t);
    }
  };
  const Work read = [&](int t) {
    for (const PackedMatrix* m : matrices) {
      const size_t part = m->memory.size() / threads / 64 * 64;
      sink = limits.read(static_cast<const char*>(m->memory.data()) + part * t, part);
    }
  };
  const auto dot = first.kind == kFp16 ? limits.fma : first.kind == kBf16 ? limits.dot_float : limits.dot_int8;
  Crew crew(threads);
  const auto best = alternate(crew, {multiply, read, [&](int) { dot(kPeakRounds); }}, repeats);
  return {best[0], best[1], dot(kPeakRounds) * threads / best[2]};
}

// Seconds for one attention step over all sequences (rows consecutive queries each), and for a plain read of the
// cache. Thread t takes every threads-th KV head.
std::pair<double, double> time_attend(const KernelTable& table, const KvCache& cache, int tokens, int rows, int heads,
                                      int threads, int repeats) {
  nb::gil_scoped_release release;
  const Limits& limits = limits_of(table.name);
  const int dim = cache.layer.head_dim, per_sequence = (tokens + cache.layer.block_size - 1) / cache.layer.block_size;
  const int sequences = cache.blocks / per_sequence;
  std::vector<int32_t> blocks(cache.blocks);
  for (int i = 0; i < cache.blocks; ++i) blocks[i] = int(int64_t{i} * 7919 % cache.blocks);
  const std::vector<float> q(size_t(rows) * heads * dim, 0.01f);
  const Work attend = [&](int t) {
    std::vector<float> out(q.size()), max(rows * heads), sum(rows * heads);
    for (int item = t; item < sequences * cache.heads; item += threads)
      for (int begin = 0; begin < tokens; begin += kSplit)
        table.attend({&cache.layer, item % cache.heads, blocks.data() + item / cache.heads * per_sequence, begin,
                      std::min(begin + kSplit, tokens), tokens, tokens - rows, rows, heads, q.data(),
                      ptrdiff_t(heads) * dim, 0, 0.0f, out.data(), max.data(), sum.data()});
  };
  const Work read = [&](int t) {
    const size_t part = cache.memory.size() / threads / 64 * 64;
    sink = limits.read(static_cast<const char*>(cache.memory.data()) + part * t, part);
  };
  Crew crew(threads);
  const auto best = alternate(crew, {attend, read}, repeats);
  return {best[0], best[1]};
}

// Bytes per second of a plain read of `bytes` bytes of huge pages, each thread its own part, in order.
double read_speed(const KernelTable& table, size_t bytes, int threads, int repeats) {
  nb::gil_scoped_release release;
  const Limits& limits = limits_of(table.name);
  Region region(bytes);
  const size_t part = bytes / threads / 256 * 256;
  const Work touch = [&](int t) { region.touch(t, threads); };
  // A small part is read often enough to be timed.
  const int rounds = static_cast<int>(std::max<size_t>(1, (size_t{4} << 20) / std::max<size_t>(part, 1)));
  const Work read = [&](int t) {
    for (int i = 0; i < rounds; ++i) sink = limits.read(region.data() + part * t, part);
  };
  Crew crew(threads);
  crew.run(touch);
  return double(part) * threads * rounds / alternate(crew, {read}, repeats)[0];
}

// Operations per second of all threads: int8 products, bfloat16 products, float multiply-adds.
std::tuple<double, double, double> peaks(const KernelTable& table, int threads, int repeats) {
  nb::gil_scoped_release release;
  const Limits& limits = limits_of(table.name);
  Crew crew(threads);
  const auto run = [&](double (*f)(int64_t)) -> Work { return [f](int) { f(kPeakRounds); }; };
  const auto best = alternate(crew, {run(limits.dot_int8), run(limits.dot_float), run(limits.fma)}, repeats);
  const auto rate = [&](double (*f)(int64_t), double seconds) { return f(kPeakRounds) * threads / seconds; };
  return {rate(limits.dot_int8, best[0]), rate(limits.dot_float, best[1]), rate(limits.fma, best[2])};
}

}  // namespace

void register_bench(nb::module_& m) {
  m.def("time_matmul", time_matmul);
  m.def("time_attend", time_attend);
  m.def("read_speed", read_speed);
  m.def("peaks", peaks);
}
