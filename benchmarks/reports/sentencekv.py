"""SentenceKV: sentences or equal chunks, whose query ranks, how much is retained, perplexity, time and memory.

    python -m benchmarks.reports.sentencekv            # an interrupted run goes on
    python -m benchmarks.reports.sentencekv --samples 20
    python -m benchmarks.reports.sentencekv --page     # the page alone, from the results that are there
    python -m benchmarks.reports.sentencekv --model PATH --profile PATH --source books/     # another model, perplexity to its context

40 questions per family at 4K tokens. Asked after compression, where the question's own tokens make the sentence's mean query; and,
as in the paper's retrieval tasks, with the question at the prompt's end, half as many. Perplexity is of 256 tokens of prose after each of
ten contexts, of the text of `--source` for another model. Writes
benchmarks/results/reports_sentencekv.json and docs/results/reports_sentencekv.md, another model's with its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.lib.claims import Claim, Figures, claims_table, curve, draw_curves, write_parts
from benchmarks.lib.costs import (
    ABOUT,
    LEVEL_OVER_LENGTHS,
    RISING,
    Contender,
    Direction,
    by_length,
    costs_table,
    directions_table,
    within,
)
from benchmarks.lib.grids import FAMILIES, Bench, parser, provenance_of, read_parts, table, write_document
from benchmarks.lib.places import DOCS
from semkv.evaluation import Grid, Report, Variant
from semkv.evaluation.tables import markdown, plain
from semkv.evaluation.tasks.perplexity import Perplexity

NAME = "reports_sentencekv"
SAMPLES = 40
BUDGETS = (0.05, 0.1, 0.2)
SWEPT = 0.1
FACTORS = (1.0, 2.0, 3.0, 5.0, 8.0)
PASSAGES = 10
PASSAGE_LENGTHS = (2048, 4096, 8192, 16_384, 32_768)
"""As far as a model's context reaches; the bundled model's own prose to 8K."""
SHARE = 0.03
"""Of the longest passages, what the budget is, in tokens per KV head and layer, as the paper's 1,024 are of 32K."""
READERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("sentencekv", "sentencekv", {}),
    ("sentencekv, recoverable", "sentencekv", {"recoverable": True}),
    ("snapkv", "snapkv", {}),
    ("quest", "quest", {}),
)
PAPER = {"chunks": "LongBench, 4 tasks: -2.6, -0.6, -3.0, -0.5 (Table 3)", "token": "NIAH: below at every r (Fig. 6)"}


def factor_labels(query: str) -> dict[float, str]:
    """Labels of the sweep of r."""
    return {r: f"r = {r:g}, {query} query" for r in FACTORS}


def unseen_grid(samples: int, length: int, chunk: int) -> Grid:
    """Everything recoverable, by what is ranked and whose query ranks; and the sweep of r."""
    whole: dict[str, Any] = {"recoverable": True}
    chunks = {"buckets": "chunks", "chunk": chunk}
    ablations = (
        ("sentences, sentence query", whole),
        ("equal chunks, sentence query", whole | chunks),
        ("sentences, token query", whole | {"query": "token"}),
        ("equal chunks, token query", whole | chunks | {"query": "token"}),
    )
    variants = [
        Variant(method="sentencekv", budget=budget, label=label, options=options)
        for label, options in ablations
        for budget in BUDGETS
    ]
    variants += [
        Variant(method="sentencekv", budget=SWEPT, label=label, options={"r": r, "query": query})
        for query in ("sentence", "token")
        for r, label in factor_labels(query).items()
    ]
    return Grid(variants=(Variant(method="full"), *variants), families=FAMILIES, lengths=(length,), samples=samples)


def seen_grid(samples: int, length: int, chunk: int) -> Grid:
    """The paper's own mode: the prompt's end is the question, and what it does not look at is dropped."""
    variants = [
        Variant(method="sentencekv", budget=budget, label=label, options={"r": r})
        for budget in (0.02, SWEPT)
        for r, label in factor_labels("sentence").items()
    ]
    variants += [
        Variant(method="sentencekv", budget=0.02, label="equal chunks", options={"buckets": "chunks", "chunk": chunk}),
        Variant(method="sentencekv", budget=0.02, label=factor_labels("token")[3.0], options={"query": "token"}),
    ]
    return Grid(
        variants=(Variant(method="full"), *variants),
        families=FAMILIES,
        lengths=(length,),
        samples=samples,
        questions=("seen",),
        questions_per_context=1,
    )


