"""Modules that go on from states of the cache, found by running the model on one that notes who touches it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from semkv.capture.checks import accepts, text_config
from semkv.capture.state_cache import Key, StateCache, cache_argument, cache_kind
from semkv.errors import CaptureError
from semkv.ir.recurrence import Form
from semkv.model.plain_tensors import wraps

ROWS, LENGTH = 3, 17
"""Of the run in which sites are found."""

CACHE = object()
"""What stands for the cache among a site's arguments."""


@dataclass
class Site:
    """A module as a function of tensors, states and weights.

    name: its path. kind: of its cache. keys: of its states. inputs, states, outputs: forms of its tensors, its states and what it returns.
    leaves, spec: its arguments, None in place of tensors and `CACHE` of the cache. places: of the tensors among the leaves, the first
    being one of all rows. returned, out_spec: likewise whether each leaf of the result is a tensor that is no state.
    """

    name: str
    module: nn.Module
    config: Any
    kind: type[StateCache]
    keys: list[Key]
    inputs: tuple[Form, ...]
    states: tuple[Form, ...]
    outputs: tuple[Form, ...]
    leaves: list[Any]
    spec: Any
    places: list[int]
    returned: list[bool]
    out_spec: Any
    weights: dict[str, Tensor] = field(default_factory=dict)

    def run(
        self, tensors: Sequence[Tensor], states: Sequence[Tensor] | None, weights: dict[str, Tensor] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The model's own code over tensors [B, T, ...] after `states` (None: after nothing): outputs and the states after them."""
        leaves = list(self.leaves)
        for place, x in zip(self.places, tensors, strict=True):
            leaves[place] = x
        given = None if states is None else dict(zip(self.keys, states, strict=True))
        cache = self.kind(self.config, given)
        args, kwargs = pytree.tree_unflatten([cache if x is CACHE else x for x in leaves], self.spec)
        result = functional_call(self.module, self.weights if weights is None else weights, args, kwargs)
        outputs = [x for x, kept in zip(pytree.tree_leaves(result), self.returned, strict=True) if kept]
        if cache.attended:
            raise CaptureError(f"{self.name} keeps a recurrent state and attends as well; expected a module for each")
        if set(cache.current) != set(self.keys):
            raise CaptureError(f"{self.name} keeps other states in one call than in another: {sorted(cache.current)}")
        return outputs, [cache.current[key] for key in self.keys]


def find_sites(model: nn.Module) -> list[Site]:
    """The innermost modules of `model` that read or write states of its cache, in execution order.

    Raises
    ------
    CaptureError: the model does not run on such a cache, or a module of it takes, returns or keeps what no graph can.
    """
    kind = cache_kind(_own_cache(model))
    seen: dict[nn.Module, list[Key]] = {}
    running: list[nn.Module] = []

    def touched(key: Key) -> None:
        if not running:
            raise CaptureError(f"{type(model).__name__} reads {key} of its cache outside of its modules")
        keys = seen.setdefault(running[-1], [])
        if key not in keys:
            keys.append(key)

    cache = kind(text_config(model), None, touched)
    calls = run_watched(model, running, cache, LENGTH, "recurrent states")
    names = {module: name for name, module in model.named_modules()}
    return [_site(names[module], module, keys, cache, calls) for module, keys in seen.items()]


def _own_cache(model: nn.Module) -> type:
    """The class of the cache that the model makes for itself."""
    try:
        with torch.no_grad():
            result = model(input_ids=example_ids(1, LENGTH), use_cache=True)
    except Exception:  # what is wrong is told where the model runs on a cache that is given
        return StateCache
    return type(getattr(result, str(cache_argument(model)), None))


def example_ids(rows: int, length: int) -> Tensor:
    """Ids that every vocabulary has, int64 [rows, length]."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    return torch.randint(5, 60, (rows, length), generator=generator, dtype=torch.int64, device="cpu")


def run_cached(model: nn.Module, ids: Tensor, cache: StateCache) -> None:
    """The model's forward over ids [B, T], with its positions where it takes them."""
    options: dict[str, Any] = {str(cache_argument(model)): cache}
    if accepts(model, "use_cache"):
        options["use_cache"] = True
    if accepts(model, "position_ids"):
        positions = torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device)
        options["position_ids"] = positions.expand(*ids.shape)
    with torch.no_grad():
        model(input_ids=ids, **options)


