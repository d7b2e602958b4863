// lru_diff: one block plans a row and head of one layer, and may copy what it planned. See __init__.py for the rules.
//
// Selected items are put into a hash table in shared memory, and the slots of the buffer look their items up in it; so
// nothing is sorted and no table of all items is needed. Yes and no of 32 slots are one word of ballots: the rank of a
// slot among the hit, or the free ones, is a prefix sum over words and a population count within one.

#include "../lru_diff.cuh"

namespace gpu_tier {

__device__ __forceinline__ uint32_t hash_of(int item, int table) {
  return (static_cast<uint32_t>(item) * 2654435769u >> 7) & static_cast<uint32_t>(table - 1);
}

__device__ __forceinline__ bool bit_of(const uint32_t* bits, int i) { return bits[i / kWarp] >> (i % kWarp) & 1; }

// How many bits are set before i.
__device__ __forceinline__ int rank_of(const uint32_t* bits, const int32_t* base, int i) {
  return base[i / kWarp] + __popc(bits[i / kWarp] & ((1u << (i % kWarp)) - 1));
}

// One warp turns the words' bits into how many are set before each word.
__device__ void scan_words(const uint32_t* bits, int32_t* base, int words, int32_t* total, int lane) {
  int before = 0;
  for (int first = 0; first < words; first += kWarp) {
    const int mine = first + lane < words ? __popc(bits[first + lane]) : 0;
    int sum = mine;
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(kAll, sum, step);
      if (lane >= step) sum += other;
    }
    if (first + lane < words) base[first + lane] = before + sum - mine;
    before += __shfl_sync(kAll, sum, kWarp - 1);
  }
  if (lane == 0) *total = before;
}

// Adds up a yes of each lane.
__device__ __forceinline__ void count_if(bool yes, int32_t* total, int lane) {
  const int number = __popc(__ballot_sync(kAll, yes));
  if (lane == 0 && number > 0) atomicAdd(total, number);
}

// What is counted, in the order of the counters.
enum { kSelections, kHitItems, kLoads, kPromotions };

__device__ __forceinline__ void add_to(const DiffArgs& a, int counter, int number) {
  if (number > 0) atomicAdd(a.counters + counter, static_cast<unsigned long long>(number));
}

// Counts selected items that are all hits: one lane adds up those of its warp.
__device__ __forceinline__ void count_hits(const DiffArgs& a, int selected) {
  for (int step = kWarp / 2; step > 0; step /= 2) selected += __shfl_down_sync(kAll, selected, step);
  if (threadIdx.x % kWarp != 0) return;
  add_to(a, kSelections, selected);
  add_to(a, kHitItems, selected);
}

__device__ void clear_outputs(const DiffArgs& a, int64_t pair) {
  for (int i = threadIdx.x; i < a.width; i += blockDim.x) {
    const int64_t at = pair * a.width + i;
    a.device_slot[at] = -1;
    a.load_host[at] = -1;
    a.load_device[at] = -1;
    a.evicted[at] = -1;
  }
  if (threadIdx.x == 0) {
    a.load_count[pair] = 0;
    a.promote_src[pair] = -1;
    a.promote_dst[pair] = -1;
  }
}

__device__ __forceinline__ int item_at(const DiffArgs& a, const Buffer& b, int i) {
  return i < a.width ? b.items[i * b.item_stride] : -1;
}

// Whether the fast path applies: all items fit, and every selected one is in the slot of its number.
__device__ bool is_fast(const DiffArgs& a, const Buffer& b) {
  if (!a.promote || b.newest >= a.capacity) return false;
  bool elsewhere = b.previous >= 0 && b.slot_item[b.lru_slots[0]] >= 0;
  for (int i = threadIdx.x; i < a.width; i += blockDim.x) {
    const int item = item_at(a, b, i);
    if (item >= 0 && item < b.newest && item != b.previous) elsewhere |= b.slot_item[item] != item;
  }
  return !__syncthreads_or(elsewhere);
}

// Makes the coldest slot the hottest.
__device__ void rotate(const DiffArgs& a, const Buffer& b, int16_t coldest) {
  for (int first = 0; first < a.capacity; first += blockDim.x) {
    const int i = first + threadIdx.x;
    const int16_t next = i < a.capacity - 1 ? b.lru_slots[i + 1] : coldest;
    __syncthreads();  // a neighbour's value is read before it is overwritten
    if (i < a.capacity) b.lru_slots[i] = next;
  }
}

