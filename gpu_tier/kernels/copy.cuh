// Copies of contiguous bytes by one warp, past the caches: every byte is used once.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace gpu_tier {

constexpr int kWarp = 32;
constexpr int kWarpsPerBlock = 32;
constexpr unsigned kAll = 0xffffffffu;
constexpr int kInFlight = 4;  // loads a lane issues before it stores; the link to host memory is slow to answer

__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_once(const uint2* p) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
template <typename T>
__device__ __forceinline__ T load_once(const T* p) {
  return __ldcs(p);
}

__device__ __forceinline__ void store_once(uint4* p, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_once(uint2* p, uint2 v) {
  asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
template <typename T>
__device__ __forceinline__ void store_once(T* p, T v) {
  __stcs(p, v);
}

// Copies as many whole T as fit from byte `done` on if both sides are aligned to T; returns the new `done`.
template <typename T>
__device__ __forceinline__ int64_t copy_as(const char* src, char* dst, int64_t done, int64_t bytes, int lane) {
  const auto bits = reinterpret_cast<uintptr_t>(src + done) | reinterpret_cast<uintptr_t>(dst + done);
  const int64_t number = (bytes - done) / static_cast<int64_t>(sizeof(T));
  if ((bits & (sizeof(T) - 1)) != 0 || number == 0) return done;
  const T* from = reinterpret_cast<const T*>(src + done);
  T* to = reinterpret_cast<T*>(dst + done);
  int64_t i = lane;
  for (; i + (kInFlight - 1) * kWarp < number; i += kInFlight * kWarp) {
    T held[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) held[k] = load_once(from + i + k * kWarp);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) store_once(to + i + k * kWarp, held[k]);
  }
  for (; i < number; i += kWarp) store_once(to + i, load_once(from + i));
  return done + number * static_cast<int64_t>(sizeof(T));
}

// Copies bytes with a whole warp: 16 bytes a lane where the addresses allow it, then 8, 4 and 1.
__device__ __forceinline__ void warp_copy(const char* src, char* dst, int64_t bytes, int lane) {
  int64_t done = copy_as<uint4>(src, dst, 0, bytes, lane);
  done = copy_as<uint2>(src, dst, done, bytes, lane);
  done = copy_as<uint32_t>(src, dst, done, bytes, lane);
  copy_as<uint8_t>(src, dst, done, bytes, lane);
}

// Gives the code back; a failure is no longer the runtime's last error, which the next launch would be blamed for.
inline cudaError_t settled(cudaError_t code) {
  if (code != cudaSuccess) cudaGetLastError();
  return code;
}

// Blocks of a launch whose warps take tasks in turn: `blocks` multiprocessors, all of them when it is 0.
inline cudaError_t grid_of(int64_t tasks, int blocks, unsigned* grid) {
  int device = 0, processors = 0;
  if (cudaError_t code = settled(cudaGetDevice(&device))) return code;
  const auto attribute = cudaDevAttrMultiProcessorCount;
  if (cudaError_t code = settled(cudaDeviceGetAttribute(&processors, attribute, device))) return code;
  const int64_t limit = blocks > 0 && blocks < processors ? blocks : processors;
  const int64_t wanted = (tasks + kWarpsPerBlock - 1) / kWarpsPerBlock;
  *grid = static_cast<unsigned>(wanted < 1 ? 1 : wanted < limit ? wanted : limit);
  return cudaSuccess;
}

}  // namespace gpu_tier
