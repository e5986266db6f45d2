// Few vectors times a matrix: weights are read once, four rows at a time, far from one another: four streams are read faster than one.
// Each product is summed in the same order whatever the threads and the other vectors, so they change no bit.

namespace {

constexpr int64_t STREAMS = 4, PART = 64;  // rows of weights at once; rows of a stream that a task computes
constexpr int64_t FITTING = REGISTERS * 3 / 4;                           // sums that stay in registers
constexpr int64_t MOST = FITTING / STREAMS < 4 ? FITTING / STREAMS : 4;  // vectors at once, at most
constexpr int64_t MANY = 16;                                             // vectors that a row of each stream meets in turn
constexpr int64_t NEAR = 640;                                            // numbers of a row that the nearest cache keeps meanwhile

struct Product {
  const float* x;       // [tokens, inner]
  const float* weight;  // [outer, inner]
  const float* bias;    // [outer] or null
  float* out;           // [tokens, outer]
  int64_t tokens, inner, outer, threads;
  Parallel parallel;
};

// A vector that stays in its register: else a compiler may read it from memory for each use.
inline Piece held(Piece x) {
#if defined(__x86_64__) && !defined(__AVX512F__)
  asm("" : "+x"(x));
#endif
  return x;
}

// Adds to sums `own` what pieces from `piece` on, `Together` of every sixteen numbers, of STREAMS rows of weights give with `Tokens`
// vectors. With `Ahead`, the numbers from `next` on are on their way meanwhile.
template <int64_t Tokens, int64_t Together, bool Ahead>
inline void add_up(const float* const* asked, const float* const* weights, const float* next, int64_t count, int64_t piece,
                   Piece (*own)[Together][STREAMS]) {
  for (int64_t at = 0; at < count; at += LANES) {
    if (Ahead) __builtin_prefetch(next + at);
    for (int64_t i = 0; i < Together; ++i) {
      Piece x[Tokens];
      for (int64_t token = 0; token < Tokens; ++token) x[token] = held(piece_at(asked[token] + at + (piece + i) * PIECE));
      for (int64_t row = 0; row < STREAMS; ++row) {
        const Piece part = held(piece_at(weights[row] + at + (piece + i) * PIECE));
        for (int64_t token = 0; token < Tokens; ++token) own[token][i][row] += part * x[token];
      }
    }
  }
}

// `count` numbers of STREAMS rows of weights times those of `Tokens` vectors, which lie `inner` apart, from x on: into `sums`, of sixteen
// lanes each, or added to what is there. next: numbers to ask for meanwhile, or null.
template <int64_t Tokens>
void meet(const float* x, int64_t inner, const float* const* weights, const float* next, int64_t count, bool adds,
          Floats (*sums)[STREAMS]) {
  constexpr int64_t together = Tokens * STREAMS * PIECES > FITTING ? 1 : PIECES;
  const float* asked[Tokens];
  for (int64_t token = 0; token < Tokens; ++token) asked[token] = x + token * inner;
  for (int64_t piece = 0; piece < PIECES; piece += together) {
    Piece own[Tokens][together][STREAMS] = {};
    const auto each = [&](auto use) {
      for (int64_t token = 0; token < Tokens; ++token)
        for (int64_t i = 0; i < together; ++i)
          for (int64_t row = 0; row < STREAMS; ++row) use(own[token][i][row], (float*)&sums[token][row] + (piece + i) * PIECE);
    };
    if (adds) each([](Piece& sum, const float* from) { sum = piece_at(from); });
    if (next && !piece)
      add_up<Tokens, together, true>(asked, weights, next, count, piece, own);
    else
      add_up<Tokens, together, false>(asked, weights, nullptr, count, piece, own);
    each([](const Piece& sum, float* to) { store(to, sum); });
  }
}

// A row of each stream times vectors [first, last), at most MANY; ahead: the row that is next, or none where it is `call.outer`.
template <int64_t Tokens>
void multiply(const Product& call, int64_t row, int64_t ahead, int64_t first, int64_t last) {
  constexpr int64_t most = Tokens < MOST ? Tokens : MOST, third = most < 3 ? most : 3, second = most < 2 ? most : 2;
  const int64_t inner = call.inner, whole = inner / LANES * LANES, part = (call.outer + STREAMS - 1) / STREAMS;
  const int64_t blocks = last - first > most ? (whole + NEAR - 1) / NEAR : 1;
  const int64_t size = blocks ? (whole / LANES + blocks - 1) / blocks * LANES : 0;
  const float* rows[STREAMS];
  for (int64_t stream = 0, at = row; stream < STREAMS; ++stream, at += part)
    rows[stream] = call.weight + (at < call.outer ? at : 0) * inner;
  Floats sums[MANY][STREAMS];
  if (!whole) std::memset(sums, 0, sizeof(sums));
  for (int64_t begin = 0; begin < whole; begin += size) {
    const int64_t end = begin + size < whole ? begin + size : whole;
    const float* weights[STREAMS];
    for (int64_t stream = 0; stream < STREAMS; ++stream) weights[stream] = rows[stream] + begin;
    const int64_t next_row = end < whole ? row : ahead, next_begin = end < whole ? end : 0;
    int64_t asking = next_row;  // a stream's next numbers with each turn but the first, whose own are on their way
    for (int64_t at = first, step; at < last; at += step) {
      const bool asks = at > first && asking < call.outer && asking < next_row + STREAMS * part;
      const float* next = asks ? call.weight + asking * inner + next_begin : nullptr;
      asking += asks ? part : 0;
      step = last - at >= most ? most : last - at;
      (step == most ? meet<most> : step == 3 ? meet<third> : step == 2 ? meet<second> : meet<1>)(
          call.x + at * inner + begin, inner, weights, next, end - begin, begin, sums + (at - first));
    }
  }
  for (int64_t token = first; token < last; ++token) {
    const Floats* own = sums[token - first];
    const Four made = sums_of(own[0], own[1], own[2], own[3]);
    for (int64_t stream = 0, to = row; stream < STREAMS && to < call.outer; ++stream, to += part) {
      float total = made[stream];
      for (int64_t at = whole; at < inner; ++at) total += rows[stream][at] * call.x[token * inner + at];
      call.out[token * call.outer + to] = total + (call.bias ? call.bias[to] : 0.0f);
    }
  }
}

// Rows [task * PART, + PART) of each of the four parts of the matrix.
template <int64_t Tokens>
void compute(const Product& call, int64_t task) {
  const int64_t part = (call.outer + STREAMS - 1) / STREAMS;
  const int64_t last = (task + 1) * PART < part ? (task + 1) * PART : part;
  for (int64_t row = task * PART; row < last; ++row)
    for (int64_t first = 0; first < call.tokens; first += MANY)
      multiply<Tokens>(call, row, row + 1 < last ? row + 1 : call.outer, first, first + MANY < call.tokens ? first + MANY : call.tokens);
}

template <int64_t Tokens>
void product(const Product& call) {
  const int64_t part = (call.outer + STREAMS - 1) / STREAMS;
  share(call, compute<Tokens>, (part + PART - 1) / PART);
}

}  // namespace
