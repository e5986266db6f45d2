// New tokens to their places in windows of a memory: a KV head of a row of the batch is a task.

namespace {

constexpr int64_t LEAST = 1 << 16;  // numbers of a thread

// Fields of 8 bytes each, as semkv.kernels.state.append writes them. Strides are bytes, of rows of the batch, heads, and places or tokens.
struct Side {
  char* into;                                        // [rows, heads, window, width], packed codes where there is a scale
  char* scale;                                       // float16 [rows, heads, window] or null
  const char* fresh;                                 // [rows, heads, tokens, width]
  int64_t width, bits, into_kind, fresh_kind;         // width: numbers; bits: of codes
  int64_t into_strides[3], scale_strides[3], fresh_strides[3];
};

struct Call {
  Side sides[2];
  char* positions;                                   // int32 [rows, window]
  const char* new_positions;                         // int64 [rows, tokens]
  const int64_t* at;                                 // [rows]
  int64_t rows, heads, window, tokens, position_stride, new_position_strides[2], threads;
  Parallel parallel;
};

void append_head(const Call& call, int64_t task) {
  if (!call.tokens) return;  // there may be no window either
  const int64_t row = task / call.heads, head = task % call.heads;
  int64_t place = call.at[row] % call.window;
  place += place < 0 ? call.window : 0;
  for (int64_t token = 0; token < call.tokens; ++token, place = place + 1 == call.window ? 0 : place + 1) {
    for (const Side& side : call.sides) {
      const char* from = side.fresh + row * side.fresh_strides[0] + head * side.fresh_strides[1] + token * side.fresh_strides[2];
      char* to = side.into + row * side.into_strides[0] + head * side.into_strides[1] + place * side.into_strides[2];
      if (!side.scale) {
        convert(from, side.fresh_kind, to, side.into_kind, side.width);
        continue;
      }
      char* scale = side.scale + row * side.scale_strides[0] + head * side.scale_strides[1] + place * side.scale_strides[2];
      quantize(from, side.fresh_kind, to, (uint16_t*)scale, side.width, side.bits);
    }
    if (head) continue;
    const char* position = call.new_positions + row * call.new_position_strides[0] + token * call.new_position_strides[1];
    *(int32_t*)(call.positions + row * call.position_stride + place * 4) = (int32_t)*(const int64_t*)position;
  }
}

}  // namespace

extern "C" void append_tokens(const Call* call) {
  Call own = *call;
  const int64_t tasks = own.rows * own.heads, most = tasks * own.tokens * own.sides[0].width / LEAST + 1;
  own.threads = own.threads < most ? own.threads : most;
  share(own, append_head, tasks);
}
