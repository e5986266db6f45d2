// Selection under a budget: units in order of their best score, as long as their costs fit. Nothing is sorted, and most units are read
// once: a sample tells a score below which the cut cannot lie, and a radix search among the units above it finds the cut.

namespace {

constexpr int DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS;
constexpr int64_t SAMPLES = 2048, SHARE = 8;  // a sample is one unit in SHARE, and SAMPLES at most
constexpr int64_t LEAST_SAMPLES = 256;        // where it would be smaller, none is taken
constexpr uint32_t PARTLY = 1u << 31;
constexpr float NONE = -__builtin_inff(), LOWEST = -__FLT_MAX__;

// Fields of 8 bytes each, as semkv.kernels.selection.cpp writes them. Strides of `score` are numbers.
struct Call {
  const float* score;      // [heads, group, tokens, units]
  const float* threshold;  // [heads, group]: a query head wants what is above it
  const int64_t* cost;     // [heads, units], or null: 1 each
  uint32_t* keys;          // [heads, units + LANES], scratch: the keys of the candidates
  uint32_t* places;        // [heads, units + LANES], scratch: their numbers, ascending, with PARTLY where some row does not want one
  uint8_t* chosen;         // [heads, units]
  uint8_t* differ;         // [heads]: whether a chosen unit is one that some query head or token does not want
  int64_t* taken;          // [heads]: how many are chosen
  int64_t heads, group, tokens, units, allowance;
  int64_t head_stride, group_stride, token_stride, threads;
  Parallel parallel;
};

// A KV head's part of a call.
struct Head {
  const Call& call;
  const int64_t number;

  int64_t cost(uint32_t place) const { return call.cost ? call.cost[number * call.units + (place & ~PARTLY)] : 1; }

  // `use(scores of a query head and token, its threshold)` for all of the group.
  template <typename Use>
  void rows(Use use) const {
    for (int64_t query = 0; query < call.group; ++query)
      for (int64_t token = 0; token < call.tokens; ++token)
        use(call.score + number * call.head_stride + query * call.group_stride + token * call.token_stride,
            call.threshold[number * call.group + query]);
  }

