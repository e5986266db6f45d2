"""SeKV: time and memory by length beside the methods of its Table 3, and the paper's formulas beside bytes that exist.

    python -m benchmarks.reports.sekv                  # minutes; an interrupted run goes on
    python -m benchmarks.reports.sekv --page           # the page alone, from the results that are there
    python -m benchmarks.reports.sekv --model PATH --profile PATH

Switches and grids are in ablations.py, answers in grid.py. Writes benchmarks/results/reports_sekv.json and
docs/results/reports_sekv.md, another model's with its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.claims import Figures, write_parts
from benchmarks.lib.costs import ABOUT, LENGTHS, Contender, Direction, by_length, costs_table, directions_table, within
from benchmarks.lib.grids import FAMILIES, Bench, measured_on, parser, read_parts, table, write_document
from benchmarks.lib.places import DOCS
from semkv.config import CompileConfig
from semkv.evaluation import Grid, Report, Variant
from semkv.evaluation.environment import describe, now
from semkv.evaluation.plots import zoom_heatmap
from semkv.evaluation.subject import add_zooms, as_ids
from semkv.evaluation.tables import size
from semkv.runtime.store.site_memory import SiteMemory
from semkv.runtime.store.tables import FACTORS

NAME = "reports_sekv"
BUDGET = 0.1
NEW = 1024
"""Tokens written in Table 3's first setting."""
OTHERS = ("streaming_llm", "chunkkv", "sentencekv")
COSTS = (Contender("sekv", "sekv", BUDGET), *(Contender(name, name, BUDGET) for name in OTHERS))


def whole(cost: Mapping[str, float]) -> float:
    """Seconds to read the context and write `NEW` tokens."""
    return cost["first_s"] + NEW * cost["step_ms"] / 1000


def against(label: str) -> Any:
    """Of `whole`: sekv's over another's, at a length."""
    return lambda _, at: whole(at["sekv"]) / whole(at[label])


def leading(_: int, at: Mapping[str, Mapping[str, float]]) -> float:
    """`whole` of StreamingLLM over the least of the others'."""
    return whole(at["streaming_llm"]) / min(whole(cost) for label, cost in at.items() if label != "streaming_llm")


SAID = (
    Direction(
        "38.1 s where the full cache takes 43.6, 4K in and 1K out (Table 3)",
        "whole, times full's",
        against("full"),
        within(high=1),
    ),
    Direction("StreamingLLM is the fastest", "its whole, times the best of the others'", leading, within(high=1)),
    Direction("as fast as ChunkKV, within 5 %", "whole, times chunkkv's", against("chunkkv"), within(high=1.05)),
    Direction("faster than SentenceKV", "whole, times sentencekv's", against("sentencekv"), within(high=1)),
)


# -- zooms -------------------------------------------------------------------------------------------------------------

ZOOMS = (
    Variant(method="sekv", budget=BUDGET, label="thresholds", options={"fill": False}),
    Variant(method="sekv", budget=BUDGET, label="paper", options={"preset": "paper"}),
)
"""Runs in which thresholds decide: where the budget is filled, every head unfolds what there is room for."""
ZOOM_SAMPLES = 4


def zoom_grid(samples: int, length: int) -> Grid:
    """What Fig. 5 and 6 are drawn from."""
    return Grid(variants=(Variant(method="full"), *ZOOMS), families=FAMILIES, lengths=(length,), samples=samples)


def draw_zooms(report: Report, folder: Path, length: int, sites: int) -> list[Path]:
    """A heat map of each variant."""
    drawn = (
        zoom_heatmap(report, "unseen", length, folder / f"zoom_{variant.label}.png", variant.label, sites)
        for variant in ZOOMS
    )
    return [path for path in drawn if path is not None]


