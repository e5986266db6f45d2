"""CompressKV: heads masked, numbers of heads that choose, selection and allocation, budgets, costs by length.

    python -m benchmarks.reports.compresskv            # an interrupted run goes on
    python -m benchmarks.reports.compresskv --samples 20
    python -m benchmarks.reports.compresskv --page     # the page alone, from the results that are there

40 questions per family at 4K tokens, each of a context of its own, the question at the prompt's end as in the paper, since what is
dropped is dropped for good; half as many for masked heads, with the full cache. Writes benchmarks/results/reports_compresskv.json and
docs/results/reports_compresskv.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.claims import WAYS, Claim, Figures, claims_table, curve, draw_curves, verdict, write_parts
from benchmarks.lib.costs import (
    ABOUT,
    RISING,
    Contender,
    Direction,
    by_length,
    costs_table,
    directions_table,
    times_full,
    within,
)
from benchmarks.lib.grids import FAMILIES, Bench, parser, provenance_of, read_parts, table, write_document
from benchmarks.lib.places import DOCS
from benchmarks.quality.quality import points
from semkv.evaluation import Grid, Report, Variant
from semkv.evaluation.plots import accuracy_by_budget
from semkv.evaluation.runner import all_tasks, cell_of, plan_of
from semkv.evaluation.schema import Interval
from semkv.evaluation.settings import QuestionMode
from semkv.evaluation.statistics import ratio_estimate
from semkv.evaluation.store import RowStore
from semkv.evaluation.tables import markdown, percent
from semkv.profiles.schema import RetrievalHeads

NAME = "reports_compresskv"
SAMPLES = 40
BUDGETS = (0.012, 0.02, 0.03, 0.05, 0.1)
SWEPT = 0.02
HEADS = (1, 2, 3, 4, 6, 8)
RANKED, MASKED, SHARES = ("semantic", "classic"), (1, 2, 3, 4, 6), (0.01, 0.02, 0.03)
"""What ranks the heads that are masked; how many of the bundled model's 32, and of another model's the paper's shares."""
OTHERS, DRAWS = 2, 5
"""Of how many of these numbers, the largest, heads are also drawn from those that are masked under neither ranking, and how often."""
SEED = 0
NEEDED = ((0, 1), (0, 6))
"""Heads of the first layer that the draws hold which fall, and no other draw: `fallen` checks it."""
FALLEN = 0.5
"""Below this share of answers, without some heads, answers have fallen: draws keep all or a fifth."""
Masking = Mapping[str, Any]
"""`heads`, (layer, query head) that are masked, `accuracy` with the full cache, an interval in JSON, and `outcomes`, a family, context
and score for each question."""
Maskings = Mapping[str, Sequence[Masking]]
"""By `KIND, COUNT`: one masking of a ranking's first heads, several of other heads (`random`); 0 under every kind."""

PAPER: dict[str, Any] = {"generated": "kept", "recent": 0}
"""The paper's mode: the window alone stays of the prompt's end, and all that is generated, beside the budget."""
METHODS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("compresskv", "compresskv", {}),
    ("semantic heads, uniform", "compresskv", {"allocation": "uniform"}),
    ("all heads, errors", "compresskv", {"selection": "all"}),
    ("all heads, uniform", "compresskv", {"selection": "all", "allocation": "uniform"}),
    ("snapkv", "snapkv", {}),
    ("compresskv, paper", "compresskv", PAPER),
    ("semantic heads, uniform, paper", "compresskv", PAPER | {"allocation": "uniform"}),
    ("all heads, uniform, paper", "compresskv", PAPER | {"selection": "all", "allocation": "uniform"}),
    ("snapkv, paper", "snapkv", {"generated": "kept"}),
)
VOTES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("compresskv", "compresskv", {}),
    ("semantic heads, uniform", "compresskv", {"allocation": "uniform"}),
    ("all heads, uniform", "compresskv", {"selection": "all", "allocation": "uniform"}),
    ("all heads, uniform, 32 queries", "compresskv", {"selection": "all", "allocation": "uniform", "window": 32}),
    ("snapkv, mean of 5", "snapkv", {"kernel": 5, "pool": "mean"}),
    ("snapkv", "snapkv", {}),
    ("all heads, uniform, the last 8 stay", "compresskv", {"selection": "all", "allocation": "uniform", "recent": 0}),
    ("all heads, uniform, paper", "compresskv", PAPER | {"selection": "all", "allocation": "uniform"}),
    ("compresskv, paper", "compresskv", PAPER),
    ("snapkv, paper", "snapkv", {"generated": "kept"}),
)
"""From the method to `snapkv`, one difference at a time; what the last tokens are worth; and the papers' mode."""
VOTED: tuple[tuple[QuestionMode, float], ...] = (("seen", 0.03), ("unseen", 0.1))
"""Where: with the question in the prompt, and as in the grid."""
NUMBERS = {
    1: (None, "not given"),
    2: ("lower", "LongBench: -0.63 (Table 2)"),
    3: (None, "not given"),
    6: ("equal", "LongBench: -0.17 (Table 2)"),
    8: ("equal", "12 of 32 heads: 0.00 (Table 2)"),
}
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
        variants=(Variant(method="full"), *variants),
        families=FAMILIES,
        lengths=(length,),
        samples=samples,
        questions=("seen",),
        questions_per_context=1,
    )


