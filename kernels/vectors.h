// Sixteen numbers at a time, in GCC's and Clang's vector extensions: what templates for the CPU share.

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t LANES = 16;
using Floats = float __attribute__((vector_size(4 * LANES)));
using Ints = int32_t __attribute__((vector_size(4 * LANES)));
using Words = uint32_t __attribute__((vector_size(4 * LANES)));
using Shorts = uint16_t __attribute__((vector_size(2 * LANES)));
using Pair = uint64_t __attribute__((vector_size(LANES)));
using Bytes = uint8_t __attribute__((vector_size(LANES)));

// What one register holds of sixteen numbers, and how many registers there are. Sums that wait in more than these are in memory, and a
// compiler that is given vectors wider than a register keeps them there in any case.
#if defined(__AVX512F__)
constexpr int64_t REGISTER_BYTES = 64, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int64_t REGISTER_BYTES = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int64_t REGISTER_BYTES = 16, REGISTERS = 32;
#else
constexpr int64_t REGISTER_BYTES = 16, REGISTERS = 16;
#endif
using Piece = float __attribute__((vector_size(REGISTER_BYTES)));
using PieceWords = uint32_t __attribute__((vector_size(REGISTER_BYTES)));
using PieceInts = int32_t __attribute__((vector_size(REGISTER_BYTES)));
constexpr int64_t PIECE = REGISTER_BYTES / sizeof(float), PIECES = LANES / PIECE;

inline Piece piece_at(const float* from) {
  Piece piece;
  std::memcpy(&piece, from, sizeof(piece));
  return piece;
}

inline Piece piece_of(const Floats& x, int64_t i) { return piece_at((const float*)&x + i * PIECE); }

inline Piece larger(Piece x, Piece y) { return x > y ? x : y; }

// What `compute` makes of sixteen numbers, a register at a time.
template <typename Compute>
inline Floats in_pieces(const Floats& x, Compute compute) {
  Piece made[PIECES];
  for (int64_t i = 0; i < PIECES; ++i) made[i] = compute(piece_of(x, i));
  Floats out;
  std::memcpy(&out, made, sizeof(out));
  return out;
}

// Sixteen sums, in registers.
struct Sums {
  Piece pieces[PIECES] = {};

  Sums() = default;
  Sums(const Floats& x) { std::memcpy(pieces, &x, sizeof(x)); }
  operator Floats() const {
    Floats x;
    std::memcpy(&x, pieces, sizeof(x));
    return x;
  }
  void add(const Floats& x, const float* y) {
    for (int64_t i = 0; i < PIECES; ++i) pieces[i] += piece_of(x, i) * piece_at(y + i * PIECE);
  }
  void add(const Floats& x, float y) {
    for (int64_t i = 0; i < PIECES; ++i) pieces[i] += piece_of(x, i) * y;
  }
};

// The first `Count` numbers from `from` on; nothing beyond them is touched, and the other lanes are 0.
template <int64_t Count, typename Vector, typename Number>
inline Vector loaded(const Number* from) {
  Vector x = {};
  std::memcpy(&x, from, Count * sizeof(Number));
  return x;
}

// The first `count` numbers of a list whose numbers are `stride` bytes apart; the other lanes are 0.
template <typename Vector, typename Number>
inline Vector spread(const char* from, int64_t stride, int64_t count) {
  if (count == LANES && stride == sizeof(Number)) return loaded<LANES, Vector>((const Number*)from);
  Vector x = {};
  for (int64_t n = 0; n < count; ++n) x[n] = *(const Number*)(from + n * stride);
  return x;
}

inline Floats load(const float* from) { return loaded<LANES, Floats>(from); }

template <typename Vector>
inline void store(float* to, Vector x) {
  std::memcpy(to, &x, sizeof(x));
}

