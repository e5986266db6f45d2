"""Modules that treat each token by itself in code that no export follows, found where export fails, and proven by running them.

A mixture of experts is often a loop over the experts that some token chose. What a token gets there is its own affair, so that such a
module can be one node of a program. That is proven of each on the model's own tensors, never taken from its name: one that drops
tokens where an expert is full, or mixes tokens in any other way, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from semkv.capture.recurrent_bodies import trace_pieces
from semkv.capture.recurrent_proof import difference
from semkv.capture.recurrent_sites import Call, Site, example_ids, watched, weights_of
from semkv.capture.state_cache import StateCache
from semkv.capture.value_branches import EveryPlace
from semkv.errors import CaptureError
from semkv.ir.local import TOLERANCE
from semkv.ir.recurrence import Form, Live, Pieces

ROWS, LENGTH = 3, 37
"""Of the text whose tokens a proof is made of."""

SINGLES = 16
"""Tokens that are run alone, and among copies of themselves."""

COPIES = 512
"""Tokens of a call in which all are one: more than an expert with a limit takes."""

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""What a module may be given beside tensors."""

BY_ROWS, BY_TOKENS, SHARED = "rows", "tokens", "shared"
"""Forms of its tensors: [rows, tokens, ...], [rows * tokens, ...], and [1, tokens, ...] of all rows."""


