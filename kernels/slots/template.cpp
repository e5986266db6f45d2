// Which slots of a workspace hold what: each KV head's are a task, read and written once.

namespace {

constexpr uint64_t GATHER = 0x0102040810204080;  // times eight bytes of 0 and 1: the highest byte has them as bits, the first lowest

// Fields of 8 bytes each, as semkv.kernels.slots.cpp writes them. -1 and `empty` stand in slots that hold nothing.
struct Call {
  const uint8_t* wanted;    // [heads, segments] of 0 and 1
  const uint8_t* held;      // [heads, known]: what comes behind is not held
  const int64_t* length;    // [segments]: tokens; this table and the next two are not read where `even_length` is not 0
  const int64_t* position;  // [segments]: of the first token
  const int64_t* start;     // [segments]: its place on the host
  int64_t* segment;         // [heads, slots]
  int64_t* tokens;          // [heads, slots]
  int32_t* positions;       // [heads, slots]
  int64_t* kept;            // [heads]: slots that stay full
  int64_t* missing;         // [heads]: tokens of wanted segments that are not held
  int64_t *at, *owner, *place;  // [sum of missing]: of each of those tokens its place among the slots of all heads, its head, its place
  int32_t* where;               // [sum of missing]: its position
  int64_t heads, segments, known, slots, empty;
  int64_t even_length, even_position, even_start;  // segments that follow each other: the length of all, and what the first has
  int64_t threads;
  Parallel parallel;

  int64_t tokens_of(int64_t n) const { return even_length ? even_length : length[n]; }
  int64_t position_of(int64_t n) const { return even_length ? even_position + n * even_length : position[n]; }
  int64_t start_of(int64_t n) const { return even_length ? even_start + n * even_length : start[n]; }
};

// Eight bytes of a row of `count` from `at` on, 0 behind its end.
inline uint64_t bytes_from(const uint8_t* row, int64_t at, int64_t count) {
  uint64_t x = 0;
  if (at + 8 <= count)
    std::memcpy(&x, row + at, 8);
  else if (at < count)
    std::memcpy(&x, row + at, count - at);
  return x;
}

// Bits of the 64 segments from `at` on: those of `wanted`, a row of `segments`, that are not in `held`, a row of `known`.
inline uint64_t lacking_of(const uint8_t* wanted, int64_t segments, const uint8_t* held, int64_t known, int64_t at) {
  uint64_t bits = 0;
  for (int64_t place = 0; place < 64; place += 8)
    bits |= (bytes_from(wanted, at + place, segments) & ~bytes_from(held, at + place, known)) * GATHER >> 56 << place;
  return bits;
}

// `use(segment)` for the wanted segments of a head that are not held, ascending.
template <typename Use>
inline void lacking(const Call& call, int64_t head, Use use) {
  const uint8_t *want = call.wanted + head * call.segments, *have = call.held + head * call.known;
  for (int64_t at = 0; at < call.segments; at += 64)
    for (uint64_t those = lacking_of(want, call.segments, have, call.known, at); those; those &= those - 1)
      use(at + __builtin_ctzll(those));
}

void release_head(const Call& call, int64_t head) {
  const uint8_t* want = call.wanted + head * call.segments;
  int64_t missing = 0, kept = 0;
  lacking(call, head, [&](int64_t segment) { missing += call.tokens_of(segment); });
  for (int64_t slot = head * call.slots; slot < (head + 1) * call.slots; ++slot) {
    const int64_t segment = call.segment[slot];
    const bool stays = segment >= 0 ? want[segment] : false;
    kept += stays;
    call.segment[slot] = stays ? segment : -1;
    call.tokens[slot] = stays ? call.tokens[slot] : -1;
    call.positions[slot] = stays ? call.positions[slot] : (int32_t)call.empty;
  }
  call.kept[head] = kept;
  call.missing[head] = missing;
}

void assign_head(const Call& call, int64_t head) {
  int64_t made = 0, slot = head * call.slots;
  for (int64_t before = 0; before < head; ++before) made += call.missing[before];
  lacking(call, head, [&](int64_t segment) {
    const int64_t count = call.tokens_of(segment), start = call.start_of(segment), position = call.position_of(segment);
    for (int64_t token = 0; token < count; ++token, ++slot, ++made) {
      while (call.segment[slot] >= 0) ++slot;
      call.segment[slot] = segment;
      call.tokens[slot] = call.place[made] = start + token;
      call.at[made] = slot;
      call.owner[made] = head;
      call.where[made] = (int32_t)(position + token);
    }
  });
}

}  // namespace

extern "C" {

// Empty the slots of segments that are not wanted, and count: `kept`, `missing`.
void release(const Call* call) { share(*call, release_head, call->heads); }

// Give each missing token of a head its first free slot, in the order of segments, and list them: `at`, `owner`, `place`, `where`.
void assign(const Call* call) { share(*call, assign_head, call->heads); }

// One more than the last slot that any head uses, to the first of `kept`.
void extent(const Call* call) {
  int64_t last = 0;
  for (int64_t head = 0; head < call->heads; ++head)
    for (int64_t slot = call->slots; slot > last; --slot)
      if (call->segment[head * call->slots + slot - 1] >= 0) last = slot;
  *call->kept = last;
}

}  // extern "C"
