"""What decides how good a trained router is: its start, the ranking term, and the text.

    python benchmarks/calibration.py                   # as long as the committed profile's; a quarter of an hour on one core
    python benchmarks/calibration.py --steps 60 --length 1024 --sequences 12       # three minutes

Each variant is calibrated on the bundled model and judged on the same unseen contexts: of the teacher's attention on spans, how
much do the spans hold that the router unfolds first, when 6 % of the context's tokens may be unfolded? Once on prose, once
on haystacks with questions as queries. Writes benchmarks/results/calibration.json and docs/results/calibration.md.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from grids import RESULTS, table, write_document

from semkv import bundled
from semkv.cli.common import quiet_libraries
from semkv.evaluation import environment
from semkv.passes.assign_budgets import AssignBudgets
from semkv.passes.base import PassOptions
from semkv.pipeline import captured_program
from semkv.profiles.calibration import CalibrationSettings, bundled_data
from semkv.profiles.calibration.contexts import Context
from semkv.profiles.calibration.metrics import COVERAGE_SHARE, caught_counts, caught_shares, mass_at_cap
from semkv.profiles.calibration.parameters import SekvParameters
from semkv.profiles.calibration.train import Trainer

VARIANTS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("as shipped: square W from the identity, ranking term, prose", {}, False),
    ("as shipped, but on haystacks with questions", {}, True),
    ("without the ranking term (the paper's four losses)", {"lambda_rank": 0.0}, False),
    ("W of D/4 rows, haystacks with questions", {"router_init": "covariance"}, True),
    ("W of D/4 rows from the covariances", {"router_init": "covariance"}, False),
    ("W of D/4 rows from random values", {"router_init": "random"}, False),
)
TEXTS = ("prose", "questions")


def caught(parameters: SekvParameters, contexts: list[Context], settings: CalibrationSettings) -> float:
    """Attention on the spans that the router takes, over all attention on spans, mean over the sites."""
    sites = [int(key) for key in parameters.router]
    shares = []
    for site in sites:
        counts = [caught_counts(parameters, context, site, COVERAGE_SHARE, settings) for context in contexts]
        shares.append(caught_shares(counts)["caught"])
    return sum(shares) / len(shares)


@torch.no_grad()
def untrained(contexts: list[Context], settings: CalibrationSettings, *, oracle: bool) -> float:
    """The same for the direction of the mean key (no training), or for the attention itself."""
    shares = []
    for index in range(len(contexts[0].sites)):
        kept = total = 0.0
        for context in contexts:
            site = context.sites[index]
            keys = torch.nn.functional.normalize(site.spans.mean_k, dim=-1)
            keys = keys.repeat_interleave(site.q.shape[0] // keys.shape[0], 0)
            order = site.mass if oracle else site.q @ keys.mT
            got, everything = mass_at_cap(order, site, COVERAGE_SHARE * context.tokens, settings)
            kept, total = kept + got, total + everything
        shares.append(kept / max(total, 1e-9))
    return sum(shares) / len(shares)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("--steps", type=int, default=240)
    options.add_argument("--length", type=int, default=2048)
    options.add_argument("--sequences", type=int, default=24)
    options.add_argument("--threads", type=int, default=1)
    arguments = options.parse_args()
    quiet_libraries()
    torch.set_num_threads(arguments.threads)
    started = environment.now()
    model, tokenizer = bundled.load()
    model.requires_grad_(False)
    program = AssignBudgets().run(captured_program(model), PassOptions(method="sekv"))
    base = CalibrationSettings(
        length=arguments.length,
        max_steps=arguments.steps,
        sequences=arguments.sequences,
        held_out=2,
        learning_rate=4e-3,
    )
    unseen: dict[str, list[Context]] = {}
    for text in TEXTS:
        judged = base.model_copy(update={"seed": 1, "sequences": 1, "held_out": 8})
        data = bundled_data(tokenizer, judged, with_tasks=text == "questions")
        reader = Trainer(program, data, judged, identity="")
        unseen[text] = [reader.read(ids) for ids in data.held_out]
    rows = []
    for label, oracle in (("attention itself (oracle)", True), ("direction of the mean key, no training", False)):
        rows.append({"label": label} | {text: untrained(unseen[text], base, oracle=oracle) for text in TEXTS})
    for label, changes, with_tasks in VARIANTS:
        settings = base.model_copy(update=changes)
        data = bundled_data(tokenizer, settings, with_tasks=with_tasks)
        result = Trainer(program, data, settings, identity="").run()
        rows.append({"label": label} | {text: caught(result.parameters, unseen[text], settings) for text in TEXTS})
        print(rows[-1], f"{result.minutes:.1f} min", flush=True)
        publish(rows, base, environment.describe(started, "cpu"))


def publish(rows: list[dict[str, Any]], base: CalibrationSettings, where: environment.Environment) -> None:
    """Write what is measured so far."""
    content = {"settings": base.model_dump(mode="json"), "rows": rows, "environment": where.model_dump(mode="json")}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "calibration.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    lines = [[row["label"], *(f"{row[text]:.2f}" for text in TEXTS)] for row in rows]
    note = (
        f"Share of the teacher's attention on spans that is unfolded when {COVERAGE_SHARE:.0%} of {base.length} tokens may "
        f"be, mean over layers, 8 unseen contexts each; {base.max_steps} steps per variant. Made by "
        f"`benchmarks/calibration.py --steps {base.max_steps} --length {base.length} --sequences {base.sequences}` at commit "
        f"{where.commit} on {where.machine}."
    )
    write_document(
        "calibration",
        "# What decides how good a trained router is",
        note,
        table(["router", "prose", "questions"], lines),
    )


if __name__ == "__main__":
    main()
