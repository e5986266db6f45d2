"""What a decode step computes between two attentions, as CUDA graphs: launched at once, not an operator at a time.

How many entries a layer attends to, and what it fetches for them, changes with every step; what lies between two attentions (norms,
projections, rotations) does not. `record_runs` takes such runs of nodes out of a graph. Each is recorded when inputs of its sizes first
come and replayed from then on: inputs are copied to where the recording reads them, and outputs from where it writes them, so that
what a step returns stays as it is when the next one runs.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from semkv.ir.graph import attribute
from semkv.kernels.runs import join_runs

MOST_SIZES = 32
"""Of inputs that a thread keeps recordings of a run for: numbers of rows, and places of weights that were moved."""
WARM_UP = 3
"""Runs before one is recorded, in which libraries choose their kernels and take their memory."""

Recorder = Callable[[Callable[[], Sequence[Any]]], tuple[Callable[[], None], Sequence[Any]]]
"""Record what a function launches: what launches it again, and what the function returned, whose tensors the launch writes anew."""

_recording = threading.Lock()  # the device records for one thread at a time


def record_runs(module: GraphModule, recorder: Callable[[], Recorder]) -> GraphModule:
    """A graph that computes the same with the same parameters; its runs of nodes whose sizes follow from those of their inputs are
    `RecordedRun`s.

    It is for decode steps on a CUDA device, and for this process: it cannot be saved. recorder: makes what records, once per thread.
    """
    threads = _OfThread(recorder)
    return join_runs(module, is_recordable, lambda run: RecordedRun(run, threads))


def is_recordable(node: Node) -> bool:
    """Whether a node launches the same for all inputs of the same sizes, and looks at no numbers on the host; by its operator alone."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace != "aten" and target != torch.ops.semkv.linear.default:
        return False
    host = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
    return not target._schema.is_mutable and not host & set(target.tags)


class CudaRecorder:
    """Records CUDA graphs on `device` that share their intermediate memory: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, function: Callable[[], Sequence[Any]]) -> tuple[Callable[[], None], Sequence[Any]]:
        with _recording, torch.cuda.device(self._device):
            if self._pool is None or self._stream is None:
                self._pool = torch.cuda.graph_pool_handle()
                # PyTorch deals streams out of two lists in turn. What other threads put on the recording one would be recorded, too:
                # no stream of this priority is made elsewhere.
                self._stream = torch.cuda.Stream(priority=-1)
            current, aside = torch.cuda.current_stream(), self._stream
            # Not on the recording stream: its workspace of cuBLAS, which graphs hold by address, is to be made while recording, in memory
            # that is the graphs'. Any other is let go of when someone clears them all, as `torch.compile` does, or drops another graph
            # (https://github.com/pytorch/pytorch/issues/193402).
            for _ in range(WARM_UP):
                function()
            graph = torch.cuda.CUDAGraph()
            # Other threads go on meanwhile: what they do to the device is no part of this, and no fault.
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"):
                    returned = function()
            except BaseException:
                torch.cuda.set_stream(current)  # a recording that cannot end leaves its own as the current one
                raise
        return graph.replay, returned


class _OfThread(threading.local):
    """What one thread records with, and the recordings of each run: two threads that step at once never share buffers."""

    def __init__(self, recorder: Callable[[], Recorder]) -> None:
        self.recorder = recorder()
        self.recordings: dict[RecordedRun, dict[tuple[Any, ...], Recording | None]] = {}


class RecordedRun:
    """Nodes of a graph that are launched together where they could be recorded, else one by one.

    module: the nodes as a graph of their own (`semkv.kernels.runs`). It is the reference, and answers calls with gradients.
    """

    def __init__(self, module: GraphModule, threads: _OfThread) -> None:
        self.module, self._threads = module, threads
        weights = [attribute(module, str(node.target)) for node in module.graph.nodes if node.op == "get_attr"]
        self._weights = [x for x in weights if isinstance(x, Tensor)]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return self.module(*inputs)
        made = self._threads.recordings.setdefault(self, {})
        # A graph reads weights where they were: moved ones make another.
        key = (
            *[(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in inputs],
            *[x.data_ptr() for x in self._weights],
        )
        if key not in made:
            made[key] = self._made(inputs, len(made))
        recording = made[key]
        return self.module(*inputs) if recording is None else recording.run(inputs)

    def _made(self, inputs: Sequence[Any], others: int) -> Recording | None:
        try:
            if others >= MOST_SIZES:
                raise RuntimeError(f"there are {others} recordings of other numbers of rows")
            with torch.inference_mode(False), torch.no_grad():  # its buffers serve callers in any mode
                return Recording(self.module, inputs, self._threads.recorder)
        except RuntimeError as reason:
            warnings.warn(
                f"a part of the decode step runs without a CUDA graph, which is slower: it could not be recorded ({reason})",
                stacklevel=2,
            )
            return None


class Recording:
    """A run recorded for inputs of given sizes, with the buffers that it reads and writes."""

    def __init__(self, module: GraphModule, inputs: Sequence[Any], recorder: Recorder) -> None:
        """Raises `RuntimeError` where something in it cannot be recorded."""
        given = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
        self._replay, self._returned = recorder(lambda: module(*given))
        self._inputs = [x for x in given if isinstance(x, Tensor)]
        self._written = [x for x in self._returned if isinstance(x, Tensor)]

    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """What the module returns of inputs of these sizes."""
        if self._inputs:
            torch._foreach_copy_(self._inputs, [x for x in inputs if isinstance(x, Tensor)])
        self._replay()
        made = [torch.empty_like(x) for x in self._written]
        if made:
            torch._foreach_copy_(made, self._written)
        tensors = iter(made)
        return tuple(next(tensors) if isinstance(x, Tensor) else x for x in self._returned)


__all__ = ["CudaRecorder", "RecordedRun", "is_recordable", "record_runs"]
