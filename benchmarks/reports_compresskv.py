"""CompressKV on the bundled model: heads masked, numbers of heads that choose, selection and allocation, budgets, costs by length.

    python benchmarks/reports_compresskv.py            # an interrupted run goes on
    python benchmarks/reports_compresskv.py --samples 20

40 questions per family at 4K tokens, each of a context of its own, the question at the prompt's end as in the paper, since what is
dropped is dropped for good; half as many for masked heads, with the full cache. Writes benchmarks/results/reports_compresskv.json and
docs/results/reports_compresskv.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from costs import ABOUT, Contender, Direction, by_length, costs_table, directions_table, times_full
from grids import DOCS, FAMILIES, Bench, parser, table, write_document
from reports import Claim, Figures, claims_table, curve, draw_curves, write_parts

from semkv.evaluation import Grid, Report, Variant
from semkv.evaluation.plots import accuracy_by_budget
from semkv.evaluation.schema import Interval
from semkv.evaluation.tables import markdown, percent, provenance
from semkv.profiles.schema import RetrievalHeads

NAME = "reports_compresskv"
SAMPLES = 40
BUDGETS = (0.012, 0.02, 0.03, 0.05, 0.1)
SWEPT = 0.02
HEADS = (1, 2, 3, 4, 6, 8)
RANKED = {"semantic": (1, 2, 3, 4, 6), "classic": (1, 2, 3, 4, 6)}
"""Numbers of masked heads by what ranks them."""
OTHERS, DRAWS = (4, 6), 5
"""Numbers of heads drawn from those that are masked under neither ranking, and how often."""
SEED = 0
Masking = tuple[Report, list[tuple[int, int]]]
"""The full cache's report, and the heads that are masked in it."""

METHODS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("compresskv", "compresskv", {}),
    ("semantic heads, uniform", "compresskv", {"allocation": "uniform"}),
    ("all heads, errors", "compresskv", {"selection": "all"}),
    ("all heads, uniform", "compresskv", {"selection": "all", "allocation": "uniform"}),
    ("snapkv", "snapkv", {}),
)
NUMBERS = {
    1: (None, "not given"), 2: ("lower", "LongBench: -0.63 (Table 2)"), 3: (None, "not given"), 6: ("equal", "LongBench: -0.17 (Table 2)"),
    8: ("equal", "12 of 32 heads: 0.00 (Table 2)"),
}  # fmt: skip
"""By heads of a layer, what the paper says against 4 of its 32; here a layer has 8."""


def heads_label(count: int) -> str:
    return "compresskv" if count == 4 else f"{count} head{'s' * (count > 1)}"


def grid(samples: int, length: int) -> Grid:
    """Budgets of the methods, numbers of heads, and how heads are ranked."""
    variants = [
        Variant(method=method, budget=budget, label=label, options=options)
        for label, method, options in METHODS
        for budget in BUDGETS
    ]
    variants += [
        Variant(method="compresskv", budget=SWEPT, label=heads_label(count), options={"heads": count})
        for count in HEADS
        if count != 4
    ]
    variants += [
        Variant(method="compresskv", budget=SWEPT, label=f"{kind} heads", options={"selection": kind})
        for kind in ("classic", "classic_top_k")
    ]
    return Grid(
        variants=(Variant(method="full"), *variants), families=FAMILIES, lengths=(length,), samples=samples, questions=("seen",),
        questions_per_context=1,
    )  # fmt: skip


def compared(report: Report) -> Report:
    """The report of the methods that were measured at every budget."""
    labels = {"full", *(label for label, _, _ in METHODS)}
    cells = [cell for cell in report.cells if cell.cell.variant.label in labels]
    summaries = [summary for summary in report.summaries if summary.variant.label in labels]
    return report.model_copy(update={"cells": cells, "summaries": summaries})


CLAIMS = tuple(
    claim
    for budget in BUDGETS
    for claim in (
        Claim("all heads, uniform", "semantic heads, uniform", "lower", "selection adds to SnapKV (Table 3)", budget),
        Claim("semantic heads, uniform", "compresskv", "lower", "allocation adds to selection (Table 3)", budget),
        Claim("snapkv", "compresskv", "lower", "all benchmarks (Tables 1, 4)", budget),
    )
) + tuple(
    Claim(heads_label(count), "compresskv", way, paper, SWEPT) for count, (way, paper) in NUMBERS.items() if way is not None
)  # fmt: skip


# -- masked heads ------------------------------------------------------------------------------------------------------


