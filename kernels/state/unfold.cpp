// Slots of a memory made to hold the tokens of the units chosen: what is missing takes free slots, and is copied from where it waits.
// A KV head of a row of the batch marks its tokens in a map of bits, from which its slots take away those that are there already; where far
// more wait than there are slots, only the words of the map that chosen units and slots lie in are ever touched. Rows that are copied lie
// far apart in a large pool: each is asked for a few rows before it is copied, as no processor foresees where the next
// one is; where the pool is a file, all are asked for first, so that a disk answers many at once and not one page fault after the other.

#include <sys/mman.h>
#include <unistd.h>

namespace {

// Times eight bytes of 0 and 1: the highest byte has them as bits, the first lowest.
[[maybe_unused]] constexpr uint64_t GATHER = 0x0102040810204080;
constexpr int64_t AHEAD = 12, SHARE = 64;        // rows that are asked for; rows of a task
constexpr int64_t LEAST = 256;                   // rows of a thread: fewer are copied before another one has begun
constexpr int64_t LEAST_SLOTS = 4096;            // slots that a thread looks at
constexpr int64_t SPARSE = 2;                    // words of the map for each slot above which it is not touched as a whole
constexpr int32_t EMPTY = INT32_MAX;

// Fields of 8 bytes each, as semkv.kernels.state.unfold writes them. Strides are bytes, of rows of the batch, heads, and places or slots.
struct Side {
  const char* stored;  // [rows, heads, waiting, width] numbers, or codes of 8 bits where there is a scale
  const char* scale;   // float16 [rows, heads, waiting] or null
  char* into;          // [rows, heads, capacity, width]
  char* into_scale;    // float16 [rows, heads, capacity], where codes stay codes, or null
  int64_t width, stored_kind, into_kind;
  int64_t stored_strides[3], scale_strides[3], into_strides[3], into_scale_strides[3];
};

struct Call {
  Side sides[2];
  char* positions;         // int32 [rows, heads, capacity]
  char* slots;             // int32 [rows, heads, capacity]
  const char* chosen;      // bool [rows, heads, units]
  const int64_t* start;    // [rows]
  const int64_t* shift;    // [rows]
  const char* bounds;      // int32 [rows, heads, units + 1] or null
  const char* order;       // int32 [rows, heads, waiting] or null
  const char* where;       // int32 [rows, waiting] or null
  int64_t* out;            // [rows, 2]: tokens that were copied, and that were there
  uint64_t* marks;         // [rows, heads, words of `waiting` bits], scratch
  int32_t *places, *into;  // [rows, heads, capacity], scratch: of the tokens that are copied, where they wait and their slots
  int64_t* counts;         // [rows, heads, 2], scratch: as `out`
  int64_t rows, heads, capacity, units, waiting, length, in_file;
  int64_t positions_strides[2], slots_strides[2], chosen_strides[2], bounds_strides[2], order_strides[2], where_stride, threads;
  Parallel parallel;
};

inline const char* part(const char* x, const int64_t* strides, int64_t row, int64_t head) { return x + row * strides[0] + head * strides[1]; }

inline int64_t words_of(int64_t bits) { return (bits + 63) / 64; }

// Set the bits from `first` to `last` - 1.
inline void set(uint64_t* marks, int64_t first, int64_t last) {
  const int64_t word = first / 64, end = (last - 1) / 64;
  const uint64_t from = ~0ull << first % 64, to = ~0ull >> (63 - (last - 1) % 64);
  if (word == end) {
    marks[word] |= from & to;
    return;
  }
  marks[word] |= from;
  for (int64_t n = word + 1; n < end; ++n) marks[n] = ~0ull;
  marks[end] |= to;
}

// `use(number)` for the bits that are set from `first` to `last` - 1, ascending.
template <typename Use>
inline void each(const uint64_t* marks, int64_t first, int64_t last, Use use) {
  for (int64_t word = first / 64; word * 64 < last; ++word) {
    uint64_t those = marks[word];
    if (word * 64 < first) those &= ~0ull << first % 64;
    if (last - word * 64 < 64) those &= (1ull << last % 64) - 1;
    for (; those; those &= those - 1) use(word * 64 + __builtin_ctzll(those));
  }
}

// The units that a head of a row has chosen, and their tokens.
struct Head {
  const Call& call;
  const int64_t row, start;
  const uint8_t* chosen;
  const int32_t *bounds, *order;

