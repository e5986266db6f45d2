// Products of queries with packed codes of 4 or 8 bits, read as they are, one vector after the other. A code c of b bits stands for
// c - 2^(b - 1), times the scale of its vector where there is one.

namespace {

constexpr int64_t SIZE = 4096;                      // vectors of a task
constexpr int64_t AHEAD = 64;                         // vectors in rows that are asked for before they are read
constexpr int64_t MAX_HALVES = 256;                 // bytes of a vector, at most, whose halves are computed apart

// Fields of 8 bytes each, as semkv.kernels.code_products.cpp writes them. Strides are bytes.
struct Call {
  const float* q;        // [heads, rows, width * 8 / bits], 0 beyond the numbers of a vector; null for lengths
  const uint8_t* codes;  // [heads, count, width]
  const char* scale;     // float16 or float32 [heads, count], or null
  float* out;            // [heads, rows, count]
  int64_t heads, rows, count, width, bits, threads;
  int64_t head_stride, vector_stride, scale_head_stride, scale_vector_stride, scale_bytes;
  Parallel parallel;
};

// What a task has of one head: vectors [start, start + count) of it and all of its queries.
struct Part {
  const float* q;
  const uint8_t* codes;
  const char* scale;
  float* out;
  int64_t count;
};

// Sixteen codes from 2 * Bits bytes on, of which `bytes` are read.
template <int64_t Bits>
inline Floats codes_in_row(const uint8_t* from, int64_t bytes) {
  constexpr int32_t middle = 1 << (Bits - 1);
  if constexpr (Bits == 8) {
    if (bytes == 16) return from_bytes(loaded<16, Bytes>(from), middle);
    Bytes some = {};
    std::memcpy(&some, from, bytes);
    return from_bytes(some, middle);
  } else {
    uint32_t words[2] = {};
    bytes == 2 * Bits ? std::memcpy(words, from, 2 * Bits) : std::memcpy(words, from, bytes);
    constexpr uint32_t per = 32 / Bits;  // codes of a word
    Words lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Words both = Bits == 4 ? (lanes < 8 ? Words{} + words[0] : Words{} + words[1]) : Words{} + words[0];
    return from_codes<Bits>(both >> (lanes % per * (uint32_t)Bits));
  }
}

// In rows of 4 bits: the low halves of sixteen bytes, then the high ones, with the queries' numbers in that order. Width: bytes of a vector
// where the compiler knows them, else 0.
template <int64_t Rows, int64_t Width>
void in_rows_by_halves(const Call& call, const Part& part, int64_t row) {
  const int64_t width = Width ? Width : call.width;
  float q[Rows][2][MAX_HALVES] = {};
  for (int64_t i = 0; i < Rows; ++i)
    for (int64_t n = 0; n < 2 * width; ++n) q[i][n % 2][n / 2] = part.q[(row + i) * 2 * width + n];
  for (int64_t n = 0; n < part.count; n += 4) {
    Floats sums[4][Rows] = {};
    for (int64_t at = 0; at < 4 * call.vector_stride; at += 64) __builtin_prefetch(part.codes + (n + AHEAD) * call.vector_stride + at);
    const uint8_t* vector[4];
    for (int64_t j = 0; j < 4; ++j) vector[j] = part.codes + (n + j < part.count ? n + j : part.count - 1) * call.vector_stride;
    auto take = [&](int64_t at, int64_t count) __attribute__((always_inline)) {
      for (int64_t j = 0; j < 4; ++j) {
        Bytes bytes = {};
        count == LANES ? std::memcpy(&bytes, vector[j] + at, LANES) : std::memcpy(&bytes, vector[j] + at, count);
        Floats low, high;
        from_halves(bytes, low, high);
        for (int64_t i = 0; i < Rows; ++i) {
          sums[j][i] += low * load(q[i][0] + at);
          sums[j][i] += high * load(q[i][1] + at);
        }
      }
    };
    int64_t at = 0;
    for (; at + LANES <= width; at += LANES) take(at, LANES);
    if (at < width) take(at, width - at);
    for (int64_t i = 0; i < Rows; ++i) {
      Four four = sums_of(sums[0][i], sums[1][i], sums[2][i], sums[3][i]);
      float* out = part.out + (row + i) * call.count + n;
      part.count - n >= 4 ? std::memcpy(out, &four, sizeof(four)) : std::memcpy(out, &four, (part.count - n) * sizeof(float));
    }
  }
}

template <int64_t Bits, int64_t Rows>
void in_rows(const Call& call, const Part& part, int64_t row) {
  if (Bits == 4 && call.width <= MAX_HALVES)  // heads of 128 and of 64 numbers are the most common ones
    return (call.width == 64   ? in_rows_by_halves<Rows, 64>
            : call.width == 32 ? in_rows_by_halves<Rows, 32>
                               : in_rows_by_halves<Rows, 0>)(call, part, row);
  const int64_t padded = call.width * 8 / Bits;
  const float* q = part.q + row * padded;
  for (int64_t n = 0; n < part.count; n += 4) {
    Floats sums[4][Rows] = {};
    const uint8_t* vector[4];
    for (int64_t j = 0; j < 4; ++j) vector[j] = part.codes + (n + j < part.count ? n + j : part.count - 1) * call.vector_stride;
    int64_t at = 0, number = 0;
    for (; at + 2 * Bits <= call.width; at += 2 * Bits, number += LANES)
      for (int64_t j = 0; j < 4; ++j) {
        Floats x = codes_in_row<Bits>(vector[j] + at, 2 * Bits);
        for (int64_t i = 0; i < Rows; ++i) sums[j][i] += x * load(q + i * padded + number);
      }
    if (at < call.width)
      for (int64_t i = 0; i < Rows; ++i) {
        Floats last = {};
        std::memcpy(&last, q + i * padded + number, (padded - number) * sizeof(float));
        for (int64_t j = 0; j < 4; ++j) sums[j][i] += codes_in_row<Bits>(vector[j] + at, call.width - at) * last;
      }
    for (int64_t i = 0; i < Rows; ++i) {
      Four four = sums_of(sums[0][i], sums[1][i], sums[2][i], sums[3][i]);
      for (int64_t j = 0; j < 4 && n + j < part.count; ++j) part.out[(row + i) * call.count + n + j] = four[j];
    }
  }
}

// Lengths of vectors in rows, into one row.
template <int64_t Bits>
void lengths(const Call& call, const Part& part) {
  const Words lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t n = 0; n < part.count; ++n) {
    const uint8_t* vector = part.codes + n * call.vector_stride;
    Floats squares = {};
    int64_t at = 0;
    for (; at + 2 * Bits <= call.width; at += 2 * Bits) {
      Floats x = codes_in_row<Bits>(vector + at, 2 * Bits);
      squares += x * x;
    }
    if (at < call.width) {
      Floats x = codes_in_row<Bits>(vector + at, call.width - at);
      squares += lanes < (uint32_t)((call.width - at) * 8 / Bits) ? x * x : Floats{};
    }
    part.out[n] = __builtin_sqrtf(sum(squares));
  }
}