__device__ int fast_step(const DiffArgs& a, const Buffer& b) {
  const int16_t coldest = b.lru_slots[0];
  const int promote_to = b.slot_loc[coldest];
  int selected = 0;
  for (int i = threadIdx.x; i < a.width; i += blockDim.x) {
    const int item = item_at(a, b, i);
    if (item > b.newest) atomicOr(a.errors, kOutOfRange);
    if (item < 0 || item > b.newest) continue;
    ++selected;
    const int slot = item == b.newest ? b.newest_slot : item == b.previous ? promote_to : b.slot_loc[item];
    a.device_slot[b.out + i] = slot;
  }
  count_hits(a, selected);
  if (b.previous < 0) return -1;
  rotate(a, b, coldest);
  if (threadIdx.x == 0) {
    b.slot_item[coldest] = b.previous;
    add_to(a, kPromotions, 1);
  }
  return promote_to;
}

// Puts the selected items that may be in the buffer into the hash table.
__device__ void insert_items(const DiffArgs& a, const Buffer& b, const Tables& t, const DiffShared& s, int lane) {
  const int rounded = s.item_words() * kWarp;
  for (int i = threadIdx.x; i < rounded; i += blockDim.x) {
    const int item = item_at(a, b, i);
    const bool valid = item >= 0 && item <= b.newest;
    if (item > b.newest) atomicOr(a.errors, kOutOfRange);
    int code = !valid ? kNone : item == b.newest ? kNewest : item == b.previous ? kPrevious : kMissing;
    if (i < a.width) t.codes[i] = code;
    if (code == kMissing) {
      uint32_t at = hash_of(item, s.table);
      for (int held = atomicCAS(&t.keys[at], -1, item); held != -1 && held != item;) {
        at = (at + 1) & (s.table - 1);
        held = atomicCAS(&t.keys[at], -1, item);
      }
      t.positions[at] = static_cast<uint16_t>(i);
    }
    count_if(valid, &t.totals[kSelected], lane);
    count_if(code == kNewest, &t.totals[kHits], lane);
    count_if(code == kPrevious, &t.totals[kBefore], lane);
  }
}

// Each slot looks its item up; hit items learn their slot.
__device__ void find_hits(const DiffArgs& a, const Buffer& b, const Tables& t, const DiffShared& s, int lane) {
  for (int c = threadIdx.x; c < s.slot_words() * kWarp; c += blockDim.x) {
    const int item = c < a.capacity ? b.slot_item[c] : -1;
    bool hit = false;
    if (item >= 0) {
      for (uint32_t at = hash_of(item, s.table); t.keys[at] != -1; at = (at + 1) & (s.table - 1)) {
        if (t.keys[at] == item) {
          t.codes[t.positions[at]] = c;
          hit = true;
          break;
        }
      }
    }
    const uint32_t word = __ballot_sync(kAll, hit);
    if (lane == 0) t.hit_bits[c / kWarp] = word;
  }
}

// Finds out which missing items can be loaded.
__device__ void find_loads(const DiffArgs& a, const Buffer& b, const Tables& t, const DiffShared& s, int lane) {
  for (int i = threadIdx.x; i < s.item_words() * kWarp; i += blockDim.x) {
    const bool missing = i < a.width && t.codes[i] == kMissing;
    const bool loadable = missing && b.host_loc[item_at(a, b, i)] >= 0;
    if (missing) t.codes[i] = loadable ? kLoadable : kNone;
    const uint32_t word = __ballot_sync(kAll, loadable);
    if (lane == 0) t.load_bits[i / kWarp] = word;
    count_if(missing && !loadable, &t.totals[kLost], lane);
  }
}

// Walks the old order: which slots were hit, which may be overwritten.
__device__ void walk_order(const DiffArgs& a, const Buffer& b, const Tables& t, const DiffShared& s, int lane) {
  for (int p = threadIdx.x; p < s.slot_words() * kWarp; p += blockDim.x) {
    bool hit = false, free = false;
    if (p < a.capacity) {
      const int slot = b.lru_slots[p];
      const int item = b.slot_item[slot];
      t.order[p] = static_cast<uint16_t>(slot);
      hit = bit_of(t.hit_bits, slot);
      free = !hit && (item < 0 || b.host_loc[item] >= 0);
    }
    const uint32_t hits = __ballot_sync(kAll, hit), frees = __ballot_sync(kAll, free);
    if (lane == 0) {
      t.hit_order[p / kWarp] = hits;
      t.free_bits[p / kWarp] = frees;
    }
  }
}