// All numbers of a vector as a list, which GCC 12 widens in one instruction; `__builtin_convertvector` takes it a dozen.
#define ALL_OF(x) x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15]

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__clang__)
using Eights = int32_t __attribute__((vector_size(32)));
inline Eights eight_of(const uint8_t* from) {
  using Packed = char __attribute__((vector_size(16)));
  uint64_t all;
  std::memcpy(&all, from, sizeof(all));
  return __builtin_ia32_pmovzxbd256((Packed)Pair{all, 0});
}
inline Words words_of(const Bytes& x) {
  const Eights both[] = {eight_of((const uint8_t*)&x), eight_of((const uint8_t*)&x + 8)};
  Words out;
  std::memcpy(&out, both, sizeof(out));
  return out;
}
inline Words words_of(const Shorts& x) {
  using Packed = short __attribute__((vector_size(16)));
  Packed halves[2];
  std::memcpy(halves, &x, sizeof(x));
  const auto low = __builtin_ia32_pmovzxwd256(halves[0]), high = __builtin_ia32_pmovzxwd256(halves[1]);
  Words out;
  std::memcpy(&out, &low, sizeof(low));
  std::memcpy((char*)&out + sizeof(low), &high, sizeof(high));
  return out;
}
inline Floats from_bytes(const Bytes& x, int32_t zero) {
  Piece both[2];
  for (int64_t i = 0; i < 2; ++i) both[i] = __builtin_convertvector(eight_of((const uint8_t*)&x + 8 * i) - zero, Piece);
  Floats out;
  std::memcpy(&out, both, sizeof(out));
  return out;
}
#else
inline Words words_of(Bytes x) { return Words{ALL_OF(x)}; }
inline Words words_of(Shorts x) { return Words{ALL_OF(x)}; }
inline Floats from_bytes(Bytes x, int32_t zero) { return __builtin_convertvector((Ints)words_of(x) - zero, Floats); }
#endif

// As many bytes as a register holds numbers.
inline PieceWords words_at(const uint8_t* from) {
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__clang__)
  return (PieceWords)eight_of(from);
#elif defined(__AVX512F__)
  return words_of(loaded<LANES, Bytes>(from));
#else
  PieceWords x;
  for (int64_t lane = 0; lane < PIECE; ++lane) x[lane] = from[lane];
  return x;
#endif
}

// bfloat16 is the upper half of a float32.
inline Floats from_bfloat16(Shorts x) { return (Floats)(words_of(x) << 16); }

