"""What a decode step computes, as CUDA graphs: launched at once, not an operator at a time.

`record_runs` is for steps that ask the memory between two attentions: what lies there (norms, projections, rotations) does not change with
the step, and such runs of nodes are taken out of a graph. Each is recorded when inputs of its sizes first come and replayed from then on:
inputs are copied to where the recording reads them, and outputs from where it writes them, so that what a step returns stays as it is
when the next one runs. `RecordedStep` is for a step that is one graph of tensors: all of it is recorded, and its state stays where it is.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from semkv.ir.graph import attribute
from semkv.kernels.runs import join_runs
from semkv.kernels.tables import Tables, kept_in

MOST_SIZES = 32
"""Of inputs that a thread keeps recordings of a run for: numbers of rows, and places of weights that were moved."""
MOST_PLACES = 4
"""Of a step's state that a thread keeps recordings of."""
WARM_UP = 3
"""Runs before one is recorded, in which libraries choose their kernels and take their memory."""

Recorder = Callable[..., tuple[Callable[[], None], Sequence[Any]]]
"""Record what a function launches: what launches it again, and what the function returned, whose tensors the launch writes anew.
whole: it changes its state in place, so that it must not run before it is replayed; tables of the host that it sends are kept."""

_recording = threading.Lock()  # the device records for one thread at a time


def record_runs(module: GraphModule, recorder: Callable[[], Recorder]) -> GraphModule:
    """A graph that computes the same with the same parameters; its runs of nodes whose sizes follow from those of their inputs are
    `RecordedRun`s.

    It is for decode steps on a CUDA device, and for this process: it cannot be saved. recorder: makes what records, once per thread.
    """
    threads = OfThread(recorder)
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

    def __call__(
        self, function: Callable[[], Sequence[Any]], *, whole: bool = False
    ) -> tuple[Callable[[], None], Sequence[Any]]:
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
            for _ in range(0 if whole else WARM_UP):
                function()
            graph, tables = torch.cuda.CUDAGraph(), Tables() if whole else None
            # Other threads go on meanwhile: what they do to the device is no part of this, and no fault.
            try:
                with (
                    torch.cuda.graph(graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"),
                    nullcontext() if tables is None else kept_in(tables),
                ):
                    returned = function()
            except BaseException:
                torch.cuda.set_stream(current)  # a recording that cannot end leaves its own as the current one
                raise
        return partial(_replay, graph, tables), returned


def _replay(graph: torch.cuda.CUDAGraph, tables: Tables | None) -> None:
    """Launch `graph`, which reads `tables`."""
    graph.replay()


class OfThread(threading.local):
    """What one thread records with, and the recordings of each run, and of each step: two threads that step at once never share
    buffers."""

    def __init__(self, recorder: Callable[[], Recorder]) -> None:
        self.recorder = recorder()
        self.recordings: dict[RecordedRun, dict[tuple[Any, ...], Recording | None]] = {}
        self.steps: dict[RecordedStep, OrderedDict[tuple[Any, ...], Recording | Literal[False] | None]] = {}


class RecordedRun:
    """Nodes of a graph that are launched together where they could be recorded, else one by one.

    module: the nodes as a graph of their own (`semkv.kernels.runs`). It is the reference, and answers calls with gradients.
    """

    def __init__(self, module: GraphModule, threads: OfThread) -> None:
        self.module, self._threads = module, threads
        self._weights = _weights(module)

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


class RecordedStep:
    """A step as one graph of tensors, launched together while its state stays where it is, else node by node.

    module: the graph, which reads and writes its state in place. anew: places of the inputs that come anew with each step; all others are
    its state.

    A step whose state moved runs node by node: there libraries choose their kernels. The next one with the same state is recorded.
    """

    def __init__(self, module: GraphModule, anew: frozenset[int], threads: OfThread) -> None:
        self.module, self.anew, self._threads = module, anew, threads
        self._weights = _weights(module)

    def __call__(self, *inputs: Tensor, behind: Sequence[Tensor] = ()) -> tuple[Any, ...]:
        """What the graph returns of `inputs` and those `behind` them."""
        inputs = (*inputs, *behind)
        made = self._threads.steps.setdefault(self, OrderedDict())
        key = (
            *[x.shape if i in self.anew else (x.data_ptr(), x.shape, x.stride()) for i, x in enumerate(inputs)],
            *[x.data_ptr() for x in self._weights],
        )
        if key not in made:
            made[key] = None
            if len(made) > MOST_PLACES:
                made.popitem(last=False)
            return self.module(*inputs)
        made.move_to_end(key)
        if made[key] is None:
            made[key] = self._made(inputs)
        recording = made[key]
        return recording.run(inputs) if recording else self.module(*inputs)

    def _made(self, inputs: Sequence[Tensor]) -> Recording | Literal[False]:
        try:
            with torch.inference_mode(False), torch.no_grad():
                return Recording(self.module, inputs, self._threads.recorder, self.anew)
        except RuntimeError as reason:
            warnings.warn(
                f"decode steps run without a CUDA graph, which is slower: one could not be recorded ({reason})",
                stacklevel=3,
            )
            return False


def _weights(module: GraphModule) -> list[Tensor]:
    """Tensors of a module's own that its nodes read."""
    found = [attribute(module, str(node.target)) for node in module.graph.nodes if node.op == "get_attr"]
    return [x for x in found if isinstance(x, Tensor)]


class Recording:
    """A run recorded for inputs of given sizes, with the buffers that it reads and writes. copied: inputs that have buffers of their own;
    None: all. The others are read and written where they are: they must stay there."""

    def __init__(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        recorder: Recorder,
        copied: frozenset[int] | None = None,
    ) -> None:
        """Raises `RuntimeError` where something in it cannot be recorded."""
        self._copied = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and (copied is None or i in copied)]
        buffers = {i: inputs[i].clone() for i in self._copied}
        places = [buffers.get(i, x) for i, x in enumerate(inputs)]
        self._replay, self._returned = recorder(lambda: module(*places), whole=copied is not None)
        self._inputs = list(buffers.values())
        self._written = [x for x in self._returned if isinstance(x, Tensor)]

    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """What the module returns of inputs of these sizes."""
        if self._inputs:
            torch._foreach_copy_(self._inputs, [inputs[i] for i in self._copied])
        self._replay()
        made = [torch.empty_like(x) for x in self._written]
        if made:
            torch._foreach_copy_(made, self._written)
        tensors = iter(made)
        return tuple(next(tensors) if isinstance(x, Tensor) else x for x in self._returned)


__all__ = ["CudaRecorder", "OfThread", "RecordedRun", "RecordedStep", "is_recordable", "record_runs"]
