// Attention to spans that wait as low-rank factors, where they wait: a span's logits are ((q V) * s) U^T, and what it adds to the value is
// ((p U) * s) V^T. A task is a KV head of a row of the batch, which reads its spans in order and keeps what its rows of queries have so far.

#include <cmath>

namespace {

constexpr float NONE = -__builtin_inff();

// Fields of 8 bytes each, as semkv.kernels.state.factored writes them. Strides are numbers: of rows of the batch, heads, and queries.
struct Call {
  const float* q;          // [rows, heads, queries, dim]
  const uint8_t* chosen;   // [rows, heads, units]
  const uint8_t* own;      // [rows, heads, queries, units], or null: all queries read what is chosen
  uint8_t* held;           // [rows, heads, spans]: what the step before has read
  const char* data;        // [rows, numbers]: of each span and head U [length, rank], s [rank], V [dim, rank], of keys and then of values
  const int64_t* where;    // [rows, heads, spans, 3]: its first number, and both ranks
  const int64_t* spans;    // [rows, spans, 2]: its length, and the position of its first token
  const int64_t* unit;     // [rows, heads, spans]: whose it is; -1: nobody's
  const int64_t* asked;    // [rows]: the position of the queries
  float* value;            // [rows, heads, queries, value_dim]
  float* mass;             // [rows, heads, queries]
  int64_t* told;           // [rows, 2]: bytes that were not held, and that were
  int64_t* counts;         // [rows, heads, 2], scratch: as `told`, in numbers
  float* scratch;          // [rows, heads, room]
  int64_t rows, heads, queries, units, count, dim, value_dim, kind, longest, rank, room, window;
  int64_t q_strides[3], chosen_strides[2], own_strides[3], held_strides[2], data_stride, where_strides[2], spans_stride, unit_strides[2];
  double scale, softcap;
  int64_t threads;
  Parallel parallel;
};

inline float dot(const float* a, const float* b, int64_t count) {
  Piece sums = {};
  int64_t n = 0;
  for (; n + PIECE <= count; n += PIECE) sums += piece_at(a + n) * piece_at(b + n);
  float total = 0;
  for (int64_t lane = 0; lane < PIECE; ++lane) total += sums[lane];
  for (; n < count; ++n) total += a[n] * b[n];
  return total;
}

// into += x * row, of `count` numbers.
inline void add(float* __restrict into, const float* __restrict row, float x, int64_t count) {
  for (int64_t n = 0; n < count; ++n) into[n] += x * row[n];
}

// The factors of keys or of values.
struct Side {
  const float *u, *s, *v;
  int64_t rank;

  Side(const float* from, int64_t rank, int64_t length) : u(from), s(u + length * rank), v(s + rank), rank(rank) {}
};

// What a row of queries has of the spans so far: the largest logit, and beside it the sum of all weights and of weighted values.
struct Line {
  float *value, top = NONE, mass = 0;
};

struct Head {
  const Call& call;
  const int64_t row, head;
  float *record, *products, *weights;  // of a span, and of a row of queries: [rank] and [longest]

  Head(const Call& call, int64_t task) : call(call), row(task / call.heads), head(task % call.heads) {
    record = call.scratch + task * call.room;
    products = record + call.room - call.rank - call.longest, weights = products + call.rank;
  }

