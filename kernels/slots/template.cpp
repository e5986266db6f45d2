// Which slots of a workspace hold what: one KV head after the other, each read and written once.
//
// wanted and held are bool [heads, segments]; segment, tokens int64 and positions int32 are [heads, slots], -1 and EMPTY where a
// slot holds nothing. Rows follow one another.

namespace {

constexpr int64_t WORD = 8;

// The first segment from `at` on whose bytes differ in a and b; `count` where there is none.
int64_t next_difference(const uint8_t* a, const uint8_t* b, int64_t at, int64_t count) {
  while (at + WORD <= count) {
    uint64_t x, y;
    __builtin_memcpy(&x, a + at, WORD);
    __builtin_memcpy(&y, b + at, WORD);
    if (x != y) return at + __builtin_ctzll(x ^ y) / 8;
    at += WORD;
  }
  while (at < count && a[at] == b[at]) ++at;
  return at;
}

}  // namespace

extern "C" {

// Empty the slots of segments that are not wanted. kept [heads]: slots that stay full; missing [heads]: tokens of the wanted segments that
// are not held.
void release(const uint8_t* wanted, const uint8_t* held, const int64_t* length, int64_t* segment, int64_t* tokens,
             int32_t* positions, int64_t* kept, int64_t* missing, int64_t heads, int64_t segments, int64_t slots, int64_t empty) {
  for (int64_t head = 0; head < heads; ++head) {
    const uint8_t *want = wanted + head * segments, *have = held + head * segments;
    int64_t lacking = 0, full = 0;
    for (int64_t s = next_difference(want, have, 0, segments); s < segments; s = next_difference(want, have, s + 1, segments))
      if (want[s]) lacking += length[s];
    for (int64_t slot = head * slots; slot < (head + 1) * slots; ++slot) {
      if (segment[slot] < 0) continue;
      if (want[segment[slot]]) {
        ++full;
      } else {
        segment[slot] = tokens[slot] = -1;
        positions[slot] = (int32_t)empty;
      }
    }
    kept[head] = full;
    missing[head] = lacking;
  }
}

// Give each missing token of a head its first free slot, in the order of segments. For each of them: at, its place among the slots of all
// heads; owner, its head.
void assign(const uint8_t* wanted, const uint8_t* held, const int64_t* length, const int64_t* start, int64_t* segment,
            int64_t* tokens, int64_t* at, int64_t* owner, int64_t heads, int64_t segments, int64_t slots) {
  int64_t made = 0;
  for (int64_t head = 0; head < heads; ++head) {
    const uint8_t *want = wanted + head * segments, *have = held + head * segments;
    int64_t slot = head * slots;
    for (int64_t s = next_difference(want, have, 0, segments); s < segments; s = next_difference(want, have, s + 1, segments)) {
      if (!want[s]) continue;
      for (int64_t token = 0; token < length[s]; ++token, ++slot, ++made) {
        while (segment[slot] >= 0) ++slot;
        segment[slot] = s;
        tokens[slot] = start[s] + token;
        at[made] = slot;
        owner[made] = head;
      }
    }
  }
}

// One more than the last slot that any head uses.
void extent(const int64_t* segment, int64_t* last, int64_t heads, int64_t slots) {
  *last = 0;
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t slot = slots; slot > *last; --slot)
      if (segment[head * slots + slot - 1] >= 0) *last = slot;
}

}  // extern "C"
