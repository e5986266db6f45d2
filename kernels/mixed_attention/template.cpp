// Mixed-resolution decode attention on a CPU: keys and values are read once, in tiles. A tile is a run of entries at each of four
// places, far from one another: a core reads four streams faster than one, and long ones faster than short ones.
//
// Constants that a specialisation defines: DIM and VALUE_DIM, the head dims; ROWS, query rows that are computed at once; MAX_ROWS, the
// most that a place has.
// A task is one KV head of one row of the batch (a place) and one split of its entries, with a softmax of its own (the
// online softmax of Milakov and Gimelshein, arXiv:1805.02867); splits are merged as in Flash-Decoding. What is split where
// depends on sizes alone, so threads change no bit.

namespace {

constexpr int64_t RUNS = 4, RUN = 128, TILE = RUNS * RUN;  // entries, at most
constexpr int64_t ROUND = RUNS * LANES;  // entries of a split are a multiple of it
constexpr int64_t MAX_TILES = (MAX_ROWS + ROWS - 1) / ROWS;
constexpr int64_t KEY_VECTORS = (DIM + LANES - 1) / LANES, KEY_WIDTH = KEY_VECTORS * LANES;
constexpr int64_t VALUE_VECTORS = (VALUE_DIM + LANES - 1) / LANES, VALUE_WIDTH = VALUE_VECTORS * LANES;
constexpr int64_t PASS = 16 / ROWS;  // vectors of values that are summed at once, for all rows, in registers
constexpr int64_t LONGEST = 4 * (DIM > VALUE_DIM ? DIM : VALUE_DIM);  // bytes of a vector
constexpr float NONE = -__builtin_inff();
#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
constexpr int64_t AHEAD = 0;  // a Zen core follows the streams by itself, and is slower where they are asked for ahead
#else
constexpr int64_t AHEAD = 16;  // entries of a run, which come to the second cache before they are read
#endif

// Fields of 8 bytes each, as semkv.kernels.mixed_attention.cpp writes them. Strides of keys, values and scales are bytes.
struct Vectors {
  const char* data;
  int64_t place_stride, entry_stride, kind;
  const char* scale;  // float16, of kinds that are codes
  int64_t scale_place_stride, scale_entry_stride;
};

struct Block {
  int64_t first, places, entries;
  Vectors k, v;
  const char* positions;
  int64_t position_place_stride, position_entry_stride, position_bytes;
  const float* bias;  // null where there is none
  int64_t bias_place_stride, bias_group_stride, bias_token_stride, bias_entry_stride;
};

struct Call {
  const float* q;          // [batch, query heads, tokens, DIM], with strides; a row is a query head of a place's group and a token
  const int64_t* where;    // [batch, tokens], with strides
  const float* sinks;      // [query heads] or null, like the next two
  const float* slopes;     // [query heads]
  const float* table;      // [query heads, table_length]
  float* out;              // [places, rows, VALUE_DIM]
  float* partial;          // [places, splits, rows in whole tiles, VALUE_WIDTH + 2]: sums, then top score and mass
  int64_t block_count, places, kv_heads, group, tokens, splits, threads, table_length, window;
  int64_t q_strides[3], where_strides[2];  // in numbers
  double softcap, scale;                   // of scores
  Parallel parallel;
  Block blocks[];
};

// How vectors are stored. HALVES: `both` reads 32 numbers from `at` on faster than `part` does, those at even places and those at odd ones.
struct Whole {
  static constexpr bool HALVES = false;
};

struct Float32 : Whole {
  template <int64_t Count>
  static Floats part(const char* vector, int64_t at) {
    return loaded<Count, Floats>((const float*)vector + at);
  }
};

struct Bfloat16 : Whole {
  template <int64_t Count>
  static Floats part(const char* vector, int64_t at) {
    return from_bfloat16(loaded<Count, Shorts>((const uint16_t*)vector + at));
  }
};

struct Float16 : Whole {
  template <int64_t Count>
  static Floats part(const char* vector, int64_t at) {
    return from_float16(loaded<Count, Shorts>((const uint16_t*)vector + at));
  }
};

struct Codes8 : Whole {
  template <int64_t Count>
  static Floats part(const char* vector, int64_t at) {
    return from_bytes(loaded<Count, Bytes>(vector + at), 128);
  }
};

struct Codes4 {  // two a byte, low half first
  static constexpr bool HALVES = true;
  static void both(const char* vector, int64_t at, Floats& even, Floats& odd) {
    from_halves(loaded<LANES, Bytes>(vector + at / 2), even, odd);
  }
  template <int64_t Count>
  static Floats part(const char* vector, int64_t at) {
    uint64_t pairs = 0;
    std::memcpy(&pairs, vector + at / 2, (Count + 1) / 2);
    Bytes halves = (Bytes)Pair{pairs, pairs >> 4} & 15;
    return from_bytes(__builtin_shufflevector(halves, halves, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15), 8);
  }
};

// Where a tile's runs are: `count[i]` entries of a block from `start[i]` on; no run is longer than the first. Numbers of its entries
// are in lists of RUNS times `width`.
struct Tile {
  int64_t start[RUNS], count[RUNS], width;

