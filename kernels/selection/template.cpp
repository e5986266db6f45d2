// Selection under a budget (select.h) for KV heads of one row of a batch.

namespace {

// Fields of 8 bytes each, as semkv.kernels.selection.cpp writes them. Strides of `score` are numbers.
struct Call {
  const float* score;      // [heads, group, tokens, units]
  const float* threshold;  // [heads, group]: a query head wants what is above it
  const int64_t* cost;     // [heads, units], or null: 1 each
  uint32_t* keys;          // [heads, units + LANES], scratch: the keys of the candidates
  uint32_t* places;        // [heads, units + LANES], scratch: their numbers, ascending, with PARTLY where some row does not want one
  uint8_t* chosen;         // [heads, units]
  uint8_t* differ;         // [heads]: whether a chosen unit is one that some query head or token does not want
  int64_t* taken;          // [heads]: how many are chosen
  int64_t heads, group, tokens, units, allowance;
  int64_t head_stride, group_stride, token_stride, threads;
  Parallel parallel;
};

// A KV head's part of a call.
struct Head {
  const Call& call;
  const int64_t number, units, allowance;

  bool costs() const { return call.cost; }
  int64_t cost(uint32_t place) const { return call.cost ? call.cost[number * call.units + (place & ~PARTLY)] : 1; }

  template <typename Use>
  void rows(Use use) const {
    for (int64_t query = 0; query < call.group; ++query)
      for (int64_t token = 0; token < call.tokens; ++token)
        use(call.score + number * call.head_stride + query * call.group_stride + token * call.token_stride,
            call.threshold[number * call.group + query]);
  }
};

void select_head(const Call& call, int64_t number) {
  const Head head = {call, number, call.units, call.allowance};
  uint8_t* chosen = call.chosen + number * call.units;
  std::memset(chosen, 0, call.units);
  int64_t taken = 0;
  uint32_t partly = 0;
  const int64_t from = number * (call.units + LANES);
  select(head, call.keys + from, call.places + from, [&](uint32_t place, bool is) {
    chosen[place & ~PARTLY] = is;
    taken += is;
    partly |= is ? place : 0;
  });
  call.differ[number] = (partly & PARTLY) != 0;
  call.taken[number] = taken;
}

}  // namespace

extern "C" void select_units(const Call* call) { share(*call, select_head, call->heads); }
