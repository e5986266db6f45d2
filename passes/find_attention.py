"""Find every attention, say what it means, and write it as one `semkv::attention` node."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from semkv.errors import CaptureError
from semkv.ir.graph import copy_graph_module, describe, finish, module_path
from semkv.ir.ops import attention
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.passes.attention_constants import AttentionConstants, whole_numbers
from semkv.passes.attention_masks import HIDDEN, Masking, ScoreFunction, classify
from semkv.passes.attention_operands import PROBE_LENGTH, Layout, Operand
from semkv.passes.attention_patterns import Match, find_matches
from semkv.passes.attention_probe import Evaluator, Rejected
from semkv.passes.base import Pass, PassOptions
from semkv.passes.graph_utils import argument, emit

aten = torch.ops.aten


class FindAttention(Pass):
    """Every attention becomes `semkv::attention` in normal form; its mask is understood by value and dies."""

    name = "find_attention"
    needs = "captured"
    leaves = "found"
    after = ("canonicalise",)

    def run(self, program: Program, options: PassOptions) -> Program:
        """The program with one node and one `AttentionSite` per attention.

        Raises
        ------
        CaptureError: no attention, or one that cannot be rewritten; the message names it and says why.
        """
        module = copy_graph_module(program.body)
        evaluator = Evaluator(module)
        with torch.no_grad():
            try:
                matches = find_matches(module.graph, evaluator)
            except Rejected as reason:
                raise CaptureError(str(reason)) from reason
            if not matches and program.stateful:
                raise CaptureError(
                    f"no attention found beside {len(program.stateful)} modules with recurrent states: what the model remembers does "
                    "not grow with the text, so there is nothing to compress; run it as it is"
                )
            if not matches:
                raise CaptureError(
                    "no attention found: the graph has no scaled_dot_product_attention and no softmax over the tokens "
                    "between two products; expected a decoder with softmax attention, loaded with "
                    'attn_implementation="sdpa" or "eager"'
                )
            rewriter = _Rewriter(program, module, evaluator)
            for match in matches:
                try:
                    rewriter.rewrite(match)
                except Rejected as reason:
                    raise CaptureError(
                        f"the attention at {describe(match.anchor)} cannot be rewritten: {reason}"
                    ) from reason
        finish(module)
        fused = sum(match.score is None for match in matches)
        note = f"find_attention: {fused} fused and {len(matches) - fused} written out, {len(rewriter.stores)} KV stores"
        return program.evolve(
            note, stage="found", body=module, sites=tuple(rewriter.sites), evaluated=tuple(sorted(evaluator.read))
        )


@dataclass(frozen=True)
class _Heads:
    """The leading axes of an attention's scores: B rows of Hq heads, however they are split."""

    lead: tuple[int, ...]
    rows: int
    count: int

    def four(self, value: Tensor) -> Tensor:
        """[*lead, X, Y] (or what broadcasts to it) as [B, Hq, X, Y]."""
        full = value.expand(*self.lead, *value.shape[-2:])
        return full.reshape(self.rows, self.count, *value.shape[-2:])