  int64_t size() const { return RUNS * width; }
};

// Entry `n` of a run, or its last one; of an empty run an entry of the first, whose weight is 0.
inline const char* entry(const char* data, int64_t stride, const Tile& tile, int64_t run, int64_t n) {
  int64_t count = tile.count[run];
  return data + (count ? tile.start[run] + (n < count ? n : count - 1) : tile.start[0]) * stride;
}

// Ask for the entry that comes AHEAD entries after this one.
inline void fetch_ahead(const char* vector, int64_t stride) {
  for (int64_t at = 0; AHEAD && at < stride && at < LONGEST; at += 64) __builtin_prefetch(vector + AHEAD * stride + at, 0, 2);
}

// Products of a tile's keys with ROWS queries [ROWS, KEY_WIDTH], into [ROWS, TILE]: a key of each run and up to four queries at once.
template <typename Kind, int64_t First = 0>
void products(const char* keys, int64_t stride, const Tile& tile, const float* given, float* __restrict out) {
  constexpr int64_t rows = ROWS - First < 4 ? ROWS - First : 4, rest = DIM % LANES;
  constexpr int64_t paired = Kind::HALVES ? DIM / LANES / 2 * 2 : 0;  // vectors that are read two at a time
  const float* q = given + First * KEY_WIDTH;
  float asked[paired ? rows * KEY_WIDTH : 1];
  if constexpr (paired > 0) {
    for (int64_t i = 0; i < rows * KEY_VECTORS; ++i) store(asked + i * LANES, load(q + i * LANES));
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < paired; i += 2) {
        float* two = asked + row * KEY_WIDTH + i * LANES;
        Floats a = load(two), b = load(two + LANES);
        store(two, evens(a, b));
        store(two + LANES, odds(a, b));
      }
    q = asked;
  }
  for (int64_t n = 0; n < tile.count[0]; ++n) {
    const char* key[RUNS];
    Sums sums[RUNS][rows];
    for (int64_t run = 0; run < RUNS; ++run) {
      key[run] = entry(keys, stride, tile, run, n);
      if (First == 0) fetch_ahead(key[run], stride);
    }
    for (int64_t i = 0; i < paired; i += 2)
      for (int64_t run = 0; run < RUNS; ++run) {
        Floats even, odd;
        if constexpr (paired > 0) Kind::both(key[run], i * LANES, even, odd);
        for (int64_t row = 0; row < rows; ++row) {
          sums[run][row].add(even, q + row * KEY_WIDTH + i * LANES);
          sums[run][row].add(odd, q + row * KEY_WIDTH + (i + 1) * LANES);
        }
      }
    for (int64_t i = paired; i < DIM / LANES; ++i)
      for (int64_t run = 0; run < RUNS; ++run) {
        Floats x = Kind::template part<LANES>(key[run], i * LANES);
        for (int64_t row = 0; row < rows; ++row) sums[run][row].add(x, q + row * KEY_WIDTH + i * LANES);
      }
    for (int64_t run = 0; run < RUNS && rest; ++run) {
      Floats x = Kind::template part<rest>(key[run], DIM - rest);
      for (int64_t row = 0; row < rows; ++row) sums[run][row].add(x, q + row * KEY_WIDTH + DIM - rest);
    }
    for (int64_t row = 0; row < rows; ++row) {
      Four four = sums_of(sums[0][row], sums[1][row], sums[2][row], sums[3][row]);
      for (int64_t run = 0; run < RUNS; ++run) out[(First + row) * TILE + run * tile.width + n] = four[run];
    }
  }
  if constexpr (First + rows < ROWS) products<Kind, First + rows>(keys, stride, tile, given, out);
}

