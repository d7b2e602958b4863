// What a block of lru_diff works on: the arguments of the launch, its row and head, and its tables in shared memory.
#pragma once

#include "copy.cuh"

namespace gpu_tier {

struct DiffStrides {
  int64_t base, page, token, layer, head;
};

// One part of the rows that the block copies; the same fields as `_Part` of cuda.py.
struct DiffPart {
  DiffStrides src, dst;
  int64_t row_bytes;
  int32_t heads;  // rows of a token that are copied on their own
  int32_t reserved;
};

// The same fields in the same order as `_Args` of cuda.py.
struct DiffArgs {
  const int32_t* items;
  const int64_t* requests;
  const int32_t* seq_lens;
  const uint8_t* sparse_mask;
  const int32_t* num_real;
  int32_t* slot_item;
  int16_t* lru_slots;
  int32_t* newest_item;
  const int32_t* slot_loc;
  const int32_t* newest_slots;
  const int64_t* host_loc;
  int32_t* device_slot;
  int64_t* load_host;
  int32_t* load_device;
  int32_t* load_count;
  int32_t* evicted;
  int32_t* promote_src;
  int32_t* promote_dst;
  unsigned long long* counters;
  int32_t* errors;
  int64_t row_stride, head_stride, item_stride, host_stride;
  int32_t rows, heads, width, capacity, unit, promote, loads_hottest, num_parts;
  // Of the copy: nothing is copied when num_parts is 0.
  const char* host;
  char* device;
  int64_t host_page_size, device_page_size;
  DiffPart parts[2];
  int32_t host_layer, device_layer, per_head, reserved;
};

constexpr int kNotBackedUp = 1, kNoVictim = 2, kOutOfRange = 4, kNotAdmitted = 8;  // DiffError of values.py
constexpr int kNone = -1, kNewest = -2, kPrevious = -3, kLoadable = -4, kMissing = -5;  // instead of an item's slot

// What is in shared memory: sizes in words of 4 bytes.
struct DiffShared {
  int table, width, capacity;
  __host__ __device__ DiffShared(int width, int capacity) : table(64), width(width), capacity(capacity) {
    while (table < 2 * width) table *= 2;
  }
  __host__ __device__ int item_words() const { return (width + kWarp - 1) / kWarp; }
  __host__ __device__ int slot_words() const { return (capacity + kWarp - 1) / kWarp; }
  __host__ __device__ int64_t bytes() const {
    // keys, codes, bits and bases of items and slots, totals; then 16-bit positions, order and victims.
    const int64_t words = int64_t{table} + width + 2 * item_words() + 5 * slot_words() + 8;
    return 4 * words + 2 * (int64_t{table} + capacity + width + 2);
  }
};

// The block's view of its row and head.
struct Buffer {
  int32_t* slot_item;
  int16_t* lru_slots;
  const int32_t* slot_loc;
  const int64_t* host_loc;
  const int32_t* items;
  int64_t item_stride;
  int64_t pair, out;  // row and head in [B, Hs], and in [B, Hs, K]
  int newest, previous, newest_slot, leaving_from;
};

struct Tables {
  int32_t* keys;
  int32_t* codes;
  uint32_t* load_bits;
  int32_t* load_base;
  uint32_t* hit_bits;       // by slot
  uint32_t* hit_order;      // by place in the old order
  uint32_t* free_bits;
  int32_t* hit_base;
  int32_t* free_base;
  int32_t* totals;          // selected, newest and hits, lost, previous, loadable, hit slots, free slots
  uint16_t* positions;
  uint16_t* order;
  uint16_t* victims;

  __device__ Tables(unsigned char* bytes, const DiffShared& s) {
    int32_t* at = reinterpret_cast<int32_t*>(bytes);
    auto take = [&at](int words) { int32_t* first = at; at += words; return first; };
    keys = take(s.table);
    codes = take(s.width);
    load_bits = reinterpret_cast<uint32_t*>(take(s.item_words()));
    load_base = take(s.item_words());
    hit_bits = reinterpret_cast<uint32_t*>(take(s.slot_words()));
    hit_order = reinterpret_cast<uint32_t*>(take(s.slot_words()));
    free_bits = reinterpret_cast<uint32_t*>(take(s.slot_words()));
    hit_base = take(s.slot_words());
    free_base = take(s.slot_words());
    totals = take(8);
    positions = reinterpret_cast<uint16_t*>(at);
    order = positions + s.table;
    victims = order + s.capacity;
  }
};

enum { kSelected, kHits, kLost, kBefore, kWanted, kHitSlots, kFreeSlots };

}  // namespace gpu_tier
