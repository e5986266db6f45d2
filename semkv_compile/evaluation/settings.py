"""What is evaluated: variants of a compiled model, and the grid of cells."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from semkv.config import check_budget
from semkv.errors import ConfigError
from semkv.methods import METHODS, find_method
from semkv.methods.auto import AUTO, measured_best
from semkv.profiles.schema import Profile
from semkv.settings import Settings

QuestionMode = Literal["unseen", "seen"]


class Variant(Settings):
    """One way to hold the memory: a method at a budget.

    Parameters
    ----------
    method: name of the method. `full` keeps everything and takes no budget.
    budget: fraction of the full KV (float) or tokens per KV head and layer (int).
    options: the method's options, `{"router": "oracle"}` for example.
    label: what tables and plots call it; the method's name by default.
    """

    method: str
    budget: int | float | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    label: str = ""

    @field_validator("budget", mode="before")
    @classmethod
    def _valid_budget(cls, value: int | float | None) -> int | float | None:
        return check_budget(value)

    @model_validator(mode="before")
    @classmethod
    def _default_label(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("label"):
            data = {**data, "label": data.get("method", "")}
        return data

    @property
    def budget_text(self) -> str:
        """`10 %`, `128 tokens`, or `-` without a budget."""
        if self.budget is None:
            return "-"
        return f"{self.budget} tokens" if isinstance(self.budget, int) else f"{100 * self.budget:g} %"


class Cell(Settings):
    """One variant on one family at one length and question mode, of one model: what a result belongs to.

    subject: fingerprint of model, profile and dtypes. parameters: all of the method's, defaults included, so that a new
    default is another cell. seed, questions_per_context: how its samples are drawn. task: options and data of a task
    (digests of its sources); None for the bundled families, whose name says all.
    """

    variant: Variant
    family: str
    length: int
    question: QuestionMode
    subject: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    seed: int
    questions_per_context: int
    task: dict[str, Any] | None = None

    @property
    def key(self) -> str:
        """Hash of everything that decides the result; the label does not."""
        settings = self.model_dump(mode="json")
        settings["variant"].pop("label")
        if self.task is None:
            settings.pop("task")
        text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Plan:
    """How many questions a cell asks: `samples` in all, `per_context` of each context."""

    samples: int
    per_context: int

    @property
    def contexts(self) -> int:
        """Contexts that hold all questions."""
        return -(-self.samples // self.per_context)

    def asked(self, index: int) -> int:
        """Questions asked of context `index`; the last context may have fewer than the others."""
        return min(self.per_context, self.samples - index * self.per_context)


class Grid(Settings):
    """All cells of a run.

    families: names of tasks, the bundled families among them. samples: questions per cell. questions_per_context: how
    many are asked of one context, where a task's questions can share one. agreement: also compare each token of an answer with the
    full cache's, which must be among the variants (`semkv.evaluation.agreement`). mass: also measure the far attention that a choice
    catches (`semkv.evaluation.attention_mass`); steps are slower then.
    """

    variants: tuple[Variant, ...] = Field(min_length=1)
    families: tuple[str, ...] = Field(min_length=1)
    lengths: tuple[int, ...] = Field(min_length=1)
    questions: tuple[QuestionMode, ...] = ("unseen",)
    samples: int = Field(default=50, ge=1)
    questions_per_context: int = Field(default=4, ge=1)
    seed: int = Field(default=0, ge=0)
    agreement: bool = False
    mass: bool = False

    @model_validator(mode="after")
    def _full_is_there(self) -> Grid:
        if self.agreement and not any(variant.method == "full" for variant in self.variants):
            raise ConfigError("agreement is with the full cache: name `full` among the methods")
        return self

    def plan(self, most: int | None = None, available: int | None = None) -> Plan:
        """The questions of a cell whose task lets `most` share a context and has `available` in all; None: any."""
        per_context = self.questions_per_context if most is None else min(most, self.questions_per_context)
        return Plan(self.samples if available is None else min(available, self.samples), per_context)

    @property
    def contexts(self) -> int:
        """Contexts per family and length."""
        return self.plan().contexts

    def asked(self, index: int) -> int:
        """Questions asked of context `index`; the last context may have fewer than the others."""
        return self.plan().asked(index)


def settle_auto(variants: Iterable[Variant], profile: Profile | None) -> tuple[Variant, ...]:
    """`variants` with the method that the profile measured to be best in place of `auto`, under its label.

    Raises ConfigError where there is no profile, or none with measured methods.
    """
    return tuple(
        variant.model_copy(update={"method": measured_best(profile, variant.budget)})
        if variant.method == AUTO
        else variant
        for variant in variants
    )


def build_variants(
    methods: list[str] | tuple[str, ...],
    budgets: list[int | float] | tuple[int | float, ...],
    generated: Sequence[str] = ("budgeted",),
) -> tuple[Variant, ...]:
    """`full` once without a budget, every other method at every budget, in the order given, and in every mode of `generated` that it has.

    Raises
    ------
    ConfigError: `kept` is the only mode and a method does not have it; names the method.
    """
    variants: list[Variant] = []
    for method in dict.fromkeys(methods):
        if method == "full":
            variants.append(Variant(method=method))
            continue
        for mode in dict.fromkeys(generated):
            options = {} if mode == "budgeted" else {"generated": mode}
            if options and "budgeted" in generated and not _has_modes(method):
                continue
            if options and method == AUTO:
                raise ConfigError(
                    f"generated {mode!r} with {AUTO!r}, which was measured with generated tokens in the budget: name the methods instead"
                )
            if options:
                find_method(method, options)
            label = f"{method}, {mode}" if options else method
            variants += [Variant(method=method, budget=x, label=label, options=options) for x in dict.fromkeys(budgets)]
    return tuple(variants)


def _has_modes(method: str) -> bool:
    """Whether what follows a prompt may stay exact beside the method's budget."""
    return method in METHODS and hasattr(find_method(method), "generated")
