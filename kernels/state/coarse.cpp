// Attention to units that are known by codes of their values. A unit's weight is added to a sum for each of its codes, for TOGETHER rows
// of queries at a time, 4 or 8, whose sums lie together: a stage is one addition. Then each vector of the books is met once, with its sum.

#include <cmath>

namespace {

constexpr int64_t VECTORS = 256;  // of a book
constexpr float NONE = -__builtin_inff();
constexpr int64_t CHUNK = REGISTERS / PIECES < 16 ? 2 : 4;  // vectors of a value that a task computes
constexpr int64_t ROOM = REGISTERS * 3 / 4 / (CHUNK * PIECES), AT_ONCE = ROOM < 4 ? ROOM : 4;  // rows of them whose sums fit registers
using Each = float __attribute__((vector_size(4 * TOGETHER)));

inline Each each_at(const float* from) {
  Each x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

// A register of weights of each query as the queries' weights of each of its units: halves are put together like cards, as often as
// halves of the queries can be halved.
inline void turn(Piece* x) {
  for (int64_t left = TOGETHER; left > 1; left /= 2) {
    Piece made[TOGETHER];
    for (int64_t n = 0; n < TOGETHER / 2; ++n) {
      made[2 * n] = first_of(x[n], x[n + TOGETHER / 2]);
      made[2 * n + 1] = second_of(x[n], x[n + TOGETHER / 2]);
    }
    for (int64_t n = 0; n < TOGETHER; ++n) x[n] = made[n];
  }
}

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
  const float* score = nullptr;
  const uint8_t* hidden = nullptr;
  float shift = 0, softcap = 0;

  Line() = default;
  Line(const Call& call, int64_t place, int64_t query, int64_t first) : softcap((float)call.softcap) {
    const int64_t row = place / call.heads, head = place % call.heads;
    score = call.score + row * call.score_strides[0] + head * call.score_strides[1] + query * call.score_strides[2] + first;
    hidden = call.own ? call.own + row * call.own_strides[0] + head * call.own_strides[1] + query * call.own_strides[2] + first
                      : call.chosen + row * call.chosen_strides[0] + head * call.chosen_strides[1] + first;
    shift = call.shift[row * call.shift_strides[0] + head * call.shift_strides[1] + query * call.shift_strides[2]];
  }

  // Scores of a register of units from `n` on, of which there are `left`; NONE where one is not read here.
  Piece scores(int64_t n, int64_t left) const {
    Piece x = Piece{} + NONE;
    uint8_t flags[PIECE] = {};
    if (left >= PIECE)
      x = piece_at(score + n), std::memcpy(flags, hidden + n, PIECE);
    else
      std::memcpy(&x, score + n, left * sizeof(float)), std::memcpy(flags, hidden + n, left);
    return words_at(flags) ? Piece{} + NONE : x;
  }

  Piece logits(Piece x) const {
    x += shift;
    return softcap == 0 ? x : (x > NONE ? softcap * hyperbolic_tangent_of(x / softcap) : x);
  }
};

// Stages: where the compiler knows them, else 0.
template <int64_t Stages>
void sum_part(const Call& call, int64_t task) {
  const int64_t number = task % call.parts, group = task / call.parts % call.groups, place = task / call.parts / call.groups;
  const int64_t row = place / call.heads, head = place % call.heads, first = number * call.part;
  const int64_t all = call.count[row] < call.units ? call.count[row] : call.units;
  const int64_t count = all - first < call.part ? all - first : call.part;
  const int64_t queries = call.queries - group * TOGETHER < TOGETHER ? call.queries - group * TOGETHER : TOGETHER;
  float* sums = call.of(place, group, number);
  float *tops = sums + call.sums(), *masses = tops + TOGETHER;
  std::memset(sums, 0, call.sums() * sizeof(float));
  const int64_t stages = call.stages, code_stride = call.code_strides[2];
  Line lines[TOGETHER];
  for (int64_t query = 0; query < TOGETHER; ++query) {
    tops[query] = NONE, masses[query] = 0;
    if (query >= queries) continue;
    const Line& line = lines[query] = Line(call, place, group * TOGETHER + query, first);
    Piece most = Piece{} + NONE;
    for (int64_t n = 0; n < count; n += PIECE) most = larger(line.scores(n, count - n), most);
    tops[query] = largest(line.logits(most));
  }
  const uint8_t* codes = call.codes + row * call.code_strides[0] + head * call.code_strides[1] + first * call.code_strides[2];
  Piece totals[TOGETHER][PIECES] = {};
  for (int64_t n = 0; n < count; n += PIECE) {
    const int64_t some = count - n < PIECE ? count - n : PIECE;
    Piece weights[TOGETHER] = {};
    for (int64_t query = 0; query < queries; ++query) {
      if (tops[query] == NONE) continue;
      const Line& line = lines[query];
      weights[query] = exponential_of(line.logits(line.scores(n, count - n)) - tops[query]);
      totals[query][n / PIECE % PIECES] += weights[query];
    }
    turn(weights);
    const uint8_t* code = codes + n * code_stride;
    for (int64_t i = 0; i < some; ++i, code += code_stride) {
      const Each weight = each_at((const float*)weights + i * TOGETHER);
      for (int64_t stage = 0; stage < (Stages ? Stages : stages); ++stage) {
        float* into = sums + (stage * VECTORS + code[stage]) * TOGETHER;
        store(into, each_at(into) + weight);
      }
    }
  }
  for (int64_t query = 0; query < queries; ++query) {
    Floats total;
    std::memcpy(&total, totals[query], sizeof(total));
    masses[query] = sum(total);
  }
}

// All parts of a group of rows, into the first one: sums, and the logarithm of the mass.
void merge(const Call& call, int64_t task) {
  const int64_t group = task % call.groups, place = task / call.groups;
  float* whole = call.of(place, group, 0);
  Each most = Each{} + NONE, total = {};
  for (int64_t number = 0; number < call.parts; ++number) {
    const Each top = each_at(call.of(place, group, number) + call.sums());
    most = top > most ? top : most;
  }
  for (int64_t number = 0; number < call.parts; ++number) {
    const float* part = call.of(place, group, number);
    const Each top = each_at(part + call.sums()), mass = each_at(part + call.sums() + TOGETHER);
    Each less = {};
    for (int64_t query = 0; query < TOGETHER; ++query) less[query] = top[query] == NONE ? 0 : std::exp(top[query] - most[query]);
    total += less * mass;
    for (int64_t n = 0; n < call.sums() && call.parts > 1; n += TOGETHER) {
      const Each x = less * each_at(part + n);
      store(whole + n, number ? each_at(whole + n) + x : x);
    }
  }
  store(whole + call.sums() + TOGETHER, total);
  for (int64_t query = 0; query < TOGETHER && group * TOGETHER + query < call.queries; ++query)
    call.mass[place * call.queries + group * TOGETHER + query] = total[query] > 0 ? most[query] + std::log(total[query]) : NONE;
}

// What a task has of the values of a group of rows: numbers from `first` on.
struct Columns {
  const float *book, *mean, *weights, *masses;
  float* out;
  int64_t queries, count;

