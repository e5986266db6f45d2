// Codes of vectors in residual codebooks: of each stage's book the vector that is nearest; what it leaves is coded by the next stage.

namespace {

constexpr int64_t VECTORS = 256, SIZE = 64;  // of a book; that a task codes
constexpr int64_t ROWS = REGISTERS / PIECES < 32 ? 1 : 4;  // coded together, whose sums with four of a book's vectors fit registers
constexpr float NONE = -__builtin_inff();
using FourWords = int32_t __attribute__((vector_size(16)));

// Fields of 8 bytes each, as semkv.kernels.residual_codes.cpp writes them.
struct Call {
  const float* x;       // [heads, count, dim]
  const float* books;   // [heads, stages, VECTORS, dim]
  const float* biases;  // [heads, stages, VECTORS]: less the squares of their lengths
  float* rest;          // [heads, count, width], scratch: whole registers, zeros behind each vector
  uint8_t* codes;       // [heads, count, stages]
  int64_t heads, count, stages, dim, width, threads;
  Parallel parallel;

  int64_t parts() const { return (count + SIZE - 1) / SIZE; }
};

// Of the best ones of four lanes the first number.
inline uint8_t first_best(Four best, FourWords at) {
  int64_t found = 0;
  for (int64_t lane = 1; lane < 4; ++lane)
    if (best[lane] > best[found] || (best[lane] == best[found] && at[lane] < at[found])) found = lane;
  return (uint8_t)at[found];
}

// Which of a book's vectors are nearest to `Rows` vectors `x`, `width` numbers apart: |b|^2 - 2 x b is least.
template <int64_t Rows>
void nearest(const float* x, const float* book, const float* bias, int64_t dim, int64_t width, uint8_t* found) {
  const int64_t whole = dim / LANES * LANES;
  Four best[Rows];
  FourWords at[Rows];
  for (int64_t row = 0; row < Rows; ++row) best[row] = Four{} + NONE, at[row] = FourWords{0, 1, 2, 3};
  for (int32_t n = 0; n < VECTORS; n += 4, book += 4 * dim) {
    Floats sums[4][Rows] = {};
    auto add = [&](int64_t j, int64_t from, const Floats& part) __attribute__((always_inline)) {
      for (int64_t row = 0; row < Rows; ++row) sums[j][row] += part * load(x + row * width + from);
    };
    for (int64_t from = 0; from < whole; from += LANES)
      for (int64_t j = 0; j < 4; ++j) add(j, from, load(book + j * dim + from));
    for (int64_t j = 0; j < 4 && whole < dim; ++j) {
      Floats last = {};
      std::memcpy(&last, book + j * dim + whole, (dim - whole) * sizeof(float));
      add(j, whole, last);
    }
    Four biases;
    std::memcpy(&biases, bias + n, sizeof(biases));
    for (int64_t row = 0; row < Rows; ++row) {
      const Four near = biases + 2 * sums_of(sums[0][row], sums[1][row], sums[2][row], sums[3][row]);
      const FourWords nearer = near > best[row];
      best[row] = nearer ? near : best[row];
      at[row] = nearer ? FourWords{n, n + 1, n + 2, n + 3} : at[row];
    }
  }
  for (int64_t row = 0; row < Rows; ++row) found[row] = first_best(best[row], at[row]);
}

template <int64_t Rows>
void code(const Call& call, int64_t head, int64_t n) {
  float* rest = call.rest + (head * call.count + n) * call.width;
  for (int64_t row = 0; row < Rows; ++row) {
    std::memcpy(rest + row * call.width, call.x + (head * call.count + n + row) * call.dim, call.dim * sizeof(float));
    std::memset(rest + row * call.width + call.dim, 0, (call.width - call.dim) * sizeof(float));
  }
  for (int64_t stage = 0; stage < call.stages; ++stage) {
    const int64_t number = head * call.stages + stage;
    const float* book = call.books + number * VECTORS * call.dim;
    uint8_t found[Rows];
    nearest<Rows>(rest, book, call.biases + number * VECTORS, call.dim, call.width, found);
    for (int64_t row = 0; row < Rows; ++row) {
      call.codes[(head * call.count + n + row) * call.stages + stage] = found[row];
      const float* taken = book + found[row] * call.dim;
      for (int64_t i = 0; i < call.dim; ++i) rest[row * call.width + i] -= taken[i];
    }
  }
}

void run(const Call& call, int64_t task) {
  const int64_t head = task / call.parts(), first = task % call.parts() * SIZE;
  int64_t n = first;
  const int64_t last = first + SIZE < call.count ? first + SIZE : call.count;
  for (; n + ROWS <= last; n += ROWS) code<ROWS>(call, head, n);
  for (; n < last; ++n) code<1>(call, head, n);
}

}  // namespace

extern "C" void residual_codes(const Call* call) { share(*call, run, call->heads * call->parts()); }