CLAIMS_UNSEEN = tuple(
    claim
    for budget in BUDGETS
    for claim in (
        Claim("equal chunks, sentence query", "sentences, sentence query", "lower", PAPER["chunks"], budget),
        Claim("sentences, token query", "sentences, sentence query", "lower", PAPER["token"], budget),
    )
) + tuple(
    Claim(factor_labels("token")[r], factor_labels("sentence")[r], "lower", PAPER["token"], SWEPT) for r in FACTORS
)
CLAIMS_SEEN = (
    Claim("equal chunks", factor_labels("sentence")[3.0], "lower", PAPER["chunks"], 0.02),
    Claim(factor_labels("token")[3.0], factor_labels("sentence")[3.0], "lower", PAPER["token"], 0.02),
    Claim(
        factor_labels("sentence")[1.0],
        factor_labels("sentence")[3.0],
        "lower",
        "rises with r, then falls (Fig. 6)",
        0.02,
    ),
    Claim(
        factor_labels("sentence")[8.0],
        factor_labels("sentence")[3.0],
        "lower",
        "rises with r, then falls (Fig. 6)",
        0.02,
    ),
)


def perplexity_grid(passages: int, lengths: tuple[int, ...]) -> Grid:
    """Prose that goes on after contexts of growing length, at one budget in tokens (Fig. 3)."""
    tokens = round(SHARE * max(lengths))
    variants = [
        Variant(method=method, budget=tokens, label=label, options=options) for label, method, options in READERS
    ]
    return Grid(
        variants=(Variant(method="full"), *variants),
        families=("perplexity",),
        lengths=lengths,
        samples=passages,
    )


def prose_of(bench: Bench) -> tuple[dict[str, Perplexity], tuple[int, ...]] | None:
    """The task of perplexity and its lengths; None for another model without a text."""
    if bench.is_bundled:
        return {"perplexity": Perplexity("perplexity")}, PASSAGE_LENGTHS[:3]
    task = bench.tasks.get("perplexity")
    return None if task is None else ({"perplexity": task}, bench.lengths(PASSAGE_LENGTHS))


def perplexity_table(report: Report) -> str:
    """Perplexity by length, and over the full cache's."""
    found = {(c.cell.variant.label, c.cell.length): c.perplexity for c in report.cells if c.perplexity is not None}
    lines = []
    lengths = sorted({n for _, n in found})
    for label in dict.fromkeys(label for label, _ in found):
        each = [(found.get((label, n)), found.get(("full", n))) for n in lengths]
        lines.append(
            [label, *["-" if a is None or b is None else f"{plain(a)}, {a.value / b.value:.3f}" for a, b in each]]
        )
    return table(["method", *[f"{n:,} tokens" for n in lengths]], lines)


COSTS = (
    Contender("sentencekv", "sentencekv", 512),
    Contender("snapkv", "snapkv", 512),
    Contender("quest", "quest", 512),
)
SAID = (
    Direction(
        "a step takes as long at 256K as at 16K, 17.8 ms (Table 4)",
        "step, ms",
        lambda _, at: at["sentencekv"]["step_ms"],
        LEVEL_OVER_LENGTHS,
    ),
    Direction(
        "and the full cache's grows from 16.8 to 84.9 ms",
        "full's step, ms",
        lambda _, at: at["full"]["step_ms"],
        RISING,
    ),
    Direction(
        "a step takes 6 to 8 % more than SnapKV's (Tables 4, 7)",
        "times snapkv's",
        lambda _, at: at["sentencekv"]["step_ms"] / at["snapkv"]["step_ms"],
        within(high=1.08),
    ),
    Direction(
        "grouping sentences is 4 s of a prefill of 64K (App. A.6), 0.06 ms of a token",
        "first token, ms more than full's, per token",
        lambda length, at: 1000 * (at["sentencekv"]["first_s"] - at["full"]["first_s"]) / length,
        within(high=0.06),
    ),
)


def pictures(name: str, unseen: Report, seen: Report | None, length: int) -> list[str]:
    """Accuracy against r, both ways of asking, where both are measured."""
    title, folder = "SentenceKV: what is retained of the prompt", DOCS / name
    draw_curves(
        folder / "r_unseen.png",
        title,
        f"{length} tokens, {100 * SWEPT:g} % of the KV, question asked afterwards",
        "r",
        {f"{query} query": curve(unseen, SWEPT, factor_labels(query)) for query in ("sentence", "token")},
    )
    if seen is None:
        return [f"![r, question unseen]({name}/r_unseen.png)"]
    draw_curves(
        folder / "r_seen.png",
        title,
        f"{length} tokens, question at the prompt's end",
        "r",
        {f"{100 * budget:g} % of the KV": curve(seen, budget, factor_labels("sentence")) for budget in (0.02, SWEPT)},
    )
    return [f"![{place}]({name}/{place}.png)" for place in ("r_unseen", "r_seen")]


