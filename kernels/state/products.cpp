// Products of queries with vectors of a memory: numbers, or codes, which kernels/code_products/template.cpp before this one reads.

namespace {

// Fields of 8 bytes each, as semkv.kernels.state.products writes them. Strides are of rows of the batch, heads, and vectors or queries: of
// `q` in numbers, else in bytes.
struct Asked {
  const float* q;      // [rows, heads, queries, dim]
  const char* x;       // [rows, heads, count, dim or bytes of codes]
  const char* scale;   // float16 or float32 [rows, heads, count], of codes
  float* out;          // [rows, heads, queries, count]
  float* padded;       // [rows, heads, queries, width]: the queries, with zeros up to whole vectors, or to all codes of a vector
  int64_t rows, heads, queries, count, dim, width, bytes, kind, bits, scale_bytes;
  int64_t q_strides[3], x_strides[3], scale_strides[3];
  int64_t threads;
  Parallel parallel;

  int64_t parts() const { return (count + SIZE - 1) / SIZE; }
};

void pad(const Asked& asked, int64_t place) {
  const int64_t row = place / asked.heads, head = place % asked.heads;
  for (int64_t query = 0; query < asked.queries; ++query) {
    float* into = asked.padded + (place * asked.queries + query) * asked.width;
    const float* q = asked.q + row * asked.q_strides[0] + head * asked.q_strides[1] + query * asked.q_strides[2];
    std::memcpy(into, q, asked.dim * sizeof(float));
    std::memset(into + asked.dim, 0, (asked.width - asked.dim) * sizeof(float));
  }
}

// `Rows` queries times vectors of numbers, four vectors at a time.
template <int64_t KIND, int64_t Rows>
void with_numbers(const Asked& asked, const float* q, const char* x, float* out, int64_t count) {
  const int64_t bytes = KIND == FLOAT32 ? 4 : 2, whole = asked.dim / LANES * LANES;
  for (int64_t n = 0; n < count; n += 4) {
    Floats sums[4][Rows] = {};
    const char* vector[4];
    for (int64_t j = 0; j < 4; ++j) vector[j] = x + (n + j < count ? n + j : count - 1) * asked.x_strides[2];
    auto take = [&](int64_t j, int64_t at, Floats part) __attribute__((always_inline)) {
      for (int64_t row = 0; row < Rows; ++row) sums[j][row] += part * load(q + row * asked.width + at);
    };
    for (int64_t at = 0; at < whole; at += LANES)
      for (int64_t j = 0; j < 4; ++j) take(j, at, numbers<LANES>(vector[j] + at * bytes, KIND));
    for (int64_t j = 0; j < 4 && whole < asked.dim; ++j) {
      Floats rest = {};
      for (int64_t at = whole; at < asked.dim; ++at) rest[at - whole] = numbers<1>(vector[j] + at * bytes, KIND)[0];
      take(j, whole, rest);
    }
    for (int64_t row = 0; row < Rows; ++row) {
      const Four four = sums_of(sums[0][row], sums[1][row], sums[2][row], sums[3][row]);
      std::memcpy(out + row * asked.count + n, &four, (count - n < 4 ? count - n : 4) * sizeof(float));
    }
  }
}

template <int64_t KIND>
void all_queries(const Asked& asked, const float* q, const char* x, float* out, int64_t count) {
  for (int64_t query = 0; query < asked.queries;) {
    const int64_t left = asked.queries - query, taken = left < 4 ? left : 4;
    (taken == 4   ? with_numbers<KIND, 4>
     : taken == 3 ? with_numbers<KIND, 3>
     : taken == 2 ? with_numbers<KIND, 2>
                  : with_numbers<KIND, 1>)(asked, q + query * asked.width, x, out + query * asked.count, count);
    query += taken;
  }
}

void ask(const Asked& asked, int64_t task) {
  const int64_t place = task / asked.parts(), start = task % asked.parts() * SIZE, row = place / asked.heads, head = place % asked.heads;
  const int64_t count = asked.count - start < SIZE ? asked.count - start : SIZE;
  const float* q = asked.padded + place * asked.queries * asked.width;
  const char* x = asked.x + row * asked.x_strides[0] + head * asked.x_strides[1] + start * asked.x_strides[2];
  float* out = asked.out + place * asked.queries * asked.count + start;
  if (asked.kind != CODES)
    return (asked.kind == FLOAT32   ? all_queries<FLOAT32>
            : asked.kind == FLOAT16 ? all_queries<FLOAT16>
                                    : all_queries<BFLOAT16>)(asked, q, x, out, count);
  Call call = {};
  call.rows = asked.queries, call.count = asked.count, call.width = asked.bytes, call.bits = asked.bits;
  call.vector_stride = asked.x_strides[2], call.scale_vector_stride = asked.scale_strides[2], call.scale_bytes = asked.scale_bytes;
  const char* scale = asked.scale + row * asked.scale_strides[0] + head * asked.scale_strides[1] + start * asked.scale_strides[2];
  const Part part = {q, (const uint8_t*)x, scale, out, count};
  asked.bits == 8 ? products<8>(call, part) : products<4>(call, part);
  multiply(call, part);
}

}  // namespace

extern "C" void state_products(const Asked* asked) {
  for (int64_t place = 0; place < asked->rows * asked->heads; ++place) pad(*asked, place);
  share(*asked, ask, asked->rows * asked->heads * asked->parts());
}
