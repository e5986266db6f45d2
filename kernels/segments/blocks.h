// Instructions of a tape, their operands, and how numbers of any dtype are read and written: a block of a row at a time, in float32 or in
// int64. Conversions of 16 bits come before (kernels/state/numbers.h).

namespace {

constexpr int64_t RANK = 4, BLOCK = 512;      // numbers of a row that are computed at once: they stay in the first cache
constexpr int64_t ABSENT = -1, IMMEDIATE = -2, ITSELF = -3;
constexpr int64_t TASK = 1 << 14;             // numbers of a task, where there are several

enum Dtype : int64_t { F32, F16, BF16, I64, I32, U8, BOOL, F64 };

struct Operand {
  int64_t base, offset, dtype, strides[RANK];  // of the table of addresses; in bytes; in numbers
};

// out[i] = code(a[i], b[i], c[i]) for all indices within `sizes`; a stride of 0 broadcasts. whole: computed in int64, else in float32.
// Reductions and what reads an index: see there.
struct Instruction {
  int64_t code, length, whole, sizes[RANK];
  Operand out, a, b, c;
  double value;
  int64_t first, second;
};

struct Tape {
  void* const* bases;
  const int64_t *words, *end;
  int64_t threads;
  Parallel parallel;
};

// What threads share of an instruction.
template <typename Use>
struct Shared {
  Use& use;
  int64_t threads;
  Parallel parallel;