// Add a tile's values, weighted by [ROWS, TILE], to [ROWS, VALUE_WIDTH], from the vector `First` on.
template <typename Kind, int64_t First = 0>
void add(const char* values, int64_t stride, const Tile& tile, const float* weights, float* out) {
  constexpr int64_t pass = Kind::HALVES ? PASS / 2 * 2 : PASS;
  constexpr int64_t vectors = VALUE_VECTORS - First < pass ? VALUE_VECTORS - First : pass;
  constexpr bool last = First + vectors == VALUE_VECTORS;
  constexpr int64_t whole = vectors - (last && VALUE_DIM % LANES), rest = VALUE_DIM % LANES;
  constexpr int64_t paired = Kind::HALVES ? whole / 2 * 2 : 0;  // vectors that are read two at a time
  Sums sums[ROWS][vectors];
  for (int64_t row = 0; row < ROWS; ++row) {
    for (int64_t i = 0; i < vectors; ++i) sums[row][i] = load(out + row * VALUE_WIDTH + (First + i) * LANES);
    for (int64_t i = 0; i < paired; i += 2) {
      Floats a = sums[row][i], b = sums[row][i + 1];
      sums[row][i] = evens(a, b), sums[row][i + 1] = odds(a, b);
    }
  }
  for (int64_t n = 0; n < tile.count[0]; ++n) {
    const char* value[RUNS];
    for (int64_t run = 0; run < RUNS; ++run) {
      value[run] = entry(values, stride, tile, run, n);
      if (First == 0) fetch_ahead(value[run], stride);
    }
    for (int64_t i = 0; i < paired; i += 2)
      for (int64_t run = 0; run < RUNS; ++run) {
        Floats even, odd;
        if constexpr (paired > 0) Kind::both(value[run], (First + i) * LANES, even, odd);
        for (int64_t row = 0; row < ROWS; ++row) {
          const float weight = weights[row * TILE + run * tile.width + n];
          sums[row][i].add(even, weight);
          sums[row][i + 1].add(odd, weight);
        }
      }
    for (int64_t i = paired; i < whole; ++i)
      for (int64_t run = 0; run < RUNS; ++run) {
        Floats x = Kind::template part<LANES>(value[run], (First + i) * LANES);
        for (int64_t row = 0; row < ROWS; ++row) sums[row][i].add(x, weights[row * TILE + run * tile.width + n]);
      }
    for (int64_t run = 0; run < RUNS && whole < vectors; ++run) {
      Floats x = Kind::template part<rest>(value[run], VALUE_DIM - rest);
      for (int64_t row = 0; row < ROWS; ++row) sums[row][whole].add(x, weights[row * TILE + run * tile.width + n]);
    }
  }
  for (int64_t row = 0; row < ROWS; ++row) {
    for (int64_t i = 0; i < paired; i += 2) {
      Floats even = sums[row][i], odd = sums[row][i + 1];
      sums[row][i] = first_of(even, odd), sums[row][i + 1] = second_of(even, odd);
    }
    for (int64_t i = 0; i < vectors; ++i) store(out + row * VALUE_WIDTH + (First + i) * LANES, sums[row][i]);
  }
  if constexpr (!last) add<Kind, First + vectors>(values, stride, tile, weights, out);
}

