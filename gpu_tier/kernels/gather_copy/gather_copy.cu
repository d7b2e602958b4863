// gather_copy: a warp copies one run of rows. See __init__.py for what is copied.

#include "../copy.cuh"

namespace gpu_tier {

// The same fields in the same order as `_Args` of cuda.py.
struct GatherArgs {
  const char* sources[3];
  int64_t strides[3];
  const int32_t* kind;
  const int64_t* src_row;
  const int32_t* n_rows;
  const int32_t* dst_row;
  const int32_t* count;
  char* out;
  int64_t row_bytes, buffer_bytes;
  int32_t buffers, runs, num_sources, reserved;
};

constexpr int kGatherWarps = 8;

__global__ void __launch_bounds__(kWarp* kGatherWarps) gather_copy_kernel(const __grid_constant__ GatherArgs a) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t place = static_cast<int64_t>(blockIdx.x) * a.runs + blockIdx.y * kGatherWarps + warp;
  if (blockIdx.y * kGatherWarps + warp >= static_cast<unsigned>(min(max(a.count[blockIdx.x], 0), a.runs))) return;
  const int kind = a.kind[place];
  if (kind < 0 || kind >= a.num_sources) return;
  const char* from = a.sources[kind] + a.src_row[place] * a.strides[kind];
  char* to = a.out + blockIdx.x * a.buffer_bytes + a.dst_row[place] * a.row_bytes;
  const int64_t rows = a.n_rows[place];
  if (a.strides[kind] == a.row_bytes) {
    warp_copy(from, to, rows * a.row_bytes, lane);
    return;
  }
  for (int64_t r = 0; r < rows; ++r) warp_copy(from + r * a.strides[kind], to + r * a.row_bytes, a.row_bytes, lane);
}

}  // namespace gpu_tier

extern "C" int gpu_tier_gather_copy(const gpu_tier::GatherArgs* args, void* stream) {
  const dim3 grid(args->buffers, (args->runs + gpu_tier::kGatherWarps - 1) / gpu_tier::kGatherWarps);
  const dim3 threads(gpu_tier::kWarp * gpu_tier::kGatherWarps);
  gpu_tier::gather_copy_kernel<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(*args);
  return cudaGetLastError();
}