  Head(const Call& call, int64_t row, int64_t head)
      : call(call), row(row), start(call.start[row]), chosen((const uint8_t*)part(call.chosen, call.chosen_strides, row, head)),
        bounds(call.bounds ? (const int32_t*)part(call.bounds, call.bounds_strides, row, head) : nullptr),
        order(call.order ? (const int32_t*)part(call.order, call.order_strides, row, head) : nullptr) {}

  // The 64 units from `at` on as bits.
  uint64_t bits(int64_t at) const {
    uint8_t bytes[64];
    const uint8_t* from = chosen + at;
    if (at + 64 > call.units) {
      std::memset(bytes, 0, sizeof(bytes));
      from = (const uint8_t*)std::memcpy(bytes, from, call.units - at);
    }
#ifdef __AVX2__
    using Signed = char __attribute__((vector_size(32)));
    Signed low, high;
    std::memcpy(&low, from, 32);
    std::memcpy(&high, from + 32, 32);
    const uint32_t first = __builtin_ia32_pmovmskb256((Signed)(low != 0)), second = __builtin_ia32_pmovmskb256((Signed)(high != 0));
    return first | (uint64_t)second << 32;
#else
    uint64_t found = 0, x;
    for (int64_t part = 0; part < 64; part += 8) {
      std::memcpy(&x, from + part, 8);
      found |= x * GATHER >> 56 << part;
    }
    return found;
#endif
  }

  // `use(first, last)` for the runs of numbers of the chosen units' tokens, ascending: places where there is no order.
  template <typename Use>
  void runs(Use use) const {
    for (int64_t at = 0; at < call.units; at += 64)
      for (uint64_t those = bits(at); those; those &= those - 1) {
        const int64_t unit = at + __builtin_ctzll(those);
        int64_t first = bounds ? bounds[unit] : start + unit * call.length, last = bounds ? bounds[unit + 1] : first + call.length;
        first = first < 0 ? 0 : first, last = last < call.waiting ? last : call.waiting;
        if (first < last) use(first, last);
      }
  }

  // Whether units have a token each, whose bits in the map are the units', further on.
  bool singles() const { return !bounds && call.length == 1 && start >= 0; }

  // Clear the words of the map that `mark` sets bits of, and those of what the slots hold.
  void clear(uint64_t* marks, const int32_t* slots) const {
    runs([&](int64_t first, int64_t last) {
      if (!order)
        std::memset(marks + first / 64, 0, ((last - 1) / 64 - first / 64 + 1) * sizeof(uint64_t));
      else
        for (int64_t n = first; n < last; ++n) marks[order[n] / 64u] = 0;
    });
    for (int64_t n = 0; n < call.capacity; ++n)
      if (slots[n] >= 0) marks[slots[n] / 64u] = 0;
  }

