"""What the five systems' papers say of them and their parts, and all that `systems.py` measures of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.claims import Way
from benchmarks.quality.ablations import GRIDS, SWITCHES
from semkv.evaluation import Variant
from semkv.evaluation.settings import QuestionMode

BUDGETS = (0.05, 0.1, 0.2, 0.5)
SWITCHED = 0.1
"""Where a paper's parts are switched."""
WHOLE = 0.5
"""Where HeteroCache's are, whose whole heads no smaller budget holds."""
KEPT = {"generated": "kept"}
RECOVERABLE = {"recoverable": True}
STRICT = {"strict": True}
LIVE = {"tau_drift": 0.5}
"""HeteroCache's trigger where roles are told apart by other thresholds, which it would follow."""

Lines = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Label to method and options."""

MODES: Lines = {
    "sekv": ("sekv", {}),
    "sekv, paper": ("sekv", {"preset": "paper"}),
    "heterocache, strict": ("heterocache", STRICT),
    "heterocache": ("heterocache", {}),
    "heterocache, paper": ("heterocache", KEPT),
    "sentencekv": ("sentencekv", {}),
    "sentencekv, recoverable": ("sentencekv", RECOVERABLE),
    "sentencekv, paper": ("sentencekv", KEPT),
    "compresskv": ("compresskv", {}),
    "compresskv, recoverable": ("compresskv", RECOVERABLE),
    "compresskv, paper": ("compresskv", KEPT | {"recent": 0}),
    "specontext, strict": ("specontext", STRICT),
    "specontext, paper": ("specontext", {}),
    "snapkv": ("snapkv", {}),
    "snapkv, paper": ("snapkv", KEPT),
    "pyramidkv": ("pyramidkv", {}),
    "pyramidkv, paper": ("pyramidkv", KEPT),
    "cake, paper": ("cake", KEPT),
    "omnikv, strict": ("omnikv", STRICT),
    "streaming_llm": ("streaming_llm", {}),
    "h2o": ("h2o", {}),
    "chunkkv": ("chunkkv", {}),
    "quest": ("quest", {}),
    "clusterkv": ("clusterkv", {}),
    "shadowkv": ("shadowkv", {}),
    "sketch": ("sketch", {}),
}
"""Measured at every budget. `paper`: the paper's own mode; the others hold generated tokens within the budget."""

CHUNK = 16
"""Tokens of an equal chunk, where no profile says how long a sentence is."""
FACTORS = (1.0, 2.0, 3.0, 5.0, 8.0)
THRESHOLDS = tuple((stable, similar) for stable in (0.3, 0.5, 0.7) for similar in (0.3, 0.5, 0.7))
HEADS: dict[int, Way] = {2: "lower", 6: "equal"}
"""By heads of a layer that choose, what CompressKV's Table 2 says against 4."""


def ranked(factor: float) -> str:
    """The label of one value of SentenceKV's r."""
    return f"sentencekv, r = {factor:g}"


def thresholds(stable: float, similar: float) -> str:
    """The label of one pair of HeteroCache's thresholds."""
    return f"heterocache, tau {stable:g} and {similar:g}"


@dataclass(frozen=True)
class Said:
    """One sentence of a paper: `label` goes `way` against `base`, asked in one mode, at these budgets."""

    label: str
    base: str
    way: Way
    text: str
    question: QuestionMode = "unseen"
    budgets: tuple[float, ...] = (SWITCHED,)


def behind(system: str, others: Sequence[str], text: str, question: QuestionMode) -> tuple[Said, ...]:
    """That the others answer less than a system, at every budget."""
    return tuple(Said(other, system, "lower", text, question, BUDGETS) for other in others)


SWITCHED_LINES: dict[str, Lines] = {
    "SeKV": {
        f"sekv, paper, {switch.label}": ("sekv", {"preset": "paper"} | switch.options) for switch in (*SWITCHES, *GRIDS)
    },
    "HeteroCache": {
        "heterocache, strict, uniform allocation": ("heterocache", STRICT | {"uniform": True}),
        "heterocache, strict, no retrieval": ("heterocache", STRICT | {"retrieval": False}),
        **{
            thresholds(*pair): ("heterocache", STRICT | LIVE | {"tau_stable": pair[0], "tau_similar": pair[1]})
            for pair in THRESHOLDS
        },
    },
    "SentenceKV": {
        "sentencekv, equal chunks": ("sentencekv", RECOVERABLE | {"buckets": "chunks", "chunk": CHUNK}),
        "sentencekv, token query": ("sentencekv", RECOVERABLE | {"query": "token"}),
        **{ranked(factor): ("sentencekv", {"r": factor}) for factor in FACTORS},
    },
    "CompressKV": {
        "compresskv, paper, all heads, uniform": (
            "compresskv",
            KEPT | {"recent": 0, "selection": "all", "allocation": "uniform"},
        ),
        "compresskv, paper, uniform": ("compresskv", KEPT | {"recent": 0, "allocation": "uniform"}),
        **{
            f"compresskv, paper, {count} heads": ("compresskv", KEPT | {"recent": 0, "heads": count}) for count in HEADS
        },
    },
    "SpeContext": {
        "specontext, strict, one choice": ("specontext", STRICT | {"selection": "batch"}),
        "specontext, each layer": ("specontext", {"retrieval": "layers"}),
    },
}
"""By system, what is measured at `SWITCHED` alone."""

WHOLE_LINES: Lines = {
    "heterocache, paper, uniform allocation": ("heterocache", KEPT | {"uniform": True}),
    "heterocache, paper, no retrieval": ("heterocache", KEPT | {"retrieval": False}),
}
"""And at `WHOLE` alone."""