def votes(question: QuestionMode, budget: float, samples: int, length: int) -> Grid:
    """`VOTES` at one budget; a question that comes later shares its context with another."""
    variants = [Variant(method=method, budget=budget, label=label, options=options) for label, method, options in VOTES]
    return Grid(
        variants=(Variant(method="full"), *variants),
        families=FAMILIES,
        lengths=(length,),
        samples=samples,
        questions=(question,),
        questions_per_context=1 if question == "seen" else 2,
    )


def votes_label(question: QuestionMode, budget: float) -> str:
    return f"question {question}, {100 * budget:g} %"


def votes_table(reports: Mapping[str, Report]) -> str:
    """Accuracy of `VOTES` where it was measured, and against `snapkv` on the same questions."""
    places = [votes_label(*place) for place in VOTED]
    found = {(name, s.variant.label): s for name in places for s in reports[name].summaries}
    lines = []
    for label, _, _ in VOTES:
        line = [label]
        for name in places:
            summary = found.get((name, label))
            line += ["-", "-"] if summary is None else [percent(summary.accuracy), points(summary.ahead.get("snapkv"))]
        lines.append(line)
    return table(
        ["variant", *[text for name in places for text in (f"{name}: mean, %", "against `snapkv`, points")]], lines
    )


def compared(report: Report) -> Report:
    """The report of the methods that were measured at every budget."""
    labels = {"full", *(label for label, _, _ in METHODS)}
    cells = [cell for cell in report.cells if cell.cell.variant.label in labels]
    summaries = [summary for summary in report.summaries if summary.variant.label in labels]
    return report.model_copy(update={"cells": cells, "summaries": summaries})


CLAIMS = tuple(
    claim
    for mode in ("", ", paper")
    for budget in BUDGETS
    for claim in (
        Claim(
            f"all heads, uniform{mode}",
            f"semantic heads, uniform{mode}",
            "lower",
            "selection adds to SnapKV (Table 3)",
            budget,
        ),
        Claim(
            f"semantic heads, uniform{mode}",
            f"compresskv{mode}",
            "lower",
            "allocation adds to selection (Table 3)",
            budget,
        ),
        Claim(f"snapkv{mode}", f"compresskv{mode}", "lower", "all benchmarks (Tables 1, 5)", budget),
    )
) + tuple(
    Claim(heads_label(count), "compresskv", way, paper, SWEPT)
    for count, (way, paper) in NUMBERS.items()
    if way is not None
)


# -- masked heads ------------------------------------------------------------------------------------------------------


def ranking(kind: str, scores: RetrievalHeads) -> list[tuple[int, int]]:
    """(site, query head) by score over all layers, those that are masked first in front."""
    rows = scores.classic if kind == "classic" else scores.semantic
    heads = [(site, head) for site, row in enumerate(rows) for head in range(len(row))]
    return sorted(heads, key=lambda place: (-rows[place[0]][place[1]], place))


def masked_counts(bench: Bench) -> tuple[int, ...]:
    """Numbers of heads that are masked."""
    heads = len(ranking("semantic", bench.profile.info.retrieval_heads))
    return MASKED if bench.is_bundled else tuple(dict.fromkeys(max(1, round(share * heads)) for share in SHARES))


