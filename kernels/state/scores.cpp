// Log-softmax of rows over as many numbers as there are, and the logarithm of their mass: each part of a row finds its largest number and
// what its exponentials sum up to beside it; then all of a row's parts together say what to take off.

#include <cmath>

namespace {

constexpr float NONE = -__builtin_inff();

// Fields of 8 bytes each, as semkv.kernels.state.scores writes them. Strides are numbers.
struct Call {
  const float* logits;   // [rows, heads, queries, size]
  const int64_t* count;  // [rows]
  float* out;            // [rows, heads, queries, size]
  float* mass;           // [rows, heads, queries]
  float* partial;        // [rows, heads, queries, parts, 2]: largest number and sum of exponentials
  int64_t rows, heads, queries, size, part, strides[3], threads;
  Parallel parallel;

  int64_t parts() const { return (size + part - 1) / part; }
};

// What a task has: numbers [first, first + there) of a row, and as many behind them as fill the part.
struct Part {
  const float* x;
  float* out;
  int64_t line, there, count;

  Part(const Call& call, int64_t task) : line(task / call.parts()) {
    const int64_t first = task % call.parts() * call.part, row = line / call.queries / call.heads;
    const int64_t all = call.count[row] < call.size ? call.count[row] : call.size;
    x = call.logits + row * call.strides[0] + line / call.queries % call.heads * call.strides[1] + line % call.queries * call.strides[2] +
        first;
    out = call.out + line * call.size + first;
    count = call.size - first < call.part ? call.size - first : call.part;
    there = all - first < 0 ? 0 : all - first < count ? all - first : count;
  }

  // `use(numbers, i)` for a register of them at a time, the i-th of sixteen; the last ones filled up with NONE.
  template <typename Use>
  void numbers(Use use, int64_t n = 0) const {
    for (; n + LANES <= there; n += LANES)
      for (int64_t i = 0; i < PIECES; ++i) use(piece_at(x + n + i * PIECE), i);
    if (n == there) return;
    Floats rest = Floats{} + NONE;
    std::memcpy(&rest, x + n, (there - n) * sizeof(float));
    for (int64_t i = 0; i < PIECES; ++i) use(piece_of(rest, i), i);
  }

  // The largest number: of four registers at a time, none of which waits for another.
  float largest_of() const {
    Piece most[4];
    for (Piece& own : most) own = Piece{} + NONE;
    int64_t n = 0;
    for (; n + 4 * LANES <= there; n += 4 * LANES)
      for (int64_t i = 0; i < 4 * PIECES; ++i) most[i % 4] = larger(piece_at(x + n + i * PIECE), most[i % 4]);
    numbers([&](Piece x, int64_t) { most[0] = larger(x, most[0]); }, n);
    for (int64_t i = 1; i < 4; ++i) most[0] = larger(most[i], most[0]);
    return largest(most[0]);
  }
};

void sum_part(const Call& call, int64_t task) {
  const Part part(call, task);
  const float top = part.largest_of();
  Sums total;
  if (top > NONE) part.numbers([&](Piece x, int64_t i) { total.pieces[i] += exponential_of(x - top); });
  call.partial[2 * task] = top;
  call.partial[2 * task + 1] = sum(total);
}

void subtract(const Call& call, int64_t task) {
  const Part part(call, task);
  const float* of_line = call.partial + 2 * part.line * call.parts();
  float top = NONE;
  for (int64_t n = 0; n < call.parts(); ++n) top = of_line[2 * n] > top ? of_line[2 * n] : top;
  double mass = 0;
  for (int64_t n = 0; n < call.parts() && top > NONE; ++n) mass += std::exp((double)of_line[2 * n] - top) * of_line[2 * n + 1];
  const float most = top > NONE ? top : 0, less = top > NONE ? (float)std::log(mass) : 0;
  for (int64_t n = 0; n < part.there; ++n) part.out[n] = part.x[n] - most - less;
  for (int64_t n = part.there; n < part.count; ++n) part.out[n] = NONE;
  if (task % call.parts() == 0) call.mass[part.line] = top > NONE ? (float)(top + std::log(mass)) : NONE;
}

}  // namespace

extern "C" void state_scores(const Call* call) {
  const int64_t lines = call->rows * call->heads * call->queries;
  if (!call->size)
    for (int64_t line = 0; line < lines; ++line) call->mass[line] = NONE;
  share(*call, sum_part, lines * call->parts());
  share(*call, subtract, lines * call->parts());
}
