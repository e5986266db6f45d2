// What a step computes: a list of instructions over tensors and weights, run one after the other. Between two calls of other functions
// (kernels/calls.py) are small tensors of several dtypes, with up to RANK dims, which are read and written through strides.
//
// The OP_ numbers are defined by a specialisation (kernels/segments/emitting.py); blocks.h comes before.

#include <alloca.h>

#include <cmath>

namespace {

constexpr float NONE = -__builtin_inff();

// A function of sixteen numbers at a time.
template <typename Function>
void wide(const Tape& tape, const Instruction& in, Function f) {
  blocks<float, 1>(tape, in, [f](float* out, const float* a, const float*, const float*, int64_t count) {
    int64_t n = 0;
    for (; n + LANES <= count; n += LANES) store(out + n, f(load(a + n)));
    if (n == count) return;
    Floats x = {};
    std::memcpy(&x, a + n, (count - n) * sizeof(float));
    x = f(x);
    std::memcpy(out + n, &x, (count - n) * sizeof(float));
  });
}

template <typename Number>
void copy_numbers(const Tape& tape, const Instruction& in) {
  const int64_t size = in.sizes[3], to = in.out.strides[3], from = in.a.strides[3];
  rows(tape, in, [&](const int64_t* i) {
    Number* out = at<Number>(tape, in.out) + shifted(in.out, i);
    const Number* a = at<Number>(tape, in.a) + shifted(in.a, i);
    if (to == 1 && from == 1)
      std::memcpy(out, a, size * sizeof(Number));
    else
      for (int64_t n = 0; n < size; ++n) out[n * to] = a[n * from];
  }, size);
}

// From one dtype to another, or within one.
void copy(const Tape& tape, const Instruction& in) {
  if (in.a.dtype != in.out.dtype) {
    auto same = [](auto* out, const auto* a, const auto*, const auto*, int64_t count) { std::memcpy(out, a, count * sizeof(*a)); };
    return in.whole ? blocks<int64_t, 1>(tape, in, same) : blocks<float, 1>(tape, in, same);
  }
  switch (bytes_of_dtype(in.out.dtype)) {
    case 8: return copy_numbers<int64_t>(tape, in);
    case 4: return copy_numbers<int32_t>(tape, in);
    case 2: return copy_numbers<int16_t>(tape, in);
    default: return copy_numbers<int8_t>(tape, in);
  }
}

// first + n * second, or value + n * second where it is of floats, over all numbers of a dense output.
void count_up(const Tape& tape, const Instruction& in) {
  double step;
  std::memcpy(&step, &in.second, sizeof(step));
  const int64_t dtype = in.out.dtype, bytes = bytes_of_dtype(dtype);
  for (int64_t n = 0; n < in.sizes[3]; ++n) {
    char* out = at<char>(tape, in.out) + n * bytes;
    if (in.whole) {
      const int64_t x = in.first + n * in.second;
      keep(&x, out, dtype, 1, 1);
    } else {
      const float x = (float)(in.value + (double)n * step);
      keep(&x, out, dtype, 1, 1);
    }
  }
}

// -- reductions over the last dim, whose strides `out` has none of --

// `use(numbers, count)` for a row of `a`, up to BLOCK at once.
template <typename T, typename Use>
void parts(const Tape& tape, const Instruction& in, const int64_t* i, Use use) {
  T room[BLOCK];
  const char* from = address(tape, in.a) + shifted(in.a, i) * bytes_of_dtype(in.a.dtype);
  for (int64_t first = 0; first < in.sizes[3]; first += BLOCK) {
    const int64_t some = in.sizes[3] - first < BLOCK ? in.sizes[3] - first : BLOCK;
    use(fetch<T>(from + first * in.a.strides[3] * bytes_of_dtype(in.a.dtype), in.a.dtype, in.a.strides[3], some, room), some);
  }
}

// `use(sixteen numbers)` of a row, the last ones filled up with `fill`.
template <typename Use>
void vectors(const Tape& tape, const Instruction& in, const int64_t* i, float fill, Use use) {
  parts<float>(tape, in, i, [&](const float* x, int64_t count) {
    int64_t n = 0;
    for (; n + LANES <= count; n += LANES) use(load(x + n));
    if (n == count) return;
    Floats rest = Floats{} + fill;
    std::memcpy(&rest, x + n, (count - n) * sizeof(float));
    use(rest);
  });
}

float total(const Tape& tape, const Instruction& in, const int64_t* i) {
  Floats sums = {};
  vectors(tape, in, i, 0, [&](Floats x) { sums += x; });
  return sum(sums);
}

// The largest number of a row; not a number where one is not.
float most_of(const Tape& tape, const Instruction& in, const int64_t* i, float sign) {
  Floats most = Floats{} + NONE;
  vectors(tape, in, i, sign * NONE, [&](Floats x) { most = x * sign > most || x != x ? x * sign : most; });
  float found = most[0];
  for (int64_t lane = 1; lane < LANES; ++lane) found = most[lane] > found || most[lane] != most[lane] ? most[lane] : found;
  return found * sign;
}

float log_sum(const Tape& tape, const Instruction& in, const int64_t* i) {
  const float top = most_of(tape, in, i, 1);
  if (!(top > NONE && top < -NONE)) return top;
  Floats sums = {};
  vectors(tape, in, i, NONE, [&](Floats x) { sums += exponential(x - top); });
  return top + std::log(sum(sums));
}

template <typename Function>
void reduce(const Tape& tape, const Instruction& in, Function f) {
  rows(tape, in, [&](const int64_t* i) {
    const auto x = f(i);
    keep(&x, address(tape, in.out) + shifted(in.out, i) * bytes_of_dtype(in.out.dtype), in.out.dtype, 1, 1);
  }, in.sizes[3]);
}

// Whole numbers: `f(so far, next)` from `start` on.
template <typename Function>
void reduce_whole(const Tape& tape, const Instruction& in, int64_t start, Function f) {
  reduce(tape, in, [&](const int64_t* i) {
    int64_t found = start;
    parts<int64_t>(tape, in, i, [&](const int64_t* x, int64_t count) {
      for (int64_t n = 0; n < count; ++n) found = f(found, x[n]);
    });
    return found;
  });
}

template <typename T>
void sum_up(const Tape& tape, const Instruction& in) {
  rows(tape, in, [&](const int64_t* i) {
    T so_far = 0, room[BLOCK];
    int64_t first = shifted(in.out, i);
    parts<T>(tape, in, i, [&](const T* x, int64_t count) {
      for (int64_t n = 0; n < count; ++n) room[n] = so_far += x[n];
      keep(room, address(tape, in.out) + first * bytes_of_dtype(in.out.dtype), in.out.dtype, in.out.strides[3], count);
      first += count * in.out.strides[3];
    });
  }, in.sizes[3]);
}

// Layer normalisation over the last dim, with weight `b` and bias `c` or none, and epsilon `value`.
void normalise(const Tape& tape, const Instruction& in) {
  const int64_t size = in.sizes[3];
  const float *weight = at<float>(tape, in.b), *bias = at<float>(tape, in.c);
  rows(tape, in, [&](const int64_t* i) {
    float* __restrict out = at<float>(tape, in.out) + shifted(in.out, i);
    const float* a = at<float>(tape, in.a) + shifted(in.a, i);
    float mean = total(tape, in, i) / size;
    Floats squares = {};
    vectors(tape, in, i, mean, [&](Floats x) { squares += (x - mean) * (x - mean); });
    float scale = 1 / std::sqrt(sum(squares) / size + (float)in.value);
    for (int64_t n = 0; n < size; ++n)
      out[n] = (a[n] - mean) * scale * (weight ? weight[n] : 1.0f) + (bias ? bias[n] : 0.0f);
  });
}

// -- indices: int64 or int32, none below 0; whether all lie within `first` --

int64_t index_at(const Tape& tape, const Operand& x, int64_t place) {
  return x.dtype == I64 ? at<int64_t>(tape, x)[place] : at<int32_t>(tape, x)[place];
}

// Rows of the matrix `b`, of which there are `first`, at the indices `a`: sizes are [.., indices, bytes of a row].
bool take(const Tape& tape, const Instruction& in) {
  bool inside = true;
  rows(tape, in, [&](const int64_t* i) {
    const int64_t index = index_at(tape, in.a, shifted(in.a, i));
    inside &= index >= 0 && index < in.first;
    if (inside) std::memcpy(at<char>(tape, in.out) + shifted(in.out, i), at<char>(tape, in.b) + index * in.second, in.sizes[3]);
  });
  return inside;
}

// out[i] = a[i, but `b`[i] along a dim of `first` with stride `second`]
template <typename Number>
bool gather(const Tape& tape, const Instruction& in) {
  bool outside = false;
  rows(tape, in, [&](const int64_t* i) {
    Number* out = at<Number>(tape, in.out) + shifted(in.out, i);
    const Number* a = at<Number>(tape, in.a) + shifted(in.a, i);
    const int64_t b = shifted(in.b, i);
    for (int64_t n = 0; n < in.sizes[3]; ++n) {
      const int64_t index = index_at(tape, in.b, b + n * in.b.strides[3]);
      if (index < 0 || index >= in.first)
        __atomic_store_n(&outside, true, __ATOMIC_RELAXED);
      else
        out[n * in.out.strides[3]] = a[n * in.a.strides[3] + index * in.second];
    }
  }, in.sizes[3]);
  return !outside;
}

bool gather(const Tape& tape, const Instruction& in) {
  switch (bytes_of_dtype(in.out.dtype)) {
    case 8: return gather<int64_t>(tape, in);
    case 4: return gather<int32_t>(tape, in);
    case 2: return gather<int16_t>(tape, in);
    default: return gather<int8_t>(tape, in);
  }
}

// out[i, but `b`[i] along a dim of `first` with stride `second`] = f(what is there, a[i]), in order.
template <typename T, typename Function>
bool scatter(const Tape& tape, const Instruction& in, Function f) {
  bool inside = true;
  const int64_t bytes = bytes_of_dtype(in.out.dtype);
  rows(tape, in, [&](const int64_t* i) {
    const int64_t b = shifted(in.b, i), to = shifted(in.out, i);
    T rooms[2];
    for (int64_t n = 0; n < in.sizes[3]; ++n) {
      const int64_t index = index_at(tape, in.b, b + n * in.b.strides[3]);
      inside &= index >= 0 && index < in.first;
      if (!inside) return;
      char* out = address(tape, in.out) + (to + n * in.out.strides[3] + index * in.second) * bytes;
      const int64_t from = shifted(in.a, i) + n * in.a.strides[3];
      const T* x = fetch<T>(address(tape, in.a) + from * bytes_of_dtype(in.a.dtype), in.a.dtype, 1, 1, rooms);
      const T made = f(*fetch<T>(out, in.out.dtype, 1, 1, rooms + 1), *x);
      keep(&made, out, in.out.dtype, 1, 1);
    }
  });
  return inside;
}

template <typename T>
bool scatter(const Tape& tape, const Instruction& in) {
  switch (in.code) {
    case OP_SCATTER: return scatter<T>(tape, in, [](T, T y) { return y; });
    case OP_SCATTER_ADD: return scatter<T>(tape, in, [](T x, T y) { return (T)(x + y); });
    case OP_SCATTER_MOST: return scatter<T>(tape, in, [](T x, T y) { return y > x || y != y ? y : x; });
    default: return scatter<T>(tape, in, [](T x, T y) { return y < x || y != y ? y : x; });
  }
}

// How many of the `first` numbers of a row of `a`, in order, are below `b`, or not above it where `second`: sizes are those of `b`.
template <typename T>
void search(const Tape& tape, const Instruction& in) {
  rows(tape, in, [&](const int64_t* i) {
    const char* row = address(tape, in.a) + shifted(in.a, i) * bytes_of_dtype(in.a.dtype);
    T rooms[2];
    for (int64_t n = 0; n < in.sizes[3]; ++n) {
      const int64_t place = shifted(in.b, i) + n * in.b.strides[3];
      const T x = *fetch<T>(address(tape, in.b) + place * bytes_of_dtype(in.b.dtype), in.b.dtype, 1, 1, rooms);
      int64_t low = 0, high = in.first;
      while (low < high) {
        const int64_t middle = (low + high) / 2;
        const T y = *fetch<T>(row + middle * bytes_of_dtype(in.a.dtype), in.a.dtype, 1, 1, rooms + 1);
        (in.second ? y <= x : y < x) ? low = middle + 1 : high = middle;
      }
      keep(&low, address(tape, in.out) + (shifted(in.out, i) + n * in.out.strides[3]) * bytes_of_dtype(in.out.dtype), in.out.dtype, 1, 1);
    }
  }, in.sizes[3]);
}

// -- small matrices: [batch, rows, columns, inner]; `a` and `out` with the strides of these, `b` too, plus `c` where there is one --

constexpr int64_t COLUMNS = 256, TOGETHER = 4;

// Columns [first, first + count) of up to TOGETHER rows. Each number is summed in the order of the inner dim.
void multiply_columns(const Instruction& in, const float* a, const float* b, int64_t taken, int64_t count, float (*sums)[COLUMNS]) {
  const int64_t inner = in.sizes[3], across = in.b.strides[2], along = in.b.strides[3];
  for (int64_t row = 0; row < taken; ++row) std::memset(sums[row], 0, count * sizeof(float));
  if (along == 1 && across != 1 && in.a.strides[3] == 1) {
    for (int64_t n = 0; n < count; ++n)
      for (int64_t row = 0; row < taken; ++row) {
        const float *x = a + row * in.a.strides[1], *y = b + n * across;
        Floats wide = {};
        int64_t k = 0;
        for (; k + LANES <= inner; k += LANES) wide += load(x + k) * load(y + k);
        float all = sum(wide);
        for (; k < inner; ++k) all += x[k] * y[k];
        sums[row][n] = all;
      }
    return;
  }
  for (int64_t k = 0; k < inner; ++k)
    for (int64_t row = 0; row < taken; ++row) {
      const float x = a[row * in.a.strides[1] + k * in.a.strides[3]];
      const float* __restrict y = b + k * along;
      float* __restrict into = sums[row];
      if (across == 1)
        for (int64_t n = 0; n < count; ++n) into[n] += x * y[n];
      else
        for (int64_t n = 0; n < count; ++n) into[n] += x * y[n * across];
    }
}

void multiply(const Tape& tape, const Instruction& in) {
  const int64_t chunks = (in.sizes[2] + COLUMNS - 1) / COLUMNS, work = in.sizes[1] * in.sizes[2] * in.sizes[3];
  spread_tasks(tape, in.sizes[0] * work, in.sizes[0] * chunks, [&](int64_t task) {
    const int64_t batch = task / chunks, first = task % chunks * COLUMNS;
    const int64_t count = in.sizes[2] - first < COLUMNS ? in.sizes[2] - first : COLUMNS;
    float sums[TOGETHER][COLUMNS];
    for (int64_t row = 0; row < in.sizes[1]; row += TOGETHER) {
      const int64_t taken = in.sizes[1] - row < TOGETHER ? in.sizes[1] - row : TOGETHER;
      const float* a = at<float>(tape, in.a) + batch * in.a.strides[0] + row * in.a.strides[1];
      multiply_columns(in, a, at<float>(tape, in.b) + batch * in.b.strides[0] + first * in.b.strides[2], taken, count, sums);
      for (int64_t own = 0; own < taken; ++own) {
        float* out = at<float>(tape, in.out) + batch * in.out.strides[0] + (row + own) * in.out.strides[1] + first * in.out.strides[2];
        const float* c = at<float>(tape, in.c);
        if (c) c += batch * in.c.strides[0] + (row + own) * in.c.strides[1] + first * in.c.strides[2];
        for (int64_t n = 0; n < count; ++n) out[n * in.out.strides[2]] = sums[own][n] + (c ? c[n * in.c.strides[2]] : 0.0f);
      }
    }
  });
}

// -- functions --

Floats logistic(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

// e^x up to where float32 ends.
Floats powers_of_e(Floats x) {
  Floats half = exponential(x * 0.5f);
  return x > 87.0f ? half * half : exponential(x);
}

int64_t rounded_down(int64_t x, int64_t y) { return y ? x / y - (x % y && (x < 0) != (y < 0)) : 0; }
float rounded_down(float x, float y) {
  if (y == 0) return x / y;
  float rest = std::fmod(x, y), made = (x - rest) / y;
  if (rest != 0 && (y < 0) != (rest < 0)) made -= 1;
  if (made == 0) return std::copysign(0.0f, x / y);
  float whole = std::floor(made);
  return made - whole > 0.5f ? whole + 1 : whole;
}
int64_t remainder_of(int64_t x, int64_t y) { return x - rounded_down(x, y) * y; }
float remainder_of(float x, float y) {
  float rest = std::fmod(x, y);
  return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}

// An expression of x = a[n], y = b[n], z = c[n] in both dtypes, or in float32 alone.
#define FUNCTION(expression)                                                                              \
  [value](auto* out, const auto* a, const auto* b, const auto* c, int64_t count) {                       \
    using T = std::remove_reference_t<decltype(*out)>;                                                    \
    (void)sizeof(T), (void)value;                                                                         \
    for (int64_t n = 0; n < count; ++n) out[n] = (expression);                                            \
  }
#define BOTH(arity, expression) \
  return in.whole ? blocks<int64_t, arity>(tape, in, FUNCTION(expression)) : blocks<float, arity>(tape, in, FUNCTION(expression))
#define FLOAT(arity, expression) return blocks<float, arity>(tape, in, FUNCTION(expression))
#define WHOLE(arity, expression) return blocks<int64_t, arity>(tape, in, FUNCTION(expression))

void compute(const Tape& tape, const Instruction& in) {
  const double value = in.value;
  switch (in.code) {
    case OP_COPY: return copy(tape, in);
    case OP_COUNT: return count_up(tape, in);
    case OP_ADD: BOTH(2, a[n] + (T)value * b[n]);
    case OP_MULTIPLY: BOTH(2, a[n] * b[n]);
    case OP_DIVIDE: FLOAT(2, a[n] / b[n]);
    case OP_DIVIDE_DOWN: BOTH(2, rounded_down(a[n], b[n]));
    case OP_DIVIDE_CUT: BOTH(2, sizeof(T) == 8 ? (b[n] ? (T)(a[n] / b[n]) : 0) : (T)std::trunc(a[n] / b[n]));
    case OP_REMAINDER: BOTH(2, remainder_of(a[n], b[n]));
    case OP_LEAST: BOTH(2, b[n] < a[n] || b[n] != b[n] ? b[n] : a[n]);
    case OP_MOST: BOTH(2, b[n] > a[n] || b[n] != b[n] ? b[n] : a[n]);
    case OP_EQUAL: BOTH(2, a[n] == b[n]);
    case OP_UNEQUAL: BOTH(2, a[n] != b[n]);
    case OP_BELOW: BOTH(2, a[n] < b[n]);
    case OP_UP_TO: BOTH(2, a[n] <= b[n]);
    case OP_ABOVE: BOTH(2, a[n] > b[n]);
    case OP_FROM: BOTH(2, a[n] >= b[n]);
    case OP_BOTH: BOTH(2, a[n] != 0 && b[n] != 0);
    case OP_EITHER: BOTH(2, a[n] != 0 || b[n] != 0);
    case OP_ONE_OF: BOTH(2, (a[n] != 0) != (b[n] != 0));
    case OP_NOT: BOTH(1, a[n] == 0);
    case OP_BITS_AND: WHOLE(2, a[n] & b[n]);
    case OP_BITS_OR: WHOLE(2, a[n] | b[n]);
    case OP_BITS_XOR: WHOLE(2, a[n] ^ b[n]);
    case OP_BITS_NOT: WHOLE(1, ~a[n]);
    case OP_SHIFT_LEFT: WHOLE(2, a[n] << b[n]);
    case OP_SHIFT_RIGHT: WHOLE(2, a[n] >> b[n]);
    case OP_WHERE: BOTH(3, a[n] != 0 ? b[n] : c[n]);
    case OP_NEGATE: BOTH(1, -a[n]);
    case OP_SIZE: BOTH(1, a[n] < 0 ? -a[n] : a[n]);
    case OP_SIGN: BOTH(1, (T)((a[n] > 0) - (a[n] < 0)));
    case OP_SQUARE: BOTH(1, a[n] * a[n]);
    case OP_CUBE: BOTH(1, a[n] * a[n] * a[n]);
    case OP_POWER: FLOAT(2, std::pow(a[n], b[n]));
    case OP_SQUARE_ROOT: FLOAT(1, std::sqrt(a[n]));
    case OP_RECIPROCAL_ROOT: FLOAT(1, 1 / std::sqrt(a[n]));
    case OP_RECIPROCAL: FLOAT(1, 1 / a[n]);
    case OP_FLOOR: FLOAT(1, std::floor(a[n]));
    case OP_CEILING: FLOAT(1, std::ceil(a[n]));
    case OP_ROUND: FLOAT(1, std::nearbyint(a[n]));
    case OP_RELU: BOTH(1, a[n] < 0 ? 0 : a[n]);
    case OP_SINE: FLOAT(1, std::sin(a[n]));
    case OP_COSINE: FLOAT(1, std::cos(a[n]));
    case OP_LOGARITHM: FLOAT(1, std::log(a[n]));
    case OP_ERROR: FLOAT(1, std::erf(a[n]));
    case OP_EXPONENTIAL: return wide(tape, in, powers_of_e);
    case OP_TANH: return wide(tape, in, hyperbolic_tangent);
    case OP_SIGMOID: return wide(tape, in, logistic);
    case OP_SILU: return wide(tape, in, [](Floats x) { return x * logistic(x); });
    case OP_GELU: FLOAT(1, 0.5f * a[n] * (1 + std::erf(a[n] * 0.70710678f)));
    case OP_GELU_TANH:
      return wide(tape, in, [](Floats x) {
        return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456f * (x + 0.044715f * x * x * x)));
      });
    case OP_SUM:
      if (in.whole) return reduce_whole(tape, in, 0, [](int64_t x, int64_t y) { return x + y; });
      return reduce(tape, in, [&](const int64_t* i) { return total(tape, in, i) * (float)value; });
    case OP_LARGEST:
      if (in.whole) return reduce_whole(tape, in, INT64_MIN, [](int64_t x, int64_t y) { return y > x ? y : x; });
      return reduce(tape, in, [&](const int64_t* i) { return most_of(tape, in, i, 1); });
    case OP_SMALLEST:
      if (in.whole) return reduce_whole(tape, in, INT64_MAX, [](int64_t x, int64_t y) { return y < x ? y : x; });
      return reduce(tape, in, [&](const int64_t* i) { return most_of(tape, in, i, -1); });
    case OP_ANY: return reduce_whole(tape, in, 0, [](int64_t x, int64_t y) { return (int64_t)(x || y); });
    case OP_ALL: return reduce_whole(tape, in, 1, [](int64_t x, int64_t y) { return (int64_t)(x && y); });
    case OP_LOG_SUM: return reduce(tape, in, [&](const int64_t* i) { return log_sum(tape, in, i); });
    case OP_SUM_UP: return in.whole ? sum_up<int64_t>(tape, in) : sum_up<float>(tape, in);
    case OP_NORMALISE: return normalise(tape, in);
    case OP_SEARCH: return in.whole ? search<int64_t>(tape, in) : search<float>(tape, in);
    case OP_MATRIX: return multiply(tape, in);
  }
}

