// gather_copy: the runs of all lines are one list, and what is copied of them is cut into pieces of about 2 KiB.
//
// Blocks take runs in turn: up to 32 at once, one for each lane of a warp, so that what is to be read of the plan is read
// together. Every warp of a block knows these runs; the warps take their pieces in turn. So a head with many misses gets
// as many threads as it has bytes to copy, and long runs are shared. A lane copies one word at a time, wherever the
// word's row lies: rows of a run need not be contiguous on either side, and 32 lanes keep 2 KiB under way.

#include "../copy.cuh"

namespace gpu_tier {

struct RowStrides {
  int64_t page, token, head;
};

// One layer of a pool.
struct GatherPool {
  char* first[2];  // row of each part
  RowStrides strides[2];
  int64_t page_size;
};

// The same fields in the same order as `_Args` of cuda.py.
struct GatherArgs {
  GatherPool pools[4];  // the sources, and last the target
  const int32_t* kind;
  const int64_t* src;
  const int32_t* dst;
  const int32_t* tokens;
  const int32_t* count;
  unsigned long long* moved;  // may be null
  int32_t row_bytes[2], word_bytes[2];
  int32_t lines, width, heads, num_sources, num_parts, blocks;
};

constexpr int kGatherWarps = 8;
constexpr int kGatherBlocks = 2;  // of a multiprocessor: registers leave room for these, and 32 KiB are under way
constexpr int kPieceBytes = 2048;
constexpr int kMostSources = 3;

// A run that a lane holds for its warp; `pieces` is 0 when it holds none.
struct Run {
  int64_t src;
  int dst, tokens, kind, head, pieces;
};

__device__ __forceinline__ int tokens_of_piece(const GatherArgs& a, int part) {
  return max(1, kPieceBytes / a.row_bytes[part]);
}

__device__ __forceinline__ int pieces_of(const GatherArgs& a, int part, int tokens) {
  const int each = tokens_of_piece(a, part);
  return (tokens + each - 1) / each;
}

// Adds up the numbers of this lane and those before.
__device__ __forceinline__ int sum_until(int sum, int lane) {
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(kAll, sum, step);
    if (lane >= step) sum += other;
  }
  return sum;
}

// Run `number` of 32 lines; `upto` are the runs of the lane's line and of those before.
__device__ Run find_run(const GatherArgs& a, int first_line, int upto, int number, int total) {
  int line = 0;  // lines that end before this run
  for (int step = kWarp / 2; step > 0; step /= 2) {
    if (__shfl_sync(kAll, upto, line + step - 1) <= number) line += step;
  }
  const int before = __shfl_sync(kAll, upto, max(line - 1, 0));
  Run run = {0, 0, 0, -1, 0, 0};
  if (number >= total) return run;
  const int64_t place = int64_t{first_line + line} * a.width + number - (line > 0 ? before : 0);
  run.kind = a.kind[place];
  run.tokens = max(a.tokens[place], 0);
  if (run.kind < 0 || run.kind >= a.num_sources) return run;
  run.src = a.src[place];
  run.dst = a.dst[place];
  run.head = (first_line + line) % a.heads;
  for (int part = 0; part < a.num_parts; ++part) run.pieces += pieces_of(a, part, run.tokens);
  return run;
}

// Where the rows of one part from a slot on lie.
struct Place {
  char* page;  // the first slot's page
  int64_t page_stride, token_stride;
  unsigned offset, page_size;

  __device__ Place(const GatherPool& pool, int part, int64_t slot, int head) {
    const RowStrides& s = pool.strides[part];
    const int64_t number = slot / pool.page_size;
    page = pool.first[part] + number * s.page + head * s.head;
    offset = static_cast<unsigned>(slot - number * pool.page_size);
    page_size = static_cast<unsigned>(pool.page_size);
    page_stride = s.page, token_stride = s.token;
  }
  __device__ __forceinline__ char* row(unsigned token) const {
    const unsigned ahead = (offset + token) / page_size;
    return page + ahead * page_stride + (offset + token - ahead * page_size) * token_stride;
  }
};

// Copies rows with a whole warp, in words of T.
template <typename T>
__device__ void copy_rows(const Place& from, const Place& to, int tokens, int row_bytes, int lane) {
  const unsigned words = row_bytes / sizeof(T);
  const unsigned all = tokens * words;
  for (unsigned first = lane; first < all; first += kInFlight * kWarp) {
    T held[kInFlight];
#pragma unroll
    for (unsigned k = 0; k < kInFlight; ++k) {
      const unsigned word = first + k * kWarp, token = word / words;
      if (word < all) held[k] = load_once(reinterpret_cast<const T*>(from.row(token)) + (word - token * words));
    }
#pragma unroll
    for (unsigned k = 0; k < kInFlight; ++k) {
      const unsigned word = first + k * kWarp, token = word / words;
      if (word < all) store_once(reinterpret_cast<T*>(to.row(token)) + (word - token * words), held[k]);
    }
  }
}