using Products = void (*)(const char*, int64_t, const Tile&, const float*, float*);
using Add = Products;
constexpr Products PRODUCTS[] = {products<Float32>, products<Bfloat16>, products<Float16>, products<Codes8>, products<Codes4>};
constexpr Add ADD[] = {add<Float32>, add<Bfloat16>, add<Float16>, add<Codes8>, add<Codes4>};

// Scales of a tile's vectors, or nothing where they have none.
const float* scales(const Vectors& of, int64_t place, const Tile& tile, float* into) {
  if (!of.scale) return nullptr;
  for (int64_t run = 0; run < RUNS; ++run)
    for (int64_t first = 0; first < tile.width; first += LANES) {
      const char* from = of.scale + place * of.scale_place_stride + (tile.start[run] + first) * of.scale_entry_stride;
      const int64_t left = tile.count[run] - first < LANES ? tile.count[run] - first : LANES;
      store(into + run * tile.width + first, from_float16(spread<Shorts, uint16_t>(from, of.scale_entry_stride, left)));
    }
  return into;
}

// How far back each of `count` positions lies from a query at `where`, -1 for one that the query does not see; whether it sees any.
template <typename Number>
bool distances(const Number* positions, int64_t stride, int64_t count, int64_t where, int64_t window, int32_t* __restrict out) {
  const int64_t most = window ? window - 1 : INT64_MAX;
  int32_t seen = 0;
  auto of = [=](Number position) {
    const int64_t back = where - position;
    const int32_t held = back > INT32_MAX ? INT32_MAX : (int32_t)back;
    return (back >= 0) & (back <= most) ? held : -1;
  };
  if (stride == sizeof(Number))  // which the compiler does sixteen at a time
    for (int64_t n = 0; n < count; ++n) seen |= (out[n] = of(positions[n])) >= 0;
  else
    for (int64_t n = 0; n < count; ++n) seen |= (out[n] = of(*(const Number*)((const char*)positions + n * stride))) >= 0;
  return seen;
}

// The same of a tile's entries.
bool distances(const Call& call, const Block& block, int64_t place, const Tile& tile, int64_t where, int32_t* out) {
  bool seen = false;
  for (int64_t n = 0; n < tile.size(); ++n) out[n] = -1;
  for (int64_t run = 0; run < RUNS; ++run) {
    const char* at = block.positions + place * block.position_place_stride + tile.start[run] * block.position_entry_stride;
    const int64_t stride = block.position_entry_stride, count = tile.count[run];
    int32_t* own = out + run * tile.width;
    seen |= block.position_bytes == 8 ? distances((const int64_t*)at, stride, count, where, call.window, own)
                                      : distances((const int32_t*)at, stride, count, where, call.window, own);
  }
  return seen;
}

// Soft-cap, biases and visibility, on the scores of one row.
void shape(const Call& call, const Block& block, int64_t place, const Tile& tile, int64_t row, const int32_t* back, float* x) {
  int64_t head = (block.first + place) % call.kv_heads * call.group + row / call.tokens;
  float cap = (float)call.softcap;
  for (int64_t n = 0; n < tile.size() && cap != 0; n += LANES) store(x + n, cap * hyperbolic_tangent(load(x + n) / cap));
  for (int64_t n = 0; n < tile.size() && call.slopes; ++n) x[n] -= call.slopes[head] * (float)back[n];
  for (int64_t n = 0; n < tile.size() && call.table; ++n) {
    int64_t at = back[n] < 0 ? 0 : back[n];
    x[n] += call.table[head * call.table_length + (at < call.table_length ? at : call.table_length - 1)];
  }
  for (int64_t run = 0; run < RUNS && block.bias; ++run) {
    const float* bias = block.bias + place * block.bias_place_stride + row / call.tokens * block.bias_group_stride +
                        row % call.tokens * block.bias_token_stride + tile.start[run] * block.bias_entry_stride;
    float* own = x + run * tile.width;
    if (block.bias_entry_stride == 1)
      for (int64_t n = 0; n < tile.count[run]; ++n) own[n] += bias[n];
    else
      for (int64_t n = 0; n < tile.count[run]; ++n) own[n] += bias[n * block.bias_entry_stride];
  }
  for (int64_t n = 0; n < tile.size(); ++n) x[n] = back[n] < 0 ? NONE : x[n];
}

