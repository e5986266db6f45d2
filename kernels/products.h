// Few vectors times a matrix: weights are read once, four rows at a time, far from one another: four streams are read faster than one.
// Each product is summed in the same order whatever the threads and the other vectors, so they change no bit.

namespace {

constexpr int64_t STREAMS = 4, PART = 64;  // rows of weights at once; rows of a stream that a task computes
constexpr int64_t MOST = REGISTERS / PIECES < 16 ? 3 : 4;  // vectors at once, at most
constexpr int64_t KEPT = 1 << 15;                          // weights that a cache keeps until all vectors have met them
constexpr bool ASKED = MOST > 3;                           // whether to ask for the next ones meanwhile gains more than it costs

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

// A vector that stays in its register: else a compiler may read it from memory for each use.
inline Piece held(Piece x) {
#if defined(__x86_64__) && !defined(__AVX512F__)
  asm("" : "+x"(x));
#endif
  return x;
}

// `Rows` rows of weights times `Tokens` vectors, to sums of sixteen lanes each, of the stream `from` on. With `Ahead`, the numbers that
// lie `ahead` behind them are on their way meanwhile.
template <int64_t Tokens, int64_t Rows, bool Ahead>
inline void add_up(const float* const* asked, const float* const* weights, int64_t inner, int64_t ahead, Floats (*sums)[STREAMS],
                   int64_t from) {
  Piece own[Rows][Tokens][PIECES] = {};
  for (int64_t at = 0; at < inner / LANES * LANES; at += LANES) {
    for (int64_t row = 0; row < Rows && Ahead; ++row) __builtin_prefetch(weights[row] + ahead + at);
    for (int64_t piece = 0; piece < PIECES; ++piece) {
      Piece x[Tokens];
      for (int64_t token = 0; token < Tokens; ++token) x[token] = held(piece_at(asked[token] + at + piece * PIECE));
      for (int64_t row = 0; row < Rows; ++row) {
        const Piece part = held(piece_at(weights[row] + at + piece * PIECE));
        for (int64_t token = 0; token < Tokens; ++token) own[row][token][piece] += part * x[token];
      }
    }
  }
  for (int64_t row = 0; row < Rows; ++row)
    for (int64_t token = 0; token < Tokens; ++token)
      for (int64_t piece = 0; piece < PIECES; ++piece) store((float*)&sums[token][from + row] + piece * PIECE, own[row][token][piece]);
}

// STREAMS rows of weights times `Tokens` vectors from `first` on.
template <int64_t Tokens, bool Ahead>
void multiply(const Product& call, int64_t row, int64_t first, int64_t ahead) {
  constexpr int64_t together = fitting(Tokens);
  const int64_t inner = call.inner, whole = inner / LANES * LANES, part = (call.outer + STREAMS - 1) / STREAMS;
  Floats sums[Tokens][STREAMS];
  const float *asked[Tokens], *weights[STREAMS];
  for (int64_t token = 0; token < Tokens; ++token) asked[token] = call.x + (first + token) * inner;
  for (int64_t stream = 0, at = row; stream < STREAMS; ++stream, at += part)
    weights[stream] = call.weight + (at < call.outer ? at : 0) * inner;
  for (int64_t from = 0; from < STREAMS; from += together)
    add_up<Tokens, together, Ahead>(asked, weights + from, inner, ahead, sums, from);
  for (int64_t token = 0; token < Tokens; ++token) {
    Four made = sums_of(sums[token][0], sums[token][1], sums[token][2], sums[token][3]);
    for (int64_t stream = 0, to = row; stream < STREAMS && to < call.outer; ++stream, to += part) {
      float total = made[stream];
      for (int64_t at = whole; at < inner; ++at) total += weights[stream][at] * asked[token][at];
      call.out[(first + token) * call.outer + to] = total + (call.bias ? call.bias[to] : 0.0f);
    }
  }
}

// Rows [row, last) of each of the four parts of the matrix.
template <int64_t Tokens, bool Ahead>
void meet(const Product& call, int64_t row, int64_t last, int64_t first) {
  const int64_t ahead = (last - row) * call.inner;
  for (; row < last; ++row) multiply<Tokens, Ahead>(call, row, first, ahead);
}

// Rows [task * PART, + PART) of each of the four parts of the matrix. As many as a cache keeps meet all vectors before the next ones do.
template <int64_t Tokens>
void compute(const Product& call, int64_t task) {
  constexpr int64_t most = Tokens < MOST ? Tokens : MOST;
  const int64_t part = (call.outer + STREAMS - 1) / STREAMS, kept = KEPT / (STREAMS * call.inner);
  const int64_t last = (task + 1) * PART < part ? (task + 1) * PART : part;
  for (int64_t row = task * PART, end; row < last; row = end) {
    end = call.tokens <= most ? last : row + (kept > 1 ? kept : 1);
    end = end < last ? end : last;
    meet<most, false>(call, row, end, 0);
    int64_t first = most;
    if (first + most <= call.tokens) meet<most, ASKED>(call, row, end, first), first += most;
    for (; first + most <= call.tokens; first += most) meet<most, false>(call, row, end, first);
    for (; first + 1 < call.tokens; first += 2) meet<2, false>(call, row, end, first);
    if (first < call.tokens) meet<1, false>(call, row, end, first);
  }
}

template <int64_t Tokens>
void product(const Product& call) {
  const int64_t part = (call.outer + STREAMS - 1) / STREAMS;
  share(call, compute<Tokens>, (part + PART - 1) / PART);
}

}  // namespace
