// Attention to units that are known by codes of their values. A unit's weight is added to a sum for each of its codes, for eight rows of
// queries at a time, whose sums lie together: a stage is one addition. Then each vector of the books is met once, with its sum.

#include <cmath>

namespace {

constexpr int64_t TOGETHER = 8, VECTORS = 256;  // rows of queries; vectors of a book
constexpr float NONE = -__builtin_inff();
using Eight = float __attribute__((vector_size(4 * TOGETHER)));

// Fields of 8 bytes each, as semkv.kernels.state.coarse writes them. Strides are of rows of the batch, heads, and units or queries; in
// numbers, which flags and codes are of a byte.
struct Call {
  const float* score;     // [rows, heads, queries, units]
  const float* shift;     // [rows, heads, queries]
  const uint8_t* chosen;  // [rows, heads, units]: those that no query reads here
  const uint8_t* own;     // [rows, heads, queries, units], instead; or null
  const int64_t* count;   // [rows]
  const uint8_t* codes;   // [rows, heads, units, stages]
  const float* books;     // [heads, stages, VECTORS, dim]
  const float* mean;      // [heads, dim]
  float* value;           // [rows, heads, queries, dim]
  float* mass;            // [rows, heads, queries]
  float* partial;         // [rows, heads, groups, parts, stages * VECTORS + 2, TOGETHER]: sums, then the largest logit and all weights
  int64_t rows, heads, queries, units, stages, dim, groups, parts, part;
  int64_t score_strides[3], shift_strides[3], chosen_strides[2], own_strides[3], code_strides[3];
  double softcap;
  int64_t threads;
  Parallel parallel;

  int64_t sums() const { return stages * VECTORS * TOGETHER; }
  float* of(int64_t place, int64_t group, int64_t number) const {
    return partial + ((place * groups + group) * parts + number) * (sums() + 2 * TOGETHER);
  }
};

// One row of queries of a part of the units.
struct Line {
  const float* score;
  const uint8_t* hidden;
  float shift, softcap;

  Line(const Call& call, int64_t place, int64_t query, int64_t first) : softcap((float)call.softcap) {
    const int64_t row = place / call.heads, head = place % call.heads;
    score = call.score + row * call.score_strides[0] + head * call.score_strides[1] + query * call.score_strides[2] + first;
    hidden = call.own ? call.own + row * call.own_strides[0] + head * call.own_strides[1] + query * call.own_strides[2] + first
                      : call.chosen + row * call.chosen_strides[0] + head * call.chosen_strides[1] + first;
    shift = call.shift[row * call.shift_strides[0] + head * call.shift_strides[1] + query * call.shift_strides[2]];
  }

  // Scores of sixteen units from `n` on, of which there are `left`; NONE where one is not read here.
  Floats scores(int64_t n, int64_t left) const {
    Floats x = Floats{} + NONE;
    Bytes flags = {};
    if (left >= LANES)
      x = load(score + n), flags = loaded<LANES, Bytes>(hidden + n);
    else
      std::memcpy(&x, score + n, left * sizeof(float)), std::memcpy(&flags, hidden + n, left);
    return Words{ALL_OF(flags)} ? Floats{} + NONE : x;
  }