#if defined(__F16C__) && !defined(__clang__)
inline Floats from_float16(Shorts x) {
  using Part = int16_t __attribute__((vector_size(16)));
  auto low = __builtin_ia32_vcvtph2ps256((Part)__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7));
  auto high = __builtin_ia32_vcvtph2ps256((Part)__builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
#elif defined(__F16C__) && defined(__FLT16_MAX__)
inline Floats from_float16(Shorts x) {
  using Halves = _Float16 __attribute__((vector_size(2 * LANES)));
  return __builtin_convertvector((Halves)x, Floats);
}
#else
// The exponent of float16 is 112 less than that of float32, which a product makes up for, subnormals included.
inline Floats from_float16(Shorts x) {
  Words wide = words_of(x);
  Words size = (wide & 0x7fff) << 13;
  Words number = (Words)((Floats)size * 0x1p112f);
  Words special = number | 0x7f800000;  // infinite, or not a number
  return (Floats)((size >= 0x0f800000 ? special : number) | (wide & 0x8000) << 16);
}
#endif

// What codes in the lowest bits of sixteen numbers stand for. A number's upper bits may be anything where Bits is 4 or less: a lookup in a
// table of sixteen, one instruction with AVX-512, reads four bits.
template <int64_t Bits>
inline Floats from_codes(Words codes) {
  constexpr int32_t middle = 1 << (Bits - 1), mask = 2 * middle - 1;
#if defined(__AVX512F__) && !defined(__clang__)
  if constexpr (Bits <= 4) {
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return __builtin_shuffle(__builtin_convertvector((lanes & mask) - middle, Floats), codes);
  }
#endif
  return __builtin_convertvector((Ints)(codes & (uint32_t)mask) - middle, Floats);
}

// The sixteen codes of 4 bits in the lower halves of bytes, and those in the upper ones.
inline void from_halves(Bytes bytes, Floats& lower, Floats& upper) {
  Words packed = words_of(bytes);
  lower = from_codes<4>(packed);
  upper = from_codes<4>(packed >> 4u);
}

// Every second of the numbers of two vectors, one after the other: from the first on, and from the second on.
inline Floats evens(Floats a, Floats b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
inline Floats odds(Floats a, Floats b) {
  return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// Numbers of two vectors in turn: the first half of them, and the second.
#if defined(__AVX512F__)
inline Piece first_of(Piece a, Piece b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline Piece second_of(Piece a, Piece b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#else
#if defined(__AVX__)
inline Piece first_of(Piece a, Piece b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline Piece second_of(Piece a, Piece b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#else
inline Piece first_of(Piece a, Piece b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline Piece second_of(Piece a, Piece b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
#endif
inline Floats of_half(const Floats& a, const Floats& b, int64_t half) {
  Piece made[PIECES];
  for (int64_t i = 0; i < PIECES; i += 2) {
    const Piece x = piece_of(a, half * PIECES / 2 + i / 2), y = piece_of(b, half * PIECES / 2 + i / 2);
    made[i] = first_of(x, y), made[i + 1] = second_of(x, y);
  }
  Floats out;
  std::memcpy(&out, made, sizeof(out));
  return out;
}
inline Floats first_of(const Floats& a, const Floats& b) { return of_half(a, b, 0); }
inline Floats second_of(const Floats& a, const Floats& b) { return of_half(a, b, 1); }
#endif

using Four = float __attribute__((vector_size(16)));

// Sums of lanes two apart, within every four lanes: those of `a` and `b` in turn.
#if defined(__AVX__) && !defined(__AVX512F__)
inline Floats folded(const Floats& a, const Floats& b) {
  Piece made[PIECES];
  for (int64_t i = 0; i < PIECES; ++i) {
    const Piece x = piece_of(a, i), y = piece_of(b, i);
    made[i] = __builtin_shufflevector(x, y, 0, 8, 1, 9, 4, 12, 5, 13) + __builtin_shufflevector(x, y, 2, 10, 3, 11, 6, 14, 7, 15);
  }
  Floats out;
  std::memcpy(&out, made, sizeof(out));
  return out;
}
#else
inline Floats folded(Floats a, Floats b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
         __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
#endif

// The sums of four vectors.
inline Four sums_of(Floats a, Floats b, Floats c, Floats d) {
  Floats x = folded(folded(a, c), folded(b, d));
  Four parts[4];
  std::memcpy(parts, &x, sizeof(x));
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

inline float sum(Floats x) { return sums_of(x, x, x, x)[0]; }

template <typename Vector>
inline float largest(const Vector& x) {
  float found = x[0];
  for (int64_t lane = 1; lane < (int64_t)(sizeof(x) / sizeof(float)); ++lane) found = x[lane] > found ? x[lane] : found;
  return found;
}

// e^x to about a unit in the last place; 0 below -87, where float32 ends, and for -infinity.
inline Piece exponential_of(Piece x) {
  Piece held = x < -87.0f ? Piece{} - 87.0f : (x > 88.0f ? Piece{} + 88.0f : x);
  const float magic = 0x1.8p23f;  // adding it rounds to an integer, which is in the lowest bits then
  Piece shifted = held * 1.44269504f + magic;
  Piece whole = shifted - magic;
  Piece rest = held - whole * 0x1.62e4p-1f;  // log 2 in two parts: the first product is exact
  rest -= whole * 1.42860677e-6f;
  Piece series = Piece{} + 1.0f / 5040;
  series = series * rest + 1.0f / 720;
  series = series * rest + 1.0f / 120;
  series = series * rest + 1.0f / 24;
  series = series * rest + 1.0f / 6;
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  series = series * rest + 1.0f;
  PieceWords power = ((PieceWords)shifted - 0x4b400000u + 127u) << 23;
  Piece out = series * (Piece)power;
  return x < -87.0f ? Piece{} : out;
}

// The hyperbolic tangent. Near 0, where a form in exponentials cancels, Lambert's continued fraction, cut after five terms.
inline Piece hyperbolic_tangent_of(Piece x) {
  Piece square = x * x;
  Piece near = x * (945.0f + square * (105.0f + square)) / (945.0f + square * (420.0f + 15.0f * square));
  Piece size = x < 0.0f ? -x : x;
  Piece far = 1.0f - 2.0f / (exponential_of(size > 20.0f ? Piece{} + 40.0f : 2.0f * size) + 1.0f);
  return size < 0.625f ? near : (x < 0.0f ? -far : far);
}

inline Floats exponential(Floats x) { return in_pieces(x, exponential_of); }
inline Floats hyperbolic_tangent(Floats x) { return in_pieces(x, hyperbolic_tangent_of); }

}  // namespace
