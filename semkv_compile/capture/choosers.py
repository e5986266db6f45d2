"""Modules that choose which tokens attention reads, by index keys of their own in the model's cache: found, proven and captured.

Such a module (an indexer of sparse attention) takes something of each new token and a causal mask, adds the new tokens' keys to those
of the cache and returns, for each new token, the places of the tokens that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from semkv.capture.checks import text_config
from semkv.capture.recurrent_bodies import in_plain_operators
from semkv.capture.recurrent_proof import TOLERANCE, difference
from semkv.capture.recurrent_sites import CACHE, Site, run_watched, weights_of
from semkv.capture.state_cache import StateCache, keeps_index_keys
from semkv.errors import CaptureError
from semkv.ir.recurrence import CHOICE_GRAPHS, Choice, Form, causal

ROWS, LENGTH = 3, 41
"""Of the run in which they are found and proven."""

TRACED = 7
"""Tokens of the example over which graphs are traced."""

MOST_TRIED = 1 << 18
"""Tokens among which a module must leave some out."""

TIED = 0.1
"""Share of the tokens whose choice may differ where they are read in other pieces: among equal scores, any may be chosen."""

CUTS = ((LENGTH - 1, 1), (23, *(1,) * (LENGTH - 23)), (7, 30, 4))


@dataclass
class ChoiceSite(Site):
    """A module as a function of tensors [B, T, ...] and the index keys [B, P, ...] of the tokens before them.

    mask: the place of the mask among its arguments; mask_dtype: of it. most: tokens that it chooses at most.
    """

    mask: int = -1
    mask_dtype: torch.dtype = torch.bool
    most: int = 0

    def choose(
        self,
        tensors: Sequence[Tensor],
        mask: Tensor,
        indexing: Callable[[Tensor], Tensor],
        weights: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """The model's own code: places [B, T, n]. indexing: of the new tokens' keys makes those of all."""
        leaves = list(self.leaves)
        for place, x in zip(self.places, tensors, strict=True):
            leaves[place] = x
        leaves[self.mask] = mask
        cache = self.kind(self.config, None, indexing=indexing)
        args, kwargs = pytree.tree_unflatten([cache if x is CACHE else x for x in leaves], self.spec)
        return functional_call(self.module, self.weights if weights is None else weights, args, kwargs)

    def after(self, tensors: Sequence[Tensor], past: Tensor | None) -> tuple[Tensor, Tensor]:
        """Places and the index keys of all tokens, behind those whose keys `past` [B, P, ...] are."""
        held: list[Tensor] = []

        def indexing(keys: Tensor) -> Tensor:
            held.append(keys if past is None else torch.cat([past, keys], 1))
            return held[-1]

        length = tensors[0].shape[1]
        whole = length + (0 if past is None else past.shape[1])
        mask = causal(length, whole, self.mask_dtype, tensors[0].device).expand(tensors[0].shape[0], -1, -1)
        return self.choose(tensors, mask, indexing), held[-1]


def find_choosers(model: nn.Module) -> list[tuple[ChoiceSite, list[Tensor]]]:
    """The innermost modules of `model` that add keys of an index to its cache, in execution order, with the tensors [ROWS, LENGTH, ...]
    that each takes.

    Raises
    ------
    CaptureError: the model does not run on such a cache, or a module of it takes or returns what no graph can.
    """
    if not keeps_index_keys(model):
        return []
    seen: dict[nn.Module, Tensor] = {}
    running: list[nn.Module] = []

    def indexing(keys: Tensor) -> Tensor:
        if not running or running[-1] in seen:
            raise CaptureError(
                f"{type(model).__name__} adds index keys to its cache outside of a module that does so once"
            )
        seen[running[-1]] = keys
        return keys

    cache = StateCache(text_config(model), None, indexing=indexing)
    calls = run_watched(model, running, cache, LENGTH, "index keys")
    names = {module: name for name, module in model.named_modules()}
    return [_site(names[each], each, keys, cache, calls[each]) for each, keys in seen.items()]


def _site(
    name: str, module: nn.Module, keys: Tensor, cache: StateCache, calls: Sequence[Any]
) -> tuple[ChoiceSite, list[Tensor]]:
    where = f"{name} ({type(module).__name__}), which chooses what attention reads"
    (call,) = calls
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs), is_leaf=lambda x: isinstance(x, StateCache))
    every = [place for place, x in enumerate(leaves) if isinstance(x, Tensor)]
    masks = [place for place in every if tuple(leaves[place].shape) == (ROWS, LENGTH, LENGTH)]
    if len(masks) != 1:
        raise CaptureError(f"{where}, takes {len(masks)} masks [rows, tokens, tokens]; expected one")
    given = leaves[masks[0]]
    if not torch.equal(given, causal(LENGTH, LENGTH, given.dtype, given.device).expand_as(given)):
        raise CaptureError(f"{where}, takes a mask that is not causal; expected each token and those before it")
    places = sorted((x for x in every if x != masks[0]), key=lambda place: leaves[place].shape[0] == 1)
    for place in places:
        if tuple(leaves[place].shape[:2]) not in ((ROWS, LENGTH), (1, LENGTH)):
            raise CaptureError(
                f"{where}, takes a tensor of shape {tuple(leaves[place].shape)}; expected [rows, tokens, ...], of which each token has its "
                "part"
            )
    if not places or leaves[places[0]].shape[0] != ROWS:
        raise CaptureError(f"{where}, takes no tensor [rows, tokens, ...]")
    made = call.result
    whole_numbers = isinstance(made, Tensor) and not made.is_floating_point() and made.dim() == 3
    if not whole_numbers or tuple(made.shape[:2]) != (ROWS, LENGTH) or tuple(keys.shape[:2]) != (ROWS, LENGTH):
        raise CaptureError(f"{where}, returns no whole numbers [rows, tokens, n], or has no key for each token")
    weights = weights_of(module, where, "that choose what attention reads")
    tensors = [leaves[place].expand(ROWS, *leaves[place].shape[1:]).clone() for place in places]
    site = ChoiceSite(
        name=name,
        module=module,
        config=cache.model_config,
        kind=type(cache),
        keys=[],
        inputs=tuple(Form(tuple(x.shape[2:]), x.dtype) for x in tensors),
        states=(Form(tuple(keys.shape[2:]), keys.dtype),),
        outputs=(Form((), made.dtype),),
        leaves=[CACHE if isinstance(x, StateCache) else None if isinstance(x, Tensor) else x for x in leaves],
        spec=spec,
        places=places,
        returned=[True],
        out_spec=None,
        weights=weights,
        mask=masks[0],
        mask_dtype=given.dtype,
    )
    site.most = _most(site, tensors, keys)
    return site, tensors


def _most(site: ChoiceSite, tensors: Sequence[Tensor], keys: Tensor) -> int:
    """How many tokens it chooses where there are more."""
    one, past = [x[:1, -1:] for x in tensors], keys[:1, :-1]
    while past.shape[1] < MOST_TRIED:
        chosen, whole = site.after(one, past)
        if chosen.shape[2] < whole.shape[1]:
            return chosen.shape[2]
        past = past.repeat(1, 4, *(1,) * (past.dim() - 2))
    raise CaptureError(
        f"{_named(site)} leaves out none of {past.shape[1]} tokens; expected a module that chooses some, as it has index keys"
    )


def prove_chooser(site: ChoiceSite, tensors: Sequence[Tensor]) -> str:
    """What is proven of a site on its inputs [ROWS, LENGTH, ...], for people.

    Raises
    ------
    CaptureError: it mixes rows, looks ahead, does not go on from its index keys, or leaves out tokens where there are few.
    """
    whole, keys = site.after(tensors, None)
    again, _ = site.after(tensors, None)
    if not torch.equal(again, whole):
        raise CaptureError(f"{_named(site)} chooses otherwise each time: it draws random numbers, or keeps something")
    alone = [site.after([x[r : r + 1] for x in tensors], None) for r in range(ROWS)]
    _same(site, torch.cat([x for x, _ in alone]), whole, torch.cat([x for _, x in alone]), keys, "a row alone")
    half = LENGTH // 2
    ahead = [torch.cat([x[:, :half], x.flip(1)[:, half:]], 1) for x in tensors]
    other, others = site.after(ahead, None)
    _same(site, other[:, :half], whole[:, :half], others[:, :half], keys[:, :half], "other tokens later on")
    for cut in CUTS:
        made, past = [], None
        for start, end in pairwise((0, *accumulate(cut))):
            chosen, past = site.after([x[:, start:end] for x in tensors], past)
            made.append(chosen)
        count = max(x.shape[2] for x in made)
        padded = torch.cat([nn.functional.pad(x, (0, count - x.shape[2]), value=LENGTH) for x in made], 1)
        assert past is not None
        _same(site, padded, whole, past, keys, f"a text read in pieces of {cut[0]} tokens and others")
    few = min(site.most, LENGTH)
    first, _ = site.after([x[:, :few] for x in tensors], None)
    every = torch.arange(few, dtype=first.dtype, device=first.device)
    if first.shape[2] != few or not torch.equal(first.sort(-1).values, every.expand_as(first)):
        raise CaptureError(f"{_named(site)} leaves out some of {few} tokens, though it may choose {site.most}")
    return f"chooses {site.most} tokens for each, by index keys that are kept"


def _same(site: ChoiceSite, mine: Tensor, theirs: Tensor, keys: Tensor, expected: Tensor, what: str) -> None:
    if difference([keys], [expected]) > TOLERANCE.get(keys.dtype, 2e-4):
        raise CaptureError(f"{_named(site)}: {what} has other index keys")
    apart = (_seen(mine) != _seen(theirs)).any(-1).double().mean()
    if apart > TIED:
        raise CaptureError(f"{_named(site)}: {what} is given another choice, for {float(apart):.0%} of the tokens")


def _seen(places: Tensor) -> Tensor:
    """bool [B, T, LENGTH]: the tokens among `places` that each of the first T may see; places from LENGTH on are none."""
    rows, length, _ = places.shape
    chosen = torch.zeros(rows, length, LENGTH + 1, dtype=torch.bool, device=places.device)
    chosen.scatter_(2, places.long(), True)
    return chosen[..., :LENGTH] & causal(LENGTH, LENGTH, torch.bool, places.device)[:, :length]


def trace_chooser(site: ChoiceSite, tensors: Sequence[Tensor]) -> Choice:
    """The graphs of a site, which compute what its module does.

    Raises
    ------
    CaptureError: its code branches on values, or on sizes besides the number that it chooses, or its graphs compute something else.
    """
    keys, choose = (_trace(site, what) for what in CHOICE_GRAPHS)
    body = Choice(keys, choose, site.states[0], site.most, site.mask_dtype, site.outputs[0].dtype)
    check_chooser(site, body, tensors)
    return body


def _trace(site: ChoiceSite, what: str) -> GraphModule:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    whole, count = site.most + 2 * TRACED, len(site.places)
    device = next(iter(site.weights.values())).device
    chooses = what == CHOICE_GRAPHS[1]

    def example(shape: Sequence[int], dtype: torch.dtype, dynamic: Sequence[int], number: int) -> Tensor:
        axes = [DimDynamic.DUCK if axis in dynamic else DimDynamic.STATIC for axis in range(len(shape))]
        return mode.from_tensor(
            torch.empty(tuple(shape), dtype=dtype, device=device),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=axes),
            source=ConstantSource(f"input_{number}"),
        )

    shapes: list[tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]] = [
        ((1, TRACED, *form.shape), form.dtype, (1,)) for form in site.inputs
    ]
    if chooses:
        (form,) = site.states
        shapes.append(((1, whole, *form.shape), form.dtype, (1,)))
        shapes.append(((1, TRACED, whole), site.mask_dtype, (1, 2)))
    shapes += [(tuple(x.shape), x.dtype, ()) for x in site.weights.values()]
    examples = [example(*each, number) for number, each in enumerate(shapes)]

    def run(*given: Tensor) -> list[Tensor]:
        tensors, rest = given[:count], given[count:]
        made: list[Tensor] = []
        if chooses:
            (keys, mask), held = rest[:2], rest[2:]
            places = site.choose(tensors, mask, lambda new: keys, dict(zip(site.weights, held)))
            return [places]

        def indexing(new: Tensor) -> Tensor:
            made.append(new)
            return new

        mask = causal(tensors[0].shape[1], tensors[0].shape[1], site.mask_dtype, device)
        site.choose(tensors, mask, indexing, dict(zip(site.weights, rest)))
        return made

    try:
        with torch.no_grad():
            module = make_fx(dispatch_functionalize(run), tracing_mode="symbolic", _allow_non_fake_inputs=True)(
                *examples
            )
    except CaptureError:
        raise
    except Exception as error:  # tracing raises whatever the model's Python raises
        raise CaptureError(
            f"{_named(site)} cannot be captured: {type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
        ) from error
    return in_plain_operators(module, f"{_named(site)}: its graph")


def check_chooser(site: ChoiceSite, body: Choice, tensors: Sequence[Tensor]) -> None:
    """Raise `CaptureError` where graphs do not choose what the module does, of whole rows and of pieces of them."""
    weights = list(site.weights.values())
    for cut in ((LENGTH,), *CUTS):
        for row in range(ROWS):
            past, held = None, None
            for start, end in pairwise((0, *accumulate(cut))):
                part = [x[row : row + 1, start:end] for x in tensors]
                (mine,), held = body(part, held, weights)
                theirs, past = site.after(part, past)
                few = past.shape[1] <= body.most
                same = mine.sort(-1).values if few else mine
                if difference(held, [past]) > TOLERANCE.get(past.dtype, 2e-4) or not torch.equal(
                    same, theirs.sort(-1).values if few else theirs
                ):
                    raise CaptureError(
                        f"{_named(site)}: its graphs do not choose what it does for tokens {start} to {end}; its code depends on values, "
                        "or on sizes that its graphs do not see"
                    )


def _named(site: Site) -> str:
    return f"{site.name} ({type(site.module).__name__})"


__all__ = ["ChoiceSite", "check_chooser", "find_choosers", "prove_chooser", "trace_chooser"]
