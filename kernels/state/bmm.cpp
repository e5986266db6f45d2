// Few rows times a matrix each. A matrix whose columns lie one after the other is a weight (kernels/products.h); of one whose rows do, four
// rows are read at a time, from one end to the other. Each number is summed in the order of the inner dim, so that threads change no bit.

namespace {

constexpr int64_t GROUP = 4, INNER = 8, CHUNK = 1024;  // rows of `a` and of `b` at once; columns of a task, at most
constexpr int64_t SMALL = 1 << 16;                     // products below which threads take longer to begin

// Fields of 8 bytes each, as semkv.kernels.state.bmm writes them. Strides are numbers.
struct Asked {
  const float* a;  // [outer, batch, rows, inner]
  const float* b;  // [outer, batch, inner, columns]
  float* out;      // [outer, batch, rows, columns]
  int64_t outer, batch, rows, inner, columns, turned, chunk;
  int64_t a_strides[4], b_strides[3];
  int64_t threads;
  Parallel parallel;

  const float* of_a(int64_t place) const { return a + place / batch * a_strides[0] + place % batch * a_strides[1]; }
  const float* of_b(int64_t place) const { return b + place / batch * b_strides[0] + place % batch * b_strides[1]; }
  int64_t tasks() const { return turned ? ((columns + STREAMS - 1) / STREAMS + PART - 1) / PART : (columns + chunk - 1) / chunk; }
};

void with_weight(const Asked& asked, int64_t task) {
  const int64_t place = task / asked.tasks();
  float* out = asked.out + place * asked.rows * asked.columns;
  const Product product = {asked.of_a(place), asked.of_b(place), nullptr, out, asked.rows, asked.inner, asked.columns};
  (asked.rows > 3    ? compute<4>
   : asked.rows == 3 ? compute<3>
   : asked.rows == 2 ? compute<2>
                     : compute<1>)(product, task % asked.tasks());
}

// Add `Some` rows of b, times what `Rows` rows of a have for them.
template <int64_t Rows, int64_t Some>
void add_rows(const Asked& asked, const float* a, const float* b, int64_t count, float (*sums)[CHUNK + LANES]) {
  float x[Rows][Some];
  for (int64_t row = 0; row < Rows; ++row)
    for (int64_t k = 0; k < Some; ++k) x[row][k] = a[row * asked.a_strides[2] + k * asked.a_strides[3]];
  int64_t n = 0;
  for (; n + PIECE <= count; n += PIECE) {
    Piece total[Rows];
    for (int64_t row = 0; row < Rows; ++row) total[row] = piece_at(sums[row] + n);
    for (int64_t k = 0; k < Some; ++k) {
      const Piece y = piece_at(b + k * asked.b_strides[2] + n);
      for (int64_t row = 0; row < Rows; ++row) total[row] += y * x[row][k];
    }
    for (int64_t row = 0; row < Rows; ++row) store(sums[row] + n, total[row]);
  }
  for (; n < count; ++n)
    for (int64_t row = 0; row < Rows; ++row)
      for (int64_t k = 0; k < Some; ++k) sums[row][n] += b[k * asked.b_strides[2] + n] * x[row][k];
}

template <int64_t Rows>
void some_rows(const Asked& asked, const float* a, const float* b, int64_t count, float* out) {
  float sums[Rows][CHUNK + LANES];  // not a power of two apart, which few lines of a cache have room for
  for (int64_t row = 0; row < Rows; ++row) std::memset(sums[row], 0, count * sizeof(float));
  int64_t k = 0;
  for (; k + INNER <= asked.inner; k += INNER)
    add_rows<Rows, INNER>(asked, a + k * asked.a_strides[3], b + k * asked.b_strides[2], count, sums);
  for (; k < asked.inner; ++k) add_rows<Rows, 1>(asked, a + k * asked.a_strides[3], b + k * asked.b_strides[2], count, sums);
  for (int64_t row = 0; row < Rows; ++row) std::memcpy(out + row * asked.columns, sums[row], count * sizeof(float));
}

void with_rows(const Asked& asked, int64_t task) {
  const int64_t place = task / asked.tasks(), first = task % asked.tasks() * asked.chunk;
  const int64_t count = asked.columns - first < asked.chunk ? asked.columns - first : asked.chunk;
  for (int64_t row = 0; row < asked.rows;) {
    const int64_t left = asked.rows - row, taken = left < GROUP ? left : GROUP;
    (taken == 4   ? some_rows<4>
     : taken == 3 ? some_rows<3>
     : taken == 2 ? some_rows<2>
                  : some_rows<1>)(asked, asked.of_a(place) + row * asked.a_strides[2], asked.of_b(place) + first, count,
                                  asked.out + (place * asked.rows + row) * asked.columns + first);
    row += taken;
  }
}

}  // namespace

extern "C" void bmm(const Asked* given) {
  Asked asked = *given;
  const int64_t places = asked.outer * asked.batch;
  if (places * asked.rows * asked.inner * asked.columns < SMALL) asked.parallel = nullptr;
  share(asked, asked.turned ? with_weight : with_rows, places * asked.tasks());
}