def counts_in(found: Maskings, kind: str) -> list[int]:
    """Numbers of heads that were masked by what chose them, ascending."""
    return sorted(int(key.split(", ")[1]) for key in found if key.startswith(f"{kind}, "))


def drawn(count: int, most: int, scores: RetrievalHeads) -> list[list[tuple[int, int]]]:
    """`DRAWS` random choices of `count` heads, none of which is among the first `most` of a ranking."""
    tested = {head for kind in RANKED for head in ranking(kind, scores)[:most]}
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
    dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    try:
        with torch.no_grad():
            for weight, (_, head) in zip(weights, heads):
                weight[:, head * dim : (head + 1) * dim] = 0
        yield
    finally:
        with torch.no_grad():
            for weight, values in zip(reversed(weights), reversed(before)):
                weight.copy_(values)


def masking(bench: Bench, samples: int, length: int) -> Maskings:
    """The full cache's answers without the heads of every kind and number."""
    plain = Grid(
        variants=(Variant(method="full"),),
        families=FAMILIES,
        lengths=(length,),
        samples=samples,
        questions_per_context=2,
    )
    scores, counts = bench.profile.info.retrieval_heads, masked_counts(bench)
    chosen = {(kind, n): [ranking(kind, scores)[:n]] for kind in RANKED for n in (0, *counts)}
    chosen |= {("random", 0): [[]]} | {("random", n): drawn(n, max(counts), scores) for n in counts[-OTHERS:]}
    found: dict[str, list[Masking]] = {}
    for (kind, count), draws in chosen.items():
        for heads in draws:
            with masked(bench.model, heads):
                bench.identify()
                accuracy = bench.run(plain, f"{count} {kind} heads masked").summaries[0].accuracy
                one = {"heads": heads, "accuracy": accuracy.model_dump(), "outcomes": outcomes(bench, plain)}
            found.setdefault(f"{kind}, {count}", []).append(one)
    bench.identify()
    return found


def outcomes(bench: Bench, plain: Grid) -> list[tuple[str, int, float]]:
    """Family, context and score of every question that the full cache answered under the bench's identity."""
    asked, known, store = bench.adapted(plain), all_tasks(bench.tasks), RowStore(bench.rows)
    found = []
    for family in asked.families:
        task = bench.tasks.get(family)
        cell = cell_of(
            plain, bench.identity, Variant(method="full"), family, plain.lengths[0], "unseen", known.get(family)
        )
        for row in store.rows(cell.key, range(plan_of(plain, task).contexts)):
            found += [(family, row.context, answer.value) for answer in row.answers if answer.nats is None]
    return found


def change_of(masking: Masking, base: Masking) -> Interval | None:
    """How much more is answered than under another masking, on the same questions; None in results from before they were kept."""
    if not masking.get("outcomes") or not base.get("outcomes"):
        return None
    pairs = list(zip(masking["outcomes"], base["outcomes"], strict=True))
    places = [(family, context) for (family, context, _), _ in pairs]
    change = [mine[2] - theirs[2] for mine, theirs in pairs]
    return Interval.of(ratio_estimate(change, [1.0] * len(change), places, strata=[family for family, _ in places]))


def accuracy_of(masking: Masking) -> Interval:
    return Interval.model_validate(masking["accuracy"])


def named(heads: Sequence[Sequence[int]]) -> str:
    """`1.0 1.2`: layer and query head of each."""
    return " ".join(f"{site}.{head}" for site, head in sorted(map(tuple, heads)))


def masking_picture(found: Maskings, heads: int, length: int, path: Path) -> Path:
    """Accuracy by number of masked heads: a curve per ranking, a point per draw of other heads."""
    curves = {
        kind: [(count, accuracy_of(found[f"{kind}, {count}"][0])) for count in counts_in(found, kind)]
        for kind in RANKED
    }
    draws = [(count, accuracy_of(one).value) for count, one in drawn_in(found)]
    return draw_curves(
        path,
        "Accuracy without some query heads",
        f"{length} tokens, full cache, {heads} query heads",
        "masked heads",
        {f"the first by {kind} score": curve for kind, curve in curves.items()},
        {"others: a point per draw": draws},
    )


