"""What the user's model makes of a prompt with images, up to the layers of its decoder, by its own code.

The model's forward runs on a twin of the model whose decoder layers do nothing: the vision tower, the merging of its features into the
embeddings and the rotary positions are the model's own, and nothing of the model is touched. What the decoder is given is noted, and what
its layers are given as well: an addition between two layers is what a layer is given where the one before gave zeros.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from semkv.errors import CaptureError, InputError
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.model.wrappers import unwrapped
from semkv.passes.find_seams import layer_of

SILENT = {"use_cache": False, "return_dict": True, "logits_to_keep": 1}
"""Arguments of the twin's forward, where it has them: no cache, and few logits, which are nobody's."""

GIVEN = ("hidden_states", "attention_mask", "position_ids", "cache", "past_key_values", "cache_position")
"""What layers are given besides, which a program has of its own; and position embeddings, under several names."""


Blocks = Sequence[tuple[int, int]]
"""Runs of tokens, each as its first and the one behind its last."""


@dataclass(frozen=True)
class DecoderInputs:
    """What a decoder is given for ids [B, T].

    embeds: [B, T, H]. rotary: int64 [axes, B, T]; None where positions are places. entering: by site, what is added to the hidden
    states that enter its layer, [B, T, H]. blocks: of each row, runs of columns (first, behind the last) that attend to one another both
    ways.
    """

    embeds: Tensor | None
    rotary: Tensor | None = None
    entering: Mapping[int, Tensor] = field(default_factory=dict)
    blocks: Sequence[Blocks] | None = None


def inputs_of(model: nn.Module) -> frozenset[str]:
    """The names that the forward of a model has; of one with adapters, those of the model inside."""
    model = unwrapped(model)
    inside = getattr(model, "get_base_model", None)
    named = inspect.signature((inside() if callable(inside) else model).forward).parameters.values()
    return frozenset(p.name for p in named if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))


def decoder_inputs(model: nn.Module, program: Program, inputs: Mapping[str, Any]) -> DecoderInputs:
    """Run the model's own code on `inputs`, arguments of its forward, up to its layers.

    Errors of the model's own code (features that do not match the image tokens, for example) are its own.

    Raises
    ------
    InputError: an argument that its forward does not have.
    CaptureError: the model does with this prompt what the program cannot: masks that are neither causal nor of runs that attend both
        ways, layers that read more than hidden states, features that are not added.
    """
    model = unwrapped(model)
    parameters = inputs_of(model)
    unknown = [name for name in inputs if name not in parameters]
    if unknown:
        raise InputError(f"{type(model).__name__} has no input {unknown[0]!r}: pass what its processor made")
    layers = _layers_of(program.sites)
    owner = layers.rpartition(".")[0]
    told = _Told()
    twin = _twin(model, owner, layers, told)
    options = {name: value for name, value in SILENT.items() if name in parameters}
    with torch.no_grad():
        twin(**inputs, **options)
    mask = inputs.get("attention_mask")
    return _checked(told, program, layers, mask if isinstance(mask, Tensor) else None)


@dataclass
class _Told:
    """What was seen. embeds, positions: given to the decoder; layers: per run and layer its hidden states [B, T, H], None where they are
    what the layer before returned, and what else. returned: by the layer that ran last. last: what the decoder returned, per run."""

    embeds: Tensor | None = None
    positions: Tensor | None = None
    layers: dict[int, dict[int, tuple[Tensor | None, dict[str, Any]]]] = field(default_factory=dict)
    last: list[Tensor] = field(default_factory=list)
    returned: Tensor | None = None
    fill: int = 0


def _layers_of(sites: Sequence[AttentionSite]) -> str:
    """The path of the list of layers that all sites are in."""
    lists = {layer_of(site.name).rpartition(".")[0] for site in sites}
    if len(lists) != 1 or not (path := lists.pop()):
        raise CaptureError(
            f"the attention of this model is not in one list of layers ({', '.join(site.name for site in sites[:3])}): what it makes of "
            "images before its layers cannot be told; give the prompt as inputs_embeds"
        )
    return path


def _twin(model: nn.Module, owner: str, layers: str, told: _Told) -> nn.Module:
    """A copy of the modules on the way to the layers, which shares everything else, with layers that note what they are given."""
    top = twin = _copy(model)
    if not owner:
        _watch_decoder(twin, model, told)
    path = ""
    for name in layers.split("."):
        path = f"{path}.{name}" if path else name
        source = twin._modules[name]
        assert source is not None
        below = _copy(source)
        twin._modules[name] = below
        if path == owner:
            _watch_decoder(below, source, told)
        twin = below
    for number, layer in list(twin._modules.items()):
        assert layer is not None
        twin._modules[number] = _watched_layer(layer, int(number), told)
    return top


def _copy(module: nn.Module) -> nn.Module:
    """The module with the same parameters and submodules, which may be replaced in it."""
    twin: nn.Module = object.__new__(type(module))
    twin.__dict__ = dict(module.__dict__)
    twin.__dict__["_modules"] = dict(module._modules)
    if "_hf_hook" in twin.__dict__:  # accelerate's, which would call the original
        twin.__dict__.pop("forward", None)
    elif "forward" in twin.__dict__:
        raise CaptureError(
            f"the forward of a {type(module).__name__} was replaced on the instance, so that the model's code cannot be run in part: give "
            "the prompt as inputs_embeds"
        )
    return twin


def _watch_decoder(twin: nn.Module, source: nn.Module, told: _Told) -> None:
    plain: Callable[..., Any] = type(source).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        bound = dict(zip(list(inspect.signature(plain).parameters)[1:], args)) | kwargs
        told.embeds, told.positions = bound.get("inputs_embeds"), bound.get("position_ids")
        if told.embeds is None and isinstance(ids := bound.get("input_ids"), Tensor):
            told.embeds = source.get_input_embeddings()(ids)  # type: ignore[operator]
        out = None
        for told.fill in (0, 1):
            out = plain(twin, *args, **kwargs)
            told.last.append(out[0] if not isinstance(out, Tensor) else out)
        return out

    twin.__dict__["forward"] = forward


def _watched_layer(layer: nn.Module, number: int, told: _Told) -> nn.Module:
    twin: nn.Module = object.__new__(type(layer))
    twin.__dict__ = dict(layer.__dict__)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        hidden = args[0] if args else kwargs["hidden_states"]
        told.layers.setdefault(told.fill, {})[number] = None if hidden is told.returned else hidden, kwargs
        told.returned = torch.full_like(hidden, told.fill)
        return told.returned

    twin.__dict__["forward"] = forward
    return twin


def _checked(told: _Told, program: Program, layers: str, mask: Tensor | None) -> DecoderInputs:
    if told.embeds is None or not told.layers:
        raise CaptureError("the model's forward gave its decoder no embeddings: give the prompt as inputs_embeds")
    rows, columns = told.embeds.shape[:2]
    real = torch.ones(rows, columns, dtype=torch.bool, device=told.embeds.device)
    if mask is not None and mask.shape == real.shape:
        real = mask.to(real.device).bool()
    zeros, ones = told.layers[0], told.layers[1]
    sites = {int(layer_of(site.name).rpartition(".")[2]): site for site in program.sites}
    open_sites = {site for site, _ in program.seams.streams}
    entering: dict[int, Tensor] = {}
    blocks = _blocks(zeros[min(zeros)][1].get("attention_mask"), real)
    for number, (hidden, kwargs) in zeros.items():
        _check_kwargs(number, kwargs)
        if (site := sites.get(number)) is not None:
            _check_mask(kwargs.get("attention_mask"), site, real, blocks)
        other = ones[number][0]
        if number == min(zeros) or (hidden is None and other is None):
            continue
        like = hidden if hidden is not None else other
        assert like is not None
        exact = like.dtype.itemsize > 2
        zero = torch.zeros_like(like) if hidden is None else hidden
        one = torch.ones_like(like) if other is None else other
        if not torch.allclose(one - 1, zero, rtol=1e-5 if exact else 2**-6, atol=1e-4 if exact else 2**-4):
            raise CaptureError(
                f"what the model does between layers {number - 1} and {number} with this prompt is no sum: {layers}"
            )
        if not bool(zero.any()):
            continue
        if site is None or site.index not in open_sites:
            raise CaptureError(
                f"the model adds features in front of layer {number}, where the program has no place for them"
            )
        entering[site.index] = zero
    last = told.last[0].masked_fill(~real[..., None], 0) - told.last[0][:, -1:].masked_fill(~real[..., None], 0)
    if bool(last.any()):
        raise CaptureError("the model adds features behind its last layer, where the program has no place for them")
    rotary = _rotary(told.positions, program.seams.axes)
    return DecoderInputs(told.embeds, rotary, entering, blocks if any(blocks) else None)


def _check_kwargs(number: int, kwargs: Mapping[str, Any]) -> None:
    for name, value in kwargs.items():
        held = value if isinstance(value, (list, tuple)) else [value]
        known = name in GIVEN or "position_embeddings" in name
        if not known and any(isinstance(x, Tensor) for x in held):
            raise CaptureError(
                f"layer {number} of the model is given {name} besides hidden states, which a program does not take: this model can "
                "be compiled for text alone"
            )


def _allowed(mask: Tensor) -> Tensor:
    """Bool [B, T, T]: which keys each query reads, of a mask [B, 1, T, T]."""
    return (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2).any(1)


def _blocks(mask: Any, real: Tensor) -> list[Blocks]:
    """Of each row, the runs of real columns in which tokens read later ones, up to the last that their first reads."""
    found: list[Blocks] = [[] for _ in real]
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return found
    columns = torch.arange(real.shape[1], dtype=torch.int64, device=mask.device)
    reach = (_allowed(mask) & real[:, None, :]).long().mul(columns).amax(-1).masked_fill(~real, -1)
    for row, ends in enumerate(reach.tolist()):
        runs, column = [], 0
        while column < len(ends):
            if ends[column] > column:
                runs.append((column, ends[column] + 1))
            column = max(column, ends[column]) + 1
        found[row] = runs
    return found


def _check_mask(mask: Any, site: AttentionSite, real: Tensor, blocks: Sequence[Blocks]) -> None:
    """Refuse a mask [B, 1, T, T] that is not, among real tokens, all before or a window of those, and all of the token's block."""
    longest = max((end - start for runs in blocks for start, end in runs), default=0)
    if site.window and longest > site.window:
        raise CaptureError(
            f"{longest} tokens of this prompt attend to one another both ways, and {site.name} has a window of {site.window}: such runs "
            "are read within the window of each layer; use smaller images"
        )
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        if longest:
            raise CaptureError(f"{site.name} reads this prompt through another mask than the layers before it")
        return
    columns = torch.arange(real.shape[1], dtype=torch.int64, device=mask.device)
    behind = columns[:, None] - columns
    expected = (
        ((behind >= 0) & (behind < site.window) if site.window else behind >= 0).expand(len(real), -1, -1).clone()
    )
    for row, runs in enumerate(blocks):
        for start, end in runs:
            expected[row, start:end, start:end] = True
    wrong = (_allowed(mask) ^ expected) & real[:, :, None] & real[:, None, :]
    if bool(wrong.any()):
        row, query, key = wrong.nonzero()[0].tolist()
        raise CaptureError(
            f"{site.name} reads this prompt through a mask that a program does not have: the token in column {query} of row {row} "
            f"{'does not read' if expected[row, query, key] else 'reads'} that in column {key}. Text is served; for this prompt run the "
            "model itself"
        )


def _rotary(positions: Any, axes: int) -> Tensor | None:
    """The last `axes` of what the decoder was given; the one before them, where there is one, is that of text."""
    if not isinstance(positions, Tensor) or positions.dim() != 3:
        return None
    if axes == 1 or positions.shape[0] not in (axes, axes + 1):
        raise CaptureError(
            f"the model gives its decoder position ids {tuple(positions.shape)}, and the program's positions have {axes} axes"
        )
    return positions[-axes:]


__all__ = ["DecoderInputs", "decoder_inputs", "inputs_of"]
