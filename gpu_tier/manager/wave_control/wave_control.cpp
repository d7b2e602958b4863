// Looks clusters up and decides what the cache takes in and gives up, on threads of its own; see __init__.py for what
// each field means and what has to come out. A line is one KV head of one row of the batch; lines share nothing.
//
// Work is a job of lines. Threads claim lines by an atomic counter; lookups go before updates, because somebody waits
// for them. Whoever asks for a lookup works on it too. Threads that were woken look for work for a while before they
// sleep again: a lookup takes about as long as waking up.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace {

enum Source : int32_t { STEADY = 0, CACHE = 1, HOST = 2 };
enum Policy : int64_t { LRU = 0, LFU = 1, FIFO = 2, RANDOM = 3 };
enum Stat { RUNS, TOKENS, CLUSTERS, CLUSTER_HITS, BLOCKS, BLOCK_HITS, CLUSTER_TOKENS, TOKEN_HITS, BAD, STATS };
enum Change { COPIES, ADMISSIONS, EVICTIONS, CHANGES };

struct Cluster {
  int32_t first_block, tokens;
};
struct Block {
  int32_t host, place;
};
struct Head {
  int64_t sequence, residents, free;
};

// One layer of one request; as `RECORD` in tables.py.
struct Record {
  Cluster* clusters;   // [H, most_clusters]
  Block* blocks;       // [H, most_blocks]
  int64_t* used;       // [H, most_clusters]
  int64_t* admitted;   // [H, most_clusters]
  int32_t* times;      // [H, most_clusters]
  int32_t* index;      // [H, most_clusters]
  int32_t* residents;  // [H, capacity]
  int32_t* free;       // [H, capacity]
  Head* heads;         // [H]
  int32_t* slots;      // [ring_capacity + capacity * block_tokens]
  int32_t* stretch;    // likewise: slots that follow each other from here
  int64_t most_clusters, most_blocks, num_clusters, capacity, sink, ring;
};

// As `Batch` in native.py.
struct Batch {
  const Record* records;
  const int32_t* requests;  // [B]
  const int32_t* ids;       // [B, H, K]
  const int32_t* lengths;   // [B, H]
  const int32_t* tokens;    // [B]
  const int32_t* first;     // [B]
  int64_t rows, heads, width, block_tokens, row_slots;
};

struct Lookup {
  Batch batch;
  int64_t capacity;
  int64_t* src;     // [B·H, capacity]
  int32_t* kind;    // [B·H, capacity]
  int32_t* dst;     // [B·H, capacity]
  int32_t* tokens;  // [B·H, capacity]
  int32_t* count;   // [B·H]
  int32_t* lens;    // [B·H]
  int64_t* stats;   // [B·H, STATS]
};

struct Update {
  Batch batch;
  int64_t capacity, policy, seed;
  int64_t* src;      // [B·H, capacity]
  int32_t* dst;      // [B·H, capacity]
  int32_t* tokens;   // [B·H, capacity]
  int64_t* changes;  // [B·H, CHANGES]
};

int64_t blocks_of(int64_t tokens, int64_t block_tokens) { return (tokens + block_tokens - 1) / block_tokens; }

// Runs of a line of the execution buffer, longer ones where one continues another.
struct Runs {
  int64_t* src;
  int32_t *kind, *dst, *tokens;
  int64_t capacity, dst_slot, count = 0;
  int64_t last_end = -1;
  int32_t last_kind = -1;

  void add(int32_t from, int64_t slot, int64_t n) {
    if (from == last_kind && slot == last_end) {
      if (count <= capacity) tokens[count - 1] += static_cast<int32_t>(n);
    } else {
      if (count < capacity) {
        src[count] = slot;
        kind[count] = from;
        dst[count] = static_cast<int32_t>(dst_slot);
        tokens[count] = static_cast<int32_t>(n);
      }
      ++count;
      last_kind = from;
    }
    last_end = slot + n;
    dst_slot += n;
  }

  // Places of the request's buffer, which follow each other within a page of the arena only.
  void add_places(const Record& record, int32_t from, int64_t place, int64_t n) {
    while (n > 0) {
      const int64_t part = std::min<int64_t>(n, record.stretch[place]);
      add(from, record.slots[place], part);
      place += part;
      n -= part;
    }
  }
};