  Floats logits(Floats x) const {
    x += shift;
    return softcap == 0 ? x : (x > NONE ? softcap * hyperbolic_tangent(x / softcap) : x);
  }
};

void sum_part(const Call& call, int64_t task) {
  const int64_t number = task % call.parts, group = task / call.parts % call.groups, place = task / call.parts / call.groups;
  const int64_t row = place / call.heads, head = place % call.heads, first = number * call.part;
  const int64_t all = call.count[row] < call.units ? call.count[row] : call.units;
  const int64_t count = all - first < call.part ? all - first : call.part;
  const int64_t queries = call.queries - group * TOGETHER < TOGETHER ? call.queries - group * TOGETHER : TOGETHER;
  float* sums = call.of(place, group, number);
  float *tops = sums + call.sums(), *masses = tops + TOGETHER;
  std::memset(sums, 0, call.sums() * sizeof(float));
  for (int64_t query = 0; query < TOGETHER; ++query) {
    tops[query] = NONE, masses[query] = 0;
    if (query >= queries) continue;
    const Line line(call, place, group * TOGETHER + query, first);
    Floats most = Floats{} + NONE;
    for (int64_t n = 0; n < count; n += LANES) {
      const Floats x = line.scores(n, count - n);
      most = x > most ? x : most;
    }
    tops[query] = largest(line.logits(most));
  }
  const uint8_t* codes = call.codes + row * call.code_strides[0] + head * call.code_strides[1] + first * call.code_strides[2];
  Floats totals[TOGETHER] = {};
  for (int64_t n = 0; n < count; n += LANES) {
    const int64_t some = count - n < LANES ? count - n : LANES;
    float weights[LANES][TOGETHER] = {};
    for (int64_t query = 0; query < queries; ++query) {
      if (tops[query] == NONE) continue;
      const Line line(call, place, group * TOGETHER + query, first);
      const Floats x = exponential(line.logits(line.scores(n, count - n)) - tops[query]);
      totals[query] += x;
      for (int64_t i = 0; i < LANES; ++i) weights[i][query] = x[i];
    }
    for (int64_t i = 0; i < some; ++i) {
      Eight weight;
      std::memcpy(&weight, weights[i], sizeof(weight));
      const uint8_t* code = codes + (n + i) * call.code_strides[2];
      for (int64_t stage = 0; stage < call.stages; ++stage) {
        float* into = sums + (stage * VECTORS + code[stage]) * TOGETHER;
        Eight so_far;
        std::memcpy(&so_far, into, sizeof(so_far));
        so_far += weight;
        std::memcpy(into, &so_far, sizeof(so_far));
      }
    }
  }
  for (int64_t query = 0; query < queries; ++query) masses[query] = sum(totals[query]);
}

// All parts of a group of rows, into the first one: sums, and the logarithm of the mass.
void merge(const Call& call, int64_t task) {
  const int64_t group = task % call.groups, place = task / call.groups;
  float* whole = call.of(place, group, 0);
  float *tops = whole + call.sums(), *masses = tops + TOGETHER, most[TOGETHER], less[TOGETHER], total[TOGETHER] = {};
  for (int64_t query = 0; query < TOGETHER; ++query) {
    most[query] = NONE;
    for (int64_t number = 0; number < call.parts; ++number) {
      const float top = (call.of(place, group, number) + call.sums())[query];
      most[query] = top > most[query] ? top : most[query];
    }
  }
  for (int64_t number = 0; number < call.parts; ++number) {
    const float* part = call.of(place, group, number);
    for (int64_t query = 0; query < TOGETHER; ++query) {
      const float top = (part + call.sums())[query];
      less[query] = top == NONE ? 0 : std::exp(top - most[query]);
      total[query] += less[query] * (part + call.sums() + TOGETHER)[query];
    }
    for (int64_t n = 0; n < call.sums(); n += TOGETHER)
      for (int64_t query = 0; query < TOGETHER; ++query)
        whole[n + query] = (number ? whole[n + query] : 0) + less[query] * part[n + query];
  }
  for (int64_t query = 0; query < TOGETHER; ++query) masses[query] = total[query];
  for (int64_t query = 0; query < TOGETHER && group * TOGETHER + query < call.queries; ++query)
    call.mass[place * call.queries + group * TOGETHER + query] = total[query] > 0 ? most[query] + std::log(total[query]) : NONE;
}

// Sixteen numbers of the values of a group of rows.
void add_books(const Call& call, int64_t task) {
  const int64_t columns = (call.dim + LANES - 1) / LANES, first = task % columns * LANES;
  const int64_t group = task / columns % call.groups, place = task / columns / call.groups, head = place % call.heads;
  const int64_t some = call.dim - first < LANES ? call.dim - first : LANES;
  const float *weights = call.of(place, group, 0), *masses = weights + call.sums() + TOGETHER;
  const float* book = call.books + head * call.stages * VECTORS * call.dim + first;
  auto part = [&](const float* from) {
    Floats x = {};
    some == LANES ? std::memcpy(&x, from, sizeof(x)) : std::memcpy(&x, from, some * sizeof(float));
    return x;
  };
  Floats sums[TOGETHER] = {};
  for (int64_t n = 0; n < call.stages * VECTORS; ++n) {
    const Floats x = part(book + n * call.dim);
    for (int64_t query = 0; query < TOGETHER; ++query) sums[query] += x * weights[n * TOGETHER + query];
  }
  const Floats mean = part(call.mean + head * call.dim + first);
  for (int64_t query = 0; query < TOGETHER && group * TOGETHER + query < call.queries; ++query) {
    const Floats x = masses[query] > 0 ? mean + sums[query] / masses[query] : Floats{};
    float* out = call.value + (place * call.queries + group * TOGETHER + query) * call.dim + first;
    std::memcpy(out, &x, some * sizeof(float));
  }
}

}  // namespace

extern "C" void coarse_attention(const Call* call) {
  const int64_t groups = call->rows * call->heads * call->groups;
  share(*call, sum_part, groups * call->parts);
  share(*call, merge, groups);
  share(*call, add_books, groups * ((call->dim + LANES - 1) / LANES));
}
