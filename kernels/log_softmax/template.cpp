// Log-softmax of rows, in place: each part of a row finds its largest number and what its exponentials sum up to beside it; then all of a
// row's parts together say what to take off.

#include <cmath>

namespace {

constexpr float NONE = -__builtin_inff();

// Fields of 8 bytes each, as semkv.kernels.log_softmax.cpp writes them.
struct Call {
  float* x;        // [rows, size]
  float* partial;  // [rows, parts, 2]: largest number and sum of exponentials
  int64_t rows, size, part, threads;
  Parallel parallel;

  int64_t parts() const { return (size + part - 1) / part; }
};

// What a task has: numbers [first, first + count) of a row.
struct Part {
  float* x;
  float* partial;
  int64_t row, count;

  Part(const Call& call, int64_t task) : partial(call.partial + 2 * task), row(task / call.parts()) {
    const int64_t first = task % call.parts() * call.part;
    x = call.x + row * call.size + first;
    count = call.size - first < call.part ? call.size - first : call.part;
  }
};

// `use(numbers)` for sixteen at a time; the last ones filled up with `fill`.
template <typename Use>
void numbers(const Part& part, float fill, Use use) {
  int64_t n = 0;
  for (; n + LANES <= part.count; n += LANES) use(load(part.x + n));
  if (n == part.count) return;
  Floats rest = Floats{} + fill;
  std::memcpy(&rest, part.x + n, (part.count - n) * sizeof(float));
  use(rest);
}

void sum_part(const Call& call, int64_t task) {
  const Part part(call, task);
  Floats most = Floats{} + NONE;
  numbers(part, NONE, [&](Floats x) { most = x > most ? x : most; });
  const float top = largest(most);
  Floats total = {};
  if (top > NONE) numbers(part, NONE, [&](Floats x) { total += exponential(x - top); });
  part.partial[0] = top;
  part.partial[1] = sum(total);
}

void subtract(const Call& call, int64_t task) {
  const Part part(call, task);
  const float* of_row = call.partial + 2 * part.row * call.parts();
  float top = NONE;
  for (int64_t n = 0; n < call.parts(); ++n) top = of_row[2 * n] > top ? of_row[2 * n] : top;
  double mass = 0;
  for (int64_t n = 0; n < call.parts(); ++n) mass += std::exp((double)of_row[2 * n] - top) * of_row[2 * n + 1];
  const float less = top + (float)std::log(mass);
  for (int64_t n = 0; n < part.count; ++n) part.x[n] -= less;
}

}  // namespace

extern "C" void log_softmax(const Call* call) {
  share(*call, sum_part, call->rows * call->parts());
  share(*call, subtract, call->rows * call->parts());
}