  Columns(const Call& call, int64_t task) {
    const int64_t chunks = (call.dim + CHUNK * LANES - 1) / (CHUNK * LANES), first = task % chunks * CHUNK * LANES;
    const int64_t group = task / chunks % call.groups, place = task / chunks / call.groups, head = place % call.heads;
    weights = call.of(place, group, 0), masses = weights + call.sums() + TOGETHER;
    book = call.books + head * call.stages * VECTORS * call.dim + first;
    mean = call.mean + head * call.dim + first;
    out = call.value + (place * call.queries + group * TOGETHER) * call.dim + first;
    queries = call.queries - group * TOGETHER < TOGETHER ? call.queries - group * TOGETHER : TOGETHER;
    count = call.dim - first < CHUNK * LANES ? call.dim - first : CHUNK * LANES;
  }
};

// `Vectors` times sixteen numbers of `Queries` rows, from `row` and the number `at` on; of the last vector there may be `some` numbers
// alone. Vectors of the books that no unit has are not read.
template <int64_t Queries, int64_t Vectors, bool Whole>
void add_books(const Call& call, const Columns& columns, int64_t row, int64_t at, int64_t some) {
  auto part = [some](const float* from, int64_t piece) __attribute__((always_inline)) {
    if (Whole) return piece_at(from + piece * PIECE);
    Piece x = {};
    const int64_t left = some - piece * PIECE;
    if (left > 0) std::memcpy(&x, from + piece * PIECE, (left < PIECE ? left : PIECE) * sizeof(float));
    return x;
  };
  const float *book = columns.book + at, *weight = columns.weights + row, *masses = columns.masses + row;
  Piece sums[Queries][Vectors * PIECES] = {};
  for (int64_t n = 0; n < call.stages * VECTORS; ++n, book += call.dim, weight += TOGETHER) {
    bool read = false;
    for (int64_t query = 0; query < Queries; ++query) read |= weight[query] != 0;
    if (!read) continue;
    for (int64_t i = 0; i < Vectors * PIECES; ++i) {
      const Piece x = part(book, i);
      for (int64_t query = 0; query < Queries; ++query) sums[query][i] += x * weight[query];
    }
  }
  for (int64_t query = 0; query < Queries; ++query)
    for (int64_t i = 0; i < Vectors * PIECES; ++i) {
      const Piece x = masses[query] > 0 ? part(columns.mean + at, i) + sums[query][i] / masses[query] : Piece{};
      const int64_t left = (Whole ? Vectors * LANES : some) - i * PIECE;
      if (left > 0) std::memcpy(columns.out + (row + query) * call.dim + at + i * PIECE, &x, (left < PIECE ? left : PIECE) * sizeof(float));
    }
}

template <int64_t Vectors, bool Whole = true>
void all_queries(const Call& call, const Columns& columns, int64_t at, int64_t some = LANES) {
  for (int64_t row = 0; row < columns.queries;) {
    const int64_t left = columns.queries - row, taken = left < AT_ONCE ? left : AT_ONCE;
    (taken == 4   ? add_books<4, Vectors, Whole>
     : taken == 3 ? add_books<3, Vectors, Whole>
     : taken == 2 ? add_books<2, Vectors, Whole>
                  : add_books<1, Vectors, Whole>)(call, columns, row, at, some);
    row += taken;
  }
}

void add_columns(const Call& call, int64_t task) {
  const Columns columns(call, task);
  const int64_t whole = columns.count / LANES, some = columns.count % LANES;
  if (whole)
    (whole == 4   ? all_queries<4>
     : whole == 3 ? all_queries<3>
     : whole == 2 ? all_queries<2>
                  : all_queries<1>)(call, columns, 0, LANES);
  if (some) all_queries<1, false>(call, columns, whole * LANES, some);
}

}  // namespace

extern "C" void coarse_attention(const Call* call) {
  const int64_t groups = call->rows * call->heads * call->groups;
  const int64_t stages = call->stages;
  share(*call, stages == 1 ? sum_part<1> : stages == 2 ? sum_part<2> : stages == 4 ? sum_part<4> : sum_part<0>, groups * call->parts);
  share(*call, merge, groups);
  share(*call, add_columns, groups * ((call->dim + CHUNK * LANES - 1) / (CHUNK * LANES)));
}