// Gives every slot its place in the new order, and lines the victims up.
__device__ void reorder(const DiffArgs& a, const Buffer& b, const Tables& t, int promoted, int taken) {
  const int hit_slots = t.totals[kHitSlots];
  const int first_warm = a.capacity - promoted - taken - hit_slots;
  const int first_load = first_warm + (a.loads_hottest ? hit_slots : 0);
  const int first_hit = first_warm + (a.loads_hottest ? 0 : taken);
  for (int p = threadIdx.x; p < a.capacity; p += blockDim.x) {
    const int hits = rank_of(t.hit_order, t.hit_base, p), frees = rank_of(t.free_bits, t.free_base, p);
    const int used = min(frees, promoted + taken);
    int place = p - hits - used;
    if (bit_of(t.hit_order, p)) {
      place = first_hit + hits;
    } else if (bit_of(t.free_bits, p) && frees < promoted + taken) {
      place = frees < promoted ? a.capacity - 1 : first_load + frees - promoted;
      t.victims[frees] = t.order[p];
    }
    b.lru_slots[place] = static_cast<int16_t>(t.order[p]);
  }
}

// Gives the j-th load the j-th victim, and every selected item its device slot.
__device__ void assign(const DiffArgs& a, const Buffer& b, const Tables& t, int promoted, int taken) {
  for (int i = threadIdx.x; i < a.width; i += blockDim.x) {
    const int code = t.codes[i];
    int slot = code >= 0 ? b.slot_loc[code] : -1;
    if (code == kNewest) slot = b.newest_slot;
    if (code == kPrevious && promoted) slot = b.slot_loc[t.victims[0]];
    if (code == kLoadable) {
      const int rank = rank_of(t.load_bits, t.load_base, i);
      if (rank < taken) {
        const int item = item_at(a, b, i), victim = t.victims[rank + promoted];
        slot = b.slot_loc[victim];
        a.evicted[b.out + rank] = b.slot_item[victim];
        a.load_host[b.out + rank] = b.host_loc[item];
        a.load_device[b.out + rank] = slot;
        b.slot_item[victim] = item;
      }
    }
    a.device_slot[b.out + i] = slot;
  }
}

// Returns where the previous newest item moved, or -1.
__device__ int slow_step(const DiffArgs& a, const Buffer& b, unsigned char* shared) {
  const DiffShared s(a.width, a.capacity);
  const Tables t(shared, s);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int i = threadIdx.x; i < s.table; i += blockDim.x) t.keys[i] = -1;
  if (threadIdx.x < 8) t.totals[threadIdx.x] = 0;
  __syncthreads();
  insert_items(a, b, t, s, lane);
  __syncthreads();
  find_hits(a, b, t, s, lane);
  __syncthreads();
  find_loads(a, b, t, s, lane);
  walk_order(a, b, t, s, lane);
  __syncthreads();
  if (warp == 0) scan_words(t.load_bits, t.load_base, s.item_words(), &t.totals[kWanted], lane);
  if (warp == 1) scan_words(t.hit_order, t.hit_base, s.slot_words(), &t.totals[kHitSlots], lane);
  if (warp == 2) scan_words(t.free_bits, t.free_base, s.slot_words(), &t.totals[kFreeSlots], lane);
  __syncthreads();
  const int wanted = t.totals[kWanted], free_slots = t.totals[kFreeSlots], before = t.totals[kBefore];
  // A previous newest item that is not selected gives way to loads.
  const int promoted = b.previous >= 0 && free_slots > (before > 0 ? 0 : wanted);
  const int taken = min(wanted, free_slots - promoted);
  reorder(a, b, t, promoted, taken);
  __syncthreads();
  assign(a, b, t, promoted, taken);
  if (threadIdx.x == 0) {
    if (promoted) b.slot_item[t.victims[0]] = b.previous;
    a.load_count[b.pair] = taken;
    const int hits = t.totals[kHits] + t.totals[kHitSlots] + (promoted ? before : 0);
    add_to(a, kSelections, t.totals[kSelected]);
    add_to(a, kHitItems, hits);
    add_to(a, kLoads, taken);
    add_to(a, kPromotions, promoted);
    const int lost = t.totals[kLost] > 0 ? kNotBackedUp : 0;
    const int crowded = wanted > taken || before > promoted ? kNoVictim : 0;
    if (lost | crowded) atomicOr(a.errors, lost | crowded);
  }
  return promoted ? b.slot_loc[t.victims[0]] : -1;
}

__device__ __forceinline__ int64_t row_offset(const DiffStrides& s, int64_t page_size, int64_t slot, int layer, int head) {
  const int64_t page = slot / page_size;
  return s.base + page * s.page + (slot - page * page_size) * s.token + layer * s.layer + head * s.head;
}

// Copies one token's rows of a part with one warp.
__device__ void copy_row(const DiffArgs& a, const char* from, const DiffStrides& src, int64_t page_size, int layer,
                         int64_t here, const DiffPart& part, int64_t there, int head, int lane) {
  const char* row = from + row_offset(src, page_size, here, layer, head);
  char* to = a.device + row_offset(part.dst, a.device_page_size, there, a.device_layer, head);
  warp_copy(row, to, part.row_bytes, lane);
}