def ranking(kind: str, scores: RetrievalHeads) -> list[tuple[int, int]]:
    """(site, query head) by score over all layers, those that are masked first in front."""
    rows = scores.classic if kind == "classic" else scores.semantic
    heads = [(site, head) for site, row in enumerate(rows) for head in range(len(row))]
    return sorted(heads, key=lambda place: (-rows[place[0]][place[1]], place))


def drawn(count: int, scores: RetrievalHeads) -> list[list[tuple[int, int]]]:
    """`DRAWS` random choices of `count` heads, none of which is masked under a ranking."""
    tested = {head for kind, counts in RANKED.items() for head in ranking(kind, scores)[: max(counts)]}
    others = [head for head in sorted(ranking("semantic", scores)) if head not in tested]
    generator = torch.Generator().manual_seed(SEED)
    return [
        sorted(others[place] for place in torch.randperm(len(others), generator=generator)[:count].tolist())
        for _ in range(DRAWS)
    ]


@contextmanager
def masked(model: Any, heads: Sequence[tuple[int, int]]) -> Iterator[None]:
    """The bundled model without the outputs of some query heads: their columns of the output projection are zero."""
    weights = [model.model.layers[site].self_attn.o_proj.weight for site, _ in heads]
    before = [weight.detach().clone() for weight in weights]
    dim = model.config.head_dim
    try:
        with torch.no_grad():
            for weight, (_, head) in zip(weights, heads):
                weight[:, head * dim : (head + 1) * dim] = 0
        yield
    finally:
        with torch.no_grad():
            for weight, values in zip(reversed(weights), reversed(before)):
                weight.copy_(values)


def masking(bench: Bench, samples: int, length: int) -> dict[tuple[str, int], list[Masking]]:
    """By kind and number of masked heads: one masking of a ranking's first heads, several of other heads (`random`); 0 under every kind."""
    plain = Grid(
        variants=(Variant(method="full"),), families=FAMILIES, lengths=(length,), samples=samples, questions_per_context=2
    )  # fmt: skip
    scores = bench.profile.info.retrieval_heads
    chosen = {(kind, n): [ranking(kind, scores)[:n]] for kind, counts in RANKED.items() for n in (0, *counts)}
    chosen |= {("random", 0): [[]]} | {("random", n): drawn(n, scores) for n in OTHERS}
    found: dict[tuple[str, int], list[Masking]] = {}
    for (kind, count), draws in chosen.items():
        for heads in draws:
            with masked(bench.model, heads):
                bench.identify()
                found.setdefault((kind, count), []).append((bench.run(plain, f"{count} {kind} heads masked"), heads))
    bench.identify()
    return found


def over_draws(maskings: Sequence[Masking]) -> Interval:
    """Accuracy of one masking with its interval; of several the mean, from the lowest to the highest."""
    each = [report.summaries[0].accuracy for report, _ in maskings]
    if len(each) == 1:
        return each[0]
    values = [one.value for one in each]
    return each[0].model_copy(update={"value": statistics.mean(values), "low": min(values), "high": max(values)})


def masking_curves(found: dict[tuple[str, int], list[Masking]]) -> dict[str, list[tuple[float, Interval]]]:
    """Accuracy by number of masked heads, a curve per kind."""
    return {
        named: [(count, over_draws(found[kind, count])) for count in (0, *counts)]
        for kind, named, counts in (*((kind, kind, counts) for kind, counts in RANKED.items()), ("random", "others", OTHERS))
    }  # fmt: skip


def masking_table(found: dict[tuple[str, int], list[Masking]]) -> str:
    """Accuracy with the first heads of each ranking masked, and which they are; and with as many others."""
    lines = []
    for count in sorted({count for kind, count in found if count}):
        line = [str(count)]
        for kind in RANKED:
            report, heads = found[kind, count][0]
            line += [percent(report.summaries[0].accuracy), " ".join(f"{site}.{head}" for site, head in sorted(heads))]
        others = found.get(("random", count))
        lines.append([*line, "-" if others is None else percent(over_draws(others))])
    columns = [text for kind in RANKED for text in (f"{kind}, %", "heads (layer.head)")]
    return table(["masked", *columns, f"{DRAWS} draws of others, %"], lines)


# -- costs -------------------------------------------------------------------------------------------------------------

