// What a step computes between two attentions: a list of instructions over small tensors and the weights, run one after the other.
//
// The OP_ numbers are defined by a specialisation (kernels/segments/instructions.py). Tensors are float32, or int64 where an
// instruction says so, with up to RANK dims.

#include <cmath>

namespace {

constexpr int64_t RANK = 4;

struct Operand {
  int64_t base, offset, strides[RANK];  // of the table of addresses; in numbers
};

// out[i] = code(a[i], b[i], c); a stride of 0 broadcasts.
//
// Reductions, products and `gather`: see there.
struct Instruction {
  int64_t code, sizes[RANK];
  Operand out, a, b, c;
  double value;
};

struct Call {
  void* const* bases;
  int64_t count, threads;
  Parallel parallel;
};

template <typename Number = float>
Number* at(const Call& call, const Operand& x) {
  return x.base < 0 ? nullptr : (Number*)call.bases[x.base] + x.offset;
}

int64_t shifted(const Operand& x, const int64_t* i) {
  return i[0] * x.strides[0] + i[1] * x.strides[1] + i[2] * x.strides[2];
}

// `row(i)` for each index of all dims but the last.
template <typename Row>
void rows(const Instruction& in, Row row) {
  int64_t i[3];
  for (i[0] = 0; i[0] < in.sizes[0]; ++i[0])
    for (i[1] = 0; i[1] < in.sizes[1]; ++i[1])
      for (i[2] = 0; i[2] < in.sizes[2]; ++i[2]) row(i);
}

template <typename Function>
void binary(const Call& call, const Instruction& in, Function f) {
  const int64_t size = in.sizes[3], step_a = in.a.strides[3], step_b = in.b.strides[3];
  rows(in, [&](const int64_t* i) {
    float* __restrict out = at(call, in.out) + shifted(in.out, i);
    const float *a = at(call, in.a) + shifted(in.a, i), *b = at(call, in.b) + shifted(in.b, i);
    if (step_a == 1 && step_b == 1)
      for (int64_t n = 0; n < size; ++n) out[n] = f(a[n], b[n]);
    else if (step_a == 1 && step_b == 0)
      for (int64_t n = 0; n < size; ++n) out[n] = f(a[n], *b);
    else
      for (int64_t n = 0; n < size; ++n) out[n] = f(a[n * step_a], b[n * step_b]);
  });
}

template <typename Function>
void unary(const Call& call, const Instruction& in, Function f) {
  const int64_t size = in.sizes[3], step = in.a.strides[3];
  rows(in, [&](const int64_t* i) {
    float* __restrict out = at(call, in.out) + shifted(in.out, i);
    const float* a = at(call, in.a) + shifted(in.a, i);
    if (step == 1)
      for (int64_t n = 0; n < size; ++n) out[n] = f(a[n]);
    else
      for (int64_t n = 0; n < size; ++n) out[n] = f(a[n * step]);
  });
}

// The one instruction whose output may have gaps.
void copy(const Call& call, const Instruction& in) {
  const int64_t size = in.sizes[3], to = in.out.strides[3], from = in.a.strides[3];
  rows(in, [&](const int64_t* i) {
    float* out = at(call, in.out) + shifted(in.out, i);
    const float* a = at(call, in.a) + shifted(in.a, i);
    if (to == 1 && from == 1)
      std::memcpy(out, a, size * sizeof(float));
    else
      for (int64_t n = 0; n < size; ++n) out[n * to] = a[n * from];
  });
}

// A function of sixteen numbers at a time.
template <typename Function>
void wide(const Call& call, const Instruction& in, Function f) {
  const int64_t size = in.sizes[3], step = in.a.strides[3];
  rows(in, [&](const int64_t* i) {
    float* __restrict out = at(call, in.out) + shifted(in.out, i);
    const float* a = at(call, in.a) + shifted(in.a, i);
    for (int64_t first = 0; first < size; first += LANES) {
      const int64_t count = size - first < LANES ? size - first : LANES;
      if (count == LANES && step == 1) {
        store(out + first, f(load(a + first)));
        continue;
      }
      Floats x = {};
      for (int64_t n = 0; n < count; ++n) x[n] = a[(first + n) * step];
      x = f(x);
      for (int64_t n = 0; n < count; ++n) out[first + n] = x[n];
    }
  });
}

// The sum of f over a dense row.
template <typename Function>
float total(const float* x, int64_t size, Function f) {
  Floats sums = {};
  int64_t n = 0;
  for (; n + LANES <= size; n += LANES) sums += f(load(x + n));
  float rest = sum(sums);
  for (; n < size; ++n) rest += f(Floats{} + x[n])[0];
  return rest;
}

// The last dim of `a`, dense, summed and multiplied by `value`; the last size of the instruction is that dim's.
void reduce(const Call& call, const Instruction& in) {
  rows(in, [&](const int64_t* i) {
    const float* a = at(call, in.a) + shifted(in.a, i);
    at(call, in.out)[shifted(in.out, i)] = total(a, in.sizes[3], [](Floats x) { return x; }) * (float)in.value;
  });
}

// Layer normalisation over the last dim, with weight `b` and bias `c` or none, and epsilon `value`.
void normalise(const Call& call, const Instruction& in) {
  const int64_t size = in.sizes[3];
  const float *weight = at(call, in.b), *bias = at(call, in.c);
  rows(in, [&](const int64_t* i) {
    float* __restrict out = at(call, in.out) + shifted(in.out, i);
    const float* a = at(call, in.a) + shifted(in.a, i);
    float mean = total(a, size, [](Floats x) { return x; }) / size;
    float variance = total(a, size, [mean](Floats x) { return (x - mean) * (x - mean); }) / size;
    float scale = 1 / std::sqrt(variance + (float)in.value);
    for (int64_t n = 0; n < size; ++n)
      out[n] = (a[n] - mean) * scale * (weight ? weight[n] : 1.0f) + (bias ? bias[n] : 0.0f);
  });
}

// Rows of the matrix `b`, of which there are `value`, at the int64 indices `a`: sizes are [.., indices, width]. Whether all are there.
bool gather(const Call& call, const Instruction& in) {
  bool inside = true;
  rows(in, [&](const int64_t* i) {
    const int64_t index = at<int64_t>(call, in.a)[shifted(in.a, i)];
    inside &= index >= 0 && index < (int64_t)in.value;
    if (inside) std::memcpy(at(call, in.out) + shifted(in.out, i), at(call, in.b) + index * in.sizes[3], in.sizes[3] * sizeof(float));
  });
  return inside;
}

// a [sizes 0, sizes 1] times the matrix b [sizes 2, sizes 1], plus c.
void multiply_matrix(const Call& call, const Instruction& in) {
  Product made = {at(call, in.a), at(call, in.b), at(call, in.c), at(call, in.out), in.sizes[0], in.sizes[1], in.sizes[2],
                  call.threads, call.parallel};
  if (made.tokens == 1)
    product<1>(made);
  else if (made.tokens == 2)
    product<2>(made);
  else
    product<4>(made);
}

Floats logistic(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

void run(const Call& call, const Instruction& in) {
  const float value = (float)in.value;
  switch (in.code) {
    case OP_COPY: return copy(call, in);
    case OP_CONVERT: {  // from int64
      return rows(in, [&](const int64_t* i) {
        for (int64_t n = 0; n < in.sizes[3]; ++n)
          at(call, in.out)[shifted(in.out, i) + n] = (float)at<int64_t>(call, in.a)[shifted(in.a, i) + n * in.a.strides[3]];
      });
    }
    case OP_ADD: return binary(call, in, [value](float x, float y) { return x + value * y; });
    case OP_MULTIPLY: return binary(call, in, [](float x, float y) { return x * y; });
    case OP_DIVIDE: return binary(call, in, [](float x, float y) { return x / y; });
    case OP_NEGATE: return unary(call, in, [](float x) { return -x; });
    case OP_SQUARE: return unary(call, in, [](float x) { return x * x; });
    case OP_CUBE: return unary(call, in, [](float x) { return x * x * x; });
    case OP_SQUARE_ROOT: return unary(call, in, [](float x) { return std::sqrt(x); });
    case OP_RECIPROCAL_ROOT: return unary(call, in, [](float x) { return 1 / std::sqrt(x); });
    case OP_RELU: return unary(call, in, [](float x) { return x < 0 ? 0 : x; });
    case OP_SINE: return unary(call, in, [](float x) { return std::sin(x); });
    case OP_COSINE: return unary(call, in, [](float x) { return std::cos(x); });
    case OP_TANH: return wide(call, in, hyperbolic_tangent);
    case OP_SIGMOID: return wide(call, in, logistic);
    case OP_SILU: return wide(call, in, [](Floats x) { return x * logistic(x); });
    case OP_GELU: return unary(call, in, [](float x) { return 0.5f * x * (1 + std::erf(x * 0.70710678f)); });
    case OP_GELU_TANH:
      return wide(call, in, [](Floats x) {
        return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456f * (x + 0.044715f * x * x * x)));
      });
    case OP_REDUCE: return reduce(call, in);
    case OP_NORMALISE: return normalise(call, in);
    case OP_PRODUCT: return multiply_matrix(call, in);
  }
}

}  // namespace

// 0, or 1 where an index lies outside of its matrix.
extern "C" int64_t segment(const Call* call, const Instruction* instructions) {
  for (int64_t i = 0; i < call->count; ++i) {
    const Instruction& in = instructions[i];
    if (in.code != OP_GATHER)
      run(*call, in);
    else if (!gather(*call, in))
      return 1;
  }
  return 0;
}