int64_t add_steady(Runs& runs, const Record& record, int64_t first, int64_t tokens) {
  const int64_t sink = std::min(record.sink, tokens);
  runs.add_places(record, STEADY, 0, sink);
  for (int64_t token = std::max(first, sink); token < tokens;) {
    const int64_t turn = (token - record.sink) % record.ring;
    const int64_t part = std::min(tokens - token, record.ring - turn);
    runs.add_places(record, STEADY, record.sink + turn, part);
    token += part;
  }
  return sink + std::max<int64_t>(0, tokens - std::max(first, sink));
}

void look_up(const Lookup& job, int64_t line) {
  const Batch& batch = job.batch;
  const int64_t row = line / batch.heads, head = line % batch.heads, bt = batch.block_tokens;
  int64_t* stats = job.stats + line * STATS;
  std::fill(stats, stats + STATS, 0);
  job.count[line] = job.lens[line] = 0;
  if (batch.first[row] < 0) return;
  const Record& record = batch.records[batch.requests[row]];
  const int64_t at = line * job.capacity, places = record.sink + record.ring;
  if (batch.tokens[row] - std::max<int64_t>(batch.first[row], record.sink) > record.ring) {
    stats[BAD] = 2;
    return;
  }
  Runs runs{job.src + at, job.kind + at, job.dst + at, job.tokens + at, job.capacity, row * batch.row_slots};
  stats[TOKENS] = add_steady(runs, record, batch.first[row], batch.tokens[row]);
  const Cluster* clusters = record.clusters + head * record.most_clusters;
  const Block* blocks = record.blocks + head * record.most_blocks;
  const int32_t* ids = batch.ids + line * batch.width;
  const int64_t selected = batch.lengths[line];
  for (int64_t i = 0; i < selected; ++i) {
    if (ids[i] < 0 || ids[i] >= record.num_clusters) {
      std::fill(stats, stats + STATS, 0);
      stats[BAD] = 1;
      return;
    }
    __builtin_prefetch(clusters + ids[i]);
  }
  for (int64_t i = 0; i < selected; ++i) __builtin_prefetch(blocks + clusters[ids[i]].first_block);
  for (int64_t i = 0; i < selected; ++i) {
    const Cluster cluster = clusters[ids[i]];
    if (!cluster.tokens) continue;
    const int64_t n_blocks = blocks_of(cluster.tokens, bt);
    const Block* block = blocks + cluster.first_block;
    const bool hit = block->place >= 0;
    for (int64_t left = cluster.tokens; left > 0; left -= bt, ++block) {
      const int64_t n = std::min(left, bt);
      if (hit) {
        runs.add_places(record, CACHE, places + block->place * bt, n);
      } else {
        runs.add(HOST, block->host * bt, n);
      }
    }
    stats[TOKENS] += cluster.tokens;
    stats[CLUSTERS] += 1;
    stats[BLOCKS] += n_blocks;
    stats[CLUSTER_TOKENS] += cluster.tokens;
    stats[CLUSTER_HITS] += hit;
    stats[BLOCK_HITS] += hit ? n_blocks : 0;
    stats[TOKEN_HITS] += hit ? cluster.tokens : 0;
  }
  stats[RUNS] = runs.count;
  job.count[line] = static_cast<int32_t>(std::min(runs.count, job.capacity));
  job.lens[line] = static_cast<int32_t>(stats[TOKENS]);
}

uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// The cache of one line while it is being changed.
class Cache {
 public:
  Cache(const Update& job, const Record& record, int64_t head)
      : job_(job),
        record_(record),
        head_(record.heads[head]),
        clusters(record.clusters + head * record.most_clusters),
        used(record.used + head * record.most_clusters),
        times(record.times + head * record.most_clusters),
        index(record.index + head * record.most_clusters),
        head_number_(head),
        begin_(head_.sequence) {
    admitted_ = record.admitted + head * record.most_clusters;
    blocks_ = record.blocks + head * record.most_blocks;
    residents_ = record.residents + head * record.capacity;
    free_ = record.free + head * record.capacity;
  }

  void use(int32_t cluster) {
    used[cluster] = ++head_.sequence;
    times[cluster] += 1;
  }

  // Returns the blocks of a cluster with their new places, or null when it cannot be taken in.
  const Block* admit(int32_t cluster) {
    const int64_t wanted = blocks_of(clusters[cluster].tokens, job_.batch.block_tokens);
    if (wanted > record_.capacity || !ensure_free(wanted)) return nullptr;
    Block* block = blocks_ + clusters[cluster].first_block;
    for (int64_t i = 0; i < wanted; ++i) block[i].place = free_[--head_.free];
    index[cluster] = static_cast<int32_t>(head_.residents);
    residents_[head_.residents++] = cluster;
    admitted_[cluster] = used[cluster];
    return block;
  }

