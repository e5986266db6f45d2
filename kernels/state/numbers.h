// Numbers of 32 and 16 bits, and codes of 8 bits, as rows of a memory have them: from one to the other as PyTorch rounds.

#include <type_traits>

namespace {

enum Kind : int64_t { FLOAT32, FLOAT16, BFLOAT16, CODES };

// The nearest bfloat16, the even one of two.
inline Shorts to_bfloat16(Floats x) {
  Words bits = (Words)x;
  Words rounded = (bits + 0x7fffu + (bits >> 16u & 1u)) >> 16u;
  return __builtin_convertvector(x == x ? rounded : Words{} + 0x7fc0u, Shorts);
}

// The nearest float16, the even one of two.
inline Shorts to_float16(Floats x) {
#ifdef __F16C__
  using Half = float __attribute__((vector_size(32)));
  using Part = uint16_t __attribute__((vector_size(16)));
  auto low = (Part)__builtin_ia32_vcvtps2ph256(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7), 0);
  auto high = (Part)__builtin_ia32_vcvtps2ph256(__builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15), 0);
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  Words bits = (Words)x, sign = bits >> 16u & 0x8000u, size = bits & 0x7fffffffu;
  Words normal = (size + 0xfffu + (size >> 13u & 1u) - 0x38000000u) >> 13u;
  Words small = (Words)((Floats)size + 0.5f) - 0x3f000000u;  // below 2^-14: the sum's last place is that of subnormal ones
  Words number = size < 0x38800000u ? small : (normal < 0x7c00u ? normal : Words{} + 0x7c00u);
  number = size < 0x47800000u ? number : (size > 0x7f800000u ? Words{} + 0x7e00u : Words{} + 0x7c00u);
  return __builtin_convertvector(number | sign, Shorts);
#endif
}

// The first `Count` numbers of a kind from `from` on, as float32; the other lanes are 0.
template <int64_t Count>
inline Floats numbers(const char* from, int64_t kind) {
  if (kind == FLOAT32) return loaded<Count, Floats>((const float*)from);
  Shorts x = loaded<Count, Shorts>((const uint16_t*)from);
  return kind == FLOAT16 ? from_float16(x) : from_bfloat16(x);
}

template <int64_t Count>
inline void put(Floats x, char* to, int64_t kind) {
  if (kind == FLOAT32) {
    std::memcpy(to, &x, Count * sizeof(float));
    return;
  }
  Shorts half = kind == FLOAT16 ? to_float16(x) : to_bfloat16(x);
  std::memcpy(to, &half, Count * sizeof(uint16_t));
}

inline int64_t bytes_of(int64_t kind) { return kind == FLOAT32 ? 4 : kind == CODES ? 1 : 2; }

// `use(how many as a constant, the first one's number)`: sixteen of `count` at a time, then one.
template <typename Use>
inline void sixteens(int64_t count, Use use) {
  int64_t n = 0;
  for (; n + LANES <= count; n += LANES) use(std::integral_constant<int64_t, LANES>(), n);
  for (; n < count; ++n) use(std::integral_constant<int64_t, 1>(), n);
}

// A row of `count` numbers of one kind as those of another.
inline void convert(const char* from, int64_t kind, char* to, int64_t into, int64_t count) {
  if (kind == into) {
    std::memcpy(to, from, count * bytes_of(kind));
    return;
  }
  sixteens(count, [&](auto some, int64_t n) { put<some>(numbers<some>(from + n * bytes_of(kind), kind), to + n * bytes_of(into), into); });
}

// A row of codes of 8 bits as numbers.
inline void rebuild(const char* codes, const uint16_t* scale, char* to, int64_t into, int64_t count) {
  const float each = from_float16(loaded<1, Shorts>(scale))[0];
  sixteens(count, [&](auto some, int64_t n) { put<some>(from_bytes(loaded<some, Bytes>(codes + n), 128) * each, to + n * bytes_of(into), into); });
}

// A row of numbers as codes of 8 or 4 bits with a scale, those of semkv.runtime.quantization. Where one is not a number, the scale is none.
inline void quantize(const char* from, int64_t kind, char* codes, uint16_t* scale, int64_t count, int64_t bits) {
  const float top = (float)((1 << (bits - 1)) - 1);
  Floats most = {}, odd = {};
  sixteens(count, [&](auto some, int64_t n) {
    Floats x = numbers<some>(from + n * bytes_of(kind), kind);
    x = x < 0.0f ? -x : x;
    odd = x == x ? odd : x;
    most = x > most ? x : most;
  });
  float each = sum(odd) == 0.0f ? largest(most) / top : __builtin_nanf("");
  each = each < 0x1p-24f ? 0x1p-24f : (each > 65504.0f ? 65504.0f : each);
  const Shorts half = to_float16(Floats{} + each);
  *scale = half[0];
  const float held = from_float16(half)[0];
  const float magic = 0x1.8p23f;  // adding it rounds to an integer, the even one of two
  sixteens(count, [&](auto some, int64_t n) {
    Floats x = numbers<some>(from + n * bytes_of(kind), kind) / held;
    x = x < -top ? Floats{} - top : (x > top ? Floats{} + top : x);
    Words code = x == x ? (Words)(x + magic) - 0x4b400000u + (uint32_t)(top + 1.0f) : Words{};
    Bytes packed = __builtin_convertvector(code, Bytes);
    if (bits == 8) {
      std::memcpy(codes + n, &packed, some);
      return;
    }
    for (int64_t k = 0; k < some; ++k) {
      uint8_t* at = (uint8_t*)codes + (n + k) / 2;
      *at = (n + k) % 2 ? (uint8_t)(*at & 15 | packed[k] << 4) : packed[k];
    }
  });
  if (bits == 4 && count % 2) codes[count / 2] |= (char)((int)(top + 1.0f) << 4);
}

}  // namespace
