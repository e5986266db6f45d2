// What codes look up in tables, of rows of a batch: kernels/sketch_scores/template.cpp before this one looks up for one KV head.

namespace {

// Fields of 8 bytes each, as semkv.kernels.state.look_up writes them. Strides are of rows of the batch and heads, and of all dims of
// tables; in numbers, which codes are of a byte.
struct Asked {
  const float* tables;   // [rows, heads, queries, stages, VECTORS]
  const uint8_t* codes;  // [rows, heads, count, stages], a unit's codes behind those of the one before
  float* out;            // [rows, heads, queries, count]
  float* together;       // [rows, heads, groups, stages, VECTORS, ROWS]
  int64_t rows, heads, queries, groups, count, stages;
  int64_t table_strides[5], code_strides[2];
  int64_t threads;
  Parallel parallel;

  int64_t of_place() const { return groups * stages * VECTORS * ROWS; }
};

// The tables of a stage of one KV head, ROWS queries together; 0 where there are fewer.
void join_tables(const Asked& asked, int64_t task) {
  const int64_t stage = task % asked.stages, place = task / asked.stages;
  const int64_t* along = asked.table_strides;
  const float* from = asked.tables + place / asked.heads * along[0] + place % asked.heads * along[1] + stage * along[3];
  for (int64_t query = 0; query < asked.groups * ROWS; ++query) {
    float* into = asked.together + place * asked.of_place() + (query / ROWS * asked.stages + stage) * VECTORS * ROWS + query % ROWS;
    for (int64_t n = 0; n < VECTORS; ++n) into[n * ROWS] = query < asked.queries ? from[query * along[2] + n * along[4]] : 0;
  }
}

void look(const Asked& asked, int64_t task) {
  Call call = {};
  call.count = asked.count;
  const int64_t tasks = asked.groups * call.parts(), place = task / tasks;
  call.tables = asked.together + place * asked.of_place();
  call.codes = asked.codes + place / asked.heads * asked.code_strides[0] + place % asked.heads * asked.code_strides[1];
  call.out = asked.out + place * asked.queries * asked.count;
  call.heads = 1, call.rows = asked.queries, call.groups = asked.groups, call.stages = asked.stages;
  (call.stages == 4 ? part_of<4> : call.stages == 2 ? part_of<2> : part_of<0>)(call, task % tasks);
}

}  // namespace

extern "C" void state_look_up(const Asked* asked) {
  const int64_t places = asked->rows * asked->heads;
  share(*asked, join_tables, places * asked->stages);
  share(*asked, look, places * asked->groups * ((asked->count + TASK - 1) / TASK));
}
