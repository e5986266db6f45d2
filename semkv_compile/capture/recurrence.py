"""Modules with recurrent states, whose code branches on values, or that choose tokens: opaque nodes of a captured program."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from semkv.capture import recurrent_proof
from semkv.capture.checks import declared_context
from semkv.capture.choosers import ChoiceSite, find_choosers, prove_chooser, trace_chooser
from semkv.capture.local_modules import LocalSite, check_local, find_local, prove_local, trace_local
from semkv.capture.preserve import preserved
from semkv.capture.recurrent_bodies import same_pieces, trace_pieces
from semkv.capture.recurrent_sites import Site, find_sites, recorded_inputs
from semkv.capture.state_cache import keeps_states
from semkv.errors import CaptureError
from semkv.ir.local import RUN_ERRORS
from semkv.ir.recurrence import Choice, Form, Live, Pieces, RecurrentSite, recur

library = torch.library.Library("semkv", "FRAGMENT")
library.define(
    # tensors [B, T, ...], the first of all rows and tokens -> outputs [B, T, ...] of the forms that `outputs` says
    "recurrence(Tensor[] tensors, int site, str outputs) -> Tensor[]"
)

library.define(
    # tensors [B, T, ...], the first of all rows -> places [B, T, n] of the tokens that each one reads, whole numbers of that many bits
    "choice(Tensor[] tensors, int site, int bits) -> Tensor"
)


@torch.library.register_fake("semkv::choice", lib=library)
def _choice_fake(tensors: list[Tensor], site: int, bits: int) -> Tensor:
    rows, length = tensors[0].shape[:2]
    return tensors[0].new_empty((rows, length, length), dtype=getattr(torch, f"int{bits}"))


def _written(forms: Sequence[Form]) -> str:
    return ";".join(f"{str(form.dtype).removeprefix('torch.')}:{','.join(map(str, form.shape))}" for form in forms)


@torch.library.register_fake("semkv::recurrence", lib=library)
def _recurrence_fake(tensors: list[Tensor], site: int, outputs: str) -> list[Tensor]:
    rows, length = tensors[0].shape[:2]
    made = []
    for form in outputs.split(";"):
        dtype, sizes = form.split(":")
        shape = (rows, length, *(int(size) for size in sizes.split(",") if size))
        made.append(tensors[0].new_empty(shape, dtype=getattr(torch, dtype)))
    return made


OPERATORS = (torch.ops.semkv.recurrence.default, torch.ops.semkv.choice.default)
"""What stands in graphs for sites."""


@dataclass(frozen=True)
class Recurrences:
    """The sites of a model, their bodies and what programs say of them; nothing where it has none."""

    sites: tuple[Site, ...] = ()
    bodies: tuple[Pieces, ...] = ()
    described: tuple[RecurrentSite, ...] = ()

    @contextmanager
    def opaque(self) -> Iterator[None]:
        """While entered, each site's module is one operator to whoever traces the model."""
        held = [vars(site.module) for site in self.sites]
        before = [attributes.get("forward") for attributes in held]
        for index, (site, attributes) in enumerate(zip(self.sites, held)):
            attributes["forward"] = _forward(index, site)
        try:
            yield
        finally:
            for attributes, forward in zip(held, before):
                del attributes["forward"]
                if forward is not None:
                    attributes["forward"] = forward

    def put_into(self, module: GraphModule, holds: Any) -> tuple[RecurrentSite, ...]:
        """Replace the operators of a captured graph by calls of the sites' bodies; what is known of these, in execution order. holds:
        registers a tensor of the user's model under a path of the graph's root."""
        described = []
        for number, node in enumerate([x for x in module.graph.nodes if x.target in OPERATORS]):
            tensors, index = node.args[0], node.args[1]
            site, body = self.sites[index], self.bodies[index]
            described.append(replace(self.described[index], index=number))
            with module.graph.inserting_before(node):
                weights = []
                for name, x in site.weights.items():
                    holds(f"{site.name}.{name}", x)
                    weights.append(module.graph.get_attr(f"{site.name}.{name}"))
                path = f"recurrence_{self._first_of(body)}"
                setattr(module, path, body)
                new = module.graph.call_function(recur, (module.graph.get_attr(path), number, tensors, weights))
                if isinstance(body, Choice):
                    new = module.graph.call_function(operator.getitem, (new, 0))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            module.graph.erase_node(node)
        return tuple(described)

    def _first_of(self, body: Pieces) -> int:
        return next(index for index, other in enumerate(self.bodies) if other is body)


def find_recurrences(model: nn.Module) -> Recurrences:
    """The modules of `model` that go on from states of its cache, proven and captured.

    Raises
    ------
    CaptureError: one of them cannot be run apart; the message names it and why.
    """
    with preserved(model), torch.no_grad():
        found = _recurrent(model) if keeps_states(model) else Recurrences()
        for site, tensors in find_choosers(model):
            reason = prove_chooser(site, tensors)
            body = trace_chooser(site, tensors)
            described = RecurrentSite(len(found.sites), site.name, site.states, reason, body.most)
            found = Recurrences((*found.sites, site), (*found.bodies, body), (*found.described, described))
    return found


