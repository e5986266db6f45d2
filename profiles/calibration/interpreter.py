"""Run a program's body with each attention site answered by a callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from semkv.ir.ops import attention


@dataclass(frozen=True)
class SiteCall:
    """One `semkv::attention` call of a body: row 0 of its tensors and its constants.

    q [Hq, T, D], k [Hkv, T, D], v [Hkv, T, Dv], positions [T]; sinks [Hq], bias_slopes [Hq], bias_table [Hq, R] or
    None.
    """

    site: int
    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    sinks: Tensor | None
    bias_slopes: Tensor | None
    bias_table: Tensor | None
    scale: float
    softcap: float
    window: int


Handler = Callable[[SiteCall], Tensor]
"""Takes a site's call and returns its output [Hq, T, Dv]."""


class SiteInterpreter(Interpreter):
    """Interprets a body at stage `found`; intermediate values die as soon as nothing needs them.

    watched: nodes whose values are kept in `seen`, under numbers of the caller's.
    """

    def __init__(
        self,
        body: GraphModule,
        handler: Handler,
        watched: Mapping[str, int] | None = None,
        seen: dict[int, Tensor] | None = None,
    ) -> None:
        super().__init__(body, garbage_collect_values=True)
        self.handler, self.watched, self.seen = handler, watched or {}, {} if seen is None else seen

    def run_node(self, n: Node) -> Any:
        """Run a node, and keep its row 0 where it is watched."""
        value = super().run_node(n)
        if n.name in self.watched:
            self.seen[self.watched[n.name]] = value[0]
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand `semkv::attention` to the handler, run everything else."""
        if target is not attention:
            return super().call_function(target, args, kwargs)
        q, k, v, positions, sinks, slopes, table = list(args) + [None] * (7 - len(args))
        sinks, slopes, table = (
            kwargs.get(name, value)
            for name, value in (("sinks", sinks), ("bias_slopes", slopes), ("bias_table", table))
        )
        call = SiteCall(
            kwargs["site"],
            q[0],
            k[0],
            v[0],
            positions[0],
            sinks,
            slopes,
            table,
            kwargs["scale"],
            kwargs.get("softcap", 0.0),
            kwargs.get("window", 0),
        )
        return self.handler(call)[None].to(q.dtype)


def run_body(
    body: GraphModule,
    ids: Tensor,
    positions: Tensor,
    handler: Handler,
    watched: Mapping[str, int] | None = None,
    seen: dict[int, Tensor] | None = None,
) -> Tensor:
    """Hidden states [T, H] of ids [T] at positions [T]; `seen` gets the values of the nodes named in `watched`."""
    return SiteInterpreter(body, handler, watched, seen).run(ids[None], positions[None])[0]


def full_attention(call: SiteCall) -> Tensor:
    """The handler that leaves a model as it is."""
    return torch.ops.semkv.attention.default(
        call.q[None],
        call.k[None],
        call.v[None],
        call.positions[None],
        call.sinks,
        call.bias_slopes,
        call.bias_table,
        site=call.site,
        scale=call.scale,
        softcap=call.softcap,
        window=call.window,
    )[0]


def scores(call: SiteCall, k: Tensor, positions: Tensor) -> Tensor:
    """Logits of the call's queries against keys k [Hkv, n, D] at positions [n], -inf where a query must not look.

    [Hq, T, n] in float32, soft-capped and biased as `semkv::mixed_attention` does.
    """
    groups = call.q.shape[0] // k.shape[0]
    q = call.q.float().unflatten(0, (k.shape[0], groups))
    raw = torch.einsum("hgtd,hnd->hgtn", q, k.float()).flatten(0, 1) * call.scale
    if call.softcap:
        raw = call.softcap * torch.tanh(raw / call.softcap)
    distance = call.positions[:, None] - positions[None, :]
    if call.bias_slopes is not None:
        raw = raw - call.bias_slopes.float().view(-1, 1, 1) * distance
    if call.bias_table is not None:
        table = call.bias_table.float()
        raw = raw + table[:, distance.clamp(0, table.shape[1] - 1)]
    hidden = distance < 0
    if call.window:
        hidden = hidden | (distance >= call.window)
    return raw.masked_fill(hidden, float("-inf"))