// Copies the promoted item (task 0 when there is one) and the loads; a warp takes one row at a time.
__device__ void copy_items(const DiffArgs& a, const Buffer& b, int selecting_head, int promote_to) {
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  const int promoted = promote_to >= 0, items = promoted + a.load_count[b.pair];
  for (int p = 0; p < a.num_parts; ++p) {
    const DiffPart& part = a.parts[p];
    const int64_t rows = int64_t{items} * a.unit * part.heads;
    for (int64_t task = threadIdx.x / kWarp; task < rows; task += warps) {
      const int head = static_cast<int>(task % part.heads) + (a.per_head ? selecting_head : 0);
      const int token = static_cast<int>(task / part.heads % a.unit);
      const int load = static_cast<int>(task / part.heads / a.unit) - promoted;
      if (load < 0) {
        copy_row(a, a.device, part.dst, a.device_page_size, a.device_layer, b.leaving_from + token, part,
                 promote_to + token, head, lane);
      } else {
        copy_row(a, a.host, part.src, a.host_page_size, a.host_layer, a.load_host[b.out + load] + token, part,
                 a.load_device[b.out + load] + token, head, lane);
      }
    }
  }
}

template <bool kCopies>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock) lru_diff_kernel(const __grid_constant__ DiffArgs a) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const int64_t row = blockIdx.x, head = blockIdx.y, pair = row * a.heads + head;
  clear_outputs(a, pair);
  if (row >= *a.num_real || !a.sparse_mask[row]) return;
  const int64_t request = a.requests[row];
  const int32_t* newest_slots = a.newest_slots + 2 * request;
  if (newest_slots[0] < 0) {
    if (threadIdx.x == 0) atomicOr(a.errors, kNotAdmitted);
    return;
  }
  const int64_t state = request * a.heads + head;
  const int newest = (a.seq_lens[row] - 1) / a.unit, leaving = a.newest_item[state];
  // The previous newest item if it is to be promoted, else an id that nothing has.
  const int previous = a.promote && leaving >= 0 && leaving + 1 == newest ? leaving : -1;
  const Buffer b{
      a.slot_item + state * a.capacity, a.lru_slots + state * a.capacity, a.slot_loc + request * a.capacity,
      a.host_loc + request * a.host_stride, a.items + row * a.row_stride + head * a.head_stride, a.item_stride,
      pair, pair * a.width, newest, previous, newest_slots[newest % 2], newest_slots[max(previous, 0) % 2],
  };
  __syncthreads();  // the outputs are clear, and every thread has read the newest item
  const int promote_to = is_fast(a, b) ? fast_step(a, b) : slow_step(a, b, shared_bytes);
  if (threadIdx.x == 0) {
    a.newest_item[state] = newest;
    if (promote_to >= 0) {
      a.promote_src[pair] = b.leaving_from;
      a.promote_dst[pair] = promote_to;
    }
  }
  if constexpr (kCopies) {
    __syncthreads();  // the plan is written
    copy_items(a, b, static_cast<int>(head), promote_to);
  }
}

}  // namespace gpu_tier

// Returns the bytes of shared memory that a block needs.
extern "C" int64_t gpu_tier_lru_diff_shared_bytes(int width, int capacity) {
  return gpu_tier::DiffShared(width, capacity).bytes();
}

extern "C" int gpu_tier_lru_diff(const gpu_tier::DiffArgs* args, void* stream) {
  const int most = args->width > args->capacity ? args->width : args->capacity;
  const int needed = (most + gpu_tier::kWarp - 1) / gpu_tier::kWarp;
  const int warps = needed < 4 ? 4 : needed < gpu_tier::kWarpsPerBlock ? needed : gpu_tier::kWarpsPerBlock;
  const int64_t bytes = gpu_tier::DiffShared(args->width, args->capacity).bytes();
  auto kernel = args->num_parts > 0 ? gpu_tier::lru_diff_kernel<true> : gpu_tier::lru_diff_kernel<false>;
  if (bytes > 48 * 1024) {
    const auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const cudaError_t code = gpu_tier::settled(cudaFuncSetAttribute(kernel, limit, static_cast<int>(bytes)));
    if (code != cudaSuccess) return code;
  }
  const dim3 grid(args->rows, args->heads), threads(warps * gpu_tier::kWarp);
  kernel<<<grid, threads, bytes, static_cast<cudaStream_t>(stream)>>>(*args);
  return cudaGetLastError();
}