@dataclass
class Call:
    """Arguments and result of a module's call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None


@contextmanager
def watched(model: nn.Module, running: list[nn.Module]) -> Iterator[dict[nn.Module, list[Call]]]:
    """While entered, `running` is the stack of modules that run, and what is yielded fills with their calls."""
    calls: dict[nn.Module, list[Call]] = {}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append(module)
        calls.setdefault(module, []).append(Call(args, kwargs))

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        running.pop()
        calls[module][-1].result = result

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def run_watched(
    model: nn.Module, running: list[nn.Module], cache: StateCache, length: int, keeps: str
) -> dict[nn.Module, list[Call]]:
    """What `watched` sees while the model reads random ids [ROWS, length] on `cache`. keeps: what it keeps there, for people.

    Raises
    ------
    CaptureError: it does not run on such a cache.
    """
    with watched(model, running) as calls:
        try:
            run_cached(model, example_ids(ROWS, length).to(next(model.parameters()).device), cache)
        except CaptureError:
            raise
        except Exception as error:  # the model's own code, which may raise anything
            raise CaptureError(
                f"{type(model).__name__} keeps {keeps}, and its forward does not run on a cache that watches them "
                f"({type(error).__name__}: {error}); it is written for another interface than that of transformers' caches"
            ) from error
    return calls


def recorded_inputs(model: nn.Module, sites: Sequence[Site], rows: int, length: int) -> list[list[Tensor]]:
    """The tensors [rows, length, ...] that each site is given when the model reads random ids."""
    with watched(model, []) as calls:
        run_cached(model, example_ids(rows, length), sites[0].kind(text_config(model), None))
    found = []
    for site in sites:
        (call,) = calls[site.module]
        leaves = _leaves((call.args, call.kwargs))[0]
        found.append([_whole(leaves[place], rows).clone() for place in site.places])
    return found


def _whole(x: Tensor, rows: int) -> Tensor:
    """What is the same for all rows, once for each."""
    return x.expand(rows, *x.shape[1:])


def _leaves(value: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(value, is_leaf=lambda x: isinstance(x, StateCache))


def _site(name: str, module: nn.Module, keys: list[Key], cache: StateCache, calls: dict[nn.Module, list[Call]]) -> Site:
    where = f"{name} ({type(module).__name__})"
    if len(calls[module]) != 1:
        raise CaptureError(f"{where} runs {len(calls[module])} times in one forward and keeps a state; expected once")
    (call,) = calls[module]
    leaves, spec = _leaves((call.args, call.kwargs))
    places = [place for place, x in enumerate(leaves) if isinstance(x, Tensor)]
    for place in places:
        if tuple(leaves[place].shape[:2]) not in ((ROWS, LENGTH), (1, LENGTH)):
            raise CaptureError(
                f"{where} keeps a state and takes a tensor of shape {tuple(leaves[place].shape)}; expected [rows, tokens, ...], of "
                "which each token has its part"
            )
    places.sort(key=lambda place: leaves[place].shape[0] == 1)  # stable: one of all rows comes first
    if not places or leaves[places[0]].shape[0] != ROWS:
        raise CaptureError(f"{where} keeps a state and takes no tensor [rows, tokens, ...]")
    results, out_spec = pytree.tree_flatten(call.result)
    states = {id(x) for x in cache.current.values()}  # the caller has no use for one
    returned = [isinstance(x, Tensor) and id(x) not in states for x in results]
    made = [x for x, kept in zip(results, returned) if kept]
    if any(not isinstance(x, (Tensor, type(None))) for x in results) or any(
        tuple(x.shape[:2]) != (ROWS, LENGTH) for x in made
    ):
        raise CaptureError(f"{where} keeps a state and returns what is no tensor [rows, tokens, ...]")
    weights = weights_of(module, where, "that keep recurrent states")
    kept = [key for key in keys if key in cache.current]
    return Site(
        name=name,
        module=module,
        config=cache.model_config,
        kind=type(cache),
        keys=kept,
        inputs=tuple(Form(tuple(leaves[place].shape[2:]), leaves[place].dtype) for place in places),
        states=tuple(Form(tuple(cache.current[key].shape[1:]), cache.current[key].dtype) for key in kept),
        outputs=tuple(Form(tuple(x.shape[2:]), x.dtype) for x in made),
        leaves=[CACHE if isinstance(x, StateCache) else None if isinstance(x, Tensor) else x for x in leaves],
        spec=spec,
        places=places,
        returned=returned,
        out_spec=out_spec,
        weights=weights,
    )


def weights_of(module: nn.Module, where: str, kind: str) -> dict[str, Tensor]:
    """The module's parameters and buffers, by name. where: it, and kind: what modules it is one of, for people.

    Raises
    ------
    CaptureError: one of them wraps others.
    """
    weights = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    if wrapping := [path for path, x in weights.items() if wraps(x)]:
        raise CaptureError(
            f"{where}: its weight {wrapping[0]!r} wraps others, as quantised weights do, which is not supported in modules {kind}; load "
            "these modules unquantised"
        )
    return weights


__all__ = [
    "Call",
    "Site",
    "example_ids",
    "find_sites",
    "recorded_inputs",
    "run_cached",
    "run_watched",
    "watched",
    "weights_of",
]
