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
  for (int64_t s = 0; s < (Stages ? Stages : stages); ++s) {
    Together x;
    std::memcpy(&x, table + (s * VECTORS + code[s]) * ROWS, sizeof(x));
    sum += x;
  }
  return sum;
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
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < there; ++i) out[row * call.count + n + i] = sums[i][row];
  };
  int64_t n = 0;  // whole registers of units apart: their number is one that the compiler knows
  for (; n + LANES <= count; n += LANES) some(n, LANES);
  if (n < count) some(n, count - n);
}

}  // namespace

extern "C" void sketch_logits(const Call* call) {
  share(*call, call->stages == 4 ? part_of<4> : call->stages == 2 ? part_of<2> : part_of<0>, call->heads * call->groups * call->parts());
}
