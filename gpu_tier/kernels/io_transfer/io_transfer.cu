// io_transfer: a warp copies one contiguous run of one entry. See __init__.py for what is copied.
//
// The runs of the live entries of all rows are numbered, and the warps of the grid take them in turn, so that rows with
// few entries cost next to nothing and the work is even. Host memory is read and written through its mapped address.

#include "../copy.cuh"

namespace gpu_tier {

struct Strides {
  int64_t base, page, token, layer, head;
};

struct PartArgs {
  Strides src, dst;
  int64_t row_bytes;
  int32_t heads;  // rows of a token that are copied on their own
  int32_t reserved;
};

// The same fields in the same order as `_Args` of cuda.py.
struct TransferArgs {
  const char* src;
  char* dst;
  const void* src_idx;
  const void* dst_idx;
  const int32_t* count;          // may be null
  unsigned long long* moved;     // may be null
  PartArgs parts[2];
  int64_t src_page_size, dst_page_size;
  int32_t num_parts, rows, entries, layers, src_layer, dst_layer, num_heads, unit, per_head, src_is_64, dst_is_64, blocks;
};

__device__ __forceinline__ int64_t load_index(const void* indices, int is_64, int64_t i) {
  return is_64 ? static_cast<const int64_t*>(indices)[i] : static_cast<const int32_t*>(indices)[i];
}

__device__ __forceinline__ int64_t row_offset(const Strides& s, int64_t page_size, int64_t slot, int layer, int head) {
  const int64_t page = slot / page_size;
  return s.base + page * s.page + (slot - page * page_size) * s.token + layer * s.layer + head * s.head;
}

// Copies run `task` of the row, returns its bytes.
__device__ int64_t copy_task(const TransferArgs& a, int row, uint32_t task, uint32_t runs_of_item, int lane) {
  const uint32_t item = task / runs_of_item;
  uint32_t rest = task - item * runs_of_item;
  const int64_t entry = static_cast<int64_t>(row) * a.entries + item;
  const int64_t here = load_index(a.src_idx, a.src_is_64, entry);
  const int64_t there = load_index(a.dst_idx, a.dst_is_64, entry);
  if (here < 0 || there < 0) return 0;
  const uint32_t runs_of_first = static_cast<uint32_t>(a.parts[0].heads) * a.unit * a.layers;
  const int number = rest >= runs_of_first;
  const PartArgs& part = a.parts[number];
  rest -= number * runs_of_first;
  const uint32_t token_of_layer = rest / part.heads;
  const uint32_t layer = token_of_layer / a.unit;
  const uint32_t token = token_of_layer - layer * a.unit;
  const int head = (rest - token_of_layer * part.heads) + (a.per_head ? row % a.num_heads : 0);
  const char* from = a.src + row_offset(part.src, a.src_page_size, here + token, a.src_layer + layer, head);
  char* to = a.dst + row_offset(part.dst, a.dst_page_size, there + token, a.dst_layer + layer, head);
  warp_copy(from, to, part.row_bytes, lane);
  return part.row_bytes;
}

// How many runs a row has; none if there is no such row.
__device__ __forceinline__ int64_t live_tasks(const TransferArgs& a, int row, uint32_t runs_of_item) {
  if (row >= a.rows) return 0;
  const int count = a.count == nullptr ? a.entries : min(max(a.count[row], 0), a.entries);
  return int64_t{runs_of_item} * count;
}

// Adds up the numbers of this lane and those before.
__device__ __forceinline__ int64_t sum_until(int64_t sum, int lane) {
  for (int step = 1; step < kWarp; step *= 2) {
    const int64_t other = __shfl_up_sync(kAll, sum, step);
    if (lane >= step) sum += other;
  }
  return sum;
}

__global__ void __launch_bounds__(kWarp* kWarpsPerBlock) io_transfer_kernel(const __grid_constant__ TransferArgs a) {
  const int lane = threadIdx.x % kWarp;
  // Neighbouring tasks go to different blocks, so that few tasks use many multiprocessors.
  const int64_t warps = int64_t{gridDim.x} * kWarpsPerBlock;
  int64_t next = int64_t{threadIdx.x / kWarp} * gridDim.x + blockIdx.x;  // task of this warp
  uint32_t runs_of_item = 0;
  for (int p = 0; p < a.num_parts; ++p) runs_of_item += static_cast<uint32_t>(a.parts[p].heads) * a.unit * a.layers;
  int64_t before = 0;  // tasks of the rows before
  int64_t copied = 0;
  for (int first = 0; first < a.rows; first += kWarp) {
    const int64_t upto = sum_until(live_tasks(a, first + lane, runs_of_item), lane);
    const int64_t total = __shfl_sync(kAll, upto, kWarp - 1);
    for (; next < before + total; next += warps) {
      const int64_t task = next - before;
      const int row = __popc(__ballot_sync(kAll, upto <= task));  // the first whose tasks reach beyond
      const int64_t skip = __shfl_sync(kAll, upto, max(row - 1, 0));
      copied += copy_task(a, first + row, static_cast<uint32_t>(row > 0 ? task - skip : task), runs_of_item, lane);
    }
    before += total;
  }
  if (a.moved != nullptr && lane == 0 && copied > 0) atomicAdd(a.moved, static_cast<unsigned long long>(copied));
}

}  // namespace gpu_tier

extern "C" int gpu_tier_io_transfer(const gpu_tier::TransferArgs* args, void* stream) {
  int64_t runs = 0;
  for (int p = 0; p < args->num_parts; ++p) {
    runs += static_cast<int64_t>(args->parts[p].heads) * args->unit * args->layers;
  }
  unsigned grid = 0;
  if (cudaError_t code = gpu_tier::grid_of(runs * args->entries * args->rows, args->blocks, &grid)) return code;
  const dim3 threads(gpu_tier::kWarp * gpu_tier::kWarpsPerBlock);
  gpu_tier::io_transfer_kernel<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(*args);
  return cudaGetLastError();
}

// Returns 0 if the driver and the device can run what was built.
extern "C" int gpu_tier_probe() {
  cudaFuncAttributes attributes;
  return gpu_tier::settled(cudaFuncGetAttributes(&attributes, gpu_tier::io_transfer_kernel));
}