class _Rewriter:
    """State of one run: the graph, the nodes made for shared operands, and the sites so far."""

    def __init__(self, program: Program, module: GraphModule, evaluator: Evaluator) -> None:
        self.program = program
        self.graph = module.graph
        self.evaluator = evaluator
        self.layout = Layout(module.graph, evaluator, FindAttention.name)
        self.constants = AttentionConstants(module, evaluator, program.dtype, FindAttention.name)
        self.sites: list[AttentionSite] = []
        self.stores: dict[tuple[Node, Node], int] = {}
        self._fused: dict[tuple, Masking] = {}

    def rewrite(self, match: Match) -> None:
        heads = self._heads(match)
        masking, swapped = self._meaning(match, heads)
        choice = self._choice(match)
        if choice is not None:
            if masking.chunk:
                raise Rejected("an indexer chooses what it reads, and its mask is of chunks; expected one of both")
            self._check_choice(match, heads)
        if match.score is not None:
            self._check_weights(match, heads)
        operands = self._operands(match, heads, swapped)
        group = self.layout.group_size([operands["k"], operands["v"]], heads.count)
        q = self.layout.bring(operands["q"], 1)
        k, v = (self.layout.bring(operands[name], group) for name in "kv")
        extra = {
            "sinks": self._sinks(match, heads),
            "bias_slopes": self.constants.tensor(masking.slopes),
            "bias_table": self.constants.tensor(masking.table),
            "chosen": choice,
        }
        store = self.stores.setdefault((k, v), len(self.stores))
        site = AttentionSite(
            index=len(self.sites),
            name=module_path(match.anchor),
            store=store,
            q_heads=heads.count,
            kv_heads=heads.count // group,
            key_dim=int(k.meta["val"].shape[-1]),
            value_dim=int(v.meta["val"].shape[-1]),
            scale=masking.scale,
            softcap=masking.softcap,
            window=masking.window,
            has_sinks=extra["sinks"] is not None,
            has_bias=masking.slopes is not None or masking.table is not None,
            chooser=-1 if choice is None else choice.args[0].args[1],
            chunk=masking.chunk,
        )
        self.sites.append(site)
        self._replace(match, (q, k, v), extra, site)

    def _replace(
        self, match: Match, operands: tuple[Node, Node, Node], extra: dict[str, Node | None], site: AttentionSite
    ) -> None:
        graph, old = self.graph, match.output
        kwargs = {name: value for name, value in extra.items() if value is not None}
        kwargs |= {"site": site.index, "scale": site.scale, "softcap": site.softcap, "window": site.window}
        kwargs |= {"chunk": site.chunk} if site.chunk else {}
        with graph.inserting_before(old):
            new = emit(
                graph,
                attention,
                (*operands, self.evaluator.positions),
                kwargs,
                like=match.anchor,
                by=FindAttention.name,
            )
            shape = old.meta["val"].shape
            if len(shape) != 4 or any(str(a) != str(b) for a, b in zip(shape, new.meta["val"].shape)):
                new = emit(graph, aten.reshape.default, (new, self._symbolic(shape)), like=old, by=FindAttention.name)
            if new.meta["val"].dtype != old.meta["val"].dtype:
                new = emit(graph, aten.to.dtype, (new, old.meta["val"].dtype), like=old, by=FindAttention.name)
        old.replace_all_uses_with(new)
        graph.erase_node(old)

    def _choice(self, match: Match) -> Node | None:
        """What says which tokens are read; None: all are."""
        source = argument(match.anchor, "attn_mask") if match.score is None else match.logits
        if not self.evaluator.choices or source is None:
            return None
        waiting, seen, found = [source], set(), set()
        while waiting:
            node = waiting.pop()
            if node in self.evaluator.choices:
                found.add(node)
            elif node not in seen and node is not match.score:
                seen.add(node)
                waiting.extend(node.all_input_nodes)
        if len(found) > 1:
            raise Rejected(f"{len(found)} modules choose the tokens that it reads; expected one")
        return next(iter(found), None)

    def _check_choice(self, match: Match, heads: _Heads) -> None:
        """Raise where a choice of some tokens does not hide all others, and nothing else."""
        length = PROBE_LENGTH
        generator = torch.Generator(device="cpu").manual_seed(0)
        chosen = torch.stack(
            [
                torch.randperm(length, generator=generator, dtype=torch.int64, device="cpu")[: length // 2]
                for _ in range(heads.rows * length)
            ]
        ).reshape(heads.rows, length, -1)
        function = (
            self._fused_function(
                argument(match.anchor, "attn_mask"), bool(argument(match.anchor, "is_causal")), 1.0, heads
            )
            if match.score is None
            else self._score_function(match, heads)
        )
        whole = function(length, None, 0.0)
        self.evaluator.chosen = chosen
        try:
            restricted = function(length, None, 0.0)
        finally:
            self.evaluator.chosen = None
        among = torch.zeros(heads.rows, 1, length, length, dtype=torch.bool, device="cpu")
        among.scatter_(3, chosen[:, None], True)
        if not torch.equal(restricted > HIDDEN, (whole > HIDDEN) & among):
            raise Rejected("what its indexer chooses does not hide all other tokens, and those alone")
        seen = restricted > HIDDEN
        if not torch.equal(restricted[seen], whole[seen]):
            raise Rejected("what its indexer chooses changes scores")

    def _sinks(self, match: Match, heads: _Heads) -> Node | None:
        if match.sinks is None:
            return None
        if match.sinks_per_row:
            return self.constants.sinks(match.sinks, lambda value: heads.four(value[..., None]))
        return self.constants.sinks(match.sinks, heads.four)

    def _symbolic(self, shape: torch.Size) -> list:
        """A shape as arguments of `reshape`: numbers, the sizes of the input, and at most one -1."""
        sizes = self.evaluator.sizes
        result: list = []
        for size in shape:
            if isinstance(size, int):
                result.append(size)
            elif sizes.is_length(size):
                result.append(self.layout.size(1))
            elif not sizes.grows(size) and sizes.value(size, 3, 5) == 3:
                result.append(self.layout.size(0))
            else:
                result.append(-1)
        return result

    def _heads(self, match: Match) -> _Heads:
        sizes, rows = self.evaluator.sizes, self.evaluator.rows
        if match.score is None:
            queries, keys = match.queries.meta["val"].shape, match.keys.meta["val"].shape
            if not (sizes.is_length(queries[-2]) and sizes.is_length(keys[-2])):
                raise Rejected(
                    f"queries have {queries[-2]} tokens and keys {keys[-2]}, expected those of the sequence in both"
                )
        lead = self._lead(match.queries if match.score is None else match.score)
        count, rest = divmod(math.prod(lead), rows)
        if rest or not lead or lead[0] % rows:
            raise Rejected(f"the scores' leading axes {lead} are not {rows} rows of heads")
        return _Heads(lead, rows, count)

    def _lead(self, node: Node) -> tuple[int, ...]:
        return self.evaluator.sizes.shape(node, self.evaluator.rows, PROBE_LENGTH)[:-2]

    def _meaning(self, match: Match, heads: _Heads) -> tuple[Masking, bool]:
        """What the scores go through before the softmax, and whether the product is keys @ queries^T."""
        if match.score is None:
            return self._fused_meaning(match, heads), False
        score = self._score_function(match, heads)
        constants = whole_numbers(self.evaluator, [match.logits], match.region)
        masking = classify(score, constants, self.program.max_positions, rows_shift=match.sinks is None)
        return masking, self._is_swapped(match, heads, masking)

    def _fused_meaning(self, match: Match, heads: _Heads) -> Masking:
        node = match.anchor
        mask, causal = argument(node, "attn_mask"), bool(argument(node, "is_causal"))
        scale = argument(node, "scale")
        if scale is None:
            scale = 1.0 / math.sqrt(int(match.queries.meta["val"].shape[-1]))
        key = (mask, causal, scale, heads)
        if key not in self._fused:
            score = self._fused_function(mask, causal, float(scale), heads)
            constants = whole_numbers(self.evaluator, [mask] if mask is not None else [], frozenset())
            masking = classify(score, constants, self.program.max_positions, rows_shift=True)
            self._fused[key] = replace(masking, scale=float(scale))
        return self._fused[key]

    def _fused_function(self, mask: Node | None, causal: bool, scale: float, heads: _Heads) -> ScoreFunction:
        def score(length: int, points: Tensor | None, raw: float) -> Tensor:
            value = torch.full(
                (heads.rows, heads.count, length, length), raw * scale, dtype=torch.float64, device="cpu"
            )
            if mask is not None:
                given = heads.four(self.evaluator.run(mask, length, points=points))
                value = value.masked_fill(~given, -math.inf) if given.dtype == torch.bool else value + given
            if causal:
                value = value.masked_fill(torch.ones(length, length, dtype=torch.bool, device="cpu").triu(1), -math.inf)
            return value

        return score

    def _score_function(self, match: Match, heads: _Heads) -> ScoreFunction:
        def score(length: int, points: Tensor | None, raw: float | Tensor) -> Tensor:
            shape = self.evaluator.sizes.shape(match.score, self.evaluator.rows, length)
            given = (
                raw.reshape(shape)
                if isinstance(raw, Tensor)
                else torch.full(shape, raw, dtype=torch.float64, device="cpu")
            )
            value = self.evaluator.run(
                match.logits, length, known={match.score: given}, points=points, exact=match.region
            )
            return value.to(torch.float64).reshape(heads.rows, heads.count, length, length)

        return score

    def _is_swapped(self, match: Match, heads: _Heads, masking: Masking) -> bool:
        """Which axis of the product is the query's: each score gets a number that is looked for at the softmax."""
        score: Callable = self._score_function(match, heads)
        length = PROBE_LENGTH
        labels = torch.arange(heads.rows * heads.count * length * length, dtype=torch.float64, device="cpu")
        unit = 1e-6
        base, marked = score(length, None, 0.0), score(length, None, labels * unit)
        visible = base > -9000.0
        seen = ((marked - base) / (unit * masking.scale))[visible].round()
        straight = labels.reshape(heads.rows, heads.count, length, length)
        if torch.equal(seen, straight[visible]):
            return False
        if torch.equal(seen, straight.transpose(-1, -2)[visible]):
            return True
        raise Rejected("the product's scores reach the softmax in another order than [rows, heads, queries, keys]")

    def _check_weights(self, match: Match, heads: _Heads) -> None:
        """What stands between the softmax and the values must change no visible weight."""
        length = PROBE_LENGTH
        shape = list(self.evaluator.sizes.shape(match.weights, self.evaluator.rows, length))
        keep = torch.ones(length, length, dtype=torch.bool, device="cpu").tril()
        weights = torch.rand(
            shape, dtype=torch.float64, generator=torch.Generator(device="cpu").manual_seed(0), device="cpu"
        )
        given = weights.reshape(heads.rows, heads.count, length, -1)
        if match.sinks is not None and not match.sinks_per_row:
            given = self._without_sink(match, given, length)
        between = frozenset(node for node in self.graph.nodes if node in self.evaluator.tainted)
        value = self.evaluator.run(match.weighted, length, known={match.weights: weights}, exact=between)
        value = value.to(torch.float64)
        if value.numel() != given.numel():
            raise Rejected(f"its weights become {tuple(value.shape)} before they meet the values")
        value = value.reshape(given.shape)
        if not torch.allclose(value[..., keep], given[..., keep], rtol=1e-9):
            raise Rejected("its weights are changed between the softmax and the values")

    def _without_sink(self, match: Match, weights: Tensor, length: int) -> Tensor:
        """The weights of the tokens, wherever the sink stands in the concatenation."""
        scores_first = self._concatenation(match).args[0][0] is match.logits
        return weights[..., :length] if scores_first else weights[..., 1:]

    def _concatenation(self, match: Match) -> Node:
        return next(
            user for user in match.logits.users if user.target == aten.cat.default and match.sinks in user.args[0]
        )

    def _operands(self, match: Match, heads: _Heads, swapped: bool) -> dict[str, Operand]:
        if match.score is None:
            grouped = bool(argument(match.anchor, "enable_gqa"))
            nodes = {"q": (match.queries, False), "k": (match.keys, False), "v": (match.values, False)}
        else:
            grouped = False
            q, k = (match.keys, match.queries) if swapped else (match.queries, match.keys)
            nodes = {"q": (q, swapped), "k": (k, not swapped), "v": (match.values, False)}
        # Scores and weights may split batch and heads differently: each operand has the axes of its own product.
        lead = heads.lead if match.product is None else self._lead(match.product)
        axes = {"q": heads, "k": heads, "v": _Heads(lead, heads.rows, heads.count)}
        return {
            name: self._operand(node, axes[name], transposed, grouped and name != "q")
            for name, (node, transposed) in nodes.items()
        }

    def _operand(self, node: Node, heads: _Heads, transposed: bool, grouped: bool) -> Operand:
        def arrange(value: Tensor) -> Tensor:
            if transposed:
                value = value.transpose(-1, -2)
            if grouped and value.shape[-3] != heads.lead[-1]:
                value = value.repeat_interleave(heads.lead[-1] // value.shape[-3], -3)
            return heads.four(value)

        def emit_arranged() -> Node:
            made = node

            def step(target: Callable, *args: object) -> None:
                nonlocal made
                with self.graph.inserting_after(made):
                    made = emit(self.graph, target, (made, *args), like=node, by=FindAttention.name)

            if transposed:
                step(aten.transpose.int, -2, -1)
            own = self.evaluator.sizes.shape(made, heads.rows, PROBE_LENGTH)[:-2]
            if grouped and own[-1] != heads.lead[-1]:
                step(aten.repeat_interleave.self_int, heads.lead[-1] // own[-1], -3)
                own = (*own[:-1], heads.lead[-1])
            if own != heads.lead:
                padded = (None,) * (len(heads.lead) - len(own)) + own
                sizes = [
                    -1 if a == b else (b if b != heads.rows else self.layout.size(0))
                    for a, b in zip(padded, heads.lead)
                ]
                step(aten.expand.default, [*sizes, -1, -1])
            if len(heads.lead) != 2:
                depth = int(made.meta["val"].shape[-1])
                step(aten.reshape.default, [self.layout.size(0), heads.count, self.layout.size(1), depth])
            return made

        return Operand(node, arrange, emit_arranged)
