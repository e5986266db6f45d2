// Few vectors times a matrix: weights are read once, four rows at a time, far from one another: four streams are read faster than one.
// Each product is summed in the same order whatever the threads and the other vectors, so they change no bit.

namespace {

constexpr int64_t STREAMS = 4, PART = 64;  // rows of weights at once; rows of a stream that a task computes

struct Product {
  const float* x;       // [tokens, inner]
  const float* weight;  // [outer, inner]
  const float* bias;    // [outer] or null
  float* out;           // [tokens, outer]
  int64_t tokens, inner, outer, threads;
  Parallel parallel;
};

// Rows of weights, of STREAMS, whose sums with `Tokens` vectors fit into three quarters of the registers.
constexpr int64_t fitting(int64_t tokens) {
  int64_t rows = STREAMS;
  while (rows > 1 && tokens * rows * PIECES > REGISTERS * 3 / 4) rows /= 2;
  return rows;
}

// `Rows` rows of weights times `Tokens` vectors, to sums of sixteen lanes each, of the stream `from` on. With `Ahead`, the rows behind them
// are on their way meanwhile.
template <int64_t Tokens, int64_t Rows, bool Ahead>
inline void add_up(const float* const* asked, const float* const* weights, int64_t inner, Floats (*sums)[STREAMS], int64_t from) {
  Piece own[Rows][Tokens][PIECES] = {};
  for (int64_t at = 0; at < inner / LANES * LANES; at += LANES)
    for (int64_t row = 0; row < Rows; ++row) {
      if (Ahead) __builtin_prefetch(weights[row] + inner + at);
      for (int64_t piece = 0; piece < PIECES; ++piece) {
        Piece part = loaded<PIECE, Piece>(weights[row] + at + piece * PIECE);
        for (int64_t token = 0; token < Tokens; ++token)
          own[row][token][piece] += part * loaded<PIECE, Piece>(asked[token] + at + piece * PIECE);
      }
    }
  for (int64_t row = 0; row < Rows; ++row)
    for (int64_t token = 0; token < Tokens; ++token)
      std::memcpy(&sums[token][from + row], own[row][token], sizeof(Floats));
}

// STREAMS rows of weights times `Tokens` vectors, the last ones again where there are fewer, which nothing is written for.
template <int64_t Tokens, bool Ahead>
void multiply(const Product& call, const int64_t* rows, int64_t first) {
  constexpr int64_t together = fitting(Tokens);
  const int64_t inner = call.inner, whole = inner / LANES * LANES;
  Floats sums[Tokens][STREAMS];
  const float *asked[Tokens], *weights[STREAMS];
  for (int64_t token = 0; token < Tokens; ++token)
    asked[token] = call.x + (first + token < call.tokens ? first + token : call.tokens - 1) * inner;
  for (int64_t stream = 0; stream < STREAMS; ++stream)
    weights[stream] = call.weight + (rows[stream] < call.outer ? rows[stream] : 0) * inner;
  for (int64_t from = 0; from < STREAMS; from += together)
    add_up<Tokens, together, Ahead>(asked, weights + from, inner, sums, from);
  for (int64_t token = 0; token < Tokens && first + token < call.tokens; ++token) {
    Four made = sums_of(sums[token][0], sums[token][1], sums[token][2], sums[token][3]);
    for (int64_t stream = 0; stream < STREAMS && rows[stream] < call.outer; ++stream) {
      float total = made[stream];
      for (int64_t at = whole; at < inner; ++at) total += weights[stream][at] * asked[token][at];
      call.out[(first + token) * call.outer + rows[stream]] = total + (call.bias ? call.bias[rows[stream]] : 0.0f);
    }
  }
}

// Rows [task * PART, + PART) of each of the four parts of the matrix.
template <int64_t Tokens>
void compute(const Product& call, int64_t task) {
  const int64_t part = (call.outer + STREAMS - 1) / STREAMS;
  const int64_t last = (task + 1) * PART < part ? (task + 1) * PART : part;
  for (int64_t row = task * PART; row < last; ++row) {
    int64_t rows[STREAMS];
    for (int64_t stream = 0; stream < STREAMS; ++stream)
      rows[stream] = stream * part + row;
    multiply<Tokens, false>(call, rows, 0);
    for (int64_t first = Tokens; first < call.tokens; first += Tokens)
      first == Tokens ? multiply<Tokens, true>(call, rows, first) : multiply<Tokens, false>(call, rows, first);
  }
}

template <int64_t Tokens>
void product(const Product& call) {
  const int64_t part = (call.outer + STREAMS - 1) / STREAMS;
  share(call, compute<Tokens>, (part + PART - 1) / PART);
}

}  // namespace