  int64_t evictions = 0;

 private:
  using Key = std::pair<std::pair<uint64_t, int64_t>, int32_t>;
  const Update& job_;
  const Record& record_;
  Head& head_;

 public:
  const Cluster* clusters;
  int64_t* used;
  int32_t *times, *index;

 private:
  int64_t head_number_, begin_;
  int64_t* admitted_;
  Block* blocks_;
  int32_t *residents_, *free_;
  bool ranked_ = false;
  int64_t evictable_ = 0;  // blocks of `candidates_`
  std::vector<Key> candidates_;

  bool ensure_free(int64_t wanted) {
    if (head_.free >= wanted) return true;
    if (!ranked_) rank();
    if (head_.free + evictable_ < wanted) return false;
    while (head_.free < wanted) {
      std::pop_heap(candidates_.begin(), candidates_.end(), std::greater<Key>());
      evict(candidates_.back().second);
      candidates_.pop_back();
    }
    return true;
  }

  void rank() {
    ranked_ = true;
    for (int64_t i = 0; i < head_.residents; ++i) {
      const int32_t cluster = residents_[i];
      if (used[cluster] > begin_) continue;
      candidates_.push_back({key(cluster), cluster});
      evictable_ += blocks_of(clusters[cluster].tokens, job_.batch.block_tokens);
    }
    std::make_heap(candidates_.begin(), candidates_.end(), std::greater<Key>());
  }

  std::pair<uint64_t, int64_t> key(int32_t cluster) const {
    switch (job_.policy) {
      case LFU:
        return {static_cast<uint64_t>(times[cluster]), used[cluster]};
      case FIFO:
        return {0, admitted_[cluster]};
      case RANDOM: {
        const uint64_t step = mixed(static_cast<uint64_t>(job_.seed) ^ static_cast<uint64_t>(begin_));
        return {mixed(step ^ (static_cast<uint64_t>(head_number_) << 32 | static_cast<uint32_t>(cluster))), 0};
      }
      default:
        return {0, used[cluster]};
    }
  }

  void evict(int32_t cluster) {
    const int64_t n = blocks_of(clusters[cluster].tokens, job_.batch.block_tokens);
    Block* block = blocks_ + clusters[cluster].first_block;
    for (int64_t i = 0; i < n; ++i) {
      free_[head_.free++] = block[i].place;
      block[i].place = -1;
    }
    const int32_t last = residents_[--head_.residents];
    residents_[index[cluster]] = last;
    index[last] = index[cluster];
    index[cluster] = -1;
    evictable_ -= n;
    ++evictions;
  }
};

void change(const Update& job, int64_t line) {
  const Batch& batch = job.batch;
  const int64_t row = line / batch.heads, head = line % batch.heads, bt = batch.block_tokens;
  int64_t* changes = job.changes + line * CHANGES;
  std::fill(changes, changes + CHANGES, 0);
  if (batch.first[row] < 0) return;
  const Record& record = batch.records[batch.requests[row]];
  if (!record.capacity) return;
  Cache cache(job, record, head);
  const int32_t* ids = batch.ids + line * batch.width;
  const int64_t selected = batch.lengths[line];
  for (int64_t i = 0; i < selected; ++i)
    if (cache.clusters[ids[i]].tokens) cache.use(ids[i]);
  const int64_t sink = std::min<int64_t>(record.sink, batch.tokens[row]);
  const int64_t recent = batch.tokens[row] - std::max<int64_t>(batch.first[row], sink);
  int64_t from = row * batch.row_slots + sink + std::max<int64_t>(0, recent);
  const int64_t at = line * job.capacity, places = record.sink + record.ring;
  int64_t copies = 0, src_end = -1, dst_end = -1;
  for (int64_t i = 0; i < selected; ++i) {
    const int64_t tokens = cache.clusters[ids[i]].tokens;
    if (tokens && cache.index[ids[i]] < 0) {
      const Block* block = cache.admit(ids[i]);
      int64_t src = from;
      for (int64_t left = block ? tokens : 0; left > 0; left -= bt, ++block) {
        int64_t place = places + block->place * bt;
        for (int64_t n = std::min(left, bt); n > 0;) {
          const int64_t part = std::min<int64_t>(n, record.stretch[place]), dst = record.slots[place];
          if (src == src_end && dst == dst_end) {
            job.tokens[at + copies - 1] += static_cast<int32_t>(part);
          } else {
            job.src[at + copies] = src;
            job.dst[at + copies] = static_cast<int32_t>(dst);
            job.tokens[at + copies++] = static_cast<int32_t>(part);
          }
          src_end = src += part;
          dst_end = dst + part;
          place += part;
          n -= part;
        }
      }
      changes[ADMISSIONS] += cache.index[ids[i]] >= 0;
    }
    from += tokens;
  }
  changes[COPIES] = copies;
  changes[EVICTIONS] = cache.evictions;
}

