"""What a method is: a name, its parameters, and the components that it composes for the runtime."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.methods.options import Allowed
from semkv.profiles.schema import Profile
from semkv.profiles.schema.codes import KeyBalance
from semkv.profiles.schema.retrieval_head import RetrievalHead
from semkv.runtime.budgets.budget import Budget
from semkv.runtime.components import Components, Generated, Part, Plan


@dataclass(frozen=True)
class Method(ABC):
    """A way to hold a long context in a small memory; subclasses are frozen dataclasses of its parameters.

    name: under which `semkv.compile(method=...)` finds it. compresses: whether it needs a budget. minimum_tokens: the
    smallest budget that it can live in, in tokens per KV head and layer. keeps_less: the option, as it is written, with which a method
    that keeps parts whole keeps less. needs_indexer: whether it serves only models that choose
    themselves which tokens attention reads. presets: values of several options under one name, which
    `with_options({"preset": NAME})` sets; options given beside it have the last word.

    Fields have types of `semkv.methods.options`, which say
    what they may be; what follows from several fields, a subclass checks in its `__post_init__`, after this one's.
    """

    name: ClassVar[str]
    compresses: ClassVar[bool] = True
    minimum_tokens: ClassVar[int] = 0
    keeps_less: ClassVar[str] = ""
    needs_indexer: ClassVar[bool] = False
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __post_init__(self) -> None:
        for name, allowed in _bounds(type(self)).items():
            if not allowed(getattr(self, name)):
                raise self.wrong(name, allowed.expected)

    def wrong(self, name: str, expected: str) -> ConfigError:
        """The error for option `name`, whose value is not what was `expected`."""
        return ConfigError(f"option {name!r} of method {self.name!r} is {getattr(self, name)!r}; expected {expected}")

    def plan(self, program: Program, profile: Profile | None) -> Plan:
        """The method for this model. By default all KV heads of all stores share one composition, `components`."""
        components = self.components(program, profile)
        stores = [site for site in program.stores if site.treatment == "method"]
        return Plan({site.store: (Part(0, site.kv_heads, components),) for site in stores})

    @abstractmethod
    def components(self, program: Program, profile: Profile | None) -> Components:
        """The composition for this model; `ConfigError` where the profile lacks what the method needs."""

    def for_budget(self, program: Program, profile: Profile | None, budget: Budget) -> Method:
        """This method with what it leaves open decided for `budget`; called before all else of it. Default: itself."""
        return self

    def layer_shares(self, program: Program, profile: Profile | None) -> tuple[float, ...] | None:
        """One positive weight per store of `program.stores`, by which layers divide the budget; None: evenly."""
        return None

    def head_roles(self, program: Program, profile: Profile | None) -> tuple[tuple[str, ...], ...] | None:
        """For each store of `program.stores` a role per KV head, heads of one role being put side by side; None: as they are."""
        return None

    def retrieval_head(self, profile: Profile | None) -> RetrievalHead | None:
        """The head that chooses tokens before the first layer, put in front of the program; None: it has none."""
        return None

    def key_balance(self, program: Program, profile: Profile | None) -> dict[int, KeyBalance] | None:
        """By store, a map of keys of all KV heads after which few bits hold more of them; None: keys are held as the model makes them."""
        return None

    shares_heads: ClassVar[bool] = True
    """Whether processes may share the heads of a layer (docs/parallel.md)."""
    divides_heads: ClassVar[bool] = False
    """Whether KV heads of a layer have budgets of their own, which processes that share them are to hold evenly."""

    def check(self, profile: Profile | None) -> None:  # noqa: B027 - most methods need nothing
        """Raise `ConfigError` where `profile` lacks what the method needs: called before any work."""

    def notes(self, profile: Profile | None) -> tuple[str, ...]:
        """What `semkv.explain` says of the method beside its name: choices that it made itself."""
        return ()

    def with_options(self, options: dict[str, Any]) -> Method:
        """A copy with `options` set, `preset` among them; `ConfigError` names an unknown one and lists those there are."""
        known = {field.name: field for field in fields(self)}
        options = self._preset(options)
        for name, value in options.items():
            if name not in known and name == "generated":
                raise ConfigError(
                    f"method {self.name!r} has no option 'generated', which is {value!r}: it treats tokens that follow a prompt like the "
                    "prompt's, as they come; methods that compress a prompt once have a choice, such as snapkv and compresskv"
                )
            if name not in known:
                listed = ", ".join(known) or "none"
                raise ConfigError(f"method {self.name!r} has no option {name!r} (it has: {listed})")
            problem = _problem(value, getattr(self, name), get_type_hints(type(self))[name])
            if problem:
                raise ConfigError(f"option {name!r} of method {self.name!r} is {value!r}; expected {problem}")
        return type(self)(**{**{name: getattr(self, name) for name in known}, **options})

    def _preset(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """`options` with those that their `preset` stands for in its place."""
        given = dict(options)
        if "preset" not in given:
            return given
        name = given.pop("preset")
        if name not in self.presets:
            there = (
                f"one of {', '.join(map(repr, self.presets))}" if self.presets else "no preset: this method has none"
            )
            raise ConfigError(f"option 'preset' of method {self.name!r} is {name!r}; expected {there}")
        return {**self.presets[name], **given}


@dataclass(frozen=True)
class OncePerPrompt(Method):
    """A method whose paper compresses a prompt once and keeps what follows it. generated: see `semkv.runtime.components.Generated`."""

    generated: Generated = field(default="budgeted", kw_only=True)

    def plan(self, program: Program, profile: Profile | None) -> Plan:
        return replace(super().plan(program, profile), generated=self.generated)


@cache
def _bounds(kind: type[Method]) -> dict[str, Allowed]:
    """What the fields of a method may be, of those whose types say so."""
    hints = get_type_hints(kind, include_extras=True)
    stated = {field.name: hints[field.name] for field in fields(kind) if get_origin(hints[field.name]) is Annotated}
    return {name: bound for name, hint in stated.items() for bound in get_args(hint) if isinstance(bound, Allowed)}


def _problem(value: Any, default: Any, hint: Any) -> str:
    """What was expected instead of `value`, in words; empty where it is fine."""
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return "" if value in choices else f"one of {', '.join(map(repr, choices))}"
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "True or False"
    if isinstance(default, int):
        return (
            ""
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0
            else f"a whole number like {default}"
        )
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return "" if number or not isinstance(default, float) else f"a number like {default:.3g}"
