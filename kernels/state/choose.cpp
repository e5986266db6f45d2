// The units that each KV head of each row of a batch unfolds: selection under a budget (select.h).

namespace {

constexpr int64_t LEAST_SCORES = 1 << 14;  // of a thread

// Fields of 8 bytes each, as semkv.kernels.state.choose writes them. Strides are numbers: of rows of the batch, heads, and queries.
struct Call {
  const float* score;      // [rows, heads, queries, units]
  const int64_t* count;    // [rows]: how many units there are
  const int64_t* room;     // [rows]
  const float* threshold;  // [heads, queries], or null
  const int32_t* cost;     // [rows, heads, units], or null: 1 each
  uint8_t* chosen;         // [rows, heads, units]
  uint8_t* each;           // [rows, heads, queries, units], or null: which of them a row of queries wants
  uint32_t *keys, *places; // [rows, heads, units + LANES], scratch
  int64_t rows, heads, queries, units, score_strides[3], threshold_strides[2], cost_strides[2], threads;
  Parallel parallel;
};

// A KV head's part of a call.
struct Head {
  const Call& call;
  const int64_t row, number, units, allowance;

  bool costs() const { return call.cost; }
  int64_t cost(uint32_t place) const {
    return call.cost ? call.cost[row * call.cost_strides[0] + number * call.cost_strides[1] + (place & ~PARTLY)] : 1;
  }
  const float* scores(int64_t query) const {
    return call.score + row * call.score_strides[0] + number * call.score_strides[1] + query * call.score_strides[2];
  }
  float threshold(int64_t query) const {
    return call.threshold ? call.threshold[number * call.threshold_strides[0] + query * call.threshold_strides[1]] : NONE;
  }

  template <typename Use>
  void rows(Use use) const {
    for (int64_t query = 0; query < call.queries; ++query) use(scores(query), threshold(query));
  }
};

void choose_head(const Call& call, int64_t task) {
  const int64_t row = task / call.heads, count = call.count[row];
  const Head head = {call, row, task % call.heads, count < 0 ? 0 : (count < call.units ? count : call.units), call.room[row]};
  uint8_t* chosen = call.chosen + task * call.units;
  uint8_t* each = call.each + task * call.queries * call.units;
  std::memset(chosen, 0, call.units);
  if (call.each) std::memset(each, 0, call.queries * call.units);
  const int64_t from = task * (call.units + LANES);
  const bool own = call.each;
  select(head, call.keys + from, call.places + from, [&](uint32_t place, bool is) {
    const int64_t unit = place & ~PARTLY;
    chosen[unit] = is;
    if (own)
      for (int64_t query = 0; query < call.queries; ++query)
        each[query * call.units + unit] = is & (head.scores(query)[unit] > head.threshold(query));
  });
}

}  // namespace

extern "C" void choose_units(const Call* call) {
  Call own = *call;
  const int64_t tasks = own.rows * own.heads, most = tasks * own.queries * own.units / LEAST_SCORES + 1;
  own.threads = own.threads < most ? own.threads : most;
  share(own, choose_head, tasks);
}