struct Job {
  void (*line)(const void*, int64_t);
  const void* args;
  int64_t lines;
  std::atomic<int64_t> next{0}, done{0};
  int64_t workers = 0;  // threads that hold it; guarded by the pool

  bool is_done() const { return done.load(std::memory_order_acquire) >= lines; }
  void work() {
    constexpr int64_t GRAIN = 4;
    for (int64_t begin; (begin = next.fetch_add(GRAIN)) < lines;) {
      const int64_t end = std::min(begin + GRAIN, lines);
      for (int64_t i = begin; i < end; ++i) line(args, i);
      done.fetch_add(end - begin, std::memory_order_release);
    }
  }
};

using Clock = std::chrono::steady_clock;
constexpr auto LOOK_FOR_WORK = std::chrono::microseconds(200);

class Pool {
 public:
  explicit Pool(int64_t threads) {
    for (int64_t i = 0; i < threads; ++i) threads_.emplace_back([this] { serve(); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    work_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void wake() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      awake_until_ = Clock::now() + LOOK_FOR_WORK;
    }
    work_.notify_all();
  }

  void submit(Job* job, bool is_urgent) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (is_urgent) {
        jobs_.push_front(job);
      } else {
        jobs_.push_back(job);
      }
      waiting_.store(static_cast<int64_t>(jobs_.size()), std::memory_order_release);
    }
    work_.notify_all();
  }

  // Works on a job that was submitted, and returns when nobody uses it any more.
  void finish(Job* job) {
    job->work();
    std::unique_lock<std::mutex> lock(mutex_);
    drop(job);
    done_.wait(lock, [job] { return job->is_done() && !job->workers; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<Job*> jobs_;
  std::atomic<int64_t> waiting_{0};
  Clock::time_point awake_until_{};
  bool ends_ = false;
  std::vector<std::thread> threads_;

  void drop(Job* job) {
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), job), jobs_.end());
    waiting_.store(static_cast<int64_t>(jobs_.size()), std::memory_order_release);
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!ends_) {
      if (jobs_.empty()) {
        rest(lock);
        continue;
      }
      Job* job = jobs_.front();
      ++job->workers;
      lock.unlock();
      job->work();
      lock.lock();
      drop(job);
      --job->workers;
      if (!job->workers) done_.notify_all();
    }
  }

  void rest(std::unique_lock<std::mutex>& lock) {
    const auto until = awake_until_;
    if (Clock::now() >= until) {
      work_.wait(lock);
      return;
    }
    lock.unlock();
    while (!waiting_.load(std::memory_order_acquire) && Clock::now() < until) std::this_thread::yield();
    lock.lock();
  }
};

}  // namespace

extern "C" {

void* wave_pool(int64_t threads) { return new Pool(threads); }

void wave_pool_end(void* pool) { delete static_cast<Pool*>(pool); }

void wave_wake(void* pool) { static_cast<Pool*>(pool)->wake(); }

void wave_lookup(void* pool, const Lookup* args) {
  Job job;
  job.line = [](const void* all, int64_t line) { look_up(*static_cast<const Lookup*>(all), line); };
  job.args = args;
  job.lines = args->batch.rows * args->batch.heads;
  if (pool) static_cast<Pool*>(pool)->submit(&job, true);
  pool ? static_cast<Pool*>(pool)->finish(&job) : job.work();
}

// Begins an update; `wave_join` ends it. The arguments have to stay where they are until then.
void* wave_update(void* pool, const Update* args) {
  Job* job = new Job;
  job->line = [](const void* all, int64_t line) { change(*static_cast<const Update*>(all), line); };
  job->args = args;
  job->lines = args->batch.rows * args->batch.heads;
  static_cast<Pool*>(pool)->submit(job, false);
  return job;
}

void wave_join(void* pool, void* job) {
  static_cast<Pool*>(pool)->finish(static_cast<Job*>(job));
  delete static_cast<Job*>(job);
}
}