  // The best score that is wanted of a unit, or NONE; whether some row does not want it.
  float best(int64_t unit, bool& partly) const {
    float found = NONE;
    partly = false;
    rows([&](const float* score, float threshold) {
      float x = score[unit] > threshold ? score[unit] : NONE;
      found = x > found ? x : found;
      partly |= x == NONE;
    });
    return found;
  }
};

// In the order of the numbers; of those above -infinity none is 0. Zeros are one number.
inline Words keys_of(Floats x) {
  Words bits = (Words)(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

inline uint32_t key_of(float x) { return keys_of(Floats{} + x)[0]; }

inline float number_of(uint32_t key) {
  uint32_t bits = key >> 31 ? key & 0x7fffffffu : ~key;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// The key at which `allowance` is used up: all units with greater ones are paid for, which is taken off it, and those with this one
// together are not. 0 where all fit.
uint32_t cut(const Head& head, const uint32_t* keys, const uint32_t* places, int64_t count, int64_t& allowance) {
  uint32_t least = ~0u, most = 0;
  for (int64_t n = 0; n < count; ++n) least = keys[n] < least ? keys[n] : least, most = keys[n] > most ? keys[n] : most;
  if (!count) return 0;
  int low = least == most ? 1 : 32 - __builtin_clz(least ^ most);  // bits from `low` on are found: all keys have them
  uint32_t found = low == 32 ? 0 : most >> low << low;
  while (low > 0) {
    int high = low;
    low = high > DIGIT_BITS ? high - DIGIT_BITS : 0;
    int64_t sums[DIGITS] = {};
    for (int64_t n = 0; n < count; ++n)
      if (high == 32 || keys[n] >> high == found >> high) sums[keys[n] >> low & ((1u << (high - low)) - 1)] += head.cost(places[n]);
    int digit = (1 << (high - low)) - 1;
    for (; digit >= 0 && sums[digit] <= allowance; --digit) allowance -= sums[digit];
    if (digit < 0) return 0;
    found |= (uint32_t)digit << low;
  }
  return found;
}

// A score that the cut is not below, as far as a sample can tell: four standard deviations of how many of it are above the cut.
float bound(const Head& head, uint32_t* keys, uint32_t* places) {
  const int64_t units = head.call.units, samples = units / SHARE < SAMPLES ? units / SHARE : SAMPLES;
  if (samples < LEAST_SAMPLES) return LOWEST;
  const int64_t stride = units / samples;
  int64_t count = 0, paid = 0;
  for (int64_t unit = 0; unit < head.call.units; unit += stride, ++count) {
    bool partly;
    float x = head.best(unit, partly);
    keys[count] = x > NONE ? key_of(x) : 0;
    places[count] = (uint32_t)unit;
    paid += head.cost((uint32_t)unit);
  }
  const double each = (double)paid / (double)count;  // what a unit costs
  const double above = (double)head.call.allowance / (each * (double)stride);
  if (!(above < (double)count)) return LOWEST;
  int64_t enough = (int64_t)((above + 4 * __builtin_sqrt(above) + 2) * each);
  uint32_t key = cut(head, keys, places, count, enough);
  return key ? number_of(key) : LOWEST;
}

// Append the lanes of `x` that `those` has to `to`, which has room for all sixteen, in their order.
inline void append(Words x, uint32_t those, uint32_t* to) {
#ifdef __AVX512F__
  using Lanes = int __attribute__((vector_size(4 * LANES)));
  Lanes packed = __builtin_ia32_compresssi512_mask((Lanes)x, Lanes{}, (uint16_t)those);
  std::memcpy(to, &packed, sizeof(packed));
#else
  uint32_t lanes[LANES];
  std::memcpy(lanes, &x, sizeof(x));
  for (; those; those &= those - 1) *to++ = lanes[__builtin_ctz(those)];
#endif
}

// The lanes of which a comparison holds, as bits.
inline uint32_t lanes_of(Ints holds) {
#ifdef __AVX512DQ__
  using Lanes = int __attribute__((vector_size(4 * LANES)));
  return (uint32_t)__builtin_ia32_cvtd2mask512((Lanes)holds);
#else
  const Words bit = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  Words bits = (Words)holds & bit;
  uint32_t found = 0;
  for (int64_t lane = 0; lane < LANES; ++lane) found |= bits[lane];
  return found;
#endif
}

// Finds the units whose best score is at least `least`, above NONE. Returns how many; paid: what they cost together.
int64_t candidates(const Head& head, float least, uint32_t* keys, uint32_t* places, int64_t& paid) {
  const int64_t units = head.call.units;
  const Floats none = Floats{} + NONE;
  const Words lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int64_t count = 0, at = 0;
  for (; at + LANES <= units; at += LANES) {
    Floats best = none, worst = -none;
    head.rows([&](const float* score, float threshold) {
      Floats x = load(score + at);
      x = x > threshold ? x : none;
      best = x > best ? x : best;
      worst = x < worst ? x : worst;
    });
    const uint32_t reach = lanes_of(best >= least);
    append(keys_of(best), reach, keys + count);
    append((lanes + (uint32_t)at) | (worst == none ? Words{} + PARTLY : Words{}), reach, places + count);
    count += __builtin_popcount(reach);
  }
  for (; at < units; ++at) {
    bool partly;
    const float best = head.best(at, partly);
    if (best < least) continue;
    keys[count] = key_of(best);
    places[count++] = (uint32_t)at | (partly ? PARTLY : 0);
  }
  paid = count;
  if (head.call.cost)
    for (int64_t n = paid = 0; n < count; ++n) paid += head.cost(places[n]);
  return count;
}

void select_head(const Call& call, int64_t number) {
  const Head head = {call, number};
  uint32_t *keys = call.keys + number * (call.units + LANES), *places = call.places + number * (call.units + LANES);
  uint8_t* chosen = call.chosen + number * call.units;
  const float least = bound(head, keys, places);
  int64_t paid, count = candidates(head, least, keys, places, paid);
  if (least > LOWEST && paid <= call.allowance) count = candidates(head, LOWEST, keys, places, paid);  // the sample misled

  int64_t allowance = call.allowance, taken = 0;
  const uint32_t last = cut(head, keys, places, count, allowance);
  std::memset(chosen, 0, call.units);
  uint32_t partly = 0;
  for (int64_t n = 0; n < count; ++n) {
    const bool above = keys[n] > last;
    chosen[places[n] & ~PARTLY] = above;
    taken += above;
    partly |= above ? places[n] : 0;
  }
  for (int64_t n = 0; n < count && last; ++n) {  // equal ones in the order of their places
    if (keys[n] != last) continue;
    if ((allowance -= head.cost(places[n])) < 0) break;
    chosen[places[n] & ~PARTLY] = 1;
    ++taken;
    partly |= places[n];
  }
  call.differ[number] = (partly & PARTLY) != 0;
  call.taken[number] = taken;
}

}  // namespace

extern "C" void select_units(const Call* call) { share(*call, select_head, call->heads); }