def _recurrent(model: nn.Module) -> Recurrences:
    """Those with recurrent states."""
    sites = find_sites(model)
    if not sites:
        return Recurrences()  # its states are kept elsewhere, and the dependence analysis will find them
    context = declared_context(model) or recurrent_proof.MOST
    if context < recurrent_proof.LENGTH:
        raise CaptureError(
            f"{sites[0].name} keeps recurrent states, and the model declares {context} positions; expected at least "
            f"{recurrent_proof.LENGTH}, over which it is tried"
        )
    inputs = recorded_inputs(model, sites, recurrent_proof.ROWS, min(context, recurrent_proof.MOST))
    bodies: list[Pieces] = []
    described = []
    for index, (site, tensors) in enumerate(zip(sites, inputs)):
        proof = recurrent_proof.prove(site, [x[:, : recurrent_proof.LENGTH] for x in tensors])
        pieces = _known(site, proof, bodies) or trace_pieces(site, proof.tokens, first=proof.first)
        recurrent_proof.check_pieces(site, pieces, tensors)
        bodies.append(pieces)
        described.append(RecurrentSite(index, site.name, site.states, proof.reason))
    return Recurrences(tuple(sites), tuple(bodies), tuple(described))


def with_local(known: Recurrences, model: nn.Module, forward: Any, module: nn.Module) -> Recurrences:
    """`known` and `module`, with all modules of its class, as nodes that treat each token by itself.

    Raises
    ------
    CaptureError: one of them mixes tokens; the message names it and what shows it.
    """
    sites, bodies, described = list(known.sites), list(known.bodies), list(known.described)
    for site, tokens in find_local(model, forward, module, known.sites):
        prove_local(site, tokens)
        body = _same_local(site, tokens, zip(sites, bodies)) or trace_local(site, tokens)
        reason = "each token is by itself there, whatever its code branches on"
        if isinstance(body, Live):
            reason += f"; it runs as the model's own code ({body.reason})"
        described.append(RecurrentSite(len(sites), site.name, (), reason))
        sites.append(site)
        bodies.append(body)
    return Recurrences(tuple(sites), tuple(bodies), tuple(described))


def _same_local(site: LocalSite, tokens: Sequence[Tensor], earlier: Iterable[tuple[Site, Pieces]]) -> Pieces | None:
    """The body of an earlier site of the same class with weights of the same shapes, where it computes the same as this one's code."""
    for other, body in earlier:
        alike = isinstance(other, LocalSite) and not isinstance(body, Live) and type(other.module) is type(site.module)
        if alike and [x.shape for x in other.weights.values()] == [x.shape for x in site.weights.values()]:
            try:
                check_local(site, body, tokens)
            except (CaptureError, *RUN_ERRORS):
                continue
            return body
    return None


def _known(site: Site, proof: recurrent_proof.Proof, bodies: Sequence[Pieces]) -> Pieces | None:
    """The body of an earlier site whose graphs over the fewest tokens are those of this one: layers of one model share their code, and
    that this one computes the same is checked by its numbers."""
    if not bodies:
        return None
    few = trace_pieces(site, proof.tokens[:2], first=proof.first)
    for other in bodies:
        graphs = {tokens: other.graphs[tokens] for tokens in few.graphs if tokens in other.graphs}
        alike = len(other.graphs) == len(proof.tokens)
        if alike and same_pieces(Pieces(graphs, other.first, other.states, other.outputs), few):
            return other
    return None


def _forward(index: int, site: Site) -> Any:
    if isinstance(site, LocalSite):
        return site.forward(torch.ops.semkv.recurrence, index, _written(site.outputs))
    return _stand_in(index, site)


def _stand_in(index: int, site: Site) -> Any:
    """A forward that is one operator."""
    outputs = _written(site.outputs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if isinstance(site, ChoiceSite):
            del leaves[site.mask]
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if len(tensors) != len(site.places):
            raise CaptureError(
                f"{site.name} ({type(site.module).__name__}) takes {len(tensors)} tensors without a cache and {len(site.places)} with one; "
                "expected the same"
            )
        order = sorted(range(len(site.places)), key=lambda place: site.places[place])
        placed = [tensors[order.index(number)] for number in range(len(tensors))]
        rows = placed[0].shape[0]
        whole = [x if x.shape[0] == rows else x.expand(rows, *x.shape[1:]) for x in placed]
        if isinstance(site, ChoiceSite):
            return torch.ops.semkv.choice(whole, index, 8 * site.outputs[0].dtype.itemsize)
        made = iter(torch.ops.semkv.recurrence(whole, index, outputs))
        return pytree.tree_unflatten([next(made) if tensor else None for tensor in site.returned], site.out_spec)

    return forward


__all__ = ["Recurrences", "find_recurrences", "with_local"]
