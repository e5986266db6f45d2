// Selection under a budget: units in order of their best score, as long as their costs fit. Nothing is sorted: a radix search finds the
// digit in which the cut lies, from the highest on, and looks again at nothing but the units that have it.

namespace {

constexpr int DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS;

// Fields of 8 bytes each, as semkv.kernels.selection.cpp writes them.
struct Call {
  const float* score;      // [heads, rows, units]; rows are the query heads of a group and their tokens
  const float* threshold;  // [heads, rows]: a row wants what is above it
  const int64_t* cost;     // [heads, units], or null: 1 each
  uint32_t* keys;          // [heads, 2, units], scratch: keys, then units in which the cut may lie
  uint8_t* partly;         // [heads, units], scratch: which units some rows do not want
  uint8_t* chosen;         // [heads, units]
  uint8_t* differ;         // [heads]: whether a chosen unit is one that some rows do not want
  int64_t heads, rows, units, allowance, threads;
  Parallel parallel;
};

// In the order of the numbers, and 0 for -infinity.
inline Words keys_of(Floats x) {
  Words bits = (Words)(x + 0.0f);  // zeros are one number
  Words key = bits >> 31 ? ~bits : bits | 0x80000000u;
  return x == -__builtin_inff() ? Words{} : key;
}

// The best score of each unit as a key, and whether some row does not want it.
void rank(const Call& call, int64_t head, uint32_t* keys, uint8_t* partly) {
  const Floats none = Floats{} - __builtin_inff();
  for (int64_t n = 0; n < call.units; n += LANES) {
    int64_t left = call.units - n < LANES ? call.units - n : LANES;
    Floats best = none, worst = -none;
    for (int64_t row = 0; row < call.rows; ++row) {
      const float* from = call.score + (head * call.rows + row) * call.units + n;
      Floats x = none;
      left == LANES ? std::memcpy(&x, from, sizeof(x)) : std::memcpy(&x, from, left * sizeof(float));
      x = x > call.threshold[head * call.rows + row] ? x : none;
      best = x > best ? x : best;
      worst = x < worst ? x : worst;
    }
    Words key = keys_of(best);
    std::memcpy(keys + n, &key, left * sizeof(uint32_t));
    Bytes some = __builtin_convertvector(worst == none, Bytes) & 1;
    std::memcpy(partly + n, &some, left);
  }
}

// What of `allowance` is left when all units above the digit with the cut are paid for; the digit, or -1 where all fit.
int cut(const int64_t* sums, int64_t& allowance) {
  for (int digit = DIGITS - 1; digit >= 0; --digit) {
    if (sums[digit] > allowance) return digit;
    allowance -= sums[digit];
  }
  return -1;
}

void select_head(const Call& call, int64_t head) {
  uint32_t *keys = call.keys + head * 2 * call.units, *near = keys + call.units;
  uint8_t *partly = call.partly + head * call.units, *__restrict chosen = call.chosen + head * call.units;
  const int64_t* cost = call.cost ? call.cost + head * call.units : nullptr;
  rank(call, head, keys, partly);

  int64_t count = call.units, allowance = call.allowance, last = 0;
  uint32_t least = 1;  // keys from it on are chosen
  for (int shift = 32 - DIGIT_BITS; count && last >= 0; shift = shift > DIGIT_BITS ? shift - DIGIT_BITS : 0) {
    int64_t sums[DIGITS] = {};
    bool first = shift == 32 - DIGIT_BITS;
    for (int64_t n = 0; n < count; ++n) {
      uint32_t unit = first ? n : near[n];
      if (keys[unit]) sums[keys[unit] >> shift & (DIGITS - 1)] += cost ? cost[unit] : 1;
    }
    last = cut(sums, allowance);
    if (last < 0) break;
    uint32_t prefix = (first ? 0 : least >> (shift + DIGIT_BITS) << (shift + DIGIT_BITS)) | (uint32_t)last << shift;
    int64_t kept = 0;
    for (int64_t n = 0; n < count; ++n) {
      uint32_t unit = first ? n : near[n];
      if (keys[unit] >> shift == prefix >> shift) near[kept++] = unit;
    }
    count = kept;
    least = prefix;
    if (shift == 0) break;
  }
  if (last >= 0) ++least;  // those at the cut have one key now, and come in the order of their places
  uint8_t differs = 0;
  for (int64_t n = 0; n < call.units; ++n) {
    uint8_t taken = keys[n] >= least;
    chosen[n] = taken;
    differs |= taken & partly[n];
  }
  for (int64_t n = 0; n < count && last >= 0; ++n) {
    uint32_t unit = near[n];
    allowance -= cost ? cost[unit] : 1;
    if (allowance < 0) break;
    chosen[unit] = 1;
    differs |= partly[unit];
  }
  call.differ[head] = differs;
}

}  // namespace

extern "C" void select_units(const Call* call) { share(*call, select_head, call->heads); }