// Turn the scores of one row into weights, relative to the largest score so far, and bring its sums to it; false: all are 0.
bool weigh(float* x, int64_t size, float* sums, float& top, float& mass) {
  Piece most = piece_at(x);
  for (int64_t n = PIECE; n < size; n += PIECE) most = larger(piece_at(x + n), most);
  float found = largest(most);
  if (found == NONE) {
    for (int64_t n = 0; n < size; ++n) x[n] = 0;
    return false;
  }
  if (found > top) {
    float less = exponential(Floats{} + (top - found))[0];
    for (int64_t i = 0; i < VALUE_VECTORS; ++i) store(sums + i * LANES, load(sums + i * LANES) * less);
    mass *= less;
    top = found;
  }
  Sums total;
  for (int64_t n = 0; n < size; n += LANES)
    for (int64_t i = 0; i < PIECES; ++i) {
      const Piece weight = exponential_of(piece_at(x + n + i * PIECE) - top);
      store(x + n + i * PIECE, weight);
      total.pieces[i] += weight;
    }
  mass += sum(total);
  return true;
}

// What a task has found of its entries so far, for each of its rows.
struct Found {
  float* sums;  // [rows in whole tiles, VALUE_WIDTH]
  float *top, *mass;
};

Found found_of(const Call& call, int64_t task) {
  int64_t rows = (call.group * call.tokens + ROWS - 1) / ROWS * ROWS;
  float* sums = call.partial + task * rows * (VALUE_WIDTH + 2);
  return {sums, sums + rows * VALUE_WIDTH, sums + rows * (VALUE_WIDTH + 1)};
}

// One tile of entries: `place` counts from the block's first one.
void attend(const Call& call, const Block& block, int64_t place, const Tile& tile, const float* q, const Found& found) {
  int32_t back[MAX_ROWS][TILE];
  int64_t rows = call.group * call.tokens;
  bool seen = false;
  const int64_t* where = call.where + (block.first + place) / call.kv_heads * call.where_strides[0];
  for (int64_t token = 0; token < call.tokens; ++token)
    seen |= distances(call, block, place, tile, where[token * call.where_strides[1]], back[token]);
  if (!seen) return;
  float key_room[TILE], value_room[TILE];
  const float* key_scale = scales(block.k, place, tile, key_room);
  const float* value_scale = scales(block.v, place, tile, value_room);
  const char* keys = block.k.data + place * block.k.place_stride;
  const char* values = block.v.data + place * block.v.place_stride;
  for (int64_t first = 0; first < rows; first += ROWS) {
    float x[ROWS * TILE];
    bool any = false;
    PRODUCTS[block.k.kind](keys, block.k.entry_stride, tile, q + first * KEY_WIDTH, x);
    for (int64_t row = first; row < first + ROWS && row < rows; ++row) {
      float* own = x + (row - first) * TILE;
      for (int64_t n = 0; n < tile.size() && key_scale; ++n) own[n] *= key_scale[n];
      shape(call, block, place, tile, row, back[row % call.tokens], own);
      any |= weigh(own, tile.size(), found.sums + row * VALUE_WIDTH, found.top[row], found.mass[row]);
      for (int64_t n = 0; n < tile.size() && value_scale; ++n) own[n] *= value_scale[n];
    }
    if (any) ADD[block.v.kind](values, block.v.entry_stride, tile, x, found.sums + first * VALUE_WIDTH);
  }
}