@dataclass
class LocalSite(Site):
    """A module as a function of tensors [N, 1, ...] of N tokens.

    taken, given: the form of each tensor that it takes and returns. branches: under which its code is traced.
    """

    taken: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    branches: EveryPlace | None = None

    def run(
        self, tensors: Sequence[Tensor], states: Sequence[Tensor] | None, weights: dict[str, Tensor] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The model's own code over tokens [N, 1, ...]: outputs [N, 1, ...], and no states."""
        leaves = list(self.leaves)
        for place, x, form in zip(self.places, tensors, self.taken, strict=True):
            leaves[place] = x[:, 0] if form == BY_TOKENS else x
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        held = self.weights if weights is None else weights
        if self.branches is None:
            result = functional_call(self.module, held, args, kwargs)
        else:
            with self.branches:
                result = functional_call(self.module, held, args, kwargs)
        made = [x for x, kept in zip(pytree.tree_leaves(result), self.returned, strict=True) if kept]
        return [x[:, None] if form == BY_TOKENS else x for x, form in zip(made, self.given, strict=True)], []

    def tokens_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the module takes, in the order of `places`, as [N, 1, ...]."""
        rows = next((x.shape[0] for x, form in zip(tensors, self.taken) if form == BY_ROWS), None)
        made = []
        for x, form in zip(tensors, self.taken, strict=True):
            if form == BY_TOKENS:
                made.append(x[:, None])
            else:
                whole = x.expand(rows, *x.shape[1:]) if form == SHARED else x
                made.append(whole.reshape(-1, 1, *x.shape[2:]))
        return made

    def returns(self, made: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the module returns, of outputs [N, 1, ...] over what it takes."""
        lead = next((x.shape[:2] for x, form in zip(tensors, self.taken) if form == BY_ROWS), None)
        return [x[:, 0] if form == BY_TOKENS else x.reshape(*lead, *x.shape[2:]) for x, form in zip(made, self.given)]

    def forward(self, operator: Callable[..., Sequence[Tensor]], index: int, outputs: str) -> Callable[..., Any]:
        """The module's forward as one call of `operator`."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves = pytree.tree_leaves((args, kwargs))
            if len(leaves) != len(self.leaves):
                raise CaptureError(
                    f"{_named(self)} is called with {len(leaves)} arguments, and with {len(self.leaves)}"
                )
            tensors = [leaves[place] for place in self.places]
            made = iter(self.returns(operator(self.tokens_of(tensors), index, outputs), tensors))
            return pytree.tree_unflatten([next(made) if tensor else None for tensor in self.returned], self.out_spec)

        return forward


def candidates(error: BaseException, model: nn.Module) -> list[nn.Module]:
    """The modules of the model that ran when it failed, the innermost first, without the model itself."""
    paths = {id(module): path for path, module in model.named_modules()}
    found: list[nn.Module] = []
    trace = error.__traceback__
    while trace is not None:
        running = trace.tb_frame.f_locals.get("self")
        if paths.get(id(running)) and running not in found:
            found.append(running)
        trace = trace.tb_next
    return found[::-1]


def find_local(
    model: nn.Module, forward: Callable[[Tensor, Tensor], Tensor], module: nn.Module, known: Sequence[Site]
) -> list[tuple[LocalSite, list[Tensor]]]:
    """`module` and the other modules of its class, each with the tokens [N, 1, ...] that it takes, in execution order.

    Parameters
    ----------
    forward: of ids and positions [B, T].
    known: sites that there are already.

    Raises
    ------
    CaptureError: `module` is none that treats each token by itself; the message says why.
    """
    names = {each: name for name, each in model.named_modules()}
    held = {site.module for site in known}
    alike = [each for each in names if type(each) is type(module) and each not in held]
    device = next(model.parameters()).device
    ids = example_ids(ROWS, LENGTH).to(device)
    positions = torch.arange(LENGTH, dtype=torch.int64, device=device).expand(ROWS, LENGTH).contiguous()
    with torch.no_grad(), watched(model, []) as calls:
        forward(ids, positions)
    ran = [each for each in calls if each in alike]
    if module not in ran:
        raise CaptureError(f"{names[module]} ({type(module).__name__}) does not run in a forward of the model")
    return [_site(names[each], each, calls[each]) for each in ran]


def _site(name: str, module: nn.Module, calls: Sequence[Call]) -> tuple[LocalSite, list[Tensor]]:
    where = f"{name} ({type(module).__name__})"
    if len(calls) != 1:
        raise CaptureError(f"{where} runs {len(calls)} times in one forward; expected once")
    (call,) = calls
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs), is_leaf=lambda x: isinstance(x, StateCache))
    places = [place for place, x in enumerate(leaves) if isinstance(x, Tensor)]
    if other := [x for x in leaves if not isinstance(x, (Tensor, *PLAIN))]:
        raise CaptureError(f"{where} takes a {type(other[0]).__name__}; expected tensors and plain values")
    results, out_spec = pytree.tree_flatten(call.result)
    if other := [x for x in results if not isinstance(x, (Tensor, type(None)))]:
        raise CaptureError(f"{where} returns a {type(other[0]).__name__}; expected tensors")
    returned = [isinstance(x, Tensor) for x in results]
    taken = tuple(_form(leaves[place], where, "takes") for place in places)
    given = tuple(_form(x, where, "returns") for x, tensor in zip(results, returned) if tensor)
    if (
        SHARED in given
        or not given
        or {*taken} <= {SHARED}
        or (BY_ROWS not in taken and {SHARED, BY_ROWS} & {*taken, *given})
    ):
        raise CaptureError(
            f"{where} takes tensors by {taken} and returns them by {given}; expected some of all tokens in both"
        )
    weights = weights_of(module, where, "whose code branches on values")
    site = LocalSite(
        name=name,
        module=module,
        config=None,
        kind=StateCache,
        keys=[],
        inputs=(),
        states=(),
        outputs=(),
        leaves=[None if isinstance(x, Tensor) else x for x in leaves],
        spec=spec,
        places=places,
        returned=returned,
        out_spec=out_spec,
        weights=weights,
        taken=taken,
        given=given,
    )
    tensors = [leaves[place] for place in places]
    tokens = [x.clone() for x in site.tokens_of(tensors)]
    made = [x for x, tensor in zip(results, returned) if tensor]
    whole = [x[:, None] if form == BY_TOKENS else x.reshape(-1, 1, *x.shape[2:]) for x, form in zip(made, given)]
    site.inputs = tuple(Form(tuple(x.shape[2:]), x.dtype) for x in tokens)
    site.outputs = tuple(Form(tuple(x.shape[2:]), x.dtype) for x in whole)
    _equal(site, site.run(tokens, None)[0], whole, "its tokens as rows of one token each give something else")
    return site, tokens


def _form(x: Tensor, where: str, does: str) -> str:
    lead = tuple(x.shape[:2])
    if lead == (ROWS, LENGTH):
        return BY_ROWS
    if lead[:1] == (ROWS * LENGTH,):
        return BY_TOKENS
    if lead == (1, LENGTH):
        return SHARED
    raise CaptureError(
        f"{where} {does} a tensor of shape {tuple(x.shape)} over {ROWS} rows of {LENGTH} tokens; expected a part of it for each token"
    )


def prove_local(site: LocalSite, tokens: Sequence[Tensor]) -> None:
    """Raise `CaptureError` where the module's code does not treat each of `tokens` [N, 1, ...] by itself; it says what shows that."""
    whole, _ = site.run(tokens, None)
    again, _ = site.run(tokens, None)
    if not all(torch.equal(a, b) for a, b in zip(again, whole)):
        raise CaptureError(
            f"{_named(site)} gives something else each time: it draws random numbers, or keeps something"
        )
    for what, given, expected in _experiments(tokens, whole):
        _equal(site, site.run(given, None)[0], expected, what)


def _experiments(tokens: Sequence[Tensor], whole: Sequence[Tensor]) -> Iterator[tuple[str, list[Tensor], list[Tensor]]]:
    """What to say where it fails, tokens, and what the module must make of them if it makes `whole` of `tokens`."""
    count, device = tokens[0].shape[0], tokens[0].device
    generator = torch.Generator(device="cpu").manual_seed(0)
    order = torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu").to(device)

    def at(index: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        return [x[index] for x in tokens], [x[index] for x in whole]

    every = torch.arange(count, dtype=torch.int64, device=device)
    yield "in another order, tokens give something else", *at(order)
    yield "its first half alone gives something else", *at(every[: count // 2])
    yield "all but its first token give something else", *at(every[1:])
    for token in order[:SINGLES]:
        yield "a token alone gives something else", *at(token[None])
        yield f"a token among {COPIES} copies of itself gives something else", *at(token.expand(COPIES))
    yield "every token twice gives something else", *at(every.repeat(2))


def trace_local(site: LocalSite, tokens: Sequence[Tensor]) -> Pieces:
    """The body of a site that was proven on `tokens`: a graph that computes the same of them, or the model's own code where none does."""
    without: list[int] = []
    while True:
        branches = EveryPlace(without)
        try:
            pieces = trace_pieces(replace(site, branches=branches), (1,), first=False)
            check_local(site, pieces, tokens)
            return pieces
        except CaptureError as error:
            # Where the code has nothing at a place, no run of the model comes there.
            if isinstance(error.__cause__, IndexError) and branches.place not in (None, *without):
                without.append(branches.place)
                continue
            return Live(site.name, str(error), site_code(site), site.outputs)


def site_code(site: LocalSite) -> Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]:
    """The model's own code, of tokens and weights."""

    def run(tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> Sequence[Tensor]:
        return site.run(tensors, None, dict(zip(site.weights, weights, strict=True)))[0]

    return run


def check_local(site: LocalSite, pieces: Pieces, tokens: Sequence[Tensor]) -> None:
    """Raise `CaptureError` where a body does not compute what the site's module does of `tokens`, together, alone and as copies."""
    weights = list(site.weights.values())
    whole, _ = site.run(tokens, None)
    _equal(site, pieces(tokens, None, weights)[0], whole, "its graph computes something else of its tokens")
    for what, given, expected in _experiments(tokens, whole):
        _equal(site, pieces(given, None, weights)[0], expected, f"of its graph, {what}")


def _equal(site: LocalSite, mine: Sequence[Tensor], theirs: Sequence[Tensor], what: str) -> None:
    limit = max(TOLERANCE.get(x.dtype, 1e-4) for x in (*mine, *theirs))
    found = difference(mine, theirs)
    if not found <= limit:
        raise CaptureError(
            f"{_named(site)} branches on values and does not treat each token by itself: {what}, by {found:.1e} of the largest number"
        )


def _named(site: LocalSite) -> str:
    return f"{site.name} ({type(site.module).__name__})"


__all__ = ["LocalSite", "candidates", "check_local", "find_local", "prove_local", "trace_local"]