COSTS = tuple(Contender(name, name, 512) for name in ("compresskv", "streaming_llm", "snapkv", "pyramidkv", "cake"))
EVICTING = tuple(one.label for one in COSTS[1:])
SAID = (
    Direction(
        "a step faster than with the full cache (Fig. 8)", "step, times full's", times_full("compresskv", "step_ms"),
        lambda values: max(values) < 1,
    ),
    Direction(
        "and the more so the longer the context", "full's step over it", lambda _, at: at["full"]["step_ms"] / at["compresskv"]["step_ms"],
        lambda values: values[-1] > values[0],
    ),
    Direction(
        "time like the other evicting methods'", "step, times the slowest of theirs",
        lambda _, at: at["compresskv"]["step_ms"] / max(at[other]["step_ms"] for other in EVICTING), lambda values: max(values) <= 1.1,
    ),
    Direction(
        "memory like theirs at a fixed budget", "device, times the largest of theirs",
        lambda _, at: at["compresskv"]["device"] / max(at[other]["device"] for other in EVICTING), lambda values: max(values) <= 1.1,
    ),
    Direction(
        "and the full cache needs more, most at long contexts", "device, times full's", times_full("compresskv", "device"),
        lambda values: values[-1] < values[0] < 1,
    ),
)  # fmt: skip


def main() -> None:
    arguments = parser((__doc__ or "").splitlines()[0]).parse_args()
    bench = Bench(NAME, arguments)
    samples, length = arguments.samples or SAMPLES, arguments.length
    report = bench.run(grid(samples, length), "CompressKV")
    found = masking(bench, max(1, samples // 2), length)
    folder = DOCS / NAME
    accuracy_by_budget(compared(report), "seen", length, folder / "budgets.png")
    subtitle = f"{length} tokens, {100 * SWEPT:g} % of the KV, question seen"
    draw_curves(
        folder / "heads.png", "CompressKV: heads that choose", subtitle, "heads of a layer",
        {"semantic": curve(report, SWEPT, {count: heads_label(count) for count in HEADS})},
    )  # fmt: skip
    draw_curves(
        folder / "masked.png", "Accuracy without some query heads", f"{length} tokens, full cache, 32 query heads", "masked heads",
        masking_curves(found),
    )  # fmt: skip
    kept = {
        f"{kind}, {count}": [
            {"heads": heads, "accuracy": one.summaries[0].accuracy.model_dump()} for one, heads in maskings
        ]
        for (kind, count), maskings in found.items()
    }
    costs = by_length(bench, Figures(arguments.rows / f"{NAME}.figures.jsonl", bench.identity), COSTS)
    write_parts(NAME, {"selection": report}, {"masking": kept, "costs": costs})
    path = write_document(
        NAME,
        "# CompressKV on the bundled model",
        f"{length} tokens, question at the prompt's end, mean over the four families. Made by `benchmarks/{NAME}.py`; do not edit. "
        "Changes are paired on the same questions. `open` means that their 95 % interval, clustered by context, holds 0: the "
        "questions do not tell.",
        "## Masked heads (Fig. 7, 23)",
        "The outputs of the best heads by each score are set to zero, in prefill and generation, with the full cache. The paper masks 10, "
        "20 and 30 of 1024 heads; that is less than one of the 32 heads here, so up to six are masked. It loses 74 % with 30 semantic "
        "heads and 12 % with 30 classic ones. Here both scores point to the same layer and mostly to the same heads, as answers are "
        "single tokens copied from where they stand: where the sets are equal, so are the figures. The control is "
        f"drawn from the heads that neither ranking masks, {DRAWS} times: the mean, in brackets the lowest and the highest draw.",
        masking_table(found),
        f"![masked heads]({NAME}/masked.png)",
        "## Selection, allocation and number of heads (Tables 2, 3)",
        "With the question in the prompt each selection but SnapKV's finds a single fact in 1 % of the KV, so that only `multi`, whose "
        "answers need two facts, tells variants apart, and only below 3 %. Equal means within five points.",
        claims_table(report, CLAIMS),
        f"![heads that choose]({NAME}/heads.png)",
        "## Budgets",
        f"![budgets]({NAME}/budgets.png)",
        markdown(report),
        "## Time and memory by length (Fig. 8)",
        ABOUT + f"A budget of {COSTS[0].budget} tokens per KV head and layer, where the paper has 1,024. Accuracy, memory and step time "
        "of every variant at one length are side by side above.",
        costs_table(costs),
        directions_table(costs, SAID),
        "At 64K tokens in larger layers see `compresskv, dropping` in [decode_cpu.md](decode_cpu.md).",
        "## Provenance",
        provenance(report),
    )  # fmt: skip
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