void multiply(const Call& call, const Part& part) {
  for (int64_t n = 0; n < part.count; n += LANES) {
    int64_t left = part.count - n < LANES ? part.count - n : LANES;
    const char* from = part.scale + n * call.scale_vector_stride;
    Floats scale = call.scale_bytes == 2 ? from_float16(spread<Shorts, uint16_t>(from, call.scale_vector_stride, left))
                                         : spread<Floats, float>(from, call.scale_vector_stride, left);
    for (int64_t row = 0; row < call.rows; ++row) {
      float* out = part.out + row * call.count + n;
      Floats x = {};
      std::memcpy(&x, out, left * sizeof(float));
      x *= scale;
      std::memcpy(out, &x, left * sizeof(float));
    }
  }
}

template <int64_t Bits>
void products(const Call& call, const Part& part) {
  for (int64_t row = 0; row < call.rows;) {
    int64_t left = call.rows - row, taken = left < 4 ? left : 4;
    if (taken == 4) in_rows<Bits, 4>(call, part, row);
    if (taken == 3) in_rows<Bits, 3>(call, part, row);
    if (taken == 2) in_rows<Bits, 2>(call, part, row);
    if (taken == 1) in_rows<Bits, 1>(call, part, row);
    row += taken;
  }
}

using OfPart = void (*)(const Call&, const Part&);

// One task, by the function for the bits of its codes.
template <OfPart Of8, OfPart Of4>
void run(const Call& call, int64_t task) {
  int64_t parts = (call.count + SIZE - 1) / SIZE, head = task / parts, start = task % parts * SIZE;
  Part part = {
      call.q + head * call.rows * call.width * 8 / call.bits,
      call.codes + head * call.head_stride + start * call.vector_stride,
      call.scale ? call.scale + head * call.scale_head_stride + start * call.scale_vector_stride : nullptr,
      call.out + head * call.rows * call.count + start,
      call.count - start < SIZE ? call.count - start : SIZE,
  };
  (call.bits == 8 ? Of8 : Of4)(call, part);
  if (part.scale) multiply(call, part);
}

}  // namespace

extern "C" void code_products(const Call* call) {
  share(*call, run<products<8>, products<4>>, call->heads * ((call->count + SIZE - 1) / SIZE));
}

extern "C" void code_norms(const Call* call) {
  share(*call, run<lengths<8>, lengths<4>>, call->heads * ((call->count + SIZE - 1) / SIZE));
}