  // Mark the tokens of the chosen units; how many.
  int64_t mark(uint64_t* marks) const {
    int64_t wanted = 0;
    if (singles()) {
      for (int64_t at = 0, place = start; at < call.units && place < call.waiting; at += 64, place += 64) {
        const int64_t left = call.waiting - place, word = place / 64, shift = place % 64;
        const uint64_t those = left < 64 ? bits(at) & ((1ull << left) - 1) : bits(at);
        wanted += __builtin_popcountll(those);
        marks[word] |= those << shift;
        if (shift && those >> (64 - shift)) marks[word + 1] |= those >> (64 - shift);
      }
      return wanted;
    }
    runs([&](int64_t first, int64_t last) {
      wanted += last - first;
      if (!order) return set(marks, first, last);
      for (int64_t n = first; n < last; ++n) marks[order[n] / 64u] |= 1ull << order[n] % 64u;
    });
    return wanted;
  }
};

// Whether sixteen slots hold tokens that wait one after the other and are all marked, as those of a page do; then they are marked no more.
inline bool run_stays(uint64_t* marks, const int32_t* slots) {
  const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int32_t first = slots[0];
  if (first < 0) return false;
  const Ints apart = loaded<LANES, Ints>(slots) ^ (lanes + first);
  uint64_t parts[LANES / 2], any = 0;
  std::memcpy(parts, &apart, sizeof(parts));
  for (uint64_t part : parts) any |= part;
  const int64_t word = first / 64, shift = first % 64;
  const uint64_t low = 0xffffull << shift, high = shift > 64 - LANES ? 0xffffull >> (64 - shift) : 0;
  if (any || (marks[word] & low) != low || (high && (marks[word + 1] & high) != high)) return false;
  marks[word] &= ~low;
  if (high) marks[word + 1] &= ~high;
  return true;
}

void find_head(const Call& call, int64_t task) {
  const int64_t row = task / call.heads, number = task % call.heads, words = words_of(call.waiting);
  const Head head(call, row, number);
  uint64_t* marks = call.marks + task * words;
  int32_t* slots = (int32_t*)part(call.slots, call.slots_strides, row, number);
  int32_t* positions = (int32_t*)part(call.positions, call.positions_strides, row, number);
  int32_t *places = call.places + task * call.capacity, *into = call.into + task * call.capacity;
  const int32_t* where = call.where ? (const int32_t*)(call.where + row * call.where_stride) : nullptr;
  const bool sparse = words > SPARSE * call.capacity && !head.singles();
  if (sparse)
    head.clear(marks, slots);
  else
    std::memset(marks, 0, words * sizeof(uint64_t));
  const int64_t wanted = head.mark(marks);

  int64_t there = 0, free = 0, made = 0;
  for (int64_t n = 0; n < call.capacity;) {  // those that are there are marked no more; `into` lists the free ones
    if (n + LANES <= call.capacity && run_stays(marks, slots + n)) {
      there += LANES, n += LANES;
      continue;
    }
    const int64_t end = n + LANES < call.capacity ? n + LANES : call.capacity;
    for (; n < end; ++n) {
      const int32_t place = slots[n];
      if (place >= 0) {
        const uint64_t bit = 1ull << place % 64u, word = marks[place / 64u];
        if (word & bit) {
          marks[place / 64u] = word & ~bit;
          ++there;
          continue;
        }
        slots[n] = -1;
        positions[n] = EMPTY;
      }
      into[free++] = (int32_t)n;
    }
  }

  auto take = [&](int64_t place) {
    if (made == free) return;
    const int64_t slot = into[made];
    slots[slot] = (int32_t)place;
    positions[slot] = where ? where[place] : (int32_t)(place + call.shift[row]);
    places[made++] = (int32_t)place;
  };
  if (wanted > there && (head.order || sparse))
    head.runs([&](int64_t first, int64_t last) {
      if (!head.order) return each(marks, first, last, take);
      for (int64_t n = first; n < last; ++n)
        if (marks[head.order[n] / 64u] >> head.order[n] % 64u & 1) take(head.order[n]);
    });
  else if (wanted > there)
    each(marks, 0, call.waiting, take);
  call.counts[2 * task] = made;
  call.counts[2 * task + 1] = there;
}

// A token that is copied: one of a head's, of those of all heads one after the other.
struct Token {
  const Call& call;
  int64_t task, number;

  // The one with number `global` of all.
  Token(const Call& call, int64_t global) : call(call), task(0), number(global) { settle(); }

  void settle() {
    for (; task < call.rows * call.heads && number >= call.counts[2 * task]; ++task) number -= call.counts[2 * task];
  }
  void next() { ++number, settle(); }

