// Tasks that threads of PyTorch's pool take in turn.

namespace {

using Function = void (*)(void*);
using Parallel = void (*)(Function, void*, unsigned, unsigned);  // GOMP_parallel

// `run(call, task)` for every task below `count`, in the order in which threads are free for them. A `Call` has `threads`, and
// `parallel`, which is null where all is to run in this thread.
template <typename Call>
void share(const Call& call, void (*run)(const Call&, int64_t), int64_t count) {
  struct Work {
    const Call& call;
    void (*run)(const Call&, int64_t);
    int64_t count, next;

    static void take(void* given) {
      Work& work = *(Work*)given;
      for (int64_t task; (task = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED)) < work.count;) work.run(work.call, task);
    }
  } work = {call, run, count, 0};
  if (call.parallel && call.threads > 1 && count > 1)
    call.parallel(Work::take, &work, call.threads, 0);
  else
    Work::take(&work);
}

}  // namespace
