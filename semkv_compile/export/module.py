"""The decode step of a program as a module: ids, positions, numbers and state in, logits and the changed state out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from semkv.export.layout import RANKING, Layout, SiteTurn
from semkv.export.plain import InPlainOperators
from semkv.ir.memory import TextInputs
from semkv.methods.speculation import KEYS
from semkv.profiles.schema.retrieval_head import matched_heads
from semkv.runtime.decode.attending import attending
from semkv.runtime.decode.layer_step import NUMBERS, attend_step

NONE = float("-inf")


class StepModule(nn.Module):
    """(ids int64 [B, 1], positions int64 [B, 1], numbers int64 [parts, len(NUMBERS), B], *state in the order of `Layout.fields`) -> (logits
    [B, vocab], the next positions, the next numbers, *what is written, in the order of `Layout.written`). Inputs stay as they are."""

    step: Tensor

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        program = layout.placement.program
        assert program.head is not None
        self.layout = layout
        self.body, self.head = attending(program), program.head
        self.selector = None if layout.selection is None else layout.selection.selector
        for turns in layout.turns:
            for turn in turns:
                for name, x in turn.constants.items():
                    self.register_buffer(_constant(turn, name), x, persistent=False)
        steps = [int(name == "at") for name in NUMBERS]
        self.register_buffer(
            "step", torch.tensor(steps, dtype=torch.int64, device="cpu")[None, :, None], persistent=False
        )

    def forward(self, ids: Tensor, positions: Tensor, numbers: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        fields = self.layout.fields
        held = {name: x.clone() if field.written else x for (name, field), x in zip(fields.items(), state, strict=True)}
        with InPlainOperators():
            ranking = None if self.selector is None else self._ranking(ids, positions, held)
            step = _Step(self, numbers, held, ranking)
            hidden = self.body(ids, positions, step)
            logits = self.head(hidden[:, -1:])[:, -1]
            logits = logits + step.nothing[:, None].to(logits.dtype)
        return (logits, positions + 1, numbers + self.step, *(held[name] for name in self.layout.written))

    def _ranking(self, ids: Tensor, positions: Tensor, held: dict[str, Tensor]) -> Tensor:
        """The retrieval head's ranking of all tokens by position, float32 [B, H, m]; its key of the new one is put down."""
        selection = self.layout.selection
        assert selection is not None
        assert self.selector is not None
        section = selection.section
        features = [held[f"features.{site}"] for site in section.feature_sites]
        given = [torch.cat(features, -1)[:, None]] if features else []
        q, k = self.selector(ids, positions, *given)
        keys, place = held[KEYS], positions[:, :, None, None]
        keys.scatter_(2, place.expand(-1, keys.shape[1], -1, keys.shape[3]), k.to(keys.dtype))
        grouped = q.float().view(ids.shape[0], section.kv_heads, -1, q.shape[3])
        logits = grouped @ keys.float().mT
        number = torch.ones_like(logits[:, :1, :1], dtype=torch.int64).cumsum(-1) - 1
        logs = logits.masked_fill(number > place, NONE).log_softmax(-1).amax(2)
        return logs.exp().mean(1, keepdim=True).log() if selection.batch else logs


