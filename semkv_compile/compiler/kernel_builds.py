"""Kernels in C++ that a program's steps will call, compiled while the rest of a compilation goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule

from semkv.errors import ConfigError
from semkv.ir import ops
from semkv.ir.program import Program
from semkv.kernels.code_products.cpp import code_library
from semkv.kernels.coding.cpp import coding_library
from semkv.kernels.cpp import MISSING
from semkv.kernels.cuda_graphs import CudaRecorder, OfThread, RecordedStep, record_runs
from semkv.kernels.gather.cpp import gather_library
from semkv.kernels.linear.cpp import linear_library
from semkv.kernels.log_softmax.cpp import log_softmax_library
from semkv.kernels.mixed_attention.call import DTYPES
from semkv.kernels.mixed_attention.cpp import attention_library
from semkv.kernels.mixed_attention.dispatch import form_of, mixed_attention
from semkv.kernels.residual_codes.cpp import residual_codes_library
from semkv.kernels.segments import Segment, fuse, segments_library, whole
from semkv.kernels.selection.cpp import selection_library
from semkv.kernels.sketch_scores.cpp import SIZES, lookup_library, together
from semkv.kernels.state.append import append_library
from semkv.kernels.state.bmm import bmm_library
from semkv.kernels.state.choose import choose_library
from semkv.kernels.state.coarse import coarse_library
from semkv.kernels.state.factored import factored_library
from semkv.kernels.state.look_up import look_up_library
from semkv.kernels.state.products import products_library
from semkv.kernels.state.scores import scores_library
from semkv.kernels.state.unfold import unfold_library

ROUTING = (
    *(code_library, coding_library, log_softmax_library, selection_library, gather_library),
    *(products_library, scores_library, choose_library, unfold_library, factored_library, bmm_library),
    residual_codes_library,
)
"""Objects for methods that choose among units: in steps of several tokens, and in those of one."""


def start_builds(program: Program, kernels: str, device: torch.device, *, routes: bool) -> None:
    """Begin to load what the sites of `program` need on `device`, and to compile what is not on disk; returns at once.

    routes: whether the method may choose among units.

    Warns where `kernels` is `auto` and there is no compiler. Raises `ConfigError` for kernels that cannot run.
    """
    form, reason = form_of(kernels, device)
    if reason == MISSING:
        warnings.warn(f"{reason}: attention on this CPU is PyTorch's, which is slower; install one", stacklevel=3)
    if form == "cpp":
        linear_library(1).start()
        append_library().start()
        if program.dtype == torch.float32:
            segments_library().start()
    if form == "cpp" and program.dtype in DTYPES:
        for shape in {(site.key_dim, site.value_dim, site.group_size) for site in program.sites}:
            attention_library(*shape).start()
        if routes:
            for made in ROUTING:
                made().start()
            for size in SIZES:
                lookup_library(size).start()
            for size in {together(site.group_size) for site in program.sites}:
                look_up_library(size).start()
                coarse_library(size).start()


def check_graphs(cuda_graphs: str | bool | None, device: torch.device) -> None:
    """Raise `ConfigError` where CUDA graphs are asked for and `device` has none."""
    if cuda_graphs and device.type != "cuda":
        raise ConfigError(
            f"cuda_graphs={cuda_graphs!r} needs a CUDA device, and the model is on {device}: pass device='cuda', or leave it"
        )


def as_run(program: Program, kernels: str, device: torch.device, *, cuda_graphs: bool = False) -> Program:
    """`program` as its steps run on `device`: on a CPU with a compiler, what lies between two attentions of `decode` is one call; with
    `cuda_graphs`, it is a CUDA graph. In both, attention is called without PyTorch's dispatcher."""
    if cuda_graphs:
        decode = record_runs(program.decode, partial(CudaRecorder, device))
    elif _fuses(kernels, program.dtype, device):
        decode = fuse(program.decode)
    else:
        return program
    return program.evolve(decode=_undispatched(decode))


def recorded_steps(kernels: str, device: torch.device) -> Callable[[GraphModule, frozenset[int]], RecordedStep]:
    """What makes of the graph of a step of one row on a CUDA device one CUDA graph; the second argument are its inputs that come anew
    with each step."""
    threads = OfThread(partial(CudaRecorder, device))

    def made(module: GraphModule, anew: frozenset[int]) -> RecordedStep:
        return RecordedStep(_launched(kernels, device, _undispatched(module)), anew, threads)

    return made


def as_step(
    kernels: str, dtype: torch.dtype, module: GraphModule, anew: frozenset[int] = frozenset()
) -> Callable[..., tuple[Tensor, ...]]:
    """The graph of a step on a CPU as it runs there: with a compiler one call, else node by node, where attention is called without
    PyTorch's dispatcher, as are Triton's kernels in its interpreter."""
    here = torch.device("cpu")
    _launched(kernels, here, _undispatched(module))
    return whole(module) if _fuses(kernels, dtype, here) else partial(_all_inputs, module)


def _all_inputs(module: GraphModule, *inputs: Tensor, behind: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    return module(*inputs, *behind)


def as_turns(kernels: str, dtype: torch.dtype, module: GraphModule) -> Callable[[], Callable[..., tuple[Tensor, ...]]]:
    """Makes what runs such a graph for a memory of its own; those that it makes share what they know of the graph."""
    made = as_step(kernels, dtype, module)
    return made.another if isinstance(made, Segment) else lambda: made


def as_between(kernels: str, dtype: torch.dtype, module: GraphModule) -> GraphModule:
    """The graph between the turns of several rows on a CPU as it runs there: with a compiler, what lies between two layers' turns is one
    call."""
    return fuse(module) if _fuses(kernels, dtype, torch.device("cpu")) else module


def _undispatched(module: GraphModule) -> GraphModule:
    """`module`, which calls attention without PyTorch's dispatcher."""
    for node in module.graph.nodes:
        if node.target == ops.mixed_attention:
            node.target = mixed_attention
    module.recompile()
    return module


def _launched(kernels: str, device: torch.device, module: GraphModule) -> GraphModule:
    """`module`, where Triton answers with its kernels for a memory's tensors."""
    if form_of(kernels, device)[0] != "triton":
        return module
    from semkv.kernels.state.triton.graph import in_triton

    return in_triton(module, device)


def _fuses(kernels: str, dtype: torch.dtype, device: torch.device) -> bool:
    native = form_of(kernels, device)[0] == "cpp" and dtype == torch.float32
    return native and segments_library().failure() is None