  void attend(const float* q, Line& line, const Side& keys, const Side& values, int64_t length, int64_t position) const {
    std::memset(products, 0, keys.rank * sizeof(float));
    for (int64_t n = 0; n < call.dim; ++n) add(products, keys.v + n * keys.rank, q[n], keys.rank);
    for (int64_t c = 0; c < keys.rank; ++c) products[c] *= keys.s[c] * (float)call.scale;
    float top = line.top;
    for (int64_t n = 0; n < length; ++n) {
      float x = dot(keys.u + n * keys.rank, products, keys.rank);
      if (call.softcap != 0) x = (float)call.softcap * std::tanh(x / (float)call.softcap);
      const int64_t away = call.asked[row] - position - n;
      weights[n] = away < 0 || (call.window && away >= call.window) ? NONE : x;
      top = weights[n] > top ? weights[n] : top;
    }
    if (top == NONE) return;
    const float less = line.top == NONE ? 0.0f : std::exp(line.top - top);
    line.mass *= less, line.top = top;
    for (int64_t n = 0; n < call.value_dim; ++n) line.value[n] *= less;
    std::memset(products, 0, values.rank * sizeof(float));
    for (int64_t n = 0; n < length; ++n) {
      const float weight = weights[n] == NONE ? 0.0f : std::exp(weights[n] - top);
      line.mass += weight;
      add(products, values.u + n * values.rank, weight, values.rank);
    }
    for (int64_t c = 0; c < values.rank; ++c) products[c] *= values.s[c];
    for (int64_t n = 0; n < call.value_dim; ++n) line.value[n] += dot(values.v + n * values.rank, products, values.rank);
  }
};

void attend_head(const Call& call, int64_t task) {
  const Head own(call, task);
  const int64_t row = own.row, head = own.head, place = row * call.heads + head;
  const uint8_t* chosen = call.chosen + row * call.chosen_strides[0] + head * call.chosen_strides[1];
  uint8_t* held = call.held + row * call.held_strides[0] + head * call.held_strides[1];
  const int64_t* where = call.where + row * call.where_strides[0] + head * call.where_strides[1];
  const int64_t* spans = call.spans + row * call.spans_stride;
  const int64_t* unit = call.unit + row * call.unit_strides[0] + head * call.unit_strides[1];
  const float* q = call.q + row * call.q_strides[0] + head * call.q_strides[1];
  float *values = call.value + place * call.queries * call.value_dim, *masses = call.mass + place * call.queries;
  int64_t* counts = call.counts + 2 * place;
  float* tops = own.record + call.room - call.rank - call.longest - call.queries;
  std::memset(values, 0, call.queries * call.value_dim * sizeof(float));
  for (int64_t query = 0; query < call.queries; ++query) tops[query] = NONE, masses[query] = 0;
  counts[0] = counts[1] = 0;
  for (int64_t n = 0; n < call.count; ++n) {
    const bool read = unit[n] >= 0 && unit[n] < call.units && chosen[unit[n]];
    const bool there = held[n];
    held[n] = read;
    if (!read) continue;
    const int64_t length = spans[2 * n], *of_head = where + 3 * n, keys = of_head[1], rest = of_head[2];
    const int64_t first = keys * (length + 1 + call.dim), size = first + rest * (length + 1 + call.value_dim);
    counts[there] += size;
    convert(call.data + (row * call.data_stride + of_head[0]) * bytes_of(call.kind), call.kind, (char*)own.record, FLOAT32, size);
    for (int64_t query = 0; query < call.queries; ++query) {
      if (call.own && !call.own[row * call.own_strides[0] + head * call.own_strides[1] + query * call.own_strides[2] + unit[n]]) continue;
      Line line = {values + query * call.value_dim, tops[query], masses[query]};
      own.attend(q + query * call.q_strides[2], line, {own.record, keys, length}, {own.record + first, rest, length}, length, spans[2 * n + 1]);
      tops[query] = line.top, masses[query] = line.mass;
    }
  }
  for (int64_t query = 0; query < call.queries; ++query) {
    const float mass = masses[query];
    for (int64_t n = 0; n < call.value_dim && mass > 0; ++n) values[query * call.value_dim + n] /= mass;
    masses[query] = mass > 0 ? tops[query] + std::log(mass) : NONE;
  }
}

}  // namespace

extern "C" void factored_attention(const Call* call) {
  share(*call, attend_head, call->rows * call->heads);
  std::memset(call->told, 0, 2 * call->rows * sizeof(int64_t));
  for (int64_t place = 0; place < call->rows * call->heads; ++place)
    for (int64_t side = 0; side < 2; ++side)
      call->told[place / call->heads * 2 + side] += call->counts[2 * place + side] * bytes_of(call->kind);
}
