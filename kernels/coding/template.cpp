// Vectors as codes of 4 or 8 bits with a scale in float16: what the largest of a vector's numbers is of the largest code.

namespace {

constexpr int64_t SIZE = 1024;  // vectors of a task

// Fields of 8 bytes each, as semkv.kernels.coding.cpp writes them.
struct Call {
  const float* x;   // [count, dim]
  uint8_t* codes;   // [count, dim], or [count, (dim + 1) / 2] at 4 bits
  uint16_t* scale;  // float16 [count]
  int64_t count, dim, bits, threads;
  Parallel parallel;
};

// The float16 nearest to a positive number of its range, ties to even, and the number that it is.
inline uint16_t nearest_float16(float& x) {
  if (x != x) return 0x7e00;
  if (x < 0x1p-14f) {  // subnormal: so many times the smallest
    const float units = __builtin_rintf(x * 0x1p24f);
    x = units * 0x1p-24f;
    return (uint16_t)units;
  }
  uint32_t word;
  std::memcpy(&word, &x, sizeof(word));
  word += 0xfff + (word >> 13 & 1);
  word &= ~0x1fffu;
  std::memcpy(&x, &word, sizeof(word));
  return (uint16_t)((word >> 13) - (112 << 10));
}

// Up to sixteen numbers, 0 behind them.
struct Some {
  float numbers[LANES] = {};
  Some(const float* from, int64_t count) {
    if (count >= LANES) std::memcpy(numbers, from, sizeof(numbers));
    else std::memcpy(numbers, from, count * sizeof(float));
  }
};

template <int64_t Bits>
void code(const Call& call, int64_t n) {
  constexpr int32_t middle = 1 << (Bits - 1);
  constexpr float top = middle - 1, magic = 0x1.8p23f;  // adding the latter rounds to an integer
  const float* x = call.x + n * call.dim;
  float largest[LANES] = {};
  bool unknown[LANES] = {};
  for (int64_t at = 0; at < call.dim; at += LANES) {
    const Some some(x + at, call.dim - at);
    for (int64_t i = 0; i < LANES; ++i) {
      const float size = __builtin_fabsf(some.numbers[i]);
      largest[i] = size > largest[i] ? size : largest[i];
      unknown[i] |= size != size;
    }
  }
  float scale = 0;
  for (int64_t i = 0; i < LANES; ++i) scale = largest[i] > scale ? largest[i] : scale;
  scale /= top;
  scale = scale < 0x1p-24f ? 0x1p-24f : scale > 65504.0f ? 65504.0f : scale;
  for (int64_t i = 0; i < LANES; ++i)
    if (unknown[i]) scale = __builtin_nanf("");
  call.scale[n] = nearest_float16(scale);
  uint8_t* out = call.codes + n * (Bits == 8 ? call.dim : (call.dim + 1) / 2);
  for (int64_t at = 0; at < call.dim; at += LANES) {
    const Some some(x + at, call.dim - at);
    const int64_t count = call.dim - at < LANES ? call.dim - at : LANES;
    uint8_t codes[LANES];
    for (int64_t i = 0; i < LANES; ++i) {
      float number = some.numbers[i] / scale;
      number = number > top ? top : number;
      number = number < -top ? -top : number;
      codes[i] = (uint8_t)((int32_t)(number + magic - magic) + middle);
    }
    if (Bits == 8) {
      std::memcpy(out + at, codes, count);
    } else {  // two codes a byte; behind the last of an odd number comes that of 0
      for (int64_t i = 0; i < (count + 1) / 2; ++i) out[at / 2 + i] = codes[2 * i] | codes[2 * i + 1] << 4;
    }
  }
}

template <int64_t Bits>
void run(const Call& call, int64_t task) {
  const int64_t last = (task + 1) * SIZE < call.count ? (task + 1) * SIZE : call.count;
  for (int64_t n = task * SIZE; n < last; ++n) code<Bits>(call, n);
}

}  // namespace

extern "C" void coded(const Call* call) { share(*call, call->bits == 8 ? run<8> : run<4>, (call->count + SIZE - 1) / SIZE); }
