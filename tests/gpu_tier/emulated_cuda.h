// Runs one CUDA kernel on a CPU: its threads are coroutines that take turns in random order wherever they synchronise,
// block after block. It shows wrong arithmetic, missing barriers at which threads part, and some missing ones between a
// write and a read; it knows nothing of time or of the memory model.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))

namespace gpu_tier {

constexpr int kWarp = 32;
constexpr int kWarpsPerBlock = 4;  // each thread has a stack to itself
constexpr unsigned kAll = 0xffffffffu;
using std::max;
using std::min;

struct Index {
  int x, y;
};
inline Index blockIdx, blockDim, gridDim, threadIdx;
alignas(16) unsigned char shared_bytes[1 << 18];

struct Barrier {
  int waiting = 0, generation = 0;
};

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  int index = 0;
  bool done = false;
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Barrier> warps;
  Barrier all;
  ucontext_t scheduler;
  Thread* running = nullptr;
  int votes = 0;
  int64_t arrivals = 0;  // at any barrier
  std::vector<int64_t> lanes;
  std::function<void()> body;
};
inline Block* block;

inline void yield() {
  Thread* me = block->running;
  swapcontext(&me->context, &block->scheduler);
}

inline void arrive(Barrier& barrier, int expected) {
  const int generation = barrier.generation;
  ++block->arrivals;
  if (++barrier.waiting == expected) {
    barrier.waiting = 0;
    ++barrier.generation;
  }
  while (barrier.generation == generation) yield();
}

inline void __syncthreads() { arrive(block->all, blockDim.x); }
inline int __syncthreads_or(int yes) {
  block->votes += yes != 0;
  __syncthreads();
  const int result = block->votes;
  __syncthreads();
  block->votes = 0;
  __syncthreads();
  return result != 0;
}

inline int lane_of() { return block->running->index % kWarp; }
inline void sync_warp() { arrive(block->warps[block->running->index / kWarp], kWarp); }

// Every lane gives a value and reads those of all lanes of its warp.
template <typename F>
auto exchange(int64_t mine, F read) {
  int64_t* lanes = &block->lanes[block->running->index / kWarp * kWarp];
  lanes[lane_of()] = mine;
  sync_warp();
  const auto result = read(lanes);
  sync_warp();
  return result;
}
inline uint32_t __ballot_sync(unsigned, bool yes) {
  return exchange(yes, [](const int64_t* lanes) {
    uint32_t word = 0;
    for (int i = 0; i < kWarp; ++i) word |= static_cast<uint32_t>(lanes[i]) << i;
    return word;
  });
}
template <typename T>
T __shfl_sync(unsigned, T mine, int from) {
  return exchange(mine, [from](const int64_t* lanes) { return static_cast<T>(lanes[from]); });
}
template <typename T>
T __shfl_up_sync(unsigned mask, T mine, int step) {
  return __shfl_sync(mask, mine, lane_of() < step ? lane_of() : lane_of() - step);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T mine, int step) {
  return __shfl_sync(mask, mine, lane_of() + step < kWarp ? lane_of() + step : lane_of());
}
inline int __popc(uint32_t word) { return __builtin_popcount(word); }
template <typename T>
T atomicAdd(T* at, T value) { const T old = *at; *at += value; return old; }
template <typename T>
T atomicOr(T* at, T value) { const T old = *at; *at |= value; return old; }
template <typename T>
T atomicCAS(T* at, T expected, T value) { const T old = *at; if (old == expected) *at = value; return old; }

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
constexpr int kInFlight = 4;
template <typename T>
T load_once(const T* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) std::abort();  // a GPU faults
  return *p;
}
template <typename T>
void store_once(T* p, T value) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) std::abort();
  *p = value;
}

inline void warp_copy(const char* src, char* dst, int64_t bytes, int lane) {
  if (lane == 0) std::memcpy(dst, src, bytes);
}

inline void enter() {
  block->body();
  block->running->done = true;
  yield();
}

// Returns false if threads are left waiting at a barrier that the others never reach.
inline bool run_block(int threads, std::mt19937& random, std::function<void()> body) {
  Block here;
  here.threads.resize(threads);
  here.warps.resize(threads / kWarp);
  here.lanes.resize(threads);
  here.body = std::move(body);
  block = &here;
  std::memset(shared_bytes, 0xa5, sizeof(shared_bytes));  // what a block finds there is anything
  std::vector<Thread*> order;
  for (int i = 0; i < threads; ++i) {
    Thread& t = here.threads[i];
    t.index = i;
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.data();
    t.context.uc_stack.ss_size = t.stack.size();
    t.context.uc_link = nullptr;
    makecontext(&t.context, enter, 0);
    order.push_back(&t);
  }
  for (int idle = 0; !order.empty() && idle < 1000;) {
    std::shuffle(order.begin(), order.end(), random);
    const int64_t before = here.arrivals;
    for (Thread* t : order) {
      here.running = t;
      threadIdx = {t->index, 0};
      swapcontext(&here.scheduler, &t->context);
    }
    const auto left = std::remove_if(order.begin(), order.end(), [](Thread* t) { return t->done; });
    idle = left == order.end() && before == here.arrivals ? idle + 1 : 0;
    order.erase(left, order.end());
  }
  return order.empty();
}

}  // namespace gpu_tier
