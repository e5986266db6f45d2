"""SentenceKV's ablations on the bundled model: sentences or equal chunks, whose query ranks, and how much is retained.

    python benchmarks/reports_sentencekv.py            # an interrupted run goes on
    python benchmarks/reports_sentencekv.py --samples 20

40 questions per family at 4K tokens. Asked after compression, where the question's own tokens make the sentence's mean query; and,
as in the paper's retrieval tasks, with the question at the prompt's end, half as many. Writes
benchmarks/results/reports_sentencekv.json and docs/results/reports_sentencekv.md.
"""

from __future__ import annotations

from typing import Any

from grids import DOCS, FAMILIES, Bench, parser, write_document
from reports import Claim, claims_table, curve, draw_curves, write_parts

from semkv.evaluation import Grid, Report, Variant
from semkv.evaluation.tables import markdown, provenance

NAME = "reports_sentencekv"
SAMPLES = 40
BUDGETS = (0.05, 0.1, 0.2)
SWEPT = 0.1
FACTORS = (1.0, 2.0, 3.0, 5.0, 8.0)
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
        variants=(Variant(method="full"), *variants), families=FAMILIES, lengths=(length,), samples=samples, questions=("seen",),
        questions_per_context=1,
    )  # fmt: skip


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
    Claim(factor_labels("sentence")[1.0], factor_labels("sentence")[3.0], "lower", "rises with r, then falls (Fig. 6)", 0.02),
    Claim(factor_labels("sentence")[8.0], factor_labels("sentence")[3.0], "lower", "rises with r, then falls (Fig. 6)", 0.02),
)  # fmt: skip


def pictures(unseen: Report, seen: Report, length: int) -> list[str]:
    """Accuracy against r, both ways of asking, where both are measured."""
    title, folder = "SentenceKV: what is retained of the prompt", DOCS / NAME
    draw_curves(
        folder / "r_unseen.png", title, f"{length} tokens, {100 * SWEPT:g} % of the KV, question asked afterwards", "r",
        {f"{query} query": curve(unseen, SWEPT, factor_labels(query)) for query in ("sentence", "token")},
    )  # fmt: skip
    if not seen.complete:
        return [f"![r, question unseen]({NAME}/r_unseen.png)"]
    draw_curves(
        folder / "r_seen.png", title, f"{length} tokens, question at the prompt's end", "r",
        {f"{100 * budget:g} % of the KV": curve(seen, budget, factor_labels("sentence")) for budget in (0.02, SWEPT)},
    )  # fmt: skip
    return [f"![{place}]({NAME}/{place}.png)" for place in ("r_unseen", "r_seen")]


def main() -> None:
    arguments = parser((__doc__ or "").splitlines()[0]).parse_args()
    bench = Bench(NAME, arguments)
    chunk = round(bench.profile.info.sentences.mean_tokens)
    samples = arguments.samples or SAMPLES
    unseen = bench.run(unseen_grid(samples, arguments.length, chunk), "SentenceKV, question unseen")
    seen = bench.run(seen_grid(max(1, samples // 2), arguments.length, chunk), "SentenceKV, question seen")
    write_parts(NAME, {"unseen": unseen} | ({"seen": seen} if seen.complete else {}), {"chunk": chunk})
    path = write_document(
        NAME,
        "# SentenceKV's ablations on the bundled model",
        f"{arguments.length} tokens, mean over the four families. Made by `benchmarks/{NAME}.py`; do not edit. Changes are paired on "
        "the same questions. `open` means that their 95 % interval, clustered by context, holds 0: the questions do not tell. "
        f"Equal chunks have {chunk} tokens, the mean length of the sentences of this text.",
        "## Buckets and queries, question asked after compression",
        "Nothing is dropped in the lines without an r, so that ranking alone decides; with an r, the prompt's end, which is not the "
        "question, says what is retained. A question here is one sentence that is looked up by few of its words, "
        "which a mean over the sentence may dilute.",
        claims_table(unseen, CLAIMS_UNSEEN),
        "## The question at the prompt's end",
        "The paper's setting. The question is prefilled, so that the mean query begins with the answer.",
        claims_table(seen, CLAIMS_SEEN) if seen.complete else "Not measured yet.",
        "## How much is retained",
        *pictures(unseen, seen, arguments.length),
        "## All figures",
        markdown(unseen),
        markdown(seen) if seen.complete else "",
        "## Provenance",
        provenance(unseen),
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
