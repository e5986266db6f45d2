"""What each system's part contributes to `mixed`, at 4K tokens and tight budgets: answers, and perplexity of what follows.

    python -m benchmarks.quality.ablation_mixed                # about an hour of one core; an interrupted run goes on

50 questions per family, asked after compression, and the perplexity of 256 tokens of prose after each of ten contexts,
which tells compositions apart where all of them answer everything. Writes benchmarks/results/ablation_mixed.json,
ablation_mixed_perplexity.json and docs/results/ablation_mixed.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.lib.grids import FAMILIES, Bench, parser, provenance_of, table, write_document, write_results
from benchmarks.quality.quality import points
from semkv.evaluation import Grid, Report, Variant
from semkv.evaluation.tables import markdown, percent, plain
from semkv.evaluation.tasks.perplexity import Perplexity

BUDGETS = (0.03, 0.05)
SAMPLES = 50
QUESTIONS = 5
PASSAGES = 10
TASKS = {"perplexity": Perplexity("perplexity")}


@dataclass(frozen=True)
class Switch:
    """A composition beside `mixed`, and whose part it takes away or adds."""

    label: str
    system: str
    options: dict[str, Any] = field(default_factory=dict)
    method: str = "mixed"


SWITCHES = (
    Switch("mixed", "all"),
    Switch("window in place of spans", "SeKV", {"others": "window"}),
    Switch("votes in place of spans", "SeKV", {"others": "votes"}),
    Switch("a sketch for every head", "CompressKV's retrieval scores", {"all_heads": True}),
    Switch("no sketch: spans for every head", "the token sketch", method="sekv"),
    Switch("with layer errors", "CompressKV's layer errors", {"errors": 0.5}),
    Switch("with votes for anchor heads", "HeteroCache's roles", {"others": "roles"}),
    Switch("with a tenth by the sentence's query", "SentenceKV", {"sentence": 0.1}),
    Switch("with a tenth by the retrieval head", "SpeContext", {"prior": 0.1}),
    Switch("sketch", "the sketch alone", method="sketch"),
)


def grid(samples: int, length: int, families: tuple[str, ...] = FAMILIES) -> Grid:
    """All compositions."""
    variants = [
        Variant(method=switch.method, budget=budget, label=switch.label, options=switch.options)
        for budget in BUDGETS
        for switch in SWITCHES
    ]
    return Grid(
        variants=(Variant(method="full"), *variants),
        families=families,
        lengths=(length,),
        samples=samples,
        questions_per_context=QUESTIONS,
    )


def contributions(report: Report, passages: Report) -> str:
    """Each composition against `mixed`, by budget: questions answered, and the perplexity of passages."""
    likelihood = {
        (c.cell.variant.label, c.cell.variant.budget): c.perplexity for c in passages.cells if c.perplexity is not None
    }
    found = {(s.variant.label, s.variant.budget): s for s in report.summaries}
    lines = []
    for budget in BUDGETS:
        for switch in SWITCHES:
            summary, nats = found.get((switch.label, budget)), likelihood.get((switch.label, budget))
            if summary is None:
                continue
            change = summary.ahead.get("mixed")
            lines.append(
                [
                    f"{100 * budget:g} %",
                    switch.label,
                    switch.system,
                    percent(summary.accuracy),
                    points(change),
                    "-" if nats is None else plain(nats),
                ]
            )
    whole = likelihood.get(("full", None))
    lines.append(["-", "full cache", "-", percent(found["full", None].accuracy), "-", plain(whole) if whole else "-"])
    return table(["budget", "composition", "whose part", "mean, %", "against mixed, points", "perplexity"], lines)


def roles_said(profile: Any) -> str:
    """What the line of HeteroCache's roles says under the profile that it was measured with."""
    found = [role for row in profile.info.head_taxonomy.roles for role in row]
    anchors = found.count("anchor")
    if anchors:
        return f"`with votes for anchor heads` changes {anchors} of {len(found)} KV heads."
    return (
        f"`with votes for anchor heads` changes nothing: none of the {len(found)} KV heads is an anchor by this profile's roles, so that "
        "the line is `mixed` once more, to the last digit. HeteroCache's pivots and satellites are no part of `mixed` and have no line: "
        "what they would contribute is not measured."
    )


def main() -> None:
    arguments = parser(__doc__.splitlines()[0]).parse_args()
    bench = Bench("ablation_mixed", arguments)
    report = bench.run(grid(arguments.samples or SAMPLES, arguments.length), "Parts of mixed")
    passages = bench.run(grid(PASSAGES, arguments.length, tuple(TASKS)), "Parts of mixed, perplexity", TASKS)
    write_results("ablation_mixed", report)
    write_results("ablation_mixed_perplexity", passages)
    path = write_document(
        "ablation_mixed",
        "# What each system contributes to `mixed`",
        f"{arguments.length} tokens, question asked after compression, mean over the four families; perplexity of 256 tokens of prose "
        f"that follow each of {PASSAGES} contexts, one by one. Made by `benchmarks/quality/ablation_mixed.py`. "
        "Changes are paired on the same questions, in "
        "brackets the 95 % interval, clustered by context.",
        contributions(report, passages),
        roles_said(bench.profile),
        "A part whose line is no better than `mixed` is off by default and stays as an option, for models where it does: layer "
        "errors that differ more, heads that are static, a retrieval head whose keys are one layer's of thirty and not of four. "
        "Perplexity is to be near the full cache's, not below it: a lower one says that this small model foretells prose better where "
        "what is far is gone. With `others='window'` answers are the same within the interval, further from the full cache in perplexity, "
        "and a step takes half the time: the choice where nothing but retrieval counts.",
        "## All figures",
        markdown(report),
        "## Provenance",
        provenance_of(report, passages),
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