def zooms_table(report: Report) -> str:
    """Of each variant, how much heads unfold, and how much of that the busiest quarter of them does."""
    lines = []
    for variant in ZOOMS:
        total = None
        for cell in report.cells:
            if cell.zoom and cell.cell.variant.label == variant.label:
                total = add_zooms(total, cell.zoom)
        if total is None:
            continue
        rates = sorted((rate for site in total.rates for rate in site), reverse=True)
        busiest = sum(rates[: -(-len(rates) // 4)]) / max(sum(rates), 1e-12)
        lines.append(
            [variant.label, f"{100 * sum(rates) / len(rates):.1f}", f"{100 * rates[0]:.1f}", f"{100 * busiest:.0f}"]
        )
    return table(
        ["sekv", "unfolded, mean, %", "by the head that unfolds most, %", "of all, by a quarter of the heads, %"], lines
    )


# -- formulas ----------------------------------------------------------------------------------------------------------


def segment_nbytes(memory: SiteMemory) -> torch.Tensor:
    """float64 [Hkv, S]: bytes of each folded segment where it waits, tables apart."""
    spans = memory.spans
    cost = (spans.tables.segment_length * spans.host_tokens.token_nbytes).double().repeat(memory.site.kv_heads, 1)
    factored = spans.tables.segment_kind == FACTORS
    if bool(factored.any()):
        cost[:, factored] = spans.host_factors.span_nbytes()[:, spans.tables.segment_start[factored]].double()
    return cost


@torch.no_grad()
def formulas(bench: Bench, length: int) -> dict[str, float]:
    """Eq. 16-20 for a state whose spans are all factored, and the bytes that it has: after a context, and in one step of a question."""
    config = CompileConfig(kv_dtype="float16", floor=0)
    compiled = bench.compiled.with_method("sekv", BUDGET, config=config, preset="paper", fill=True)
    sample = bench.sample(length)
    state = compiled.prefill(as_ids(sample.ids))
    memories = [memory for memory in state.rows[0].budgeted() if memory.spans is not None]
    held, waiting = state.nbytes["device"], state.nbytes["host"]
    scalar = compiled.placement.budget.dtype.itemsize
    exact = summaries = bases = 0.0
    for memory in memories:
        site = memory.site
        exact += (memory.kept.length + memory.recent.length) * site.values_per_token * scalar
        rank = memory.components.router.weights[site.index].shape[1]
        summaries += 2 * site.q_heads * rank * memory.spans.count * scalar
        bases += float(segment_nbytes(memory).sum())
    for token in sample.questions[0].ids:
        compiled.extend(state, as_ids((token,)))
    chosen = [memory.spans.segments_of(memory.zoom.chosen) for memory in memories]
    cost = [segment_nbytes(memory) for memory in memories]
    zoomed = torch.stack([one.any(0) for one in chosen]).any(0) if len({one.shape for one in chosen}) == 1 else None
    return {
        "full": sum(m.site.values_per_token for m in memories) * len(sample.ids) * scalar,
        "full_held": state.full_bytes,
        "device": exact + summaries,
        "device_held": held,
        "host": bases,
        "host_held": waiting,
        "every_head": float("nan") if zoomed is None else sum(float(one[:, zoomed].sum()) for one in cost),
        "own_heads": sum(float(one[picked].sum()) for one, picked in zip(cost, chosen)),
        "moved": sum(m.moved_nbytes for m in memories),
    }


def formulas_table(found: Mapping[int, Mapping[str, float]]) -> str:
    """Each formula's bytes and those that exist, by length."""
    rows = (
        ("full KV (Eq. 16)", "full", "full_held"),
        ("SeKV on the device (Eq. 17)", "device", "device_held"),
        ("SeKV on the host (Eq. 18, 19)", "host", "host_held"),
        ("moved in a step (Eq. 20, all heads for each zoom)", "every_head", "moved"),
        ("moved in a step, heads that zoom", "own_heads", "moved"),
    )
    lines = [
        [
            f"{length:,}",
            name,
            size(at[formula]),
            size(at[held]),
            f"{at[held] / at[formula]:.2f}" if at[formula] else "-",
        ]
        for length, at in found.items()
        for name, formula, held in rows
    ]
    return table(["tokens", "", "by the formula", "measured", "measured over formula"], lines)


def zooms_of(content: Mapping[str, Any], bench: Bench) -> list[str]:
    """The part of the page on zooms; nothing but how to measure it where that was not done."""
    report = content["reports"].get("zooms")
    if report is None:
        return ["Not measured yet: `python -m benchmarks.reports.sekv`."]
    pictures = sorted((DOCS / bench.name).glob("zoom_*.png"))
    return [
        "Share of its spans that each query head unfolds in a step, above its own threshold: where the budget is filled instead "
        "(`fill=True`, the default), every head unfolds what there is room for. `thresholds` is `fill=False`, `paper` the preset.",
        zooms_table(report),
        *(
            f"![What heads unfold, {picture.stem.removeprefix('zoom_')}]({bench.name}/{picture.name})"
            for picture in pictures
        ),
    ]


def write_page(content: Mapping[str, Any], bench: Bench) -> Path:
    """The page, from the results."""
    costs, bytes_by_length = ({int(n): at for n, at in content[part].items()} for part in ("costs", "formulas"))
    return write_document(
        bench.name,
        f"# SeKV's time and memory on {bench.title}",
        f"Made by `benchmarks/reports/sekv.py`; do not edit. {100 * BUDGET:g} % of the KV.",
        *bench.of_bundled(
            "Its switches and grids are in [ablations.md](ablations.md), its answers in [grid.md](grid.md)."
        ),
        "## Time and memory by length (Table 3, Fig. 4)",
        ABOUT,
        costs_table(costs),
        f"`whole` is the first token and {NEW:,} steps, by their median. Memory is of the KV alone, where the paper has the whole device.",
        directions_table(costs, SAID),
        *bench.of_bundled(
            "The full cache of four layers is small, and steps are bound by the number of calls: at 64K to 128K tokens in larger layers "
            "see [decode_cpu.md](decode_cpu.md)."
        ),
        "## What heads unfold (Fig. 5, 6)",
        *zooms_of(content, bench),
        "## The paper's formulas (Eq. 16 to 20)",
        "By the preset `paper`, with every span factored as the formulas have it, and the budget filled in order of gate (Sec. 4.1); each "
        "span and head with its own rank, which Eq. 18 has as one r. Eq. 17 counts routing keys for every query head, at full precision, "
        "twice, and leaves out the coarse means and short spans: here routing summaries are made from the coarse means. Eq. 20 has every "
        "head of every layer fetch what any of them zooms into; the last line counts the heads that zoom. Measured bytes on the host "
        "include tables. A budget is filled up, so that what is moved is what it has room for.",
        formulas_table(bytes_by_length),
        "## Provenance",
        measured_on(content["environment"]),
    )


def main() -> None:
    started = now()
    arguments = parser((__doc__ or "").splitlines()[0], page=True).parse_args()
    bench = Bench(NAME, arguments)
    if not arguments.page:
        figures = Figures(arguments.rows / f"{bench.name}.figures.jsonl", bench.identity)
        costs = by_length(bench, figures, COSTS)
        found = {
            length: figures.get("formulas", {"length": length}, lambda n=length: formulas(bench, n))
            for length in bench.lengths(LENGTHS, 64)
        }
        zooms = bench.run(zoom_grid(arguments.samples or ZOOM_SAMPLES, arguments.length), "Zooms")
        draw_zooms(zooms, DOCS / bench.name, arguments.length, len(bench.compiled.program.stores))
        environment = describe(started).model_dump(mode="json")
        write_parts(bench.name, {"zooms": zooms}, {"costs": costs, "formulas": found, "environment": environment})
    print(f"wrote {write_page(read_parts(bench.name), bench)}")


if __name__ == "__main__":
    main()
