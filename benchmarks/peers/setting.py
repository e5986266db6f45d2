"""What is compared: the grid of both sides, and where its files are."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.lib.grids import FAMILIES, LENGTH
from benchmarks.lib.places import ROOT
from semkv import bundled
from semkv.evaluation import Grid, Variant
from semkv.evaluation.settings import settle_auto

HERE = Path(__file__).resolve().parent
FOLDER = ROOT / "runs" / "peers"
BUDGETS = (0.03, 0.05, 0.1)
SAMPLES = 100
THEIR_SNAPKV = {"window": 64, "kernel": 5, "pool": "mean"}
"""The defaults of kvpress's SnapKVPress, for our own `snapkv`."""
THEIR_PYRAMIDKV = {"kernel": 5, "pool": "mean"}
"""The pooling of kvpress's presses, for our own `pyramidkv`, whose window is 8."""
OURS = (
    ("auto", {}),
    ("mixed", {}),
    ("sketch", {}),
    ("sekv", {}),
    ("specontext", {"strict": True}),
    ("snapkv", {}),
    ("snapkv", THEIR_SNAPKV),
    ("pyramidkv", {}),
    ("pyramidkv", THEIR_PYRAMIDKV),
    ("chunkkv", {}),
    ("chunkkv", {"reuse": 1}),
    ("chunkkv", {"chunk": 20, "reuse": 1, "window": 64}),
    ("streaming_llm", {}),
    ("omnikv", {"strict": True}),
)

ON_TOP = (("streaming_llm", {}), ("snapkv", THEIR_SNAPKV), ("pyramidkv", THEIR_PYRAMIDKV))
"""Our methods that are also measured as presses count: at the budget of the context alone, question and answer on top."""


def label(method: str, options: dict[str, object]) -> str:
    """`snapkv`, or `snapkv (window 64)` where options are not the defaults."""
    return method + (f" ({', '.join(f'{name} {value}' for name, value in options.items())})" if options else "")


def label_on_top(method: str, options: dict[str, object]) -> str:
    """The label of a method with question and answer on top of its budget."""
    return f"{label(method, options)}, question on top"


def tokens_on_top(budget: float) -> int:
    """The budget in tokens that holds as many of the context's tokens as a press keeps at `budget`, and what is on top for it.

    On top: the longest question with its answer (16 tokens), each token's position (4 bytes beside the 256 of its key and value
    in float16) and a page that is not full (8 tokens).
    """
    return math.ceil((budget * LENGTH + 16) * (1 + 4 / 256)) + 8


def share_of(budget: int | float | None) -> float | None:
    """The budget at which a variant stands beside the presses."""
    return next((b for b in BUDGETS if budget == tokens_on_top(b)), budget)


def grid() -> Grid:
    """The full cache, and our methods at each budget: the first contexts of the grid of `benchmarks/quality/quality.py`."""
    variants = [
        Variant(method=method, budget=budget, options=options, label=label(method, options))
        for method, options in OURS
        for budget in BUDGETS
    ]
    variants += [
        Variant(method=method, budget=tokens_on_top(budget), options=options, label=label_on_top(method, options))
        for method, options in ON_TOP
        for budget in BUDGETS
    ]
    return Grid(
        variants=(Variant(method="full"), *settle_auto(variants, bundled.profile())),
        samples=SAMPLES,
        families=FAMILIES,
        lengths=(LENGTH,),
        questions_per_context=4,
    )


def kvpress_versions() -> list[str]:
    """What is installed on kvpress's side, as pip writes it."""
    lines = (HERE / "requirements-kvpress.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "==" in line]
