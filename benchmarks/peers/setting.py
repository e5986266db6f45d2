"""What is compared: the grid of both sides, and where its files are."""

from __future__ import annotations

from grids import FAMILIES, LENGTH, ROOT

from semkv.evaluation import Grid, Variant

FOLDER = ROOT / "runs" / "peers"
BUDGETS = (0.03, 0.05, 0.1)
SAMPLES = 100
THEIR_SNAPKV = {"window": 64, "kernel": 5, "pool": "mean"}
"""The defaults of kvpress's SnapKVPress, for our own `snapkv`."""
THEIR_PYRAMIDKV = {"kernel": 5, "pool": "mean"}
"""The pooling of kvpress's presses, for our own `pyramidkv`, whose window is 8."""
OURS = (
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


def label(method: str, options: dict[str, object]) -> str:
    """`snapkv`, or `snapkv (window 64)` where options are not the defaults."""
    return method + (f" ({', '.join(f'{name} {value}' for name, value in options.items())})" if options else "")


def grid() -> Grid:
    """The full cache, and our methods at each budget: the first contexts of the grid of `benchmarks/quality.py`."""
    variants = [
        Variant(method=method, budget=budget, options=options, label=label(method, options))
        for method, options in OURS
        for budget in BUDGETS
    ]
    return Grid(
        variants=(Variant(method="full"), *variants),
        samples=SAMPLES,
        families=FAMILIES,
        lengths=(LENGTH,),
        questions_per_context=4,
    )
