"""Names of models and programs by content, so that profiles and states can refuse another's.

Weights are sampled, not read in full: up to 4096 values per tensor at fixed, spread places, which any training step,
merge or quantisation changes. An edit of a few chosen weights may go unseen: a fingerprint tells models apart, it is no
seal. Files have their SHA-256 for that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor, nn

from semkv.artifact.graph_json import graph_tensors, graph_to_json
from semkv.artifact.recurrences import bodies_of, body_graphs
from semkv.errors import CaptureError
from semkv.ir.program import Program
from semkv.model.plain_tensors import plain_tensors
from semkv.model.wrappers import unwrapped

MIXED_ATTENTION = "semkv::mixed_attention.default"
BOUND = ("kernel", "layout")
"""Arguments of it that belong to a device (`semkv.passes.bind_kernels`)."""

ABSENT = {"chooser": -1, "chunk": 0}
"""Fields of sites that states of programs without them do not know, and what they are there."""

SAMPLES = 4096
PROGRAM_GRAPHS = ("body", "head", "prefill", "extend", "decode", "selector")
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: multiples spread evenly whatever the rows of the tensor


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, shapes and sampled values.

    Floating values count in bfloat16, so that a model and its cast from float32 or float64 to bfloat16 agree. A tensor
    under several names counts once, under the first in the alphabet. One that wraps others, as quantised weights do, counts as
    those that it holds.
    """
    tensors = dict(pair for name, tensor in tensors.items() for pair in plain_tensors(name, tensor))
    first: dict[tuple[object, ...], str] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        first.setdefault((tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) if tensor.numel() else (name,), name)
    digest = hashlib.sha256()
    for name in sorted(first.values()):
        digest.update(f"{name} {tuple(tensors[name].shape)}\n".encode())
        digest.update(_sample(tensors[name]))
    return digest.hexdigest()


def model_fingerprint(model: nn.Module) -> str:
    """The fingerprint of a model's weights: `weights_digest` of its parameters and persistent buffers.

    What profiles carry. Tied weights count once; caches such as cos/sin tables, which are not saved, do not count. A model in
    `torch.compile` or `DataParallel` is the model inside. What else modules save (packed weights in tuples, settings) counts too.

    Raises
    ------
    CaptureError: a weight without data (on the meta device), or something saved that is no data; the message names it.
    """
    tensors: dict[str, Tensor] = {}
    others: list[str] = []
    for name, value in unwrapped(model).state_dict(keep_vars=True).items():
        _collect(name, value, tensors, others)
    digest = weights_digest(tensors)
    return hashlib.sha256("\n".join([digest, *others]).encode()).hexdigest() if others else digest


def _collect(name: str, value: object, tensors: dict[str, Tensor], others: list[str]) -> None:
    """Put what a model saves under `name` among the tensors, by name, or as text among what is none."""
    if isinstance(value, Tensor):
        if value.is_meta:
            raise CaptureError(
                f"weight {name!r} has no data (device meta): load the model's weights, without offload, before it is used"
            )
        tensors[name] = value.dequantize() if value.is_quantized else value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _collect(f"{name}.{index}", item, tensors, others)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(f"{name}.{key}", item, tensors, others)
    elif isinstance(value, (type(None), bool, int, float, str, bytes, torch.dtype)):
        others.append(f"{name}={value!r}")
    else:
        raise CaptureError(f"the model saves {name!r}, a {type(value).__name__}; expected tensors, numbers and text")


def program_weights(program: Program) -> dict[str, Tensor]:
    """The tensors that a program's graphs read, by path; of paths that stand for different tensors the first."""
    tensors: dict[str, Tensor] = {}
    for name in PROGRAM_GRAPHS:
        module = getattr(program, name)
        for path, tensor in graph_tensors(module).items() if module is not None else ():
            tensors.setdefault(path, tensor)
    return tensors


def program_fingerprint(program: Program) -> str:
    """The fingerprint of a program: graphs, sites, weights and facts. What states carry.

    The same before saving and after loading; independent of node names, of the device and of what was noted on the way.
    """
    digest = hashlib.sha256()
    facts = [program.vocab_size, program.max_positions, str(program.dtype), program.batched]
    digest.update(json.dumps(facts).encode())
    for site in program.sites:
        fields = dataclasses.asdict(site) | {"name": "", "reason": ""}
        del fields["host_from"]  # where tokens wait changes nothing
        for name, absent in ABSENT.items():
            if fields[name] == absent:
                del fields[name]
        digest.update(json.dumps(fields, sort_keys=True).encode())
    for name in PROGRAM_GRAPHS:
        module = getattr(program, name)
        if module is not None:
            digest.update(f"\n{name}\n".encode())
            digest.update(_structure(graph_to_json(module, meta=False)))
    for name, module in body_graphs(bodies_of(program)).items():
        digest.update(f"\n{name}\n".encode())
        digest.update(_structure(graph_to_json(module, meta=False)))
        digest.update(weights_digest(graph_tensors(module)).encode())
    weights = program_weights(program)
    digest.update(json.dumps(sorted((path, str(tensor.dtype)) for path, tensor in weights.items())).encode())
    digest.update(weights_digest(weights).encode())
    return digest.hexdigest()


def _structure(graph: dict) -> bytes:
    """A graph's JSON with nodes named by their place."""
    places = {node["name"]: f"%{place}" for place, node in enumerate(graph["nodes"])}

    def renamed(value: object) -> object:
        if isinstance(value, dict):
            if set(value) == {"node"}:
                return {"node": places[value["node"]]}
            return {key: renamed(item) for key, item in value.items()}
        return [renamed(item) for item in value] if isinstance(value, list) else value

    def computed(node: dict) -> dict:
        """The keyword arguments that change what is computed."""
        given = node.get("kwargs", {})
        if node.get("target") != MIXED_ATTENTION:
            return given
        return {name: value for name, value in given.items() if name not in BOUND}

    nodes = [
        [node["op"], node.get("target"), renamed(node.get("args", [])), renamed(computed(node))]
        for node in graph["nodes"]
    ]
    return json.dumps(nodes, sort_keys=True).encode()


@cache
def _places(count: int) -> Tensor:
    """At most SAMPLES element indices below `count`, spread over all of it."""
    if count <= SAMPLES:
        return torch.arange(count, dtype=torch.int64, device="cpu")
    return torch.tensor([(i * _GOLDEN % 2**64) * count >> 64 for i in range(SAMPLES)], dtype=torch.int64, device="cpu")


def _sample(tensor: Tensor) -> bytes:
    """The bytes of the sampled values."""
    if tensor.numel() == 0:
        return b""
    indices = torch.unravel_index(_places(tensor.numel()).to(tensor.device), tensor.shape)
    values = tensor.detach()[indices] if tensor.dim() else tensor.detach().reshape(1)
    values = values.to("cpu")
    if values.is_floating_point():
        values = values.to(torch.bfloat16)
    return values.contiguous().view(torch.uint8).numpy().tobytes()