  static void run(const Shared& shared, int64_t task) { shared.use(task); }
};

// `use(task)` for each task below `count`, by several threads where there is work for them.
template <typename Use>
void spread_tasks(const Tape& tape, int64_t numbers, int64_t count, Use use) {
  if (numbers < 2 * TASK || tape.threads == 1) {
    for (int64_t task = 0; task < count; ++task) use(task);
    return;
  }
  share(Shared<Use>{use, tape.threads, tape.parallel}, Shared<Use>::run, count);
}

int64_t bytes_of_dtype(int64_t dtype) {
  return dtype == F32 || dtype == I32 ? 4 : dtype == I64 || dtype == F64 ? 8 : dtype == U8 || dtype == BOOL ? 1 : 2;
}

char* address(const Tape& tape, const Operand& x) {
  if (x.base == ABSENT) return nullptr;
  return x.base == IMMEDIATE ? (char*)&x.offset : (char*)tape.bases[x.base] + x.offset;
}

template <typename Number>
Number* at(const Tape& tape, const Operand& x) {
  return (Number*)address(tape, x);
}

int64_t shifted(const Operand& x, const int64_t* i) { return i[0] * x.strides[0] + i[1] * x.strides[1] + i[2] * x.strides[2]; }

int64_t rows_of(const Instruction& in) { return in.sizes[0] * in.sizes[1] * in.sizes[2]; }

void index_of(const Instruction& in, int64_t row, int64_t* i) {
  i[2] = row % in.sizes[2], i[1] = row / in.sizes[2] % in.sizes[1], i[0] = row / in.sizes[2] / in.sizes[1];
}

// `use(i)` for each index of all dims but the last, by this thread, or by several where a row is `work` numbers.
template <typename Use>
void rows(const Tape& tape, const Instruction& in, Use use, int64_t work = 0) {
  const int64_t count = rows_of(in), each = work ? (TASK + work - 1) / work : count;
  if (!count) return;
  spread_tasks(tape, work * count, (count + each - 1) / each, [&](int64_t task) {
    int64_t i[3];
    for (int64_t row = task * each; row < (task + 1) * each && row < count; ++row) index_of(in, row, i), use(i);
  });
}

template <typename T, typename From>
void spread_numbers(const char* from, int64_t stride, int64_t count, T* room) {
  const From* x = (const From*)from;
  if (stride == 1)
    for (int64_t n = 0; n < count; ++n) room[n] = (T)x[n];
  else
    for (int64_t n = 0; n < count; ++n) room[n] = (T)x[n * stride];
}

float half_of(const char* from, int64_t dtype) {
  const Shorts x = loaded<1, Shorts>((const uint16_t*)from);
  return (dtype == F16 ? from_float16(x) : from_bfloat16(x))[0];
}

// `count` numbers of a row of an operand, from `from` on, in a dtype: where they are, or in `room`.
template <typename T>
__attribute__((noinline)) const T* fetch(const char* from, int64_t dtype, int64_t stride, int64_t count, T* room) {
  const int64_t own = sizeof(T) == 4 ? F32 : I64;
  if (dtype == own && stride == 1) return (const T*)from;
  if (stride == 0 && count > 1) {
    const T one = *fetch<T>(from, dtype, 1, 1, room);
    for (int64_t n = 0; n < count; ++n) room[n] = one;
    return room;
  }
  switch (dtype) {
    case F32: spread_numbers<T, float>(from, stride, count, room); break;
    case I64: spread_numbers<T, int64_t>(from, stride, count, room); break;
    case I32: spread_numbers<T, int32_t>(from, stride, count, room); break;
    case F64: spread_numbers<T, double>(from, stride, count, room); break;
    case U8: case BOOL: spread_numbers<T, uint8_t>(from, stride, count, room); break;
    default:
      for (int64_t n = 0; n < count; ++n) room[n] = (T)half_of(from + 2 * n * stride, dtype);
  }
  return room;
}

template <typename Into, typename T>
void put_numbers(const T* x, char* to, int64_t stride, int64_t count) {
  Into* out = (Into*)to;
  if (stride == 1)
    for (int64_t n = 0; n < count; ++n) out[n] = (Into)x[n];
  else
    for (int64_t n = 0; n < count; ++n) out[n * stride] = (Into)x[n];
}

template <typename T>
__attribute__((noinline)) void keep(const T* x, char* to, int64_t dtype, int64_t stride, int64_t count) {
  switch (dtype) {
    case F32: return put_numbers<float>(x, to, stride, count);
    case I64: return put_numbers<int64_t>(x, to, stride, count);
    case I32: return put_numbers<int32_t>(x, to, stride, count);
    case U8: return put_numbers<uint8_t>(x, to, stride, count);
    case BOOL:
      for (int64_t n = 0; n < count; ++n) ((uint8_t*)to)[n * stride] = x[n] != 0;
      return;
    default:
      for (int64_t n = 0; n < count; ++n) {
        const Floats one = Floats{} + (float)x[n];
        ((uint16_t*)to)[n * stride] = (dtype == F16 ? to_float16(one) : to_bfloat16(one))[0];
      }
  }
}

template <typename T>
using OfBlock = void (*)(const void* function, T* out, const T* a, const T* b, const T* c, int64_t count);

// `f` for the numbers of each row, up to BLOCK at once, in the dtype T.
template <typename T>
__attribute__((noinline)) void all_blocks(const Tape& tape, const Instruction& in, int arity, OfBlock<T> f, const void* function) {
  const int64_t size = in.sizes[3], chunks = (size + BLOCK - 1) / BLOCK, count = rows_of(in) * chunks;
  if (!count) return;
  const Operand* operands[] = {&in.a, &in.b, &in.c};
  const char* from[3] = {};
  char* to = address(tape, in.out);
  for (int n = 0; n < arity; ++n) from[n] = address(tape, *operands[n]);
  const int64_t wide = size < BLOCK ? size : BLOCK, each = (TASK + wide - 1) / wide;
  const int64_t own = sizeof(T) == 4 ? F32 : I64, out_bytes = bytes_of_dtype(in.out.dtype);
  spread_tasks(tape, rows_of(in) * size, (count + each - 1) / each, [&](int64_t task) {
    T rooms[4][BLOCK];
    for (int64_t block = task * each; block < (task + 1) * each && block < count; ++block) {
      int64_t i[3];
      index_of(in, block / chunks, i);
      const int64_t first = block % chunks * BLOCK, some = size - first < BLOCK ? size - first : BLOCK;
      const T* x[3] = {};
      for (int n = 0; n < arity; ++n) {
        const Operand& given = *operands[n];
        const int64_t shift = shifted(given, i) + first * given.strides[3];
        x[n] = fetch<T>(from[n] + shift * bytes_of_dtype(given.dtype), given.dtype, given.strides[3], some, rooms[n]);
      }
      char* out = to + (shifted(in.out, i) + first * in.out.strides[3]) * out_bytes;
      const bool direct = in.out.dtype == own && in.out.strides[3] == 1;
      T* made = direct ? (T*)out : rooms[3];
      f(function, made, x[0], x[1], x[2], some);
      if (!direct) keep(made, out, in.out.dtype, in.out.strides[3], some);
    }
  });
}

// `f(out, a, b, c, count)` for them.
template <typename T, int Arity, typename Function>
void blocks(const Tape& tape, const Instruction& in, Function f) {
  const OfBlock<T> call = [](const void* function, T* out, const T* a, const T* b, const T* c, int64_t count) {
    (*(const Function*)function)(out, a, b, c, count);
  };
  all_blocks<T>(tape, in, Arity, call, &f);
}

}  // namespace