TABLE_4 = ("uniform allocation: Qasper -1.0 (Table 4)", "without retrieval: Qasper -0.7 (Table 4)")
SAID: dict[str, tuple[Said, ...]] = {
    "SeKV": (
        *behind(
            "sekv, paper",
            ("streaming_llm", "snapkv, paper", "pyramidkv, paper", "chunkkv", "sentencekv, paper"),
            "the others answer less, at 10 % (Table 1)",
            "unseen",
        ),
        *(
            Said(
                f"sekv, paper, {switch.label}",
                "sekv, paper" if switch.base == "paper" else f"sekv, paper, {switch.base}",
                "lower" if switch.niah < 0 else "higher",
                f"NIAH {switch.niah:+.1f}, RULER {switch.ruler:+.1f} (Table {5 if switch in SWITCHES else 7})",
            )
            for switch in (*SWITCHES, *GRIDS)
            if switch.niah
        ),
    ),
    "HeteroCache": (
        *behind(
            "heterocache, paper",
            ("quest", "shadowkv", "omnikv, strict", "cake, paper"),
            "the others answer less, at 30 and 50 % (Tables 1, 2)",
            "unseen",
        ),
        Said("heterocache, strict, uniform allocation", "heterocache, strict", "lower", TABLE_4[0]),
        Said("heterocache, strict, no retrieval", "heterocache, strict", "lower", TABLE_4[1]),
        Said(
            "heterocache, paper, uniform allocation",
            "heterocache, paper",
            "lower",
            TABLE_4[0],
            budgets=(WHOLE,),
        ),
        Said(
            "heterocache, paper, no retrieval",
            "heterocache, paper",
            "lower",
            TABLE_4[1],
            budgets=(WHOLE,),
        ),
        *(
            Said(thresholds(*pair), thresholds(0.5, 0.5), "equal", "hardly depends on thresholds (Fig. 5)")
            for pair in THRESHOLDS
            if pair != (0.5, 0.5)
        ),
    ),
    "SentenceKV": (
        *behind(
            "sentencekv, paper",
            ("h2o", "snapkv, paper", "quest", "shadowkv"),
            "the others answer less (Table 1, Fig. 4)",
            "seen",
        ),
        Said(
            "sentencekv, equal chunks",
            "sentencekv, recoverable",
            "lower",
            "equal chunks: LongBench -0.5 to -3.0 (Table 3)",
        ),
        Said(
            "sentencekv, token query",
            "sentencekv, recoverable",
            "lower",
            "a token's query: below at every r (Fig. 6)",
        ),
        *(
            Said(
                ranked(factor),
                ranked(3.0),
                "equal" if factor in (2.0, 5.0) else "lower",
                "rises with r, then falls (Fig. 6)",
            )
            for factor in FACTORS
            if factor != 3.0
        ),
    ),
    "CompressKV": (
        *behind(
            "compresskv, paper",
            ("streaming_llm", "snapkv, paper", "pyramidkv, paper", "cake, paper"),
            "the others answer less (Tables 1, 5)",
            "seen",
        ),
        Said(
            "compresskv, paper, all heads, uniform",
            "compresskv, paper, uniform",
            "lower",
            "selection adds to SnapKV (Table 3)",
            "seen",
        ),
        Said(
            "compresskv, paper, uniform",
            "compresskv, paper",
            "lower",
            "allocation adds to selection (Table 3)",
            "seen",
        ),
        *(
            Said(f"compresskv, paper, {count} heads", "compresskv, paper", way, "numbers of heads (Table 2)", "seen")
            for count, way in HEADS.items()
        ),
    ),
    "SpeContext": (
        *(
            Said(
                other,
                "specontext, paper",
                "equal",
                "on a par with Quest, ClusterKV, ShadowKV (Sec. 7.2)",
                budgets=BUDGETS,
            )
            for other in ("quest", "clusterkv", "shadowkv")
        ),
        Said(
            "specontext, strict, one choice",
            "specontext, strict",
            "lower",
            "head level above batch level (Fig. 5a)",
        ),
        Said(
            "specontext, each layer",
            "specontext, strict",
            "equal",
            "one selection before the pass keeps accuracy (Sec. 7.2)",
        ),
    ),
}


def variants(
    question: QuestionMode | None = None,
    chunk: int = CHUNK,
    asked: Sequence[float] = BUDGETS,
    *,
    modes: bool = False,
) -> tuple[Variant, ...]:
    """All that is measured at the budgets `asked`, `full` first; of one question mode the switches that something is said of in it,
    or the modes alone. chunk: see `CHUNK`."""
    lines: list[tuple[str, tuple[str, Mapping[str, Any]], tuple[float, ...]]]
    lines = [(label, line, BUDGETS) for label, line in MODES.items()]
    lines += [(label, line, (SWITCHED,)) for own in SWITCHED_LINES.values() for label, line in own.items()]
    lines += [(label, line, (WHOLE,)) for label, line in WHOLE_LINES.items()]
    named = {one.label for said in SAID.values() for one in said if question in (None, one.question)}
    named |= {one.base for said in SAID.values() for one in said if question in (None, one.question)}
    named = set() if modes else named
    return (
        Variant(method="full"),
        *(
            Variant(
                method=method,
                budget=budget,
                label=label,
                options=dict(options) | ({"chunk": chunk} if "chunk" in options else {}),
            )
            for label, (method, options), budgets in lines
            if label in MODES or label in named
            for budget in budgets
            if budget in asked
        ),
    )