  const char* stored(const Side& side) const { return at(side.stored, side.stored_strides, call.places); }
  const char* scale(const Side& side) const { return at(side.scale, side.scale_strides, call.places); }
  char* into(const Side& side) const { return (char*)at(side.into, side.into_strides, call.into); }
  char* into_scale(const Side& side) const { return (char*)at(side.into_scale, side.into_scale_strides, call.into); }

 private:
  const char* at(const char* x, const int64_t* strides, const int32_t* list) const {
    return part(x, strides, task / call.heads, task % call.heads) + list[task * call.capacity + number] * strides[2];
  }
};

// Have the system begin to read the pages of rows of `bytes` bytes; rows in a row are one request.
template <typename Row>
void read_ahead(const Call& call, int64_t count, int64_t bytes, Row row) {
  const uintptr_t page = sysconf(_SC_PAGESIZE);
  uintptr_t begin = 0, end = 0;
  Token token(call, 0);
  for (int64_t i = 0; i <= count; ++i) {
    uintptr_t first = 0, last = 0;
    if (i < count) {
      const uintptr_t at = (uintptr_t)row(token);
      first = at / page * page, last = (at + bytes + page - 1) / page * page;
      token.next();
      if (begin <= first && first <= end) {
        end = last > end ? last : end;
        continue;
      }
    }
    if (end > begin) madvise((void*)begin, end - begin, MADV_WILLNEED);
    begin = first, end = last;
  }
}

inline void ask(const Call& call, const Token& token) {
  for (const Side& side : call.sides) {
    const char* row = token.stored(side);
    for (int64_t byte = 0; byte < side.width * bytes_of(side.stored_kind); byte += 64) __builtin_prefetch(row + byte, 0, 0);
    if (side.scale) __builtin_prefetch(token.scale(side), 0, 0);
  }
}

void copy_rows(const Call& call, int64_t task) {
  int64_t total = 0;
  for (int64_t n = 0; n < call.rows * call.heads; ++n) total += call.counts[2 * n];
  const int64_t first = task * SHARE, last = first + SHARE < total ? first + SHARE : total;
  Token token(call, first), ahead(call, first);
  for (int64_t i = first; i < first + AHEAD && i < last; ++i, ahead.next()) ask(call, ahead);
  for (int64_t i = first; i < last; ++i, token.next()) {
    if (i + AHEAD < last) ask(call, ahead), ahead.next();
    for (const Side& side : call.sides) {
      if (side.scale && !side.into_scale) {
        rebuild(token.stored(side), (const uint16_t*)token.scale(side), token.into(side), side.into_kind, side.width);
        continue;
      }
      std::memcpy(token.into(side), token.stored(side), side.width * bytes_of(side.stored_kind));
      if (side.scale) std::memcpy(token.into_scale(side), token.scale(side), sizeof(uint16_t));
    }
  }
}

}  // namespace

extern "C" void unfold_units(const Call* call) {
  Call own = *call;
  const int64_t tasks = own.rows * own.heads, words = words_of(own.waiting);
  const int64_t looks = tasks * (own.capacity + own.units / 8 + (words < own.capacity ? words : own.capacity)) / LEAST_SLOTS + 1;
  own.threads = call->threads < looks ? call->threads : looks;
  share(own, find_head, tasks);

  int64_t total = 0;
  std::memset(own.out, 0, 2 * own.rows * sizeof(int64_t));
  for (int64_t task = 0; task < tasks; ++task) {
    total += own.counts[2 * task];
    for (int64_t side = 0; side < 2; ++side) own.out[task / own.heads * 2 + side] += own.counts[2 * task + side];
  }
  for (const Side& side : own.sides) {
    if (!own.in_file) break;
    read_ahead(own, total, side.width * bytes_of(side.stored_kind), [&](const Token& token) { return token.stored(side); });
    if (side.scale) read_ahead(own, total, sizeof(uint16_t), [&](const Token& token) { return token.scale(side); });
  }
  const int64_t most = (total + LEAST - 1) / LEAST;
  own.threads = call->threads < most ? call->threads : most;
  share(own, copy_rows, (total + SHARE - 1) / SHARE);
}