class _Step(TextInputs):
    """The memory of one step, as a program asks it."""

    def __init__(self, module: StepModule, numbers: Tensor, held: dict[str, Tensor], ranking: Tensor | None) -> None:
        self.module, self.numbers, self.held, self.ranking = module, numbers, held, ranking
        self.nothing = torch.zeros_like(numbers[0, 0], dtype=torch.float32)
        """float32 [B], zeros that are read from the place of each new token: where it has none, the step fails."""

    def attend(
        self, site: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, terms: Mapping[str, Tensor]
    ) -> Tensor:
        """The output [B, Hq, 1, Dv] of a site."""
        turns = self.module.layout.turns[site]
        outs = [self._turn(turn, q, k, v, positions, terms) for turn in turns]
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _turn(
        self, turn: SiteTurn, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, terms: Mapping[str, Tensor]
    ) -> Tensor:
        layer, part = turn.layer, turn.part
        asking, heads = (
            layer.site.query_heads,
            slice(layer.site.first_head, layer.site.first_head + layer.site.kv_heads),
        )
        numbers = self.numbers[part.number]
        tensors = {name: self.held[part.prefix + name] for name in part.local}
        tensors |= {name: getattr(self.module, _constant(turn, name)) for name in turn.constants}
        if turn.ranked:
            tensors[RANKING], numbers = self._ranked(turn, numbers, k.shape[1])
        own = {name: x[asking] for name, x in terms.items()}
        if layer.owner:
            there = tensors["recent.positions"]  # [B, Hkv|1, capacity]
            place = numbers[NUMBERS.index("at")].view(-1, 1, 1).expand(-1, there.shape[1], -1)
            self.nothing = self.nothing + 0.0 * there.gather(2, place).float().sum((1, 2))
        out, _ = attend_step(layer, q[:, asking], k[:, heads], v[:, heads], positions, numbers, tensors, own)
        return out

    def _ranked(self, turn: SiteTurn, numbers: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
        """The ranking for a part's heads, and numbers whose units are the tokens from position 0 on."""
        assert self.ranking is not None
        site = turn.layer.site
        own = matched_heads(self.ranking.transpose(0, 1), kv_heads).transpose(0, 1)
        own = own[:, site.first_head : site.first_head + site.kv_heads]
        at, count, room, start, shift = numbers.unbind(0)
        skipped = torch.where(count > 0, start + shift, 0)
        place = torch.ones_like(own[:, :1], dtype=torch.int64).cumsum(-1) - 1
        own = own.masked_fill(place < skipped.view(-1, 1, 1), NONE)
        return own, torch.stack((at, count + skipped, room, start - skipped, shift))

    def observe(self, site: int, hidden: Tensor) -> None:
        """Hidden states [B, 1, H] that enter a site's layer."""
        name = f"features.{site}"
        if name in self.held:
            self.held[name] = hidden[:, -1].float()


def _constant(turn: SiteTurn, name: str) -> str:
    site = turn.layer.site
    return f"constant_{site.index}_{site.first_head}_{name}".replace(".", "_")


def dynamic_shapes(layout: Layout) -> Any:
    """Of the inputs of `StepModule.forward`, as `torch.export` takes them: every symbol of the layout is a size of its own."""
    rows = torch.export.Dim("rows", min=1) if layout.placement.program.batched else None
    known: dict[str, Any] = {"rows": rows}

    def size(told: int | str) -> Any:
        if isinstance(told, int):
            return None
        name, _, more = told.partition(" + ")
        if name not in known:
            known[name] = torch.export.Dim(name, min=1)
        return known[name] + int(more) if more else known[name]

    shapes = [
        {dim: made for dim, told in enumerate(field.shape) if (made := size(told)) is not None}
        for field in layout.fields.values()
    ]
    first = {} if rows is None else {0: rows}
    return (first, first, {} if rows is None else {2: rows}, tuple(shapes))


def example_inputs(layout: Layout) -> tuple[Tensor, ...]:
    """Inputs of `StepModule.forward` without numbers, whose sizes are unlike each other."""
    rows = 3 if layout.placement.program.batched else 1
    known = {"rows": rows} | {name: 17 + 2 * at for at, name in enumerate(layout.symbols()) if name != "rows"}

    def size(told: int | str) -> int:
        if isinstance(told, int):
            return told
        name, _, more = told.partition(" + ")
        return known[name] + int(more or 0)

    ids = torch.zeros(rows, 1, dtype=torch.int64, device="cpu")
    numbers = torch.zeros(len(layout.parts), len(NUMBERS), rows, dtype=torch.int64, device="cpu")
    state = [torch.zeros([size(x) for x in f.shape], dtype=f.dtype, device="cpu") for f in layout.fields.values()]
    return (ids, torch.zeros_like(ids), numbers, *state)


__all__ = ["StepModule", "dynamic_shapes", "example_inputs"]