// Entries [start, stop) of a block, in tiles whose runs are in its four quarters.
void attend_range(const Call& call, const Block& block, int64_t place, int64_t start, int64_t stop, const float* q, const Found& found) {
  int64_t quarter = (stop - start + RUNS - 1) / RUNS;
  for (int64_t at = 0; at < quarter; at += RUN) {
    Tile tile;
    for (int64_t run = 0; run < RUNS; ++run) {
      int64_t from = start + run * quarter + at, left = (stop < from - at + quarter ? stop : from - at + quarter) - from;
      tile.start[run] = from;
      tile.count[run] = left < 0 ? 0 : left < RUN ? left : RUN;
    }
    tile.width = (tile.count[0] + LANES - 1) / LANES * LANES;
    attend(call, block, place, tile, q, found);
  }
}

// A row of queries, times the scale of scores.
void ask(const Call& call, int64_t place, int64_t row, float* into) {
  const int64_t head = place % call.kv_heads * call.group + row / call.tokens;
  const float* q = call.q + place / call.kv_heads * call.q_strides[0] + head * call.q_strides[1] + row % call.tokens * call.q_strides[2];
  for (int64_t n = 0; n < DIM; ++n) into[n] = q[n] * (float)call.scale;
}

void attend_split(const Call& call, int64_t task) {
  int64_t place = task / call.splits, split = task % call.splits, rows = call.group * call.tokens, total = 0;
  Found found = found_of(call, task);
  float q[MAX_TILES * ROWS * KEY_WIDTH];
  for (int64_t row = 0; row < (rows + ROWS - 1) / ROWS * ROWS; ++row) {
    std::memset(q + row * KEY_WIDTH, 0, KEY_WIDTH * sizeof(float));
    if (row < rows) ask(call, place, row, q + row * KEY_WIDTH);
    std::memset(found.sums + row * VALUE_WIDTH, 0, VALUE_WIDTH * sizeof(float));
    found.top[row] = NONE;
    found.mass[row] = 0;
  }
  const Block* end = call.blocks + call.block_count;
  auto has = [place](const Block& block) { return block.first <= place && place < block.first + block.places; };
  for (const Block* block = call.blocks; block < end; ++block) total += has(*block) ? block->entries : 0;
  int64_t share = ((total + call.splits - 1) / call.splits + ROUND - 1) / ROUND * ROUND, begin = split * share;
  for (const Block* block = call.blocks; block < end; ++block) {
    if (!has(*block)) continue;
    int64_t stop = begin + share < block->entries ? begin + share : block->entries;
    attend_range(call, *block, place - block->first, begin < 0 ? 0 : begin, stop, q, found);
    begin -= block->entries;
  }
}

void merge_splits(const Call& call, int64_t place) {
  int64_t rows = call.group * call.tokens;
  for (int64_t row = 0; row < rows; ++row) {
    int64_t head = place % call.kv_heads * call.group + row / call.tokens;
    float top = call.sinks ? call.sinks[head] : NONE;
    for (int64_t split = 0; split < call.splits; ++split) {
      float own = found_of(call, place * call.splits + split).top[row];
      top = own > top ? own : top;
    }
    Floats sums[VALUE_VECTORS] = {};
    float mass = call.sinks ? exponential(Floats{} + (call.sinks[head] - top))[0] : 0;
    for (int64_t split = 0; split < call.splits; ++split) {
      Found found = found_of(call, place * call.splits + split);
      if (found.mass[row] == 0) continue;
      float less = exponential(Floats{} + (found.top[row] - top))[0];
      mass += less * found.mass[row];
      for (int64_t i = 0; i < VALUE_VECTORS; ++i) sums[i] += less * load(found.sums + row * VALUE_WIDTH + i * LANES);
    }
    float wide[VALUE_WIDTH];
    for (int64_t i = 0; i < VALUE_VECTORS; ++i) store(wide + i * LANES, sums[i] / mass);
    std::memcpy(call.out + (place * rows + row) * VALUE_DIM, wide, VALUE_DIM * sizeof(float));
  }
}

}  // namespace

extern "C" void mixed_attention(const Call* call) {
  share(*call, attend_split, call->places * call->splits);
  share(*call, merge_splits, call->places);
}