def masking_table(found: Maskings) -> str:
    """Accuracy with the first heads of each ranking masked, and which they are."""
    lines = []
    for count in counts_in(found, RANKED[0])[1:]:
        line = [str(count)]
        for kind in RANKED:
            one = found[f"{kind}, {count}"][0]
            line += [percent(accuracy_of(one)), named(one["heads"])]
        lines.append(line)
    return table(["masked", *[text for kind in RANKED for text in (f"{kind}, %", "heads (layer.head)")]], lines)


def drawn_in(found: Maskings) -> list[tuple[int, Masking]]:
    """Every draw of other heads, with how many they are."""
    return [(count, one) for count in counts_in(found, "random")[1:] for one in found[f"random, {count}"]]


def draws_table(found: Maskings) -> str:
    """Each draw of heads that neither ranking masks."""
    lines = [
        [str(count), named(one["heads"]), percent(accuracy_of(one)), "yes" if holds(one) else "no"]
        for count, one in drawn_in(found)
    ]
    return table(["masked", "heads drawn (layer.head)", "mean, %", f"holds {named(NEEDED)}"], lines)


def holds(one: Masking) -> bool:
    return set(NEEDED) <= set(map(tuple, one["heads"]))


def fallen(found: Maskings) -> str:
    """What the draws say of the rankings; exits where it is no longer so."""
    draws = [one for _, one in drawn_in(found)]
    low = [accuracy_of(one).value for one in draws if holds(one)]
    rest = [accuracy_of(one).value for one in draws if not holds(one)]
    if not low or not rest or max(low) >= FALLEN or min(rest) < FALLEN:
        raise SystemExit(
            f"the draws that fall are no longer those that hold {named(NEEDED)}: write anew what they say, and which heads"
        )
    return (
        f"The draws do not agree: of {len(draws)}, the {len(low)} that hold heads {' and '.join(named([head]) for head in NEEDED)} of the "
        f"first layer fall to {100 * min(low):.0f} to {100 * max(low):.0f} %, the others keep {100 * min(rest):.0f} %. A mean of the two "
        "kinds would describe neither, so none is given. Both heads are near zero by either score. Masking a head shows that answers "
        "depend on it, not that it retrieves: it does not separate retrieval heads from heads that retrieval depends on, so that the fall "
        "under the rankings is by itself no evidence for them. "
        "Head 0.6 without 0.1 is in a draw that keeps all; 0.1 without 0.6 was not drawn."
    )


def masking_verdicts(found: Maskings) -> str:
    """What the paper says of masked heads, and whether it is seen here, by changes on the same questions."""
    counts = counts_in(found, RANKED[0])[1:]
    most, apart = max(counts), [n for n in counts if not same_heads(found, n)]
    first = {kind: {n: found[f"{kind}, {n}"][0] for n in (0, *counts)} for kind in RANKED}
    fall = change_of(first["semantic"][most], first["semantic"][0])
    against = {n: change_of(first["semantic"][n], first["classic"][n]) for n in apart}
    lines = [
        [
            "without the first heads by semantic score answers fall: -74 % with 30 of 1024 (App. F)",
            f"{most} masked",
            points(fall),
            verdict(fall, *WAYS["lower"]),
        ]
    ]
    lines += [
        [
            "and more than without as many by classic score: -12 % with 30 (App. F)",
            f"{n} masked",
            points(change),
            verdict(change, *WAYS["lower"]),
        ]
        for n, change in against.items()
    ]
    return table(["the paper says", "", "change, points", "here"], lines)


def same_heads(found: Maskings, count: int) -> bool:
    one, other = (set(map(tuple, found[f"{kind}, {count}"][0]["heads"])) for kind in RANKED)
    return one == other


# -- costs -------------------------------------------------------------------------------------------------------------

COSTS = tuple(Contender(name, name, 512) for name in ("compresskv", "streaming_llm", "snapkv", "pyramidkv", "cake"))
EVICTING = tuple(one.label for one in COSTS[1:])
SAID = (
    Direction(
        "a step faster than with the full cache (Fig. 8)",
        "step, times full's",
        times_full("compresskv", "step_ms"),
        within(high=1),
    ),
    Direction(
        "and the more so the longer the context",
        "full's step over it",
        lambda _, at: at["full"]["step_ms"] / at["compresskv"]["step_ms"],
        RISING,
    ),
    Direction(
        "time like the other evicting methods', here at most 10 % more",
        "step, times the slowest of theirs",
        lambda _, at: at["compresskv"]["step_ms"] / max(at[other]["step_ms"] for other in EVICTING),
        within(high=1.1),
    ),
)