def write_page(content: Mapping[str, Any], bench: Bench) -> Path:
    """The page and its pictures, from the results."""
    reports, chunk = content["reports"], content["chunk"]
    unseen, prose, seen = reports["unseen"], reports.get("perplexity"), reports.get("seen")
    costs = {int(n): at for n, at in content["costs"].items()}
    length = unseen.summaries[0].length
    read = [] if prose is None else sorted({cell.cell.length for cell in prose.cells})
    budgets = [] if prose is None else [s.variant.budget for s in prose.summaries if s.variant.budget is not None]
    return write_document(
        bench.name,
        f"# SentenceKV on {bench.title}",
        f"{length} tokens, mean over {', '.join(unseen.summaries[0].families)}. Made by `benchmarks/reports/sentencekv.py`; do not edit. "
        "Changes are paired on the same questions. `open` means that their 95 % interval, clustered by context, does not tell. "
        f"Equal chunks have {chunk} tokens, the mean length of the sentences of the calibration's text.",
        "## Buckets and queries, question asked after compression",
        "Nothing is dropped in the lines without an r, so that ranking alone decides; with an r, the prompt's end, which is not the "
        "question, says what is retained.",
        claims_table(unseen, CLAIMS_UNSEEN),
        *bench.left_out(),
        "## The question at the prompt's end",
        "The paper's setting. The question is prefilled, so that the mean query begins with the answer.",
        claims_table(seen, CLAIMS_SEEN) if seen is not None else "Not measured yet.",
        "## How much is retained",
        *pictures(bench.name, unseen, seen, length),
        "## Perplexity (Fig. 3)",
        "Not measured: another model needs a text, `--source`."
        if prose is None
        else f"Of 256 tokens of text after contexts of these lengths, at a budget of {budgets[0]} tokens, "
        f"{100 * budgets[0] / max(read):.0f} % of the longest; after the comma over the full cache's on the same text. The paper finds "
        "SentenceKV nearly identical to the full cache on PG-19 up to 32K. What is below 1 says that the model foretells the text better "
        "where what is far is gone.",
        "" if prose is None else perplexity_table(prose),
        "## Time and memory by length (Tables 4 and 5, App. A.5 and A.6)",
        ABOUT
        + f"A budget of {COSTS[0].budget} tokens per KV head and layer. The paper's memory is of the whole device, weights included; here "
        "it is the KV alone, which a budget in tokens fixes.",
        costs_table(costs),
        directions_table(costs, SAID),
        *bench.of_bundled(
            "The full cache of four layers is small, and steps are bound by the number of calls: at 64K to 128K tokens in larger layers "
            "see [decode_cpu.md](decode_cpu.md)."
        ),
        "## All figures",
        markdown(unseen),
        markdown(seen) if seen is not None else "",
        "## Provenance",
        provenance_of(unseen, *reports.values(), figures=True),
    )


def main() -> None:
    arguments = parser((__doc__ or "").splitlines()[0], page=True).parse_args()
    bench = Bench(NAME, arguments)
    if not arguments.page:
        chunk = round(bench.profile.info.sentences.mean_tokens)
        samples = arguments.samples or SAMPLES
        unseen = bench.run(unseen_grid(samples, arguments.length, chunk), "SentenceKV, question unseen")
        seen = bench.run(seen_grid(max(1, samples // 2), arguments.length, chunk), "SentenceKV, question seen")
        parts, read = {"unseen": unseen} | ({"seen": seen} if seen.complete else {}), prose_of(bench)
        if read is not None:
            tasks, lengths = read
            parts["perplexity"] = bench.run(
                perplexity_grid(min(PASSAGES, samples), lengths), "SentenceKV, perplexity", tasks
            )
        costs = by_length(bench, Figures(arguments.rows / f"{bench.name}.figures.jsonl", bench.identity), COSTS)
        write_parts(bench.name, parts, {"chunk": chunk, "costs": costs})
    print(f"wrote {write_page(read_parts(bench.name), bench)}")


if __name__ == "__main__":
    main()
