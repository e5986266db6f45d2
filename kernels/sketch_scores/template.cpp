// Sums of what codes of a byte look up in tables, for ROWS rows of queries at a time, 4 or 8: their numbers lie together, so that a lookup
// is one load. A task is a part of the tokens of one head and one group of rows.

namespace {

constexpr int64_t VECTORS = 256, TASK = 4096;
using Together = float __attribute__((vector_size(4 * ROWS)));

// Fields of 8 bytes each, as semkv.kernels.sketch_scores.cpp writes them.
struct Call {
  const float* tables;   // [heads, groups, stages, VECTORS, ROWS]
  const uint8_t* codes;  // [heads, count, stages], heads `head_stride` bytes apart
  float* out;            // [heads, rows, count]
  int64_t heads, rows, groups, count, stages, head_stride, threads;
  Parallel parallel;

  int64_t parts() const { return (count + TASK - 1) / TASK; }
};

template <int64_t Stages>
inline Together looked_up(const float* table, const uint8_t* code, int64_t stages) {
  Together sum = {};
  auto add = [&](int64_t bytes) {
    Together x;
    std::memcpy(&x, (const char*)table + bytes, sizeof(x));
    sum += x;
  };
  constexpr uint64_t EACH = sizeof(Together);
  if (Stages == 4 || Stages == 2) {  // all codes of a unit in one load
    uint64_t all = 0;
    std::memcpy(&all, code, Stages);
    for (int64_t s = 0; s < Stages; ++s) add(s * VECTORS * EACH + (all * EACH >> 8 * s & 255 * EACH));
    return sum;
  }
  for (int64_t s = 0; s < stages; ++s) add((s * VECTORS + code[s]) * EACH);
  return sum;
}

// Sums of sixteen units, each with those of its ROWS queries, as a register of units for each query. Where they go through memory, a
// register is loaded from bytes that are on their way there in parts, and waits for them.
template <int64_t Rows, typename Vector>
inline void turned(const Vector* sums, Floats* lines) {
  for (int64_t n = 0; n < Rows; ++n) {
    if constexpr (Rows == 8) {
      lines[n] = __builtin_shufflevector(sums[2 * n], sums[2 * n + 1], 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    } else {
      const auto low = __builtin_shufflevector(sums[4 * n], sums[4 * n + 1], 0, 1, 2, 3, 4, 5, 6, 7);
      const auto high = __builtin_shufflevector(sums[4 * n + 2], sums[4 * n + 3], 0, 1, 2, 3, 4, 5, 6, 7);
      lines[n] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    }
  }
  for (int64_t left = ROWS; left > 1; left /= 2) {  // what is of every second query first
    Floats made[ROWS];
    for (int64_t n = 0; n < ROWS / 2; ++n) {
      made[n] = evens(lines[2 * n], lines[2 * n + 1]);
      made[n + ROWS / 2] = odds(lines[2 * n], lines[2 * n + 1]);
    }
    for (int64_t n = 0; n < ROWS; ++n) lines[n] = made[n];
  }
}

// Stages: where the compiler knows them, else 0.
template <int64_t Stages>
void part_of(const Call& call, int64_t task) {
  const int64_t part = task % call.parts(), group = task / call.parts() % call.groups, head = task / call.parts() / call.groups;
  const int64_t first = part * TASK, count = call.count - first < TASK ? call.count - first : TASK;
  const int64_t rows = call.rows - group * ROWS < ROWS ? call.rows - group * ROWS : ROWS;
  const float* table = call.tables + (head * call.groups + group) * call.stages * VECTORS * ROWS;
  const uint8_t* codes = call.codes + head * call.head_stride + first * call.stages;
  float* out = call.out + (head * call.rows + group * ROWS) * call.count + first;
  auto some = [&](int64_t n, int64_t there) __attribute__((always_inline)) {
    Together sums[LANES];
    for (int64_t i = 0; i < LANES; ++i) sums[i] = looked_up<Stages>(table, codes + (n + (i < there ? i : 0)) * call.stages, call.stages);
    Floats lines[ROWS];
    turned<ROWS>(sums, lines);
    for (int64_t row = 0; row < rows; ++row) std::memcpy(out + row * call.count + n, &lines[row], there * sizeof(float));
  };
  int64_t n = 0;
  for (; n + LANES <= count; n += LANES) some(n, LANES);
  if (n < count) some(n, count - n);
}

}  // namespace

extern "C" void sketch_logits(const Call* call) {
  share(*call, call->stages == 4 ? part_of<4> : call->stages == 2 ? part_of<2> : part_of<0>, call->heads * call->groups * call->parts());
}