// Copies a piece of a run that the whole warp knows.
__device__ void copy_piece(const GatherArgs& a, const Run& run, int piece, int lane) {
  const int of_first = pieces_of(a, 0, run.tokens);
  const int part = piece >= of_first;
  const int each = tokens_of_piece(a, part);
  const int begin = (piece - part * of_first) * each;
  const int tokens = min(each, run.tokens - begin);
  const Place from(a.pools[run.kind], part, run.src + begin, run.head);
  const Place to(a.pools[kMostSources], part, int64_t{run.dst} + begin, run.head);
  const int row_bytes = a.row_bytes[part];
  switch (a.word_bytes[part]) {
    case 16: return copy_rows<uint4>(from, to, tokens, row_bytes, lane);
    case 8: return copy_rows<uint2>(from, to, tokens, row_bytes, lane);
    case 4: return copy_rows<uint32_t>(from, to, tokens, row_bytes, lane);
    default: return copy_rows<uint8_t>(from, to, tokens, row_bytes, lane);
  }
}

// Copies the runs that the lanes hold, beside the other warps of the block.
__device__ void copy_runs(const GatherArgs& a, const Run& mine, int warp, int lane) {
  const int upto = sum_until(mine.pieces, lane);
  const int all = __shfl_sync(kAll, upto, kWarp - 1);
  for (int piece = warp; piece < all; piece += kGatherWarps) {
    const int owner = __popc(__ballot_sync(kAll, upto <= piece));  // the first whose pieces reach beyond
    const int before = __shfl_sync(kAll, upto - mine.pieces, owner);
    Run run;
    run.src = __shfl_sync(kAll, mine.src, owner);
    run.dst = __shfl_sync(kAll, mine.dst, owner);
    run.tokens = __shfl_sync(kAll, mine.tokens, owner);
    run.kind = __shfl_sync(kAll, mine.kind, owner);
    run.head = __shfl_sync(kAll, mine.head, owner);
    copy_piece(a, run, piece - before, lane);
  }
}

// Adds what a warp's lanes counted to the bytes of each source.
__device__ void add_moved(const GatherArgs& a, const int64_t (&tokens)[kMostSources], int lane) {
  const int64_t bytes = a.row_bytes[0] + (a.num_parts > 1 ? a.row_bytes[1] : 0);
#pragma unroll
  for (int source = 0; source < kMostSources; ++source) {
    int64_t sum = tokens[source];
    for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_down_sync(kAll, sum, step);
    if (lane == 0 && sum > 0) atomicAdd(a.moved + source, static_cast<unsigned long long>(sum * bytes));
  }
}

__global__ void __launch_bounds__(kWarp* kGatherWarps, kGatherBlocks) gather_copy_kernel(const __grid_constant__ GatherArgs a) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, grid = gridDim.x;
  int next = blockIdx.x;  // run of this block, counted from the first of the group
  int64_t tokens[kMostSources] = {0, 0, 0};
  for (int first_line = 0; first_line < a.lines; first_line += kWarp) {
    const int line = first_line + lane;
    const int upto = sum_until(line < a.lines ? min(max(a.count[line], 0), a.width) : 0, lane);
    const int total = __shfl_sync(kAll, upto, kWarp - 1);
    while (next < total) {
      const Run run = find_run(a, first_line, upto, next + lane * grid, total);
      copy_runs(a, run, warp, lane);
#pragma unroll
      for (int source = 0; source < kMostSources; ++source) tokens[source] += run.kind == source ? run.tokens : 0;
      next += min(kWarp, (total - next + grid - 1) / grid) * grid;
    }
    next -= total;
  }
  if (a.moved != nullptr && warp == 0) add_moved(a, tokens, lane);
}

}  // namespace gpu_tier

extern "C" int gpu_tier_gather_copy(const gpu_tier::GatherArgs* args, void* stream) {
  using namespace gpu_tier;
  unsigned grid = 0;
  const int64_t blocks = int64_t{args->lines} * args->width / kGatherBlocks + 1;
  if (cudaError_t code = grid_of(blocks * kWarpsPerBlock, args->blocks, &grid)) return code;
  const dim3 threads(kWarp * kGatherWarps);
  gather_copy_kernel<<<grid * kGatherBlocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(*args);
  return cudaGetLastError();
}
