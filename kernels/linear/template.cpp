// Few vectors times a matrix: weights are read once, four rows at a time, far from one another: four streams are read faster than one.
// TOKENS, vectors that are multiplied at once, is defined by a specialisation. Each product is summed in the same order whatever the
// threads, so they change no bit.

namespace {

constexpr int64_t STREAMS = 4, PART = 64;  // rows of weights at once; rows of a stream that a task computes

struct Call {
  const float* x;       // [tokens, inner]
  const float* weight;  // [outer, inner]
  const float* bias;    // [outer] or null
  float* out;           // [tokens, outer]
  int64_t tokens, inner, outer, threads;
  Parallel parallel;
};

// STREAMS rows of weights times TOKENS vectors, the last ones again where there are fewer, which nothing is written for.
void multiply(const Call& call, const int64_t* rows, int64_t first) {
  const int64_t inner = call.inner, whole = inner / LANES * LANES;
  Floats sums[TOKENS][STREAMS] = {};
  const float* asked[TOKENS];
  for (int64_t token = 0; token < TOKENS; ++token)
    asked[token] = call.x + (first + token < call.tokens ? first + token : call.tokens - 1) * inner;
  for (int64_t at = 0; at < whole; at += LANES)
    for (int64_t stream = 0; stream < STREAMS; ++stream) {
      Floats weights = load(call.weight + (rows[stream] < call.outer ? rows[stream] : 0) * inner + at);
      for (int64_t token = 0; token < TOKENS; ++token) sums[token][stream] += weights * load(asked[token] + at);
    }
  for (int64_t token = 0; token < TOKENS && first + token < call.tokens; ++token) {
    Four made = sums_of(sums[token][0], sums[token][1], sums[token][2], sums[token][3]);
    for (int64_t stream = 0; stream < STREAMS && rows[stream] < call.outer; ++stream) {
      float total = made[stream];
      for (int64_t at = whole; at < inner; ++at) total += call.weight[rows[stream] * inner + at] * asked[token][at];
      call.out[(first + token) * call.outer + rows[stream]] = total + (call.bias ? call.bias[rows[stream]] : 0.0f);
    }
  }
}

// Rows [task * PART, + PART) of each of the four parts of the matrix.
void compute(const Call& call, int64_t task) {
  const int64_t part = (call.outer + STREAMS - 1) / STREAMS;
  const int64_t last = (task + 1) * PART < part ? (task + 1) * PART : part;
  for (int64_t row = task * PART; row < last; ++row) {
    int64_t rows[STREAMS];
    for (int64_t stream = 0; stream < STREAMS; ++stream)
      rows[stream] = stream * part + row;
    for (int64_t first = 0; first < call.tokens; first += TOKENS) multiply(call, rows, first);
  }
}

}  // namespace

extern "C" void linear(const Call* call) {
  const int64_t part = (call->outer + STREAMS - 1) / STREAMS;
  share(*call, compute, (part + PART - 1) / PART);
}
