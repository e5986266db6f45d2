// Selection under a budget: units in order of their best score, as long as their costs fit. Nothing is sorted, and most units are read
// once: a sample tells a score below which the cut cannot lie, and the cut's bits are found one by one among the units above it.
//
// A `Head` has `units`; `allowance`; `costs()`, whether units have costs of their own; `cost(place)`, 1 where not, at least 0, for a number
// that may have PARTLY; and `rows(use)`, which calls use(scores, threshold) for each of its rows of scores: it wants what is above that.

namespace {

constexpr int ROUND = 8;                                         // bits of a key that are found before the keys that have them
constexpr int64_t FEW = 512;                                     // are taken aside, where they are no more
constexpr int64_t SAMPLES = 2048, SHARE = 8;                     // a sample is one unit in SHARE, and SAMPLES at most
constexpr int64_t MOST_SAMPLES = SAMPLES + SAMPLES / SHARE + 1;  // or a few more, as its stride is whole
constexpr int64_t LEAST_SAMPLES = 256;                           // where it would be smaller, none is taken
constexpr uint32_t PARTLY = 1u << 31;                            // beside the number of a unit that some row does not want
constexpr float NONE = -__builtin_inff(), LOWEST = -__FLT_MAX__;

// The best score that is wanted of a unit, or NONE; whether some row does not want it.
template <typename Head>
float best_of(const Head& head, int64_t unit, bool& partly) {
  float found = NONE;
  partly = false;
  head.rows([&](const float* score, float threshold) {
    float x = score[unit] > threshold ? score[unit] : NONE;
    found = x > found ? x : found;
    partly |= x == NONE;
  });
  return found;
}

// In the order of the numbers; of those above -infinity none is 0. Zeros are one number.
inline PieceWords keys_of(Piece x) {
  PieceWords bits = (PieceWords)(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

inline uint32_t key_of(float x) { return keys_of(Piece{} + x)[0]; }

inline float number_of(uint32_t key) {
  uint32_t bits = key >> 31 ? key & 0x7fffffffu : ~key;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Append the lanes of `x` that `those` has to `to`, which has room for a whole register, in their order.
inline void append(PieceWords x, uint32_t those, uint32_t* to) {
#ifdef __AVX512F__
  using Lanes = int __attribute__((vector_size(REGISTER_BYTES)));
  Lanes packed = __builtin_ia32_compresssi512_mask((Lanes)x, Lanes{}, (uint16_t)those);
  std::memcpy(to, &packed, sizeof(packed));
#else
  uint32_t lanes[PIECE];
  std::memcpy(lanes, &x, sizeof(x));
  for (; those; those &= those - 1) *to++ = lanes[__builtin_ctz(those)];
#endif
}

// The lanes of which a comparison holds, as bits.
inline uint32_t lanes_of(PieceInts holds) {
#if defined(__AVX512DQ__)
  using Lanes = int __attribute__((vector_size(REGISTER_BYTES)));
  return (uint32_t)__builtin_ia32_cvtd2mask512((Lanes)holds);
#elif defined(__AVX__) && !defined(__AVX512F__)
  return (uint32_t)__builtin_ia32_movmskps256((Piece)holds);
#else
  uint32_t found = 0;
  for (int64_t lane = 0; lane < PIECE; ++lane) found |= holds[lane] ? 1u << lane : 0;
  return found;
#endif
}

// What units with keys from `least` on cost together.
template <typename Head>
int64_t paid_from(const Head& head, uint32_t least, const uint32_t* keys, const uint32_t* places, int64_t count) {
  int64_t paid = 0;
  if (head.costs()) {
    for (int64_t n = 0; n < count; ++n) paid += keys[n] >= least ? head.cost(places[n]) : 0;
    return paid;
  }
  uint32_t units = 0;
  for (int64_t n = 0; n < count; ++n) units += keys[n] >= least;
  return units;
}

inline PieceWords words_from(const uint32_t* from) {
  PieceWords x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

// Take aside keys from `least` to `most` and their places, if they are FEW at most; how many they are, or more than FEW.
inline int64_t take(uint32_t least, uint32_t most, const uint32_t* keys, const uint32_t* places, int64_t count, uint32_t* few,
                    uint32_t* of_few) {
  int64_t kept = 0;
  for (int64_t n = 0; n < count && kept <= FEW; n += PIECE) {
    const PieceWords key = words_from(keys + n);
    uint32_t those = lanes_of((key >= least) & (key <= most));
    if (count - n < PIECE) those &= (1u << (count - n)) - 1;
    if (!those) continue;
    append(key, those, few + kept);
    append(words_from(places + n), those, of_few + kept);
    kept += __builtin_popcount(those);
  }
  return kept;
}

// The key at which `allowance` is used up: all units with greater ones are paid for, which is taken off it, and those with this one
// together are not. 0 where all fit. Of the keys and places, PIECE more than `count` can be read.
template <typename Head>
uint32_t cut(const Head& head, const uint32_t* keys, const uint32_t* places, int64_t count, int64_t& allowance) {
  uint32_t few[FEW + 2 * PIECE], of_few[FEW + 2 * PIECE], least = ~0u, most = 0;
  auto paid = [&](uint32_t from) { return paid_from(head, from, keys, places, count); };
  const int64_t all = paid(0);
  if (all <= allowance) {
    allowance -= all;
    return 0;
  }
  for (int64_t n = 0; n < count; ++n) least = keys[n] < least ? keys[n] : least, most = keys[n] > most ? keys[n] : most;
  int low = least == most ? 0 : 32 - __builtin_clz(least ^ most);  // bits from `low` on are found: all keys have them
  uint32_t found = low == 32 ? 0 : most >> low << low;
  while (low > 0) {
    for (const int end = low > ROUND ? low - ROUND : 0; low > end;)
      if (paid(found | 1u << --low) > allowance) found |= 1u << low;
    const uint32_t last = found | ((1u << low) - 1);
    const int64_t above = ~last ? paid(last + 1) : 0;
    const int64_t kept = low ? take(found, last, keys, places, count, few, of_few) : 0;
    if (kept > FEW) continue;
    allowance -= above;
    keys = few, places = of_few, count = kept;
  }
  return found;
}

// A score that the cut is not below, as far as a sample can tell: four standard deviations of how many of it are above the cut.
template <typename Head>
float bound(const Head& head, uint32_t* keys, uint32_t* places) {
  const int64_t units = head.units, samples = units / SHARE < SAMPLES ? units / SHARE : SAMPLES;
  if (samples < LEAST_SAMPLES) return LOWEST;
  const int64_t stride = units / samples;
  int64_t count = 0, paid = 0;
  float best[MOST_SAMPLES];
  for (int64_t unit = 0; unit < units; unit += stride) best[count++] = NONE;
  head.rows([&](const float* score, float threshold) {
    for (int64_t n = 0; n < count; ++n) {
      const float x = score[n * stride];
      best[n] = (x > threshold) & (x > best[n]) ? x : best[n];
    }
  });
  for (int64_t n = 0; n < count; ++n) {
    keys[n] = best[n] > NONE ? key_of(best[n]) : 0;
    places[n] = (uint32_t)(n * stride);
    paid += head.cost(places[n]);
  }
  const double each = (double)paid / (double)count;  // what a unit costs
  const double above = (double)head.allowance / (each * (double)stride);
  if (!(above < (double)count)) return LOWEST;
  int64_t enough = (int64_t)((above + 4 * __builtin_sqrt(above) + 2) * each);
  uint32_t key = cut(head, keys, places, count, enough);
  return key ? number_of(key) : LOWEST;
}

// Finds the units whose best score is at least `least`, above NONE. Returns how many; paid: what they cost together.
template <typename Head>
int64_t candidates(const Head& head, float least, uint32_t* keys, uint32_t* places, int64_t& paid) {
  const int64_t units = head.units;
  const Piece none = Piece{} + NONE;
  PieceWords lanes;
  for (uint32_t lane = 0; lane < PIECE; ++lane) lanes[lane] = lane;
  int64_t count = 0, at = 0;
  for (; at + PIECE <= units; at += PIECE) {
    Piece best = none, worst = -none;
    head.rows([&](const float* score, float threshold) {
      Piece x = piece_at(score + at);
      x = x > threshold ? x : none;
      best = larger(x, best);
      worst = x < worst ? x : worst;
    });
    const uint32_t reach = lanes_of(best >= least);
    if (!reach) continue;
    append(keys_of(best), reach, keys + count);
    append((lanes + (uint32_t)at) | (worst == none ? PieceWords{} + PARTLY : PieceWords{}), reach, places + count);
    count += __builtin_popcount(reach);
  }
  for (; at < units; ++at) {
    bool partly;
    const float best = best_of(head, at, partly);
    if (best < least) continue;
    keys[count] = key_of(best);
    places[count++] = (uint32_t)at | (partly ? PARTLY : 0);
  }
  paid = count;
  if (head.costs())
    for (int64_t n = paid = 0; n < count; ++n) paid += head.cost(places[n]);
  return count;
}

// `use(place, whether it is chosen)` for units that may be, each chosen one among them once; place: its number, with PARTLY where some row
// does not want it. keys, places: [units + LANES], scratch.
template <typename Head, typename Use>
void select(const Head& head, uint32_t* keys, uint32_t* places, Use use) {
  int64_t allowance = head.allowance;
  if (allowance < 0) return;
  const float least = bound(head, keys, places);
  int64_t paid, count = candidates(head, least, keys, places, paid);
  if (least > LOWEST && paid <= allowance) count = candidates(head, LOWEST, keys, places, paid);  // the sample misled
  const uint32_t last = cut(head, keys, places, count, allowance);
  for (int64_t n = 0; n < count; ++n) use(places[n], keys[n] > last);
  for (int64_t at = 0; at < count && last; at += PIECE) {  // equal ones in the order of their places
    uint32_t those = lanes_of(words_from(keys + at) == last);
    if (count - at < PIECE) those &= (1u << (count - at)) - 1;
    for (; those; those &= those - 1) {
      const uint32_t place = places[at + __builtin_ctz(those)];
      if ((allowance -= head.cost(place)) < 0) return;
      use(place, true);
    }
  }
}

}  // namespace