// A function with its structure: [code, length, function, words, word of threads, word of parallel, n, n times (base, offset, word), words].
void call(const Tape& tape, const int64_t* given) {
  const int64_t count = given[3], patches = given[6], *own = given + 7 + 3 * patches;
  int64_t* words = (int64_t*)alloca(count * sizeof(int64_t));
  std::memcpy(words, own, count * sizeof(int64_t));
  for (int64_t n = 0; n < patches; ++n) {
    const int64_t base = given[7 + 3 * n], offset = given[8 + 3 * n];
    words[given[9 + 3 * n]] = base == ABSENT ? 0 : (int64_t)(base == ITSELF ? (char*)words : (char*)tape.bases[base]) + offset;
  }
  words[given[4]] = tape.threads;
  words[given[5]] = (int64_t)tape.parallel;
  ((void (*)(void*))given[2])(words);
}

// Whether all indices are there.
bool run(const Tape& tape, const int64_t* words) {
  const Instruction& in = *(const Instruction*)words;
  switch (in.code) {
    case OP_CALL: call(tape, words); return true;
    case OP_TAKE: return take(tape, in);
    case OP_GATHER: return gather(tape, in);
    case OP_SCATTER: case OP_SCATTER_ADD: case OP_SCATTER_MOST: case OP_SCATTER_LEAST:
      return in.whole ? scatter<int64_t>(tape, in) : scatter<float>(tape, in);
    default: compute(tape, in); return true;
  }
}

}  // namespace

// 0, or 1 where an index lies outside of what it is of.
extern "C" int64_t run_tape(const Tape* tape) {
  for (const int64_t* words = tape->words; words < tape->end; words += words[1])
    if (!run(*tape, words)) return 1;
  return 0;
}

// Tapes one after the other, until one says 1.
extern "C" int64_t run_tapes(const Tape* const* tapes, int64_t count) {
  for (int64_t at = 0; at < count; ++at)
    if (run_tape(tapes[at])) return 1;
  return 0;
}
