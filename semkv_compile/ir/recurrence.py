"""Modules that go on from states which are no keys and values: what is known of each, and graphs of what it computes.

A recurrent layer, or a short convolution, is one node of a program: a call of `recur`, with the graphs of its body (`Pieces`), the
tensors that it reads and its weights. A body is a graph for each of a few numbers of tokens; any other number is made of these.
Modules that treat each token by itself in code that branches on values, as experts do, are such nodes without a state. Modules that choose
which tokens attention reads are such nodes whose state grows: an index key of each token (`Choice`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

TOKENS = (1, 2, 3, 4, 16, 64, 256)
"""Numbers of tokens for which a body that goes on in pieces has graphs. From two tokens on, no piece is of a single one: that may be
another computation."""


@dataclass(frozen=True)
class Form:
    """A tensor of one row, or of one token of a row: its shape, without the dimensions of rows and tokens, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def empty(self, rows: int, device: torch.device) -> Tensor:
        """What the state is before the first token: zeros [rows, *shape]."""
        return torch.zeros((rows, *self.shape), dtype=self.dtype, device=device)


@dataclass(frozen=True)
class RecurrentSite:
    """A module of the model that goes on from states.

    Attributes
    ----------
    index: its number in the program, in execution order.
    name: its path in the user's model.
    states: of one row; none where it treats each token by itself.
    reason: how it was found to run, for people.
    chooses: how many tokens it chooses for each token that attends, at most; its state is then that of one token, and there is one of each.
        0: it is none that chooses.
    """

    index: int
    name: str
    states: tuple[Form, ...]
    reason: str = ""
    chooses: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the states of one row, of a site that chooses for each token."""
        return sum(form.nbytes for form in self.states)


class Pieces(nn.Module):
    """The body of one or several sites, as graphs.

    graphs: by number of tokens T; each of (tensors [B, T, ...], states [B, ...], weights), one behind the other, returns outputs
    [B, T, ...] and the states after them; B is any number where T is 1, else 1. first: the same for one token that follows none, where
    that is another computation than one that follows others; None where it is not. states, outputs: their forms.
    """

    def __init__(
        self,
        graphs: Mapping[int, GraphModule],
        first: GraphModule | None,
        states: tuple[Form, ...],
        outputs: tuple[Form, ...],
    ) -> None:
        super().__init__()
        self.graphs = dict(sorted(graphs.items()))
        self._first = (
            () if first is None else (first,)
        )  # neither is a submodule, which a graph would lose that does not call it
        self.states, self.outputs = states, outputs

    @property
    def first(self) -> GraphModule | None:
        """See the class."""
        return self._first[0] if self._first else None

    def modules_by_name(self) -> dict[str, GraphModule]:
        """The graphs by names that artifacts have for them: the number of tokens, and `first`."""
        named = {str(tokens): graph for tokens, graph in self.graphs.items()}
        return named if self.first is None else {**named, "first": self.first}

    def forward(
        self, tensors: Sequence[Tensor], states: Sequence[Tensor] | None, weights: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """tensors [B, T, ...] after `states` (None: after nothing) -> outputs [B, T, ...] and the states after them."""
        rows, length = tensors[0].shape[:2]
        if not self.states:
            flat = [x.reshape(rows * length, 1, *x.shape[2:]) for x in tensors]
            return [x.reshape(rows, length, *x.shape[2:]) for x in self._alone(flat, weights)], []
        single = self.graphs[1]
        if states is None:
            single = single if self.first is None else self.first
            states = [form.empty(rows, tensors[0].device) for form in self.states]
        if length > 1 and rows > 1:
            return self._each_row(tensors, states, weights)
        made, start = [], 0
        for tokens in self._cut(length):
            part = [x[:, start : start + tokens] for x in tensors]
            graph = single if tokens == 1 else self.graphs[tokens]
            results = graph(*part, *states, *weights)
            made.append(results[: len(self.outputs)])
            states, start, single = results[len(self.outputs) :], start + tokens, self.graphs[1]
        whole = made[0] if len(made) == 1 else [torch.cat(parts, 1) for parts in zip(*made)]
        return list(whole), list(states)

    def _alone(self, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tokens [N, 1, ...] that each stand alone: without states, the rows of a call are any tokens."""
        return self.graphs[1](*tensors, *weights)

    def _each_row(
        self, tensors: Sequence[Tensor], states: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """`forward` over several tokens of several rows."""
        rows = range(tensors[0].shape[0])
        each = [self([x[r : r + 1] for x in tensors], [x[r : r + 1] for x in states], weights) for r in rows]
        outputs, after = zip(*each)
        return [torch.cat(parts) for parts in zip(*outputs)], [torch.cat(parts) for parts in zip(*after)]

    def _cut(self, length: int) -> Iterator[int]:
        """Numbers of tokens that there are graphs for, `length` together; of a single token only where there is no other way."""
        several = [tokens for tokens in self.graphs if tokens > 1]
        while length:
            fitting = [tokens for tokens in several if tokens <= length and length - tokens != 1]
            tokens = fitting[-1] if fitting else 1
            yield tokens
            length -= tokens

    def mapped(self, function: Callable[[GraphModule], GraphModule]) -> Pieces:
        """With what `function` makes of each graph."""
        graphs = {tokens: function(graph) for tokens, graph in self.graphs.items()}
        first = None if self.first is None else function(self.first)
        return Pieces(graphs, first, self.states, self.outputs)


class Live(Pieces):
    """The body of a site without states whose code no graph can hold: the model's own Python, which no artifact can.

    name: of the module in the user's model. reason: why there is no graph. run: of (tensors [N, 1, ...], weights), outputs [N, 1, ...].
    """

    def __init__(
        self,
        name: str,
        reason: str,
        run: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]],
        outputs: tuple[Form, ...],
    ) -> None:
        super().__init__({}, None, (), outputs)
        self.name, self.reason, self._run = name, reason, run

    def _alone(self, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._run(tensors, weights)

    def mapped(self, function: Callable[[GraphModule], GraphModule]) -> Pieces:
        """Itself: it has no graph."""
        return self


class Choice(Pieces):
    """The body of a site that chooses, by keys of its own, which tokens attention reads: for each token the places of others in its row.

    keys: a graph of (tensors [1, T, ...], weights), one behind the other: index keys [1, T, *form]. choose: a graph of (tensors, index keys
    [1, N, *form] of all tokens up to the last of the T, mask [1, T, N], weights): places, whole numbers [1, T, most], for N above `most`.
    mask: its dtype; a token that may be chosen is True, or 0 and another the least number. kind: dtype of the places.
    """

    def __init__(
        self, keys: GraphModule, choose: GraphModule, form: Form, most: int, mask: torch.dtype, kind: torch.dtype
    ) -> None:
        super().__init__({}, None, (form,), (Form((most,), kind),))
        self._held = (keys, choose)  # see `Pieces`
        self.most, self.mask = most, mask

    def modules_by_name(self) -> dict[str, GraphModule]:
        """See `Pieces`."""
        return dict(zip(CHOICE_GRAPHS, self._held))

    def mapped(self, function: Callable[[GraphModule], GraphModule]) -> Pieces:
        """See `Pieces`."""
        keys, choose = (function(graph) for graph in self._held)
        return Choice(keys, choose, self.states[0], self.most, self.mask, self.outputs[0].dtype)

    def forward(
        self, tensors: Sequence[Tensor], states: Sequence[Tensor] | None, weights: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """tensors [B, T, ...] behind the tokens of each row whose index keys `states` [1, P, *form] are, one of each row -> places
        [B, T, n], -1 where a row has fewer, and the index keys of each row after them."""
        rows = range(tensors[0].shape[0])
        given = [None] * len(rows) if states is None else states
        made = [self._of_row([x[r : r + 1] for x in tensors], past, weights) for r, past in zip(rows, given)]
        most = max(places.shape[2] for places, _ in made)
        padded = [torch.nn.functional.pad(places, (0, most - places.shape[2]), value=-1) for places, _ in made]
        return [torch.cat(padded)], [keys for _, keys in made]

    def _of_row(
        self, tensors: Sequence[Tensor], past: Tensor | None, weights: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        graph, choose = self._held
        (keys,) = graph(*tensors, *weights)
        keys = keys if past is None else torch.cat([past, keys], 1)
        length, whole, device = tensors[0].shape[1], keys.shape[1], keys.device
        if whole <= self.most:
            places = torch.arange(whole, dtype=self.outputs[0].dtype, device=device)
            return places.expand(1, length, whole), keys
        (places,) = choose(*tensors, keys, causal(length, whole, self.mask, device), *weights)
        return places, keys


CHOICE_GRAPHS = ("keys", "choose")
"""Names of the graphs of a `Choice`."""


def causal(length: int, whole: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mask [1, length, whole] of the last tokens of `whole`: True or 0 for a token and those before it, False or the least number."""
    seen = torch.ones(1, length, whole, dtype=torch.bool, device=device).tril(whole - length)
    if dtype == torch.bool:
        return seen
    return torch.zeros(1, length, whole, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)


def recur(pieces: Pieces, site: int, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """Graph function of programs that hold no memory, and of sites without states: the outputs [B, T, ...] over all tokens from the first
    one on."""
    return pieces(tensors, None, weights)[0]


def recurrent_nodes(graph: Graph) -> list[Node]:
    """The calls of `recur`, in execution order."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target is recur]


def held_pieces(module: GraphModule) -> dict[str, Pieces]:
    """The bodies that the graph's nodes read, by path, in order of first use."""
    found: dict[str, Pieces] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target), None)
            if isinstance(value, Pieces):
                found[str(node.target)] = value
    return found


def distinct_pieces(modules: Sequence[GraphModule | None]) -> list[Pieces]:
    """The bodies of several graphs, each once, in order of first use."""
    found: dict[int, Pieces] = {}
    for module in modules:
        for pieces in held_pieces(module).values() if module is not None else ():
            found.setdefault(id(pieces), pieces)
    return list(found.values())


def local_recurrence(pieces: Pieces, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A stand-in for `recur` that reads its own token only, and all tensors: outputs of the right shapes and dtypes."""
    rows, length = tensors[0].shape[:2]
    dtype = tensors[0].dtype
    own = torch.zeros(rows, length, dtype=dtype, device=tensors[0].device)
    for x in tensors:
        flat = x.reshape(rows, length, -1).to(dtype)
        weights = torch.linspace(0.5, 1.5, flat.shape[-1], dtype=dtype, device=flat.device)
        own = own + (flat * weights).mean(-1)
    if isinstance(pieces, Choice):
        return [torch.sin(3 * own)[..., None]]
    made = []
    for number, form in enumerate(pieces.outputs):
        shape = torch.Size(form.shape)
        ramp = torch.arange(1, 1 + shape.numel(), dtype=dtype, device=own.device).reshape(shape)
        out = torch.sin(own.reshape(rows, length, *(1,) * len(shape)) * 3 + ramp + number)
        made.append(out.to(form.dtype))
    return made


__all__ = [
    "CHOICE_GRAPHS",
    "TOKENS",
    "Choice",
    "Form",
    "Live",
    "Pieces",
    "RecurrentSite",
    "causal",
    "distinct_pieces",
    "held_pieces",
    "local_recurrence",
    "recur",
    "recurrent_nodes",
]
