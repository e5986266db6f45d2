// Tokens from where they wait to the slots of a workspace: rows far apart in a large pool. Each is asked for a few rows before it is
// copied, as no processor foresees where the next one is; where the pool is a file, all are asked for before the first is copied, so
// that a disk answers many at once and not one page fault after the other.

#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr int64_t AHEAD = 12, SHARE = 64;  // rows that are asked for; rows of a task
constexpr int64_t LEAST = 256;             // rows of a thread: fewer are copied before another one has begun

// Fields of 8 bytes each, as semkv.kernels.gather.cpp writes them.
struct Pool {
  const char* stored;     // [heads, capacity, width] numbers, or codes of 8 bits where there is a scale
  const uint16_t* scale;  // float16 [heads, capacity] or null
  char* into;             // [rows, width] numbers, float32 where there is a scale
  int64_t capacity, bytes;  // of a stored row
  int64_t stored_in_file, scale_in_file;
};

struct Call {
  const Pool* pools;
  const int64_t *heads, *places, *at;  // [count]
  int64_t pool_count, count, threads;
  Parallel parallel;
};

// Have the system begin to read the pages of rows of `bytes` bytes; rows in a row are one request.
void read_ahead(const Call& call, const char* stored, int64_t capacity, int64_t bytes) {
  const uintptr_t page = sysconf(_SC_PAGESIZE);
  uintptr_t begin = 0, end = 0;
  for (int64_t i = 0; i <= call.count; ++i) {
    uintptr_t first = 0, last = 0;
    if (i < call.count) {
      const uintptr_t row = (uintptr_t)stored + (call.heads[i] * capacity + call.places[i]) * bytes;
      first = row / page * page, last = (row + bytes + page - 1) / page * page;
      if (begin <= first && first <= end) {
        end = last > end ? last : end;
        continue;
      }
    }
    if (end > begin) madvise((void*)begin, end - begin, MADV_WILLNEED);
    begin = first, end = last;
  }
}

void ask(const Call& call, int64_t i) {
  for (int64_t n = 0; n < call.pool_count; ++n) {
    const Pool& pool = call.pools[n];
    const int64_t row = call.heads[i] * pool.capacity + call.places[i];
    for (int64_t byte = 0; byte < pool.bytes; byte += 64) __builtin_prefetch(pool.stored + row * pool.bytes + byte, 0, 0);
    if (pool.scale) __builtin_prefetch(pool.scale + row, 0, 0);
  }
}

void copy(const Pool& pool, int64_t row, int64_t at) {
  const char* from = pool.stored + row * pool.bytes;
  if (!pool.scale) {
    std::memcpy(pool.into + at * pool.bytes, from, pool.bytes);
    return;
  }
  const float scale = from_float16(loaded<1, Shorts>(pool.scale + row))[0];
  float* out = (float*)pool.into + at * pool.bytes;
  int64_t n = 0;
  for (; n + LANES <= pool.bytes; n += LANES) store(out + n, from_bytes(loaded<LANES, Bytes>(from + n), 128) * scale);
  for (; n < pool.bytes; ++n) out[n] = (float)((int32_t)(uint8_t)from[n] - 128) * scale;
}

void move(const Call& call, int64_t task) {
  const int64_t first = task * SHARE, last = first + SHARE < call.count ? first + SHARE : call.count;
  for (int64_t i = first; i < first + AHEAD && i < last; ++i) ask(call, i);
  for (int64_t i = first; i < last; ++i) {
    if (i + AHEAD < last) ask(call, i + AHEAD);
    for (int64_t n = 0; n < call.pool_count; ++n)
      copy(call.pools[n], call.heads[i] * call.pools[n].capacity + call.places[i], call.at[i]);
  }
}

}  // namespace

extern "C" void copy_tokens(const Call* call) {
  for (int64_t n = 0; n < call->pool_count; ++n) {
    const Pool& pool = call->pools[n];
    if (pool.stored_in_file) read_ahead(*call, pool.stored, pool.capacity, pool.bytes);
    if (pool.scale_in_file) read_ahead(*call, (const char*)pool.scale, pool.capacity, sizeof(uint16_t));
  }
  Call own = *call;
  const int64_t most = (call->count + LEAST - 1) / LEAST;
  own.threads = own.threads < most ? own.threads : most;
  share(own, move, (call->count + SHARE - 1) / SHARE);
}