def write_page(content: Mapping[str, Any], bench: Bench) -> Path:
    """The page and its pictures, from the results."""
    report, found = content["reports"]["selection"], content["masking"]
    costs = {int(n): at for n, at in content["costs"].items()}
    length = report.summaries[0].length
    folder, heads = DOCS / bench.name, len(ranking("semantic", bench.profile.info.retrieval_heads))
    accuracy_by_budget(compared(report), "seen", length, folder / "budgets.png")
    subtitle = f"{length} tokens, {100 * SWEPT:g} % of the KV, question seen"
    draw_curves(
        folder / "heads.png",
        "CompressKV: heads that choose",
        subtitle,
        "heads of a layer",
        {"semantic": curve(report, SWEPT, {count: heads_label(count) for count in HEADS})},
    )
    masking_picture(found, heads, length, folder / "masked.png")
    return write_document(
        bench.name,
        f"# CompressKV on {bench.title}",
        f"{length} tokens, question at the prompt's end, mean over {', '.join(report.summaries[0].families)}. Made by "
        "`benchmarks/reports/compresskv.py`; do not edit. Changes are paired on the same questions. `open` means that their "
        "95 % interval, clustered by context, does not tell. Variants named `paper` hold what is generated beside the budget, as the "
        "papers do (`generated='kept'`, of `compresskv` with `recent=0`); all others hold it within the budget.",
        "## Masked heads (Fig. 7, 23)",
        "The outputs of the best heads by each score are set to zero, in prefill and generation, with the full cache. The paper masks 10, "
        f"20 and 30 of 1024 heads; here there are {heads}. Where both scores choose the same heads, the figures are the same.",
        masking_table(found),
        masking_verdicts(found),
        f"The control is drawn from the heads that neither ranking masks, {DRAWS} times for each number:",
        draws_table(found),
        *((fallen(found),) if bench.is_bundled else ()),
        f"![masked heads]({bench.name}/masked.png)",
        "## Selection, allocation and number of heads (Tables 2, 3)",
        "Equal means within five points.",
        claims_table(report, CLAIMS),
        *bench.left_out(),
        *(
            (
                "One difference at a time, from the method to `snapkv`; also at 10 % with the question asked after compression:",
                votes_table(content["reports"]),
            )
            if len(content["reports"]) > 1
            else ()
        ),
        f"![heads that choose]({bench.name}/heads.png)",
        "## Budgets",
        f"![budgets]({bench.name}/budgets.png)",
        markdown(report),
        "## Time and memory by length (Fig. 8)",
        ABOUT
        + f"A budget of {COSTS[0].budget} tokens per KV head and layer, where the paper has 1,024: memory is what that says, for every "
        "method that evicts. Accuracy, memory and step time of every variant at one length are side by side above.",
        costs_table(costs),
        directions_table(costs, SAID),
        *bench.of_bundled(
            "At 64K tokens in larger layers see `compresskv, dropping` in [decode_cpu.md](decode_cpu.md)."
        ),
        "## Provenance",
        provenance_of(*content["reports"].values(), figures=True),
    )


def main() -> None:
    arguments = parser((__doc__ or "").splitlines()[0], page=True).parse_args()
    bench = Bench(NAME, arguments)
    if not arguments.page:
        samples, length = arguments.samples or SAMPLES, arguments.length
        report = bench.run(grid(samples, length), "CompressKV")
        found = masking(bench, max(1, samples // 2), length)
        costs = by_length(bench, Figures(arguments.rows / f"{bench.name}.figures.jsonl", bench.identity), COSTS)
        voted = {
            votes_label(question, budget): bench.run(
                votes(question, budget, samples, length), f"CompressKV, question {question}"
            )
            for question, budget in VOTED
        }
        write_parts(bench.name, {"selection": report, **voted}, {"masking": found, "costs": costs})
    print(f"wrote {write_page(read_parts(bench.name), bench)}")


if __name__ == "__main__":
    main()
