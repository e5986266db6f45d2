"""All tasks by name, groups of them, and what the command line says about their options and data."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError

from semkv.errors import ConfigError
from semkv.evaluation.samples import families
from semkv.evaluation.tasks.base import OptionTask, Task
from semkv.evaluation.tasks.bundled import FamilyTask
from semkv.evaluation.tasks.gsm8k import ManyShot
from semkv.evaluation.tasks.infinitebench import HiddenNumber, KeyValues
from semkv.evaluation.tasks.longbench import LongBench
from semkv.evaluation.tasks.longbench_sets import DATA_SETS
from semkv.evaluation.tasks.longbench_v2 import LongBenchV2
from semkv.evaluation.tasks.longwriter import LongWriter
from semkv.evaluation.tasks.needle_grid import NeedleGrid
from semkv.evaluation.tasks.perplexity import Perplexity
from semkv.evaluation.tasks.ruler_common_words import RulerCommonWords
from semkv.evaluation.tasks.ruler_frequent_words import RulerFrequentWords
from semkv.evaluation.tasks.ruler_needles import RulerNeedles
from semkv.evaluation.tasks.ruler_questions import RulerQuestions
from semkv.evaluation.tasks.ruler_tracking import RulerTracking
from semkv.evaluation.tasks.sources import Source


@dataclass(frozen=True)
class Entry:
    """A task that can be asked for. make: called with name, chat, options and sources. suite: the group it is in."""

    make: Callable[..., Task]
    cls: type[Task]
    suite: str
    summary: str

    @property
    def sources(self) -> tuple[str, ...]:
        """Data that the user gives, or may give."""
        made = self.make(name="")
        return tuple(
            n for n, hint in _fields(self) if _is_source(hint) and isinstance(made, OptionTask) and made.uses(n)
        )

    @property
    def options(self) -> dict[str, Any]:
        """What `--set` may change, with the defaults."""
        made = self.make(name="")
        names = [name for name, hint in _fields(self) if not _is_source(hint) and name not in FIXED]
        return {name: getattr(made, name) for name in names}


FIXED = ("name", "chat", "dataset", "what")
"""Fields that a task's name decides, or that have an option of their own on the command line."""


def _fields(entry: Entry) -> list[tuple[str, Any]]:
    """Names and types of a task's fields."""
    cls: Any = entry.cls
    hints = typing.get_type_hints(cls)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(cls)]


def _is_source(hint: Any) -> bool:
    return Source in typing.get_args(hint)


def _entry(cls: type[Task], suite: str, summary: str, **fixed: Any) -> Entry:
    return Entry(partial(cls, **fixed), cls, suite, summary)


TASKS: dict[str, Entry] = {
    **{name: _entry(FamilyTask, "bundled", "the bundled model's facts and questions") for name in families()},
    "niah_single_1": _entry(RulerNeedles, "ruler", "a number in a repeated sentence", within="noise"),
    "niah_single_2": _entry(RulerNeedles, "ruler", "a number in prose"),
    "niah_single_3": _entry(RulerNeedles, "ruler", "a UUID in prose", value_form="uuids"),
    "niah_multikey_1": _entry(RulerNeedles, "ruler", "one of four keys in prose", keys=4),
    "niah_multikey_2": _entry(RulerNeedles, "ruler", "one key among nothing but keys", within="needles"),
    "niah_multikey_3": _entry(
        RulerNeedles,
        "ruler",
        "one UUID among nothing but UUIDs",
        within="needles",
        key_form="uuids",
        value_form="uuids",
    ),
    "niah_multivalue": _entry(RulerNeedles, "ruler", "four values of one key", values=4),
    "niah_multiquery": _entry(RulerNeedles, "ruler", "four keys asked at once", asked=4),
    "vt": _entry(RulerTracking, "ruler", "names at the end of a chain of assignments"),
    "cwe": _entry(RulerCommonWords, "ruler", "the ten common words of a list"),
    "fwe": _entry(RulerFrequentWords, "ruler", "the three most frequent coded words"),
    "qa_1": _entry(RulerQuestions, "ruler", "SQuAD's questions among paragraphs", dataset="squad"),
    "qa_2": _entry(RulerQuestions, "ruler", "HotpotQA's questions among paragraphs", dataset="hotpotqa"),
    "nq": _entry(RulerQuestions, "nq", "Natural Questions among passages of others", dataset="nq"),
    "niah": _entry(NeedleGrid, "needles", "a needle at each depth of a grid"),
    "niah_multi": _entry(NeedleGrid, "needles", "several needles asked at once", needles=4),
    "infinitebench_passkey": _entry(HiddenNumber, "infinitebench", "a pass key in a repeated sentence"),
    "infinitebench_number_string": _entry(
        HiddenNumber, "infinitebench", "ten repeated digits in a repeated sentence", what="number_string"
    ),
    "infinitebench_kv_retrieval": _entry(KeyValues, "infinitebench", "a value in a JSON object of UUIDs"),
    "gsm8k": _entry(ManyShot, "gsm8k", "a problem after many solved ones"),
    "perplexity": _entry(Perplexity, "perplexity", "likelihood of a text's next tokens, one by one"),
    **{f"longbench_{name}": _entry(LongBench, "longbench", f"LongBench's {name}", dataset=name) for name in DATA_SETS},
    "longbench_v2": _entry(LongBenchV2, "longbench_v2", "hard questions with four choices"),
    "longwriter": _entry(LongWriter, "longwriter", "answers of a required length"),
}

ENGLISH = tuple(
    f"longbench_{name}"
    for name, data in DATA_SETS.items()
    if data.metric not in ("f1_zh", "rouge_zh", "paragraph_zh") and name != "lsht"
)

GROUPS: dict[str, tuple[str, ...]] = {
    suite: tuple(name for name, entry in TASKS.items() if entry.suite == suite)
    for suite in dict.fromkeys(entry.suite for entry in TASKS.values())
    if suite not in TASKS
} | {"longbench_en": ENGLISH}

SOURCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "haystack": ("a text to hide needles in", ()),
    "text": ("a text for perplexity", ()),
    "words": ("words for cwe, one per line", ()),
    "squad": ("SQuAD's JSON or rows", ("squad_v2/validation-00000-of-00001.parquet",)),
    "hotpotqa": ("HotpotQA's JSON or rows", ("distractor/validation-00000-of-00001.parquet",)),
    "nq": ("Natural Questions, each with its passage", ()),
    "gsm8k": ("problems to solve", ("main/test-00000-of-00001.parquet",)),
    "gsm8k_train": ("solved problems to show", ("main/train-00000-of-00001.parquet",)),
    "longbench": ("LongBench's NAME.jsonl files, a folder or .zip", ("data.zip",)),
    "longbench_v2": ("LongBench v2's rows", ("data.json",)),
    "longwriter": ("instructions with a required length", ()),
}
"""What `--source` takes: what it is, and the file that is taken from a Hub data set where none is named."""


def task_names(asked: Sequence[str]) -> tuple[str, ...]:
    """Names and groups as names, each once. Raises ConfigError for one that is neither."""
    found: list[str] = []
    for name in asked:
        if name not in TASKS and name not in GROUPS:
            raise ConfigError(
                f"unknown task {name!r}; there are the groups {', '.join(GROUPS)} and the tasks that `semkv tasks` lists"
            )
        found += GROUPS.get(name, (name,))
    return tuple(dict.fromkeys(found))


def build_tasks(
    names: Sequence[str],
    *,
    sources: Mapping[str, str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    chat: bool = False,
) -> dict[str, Task]:
    """Tasks by name.

    Parameters
    ----------
    names: tasks or groups. sources: places by the keys of `SOURCES`. options: values by task (or group) and option.
    chat: write prompts by the tokenizer's chat template, where a benchmark uses one.

    Raises ConfigError for an unknown name, source or option, or a value of another type.
    """
    wanted = task_names(names)
    for key in sources or {}:
        if key not in SOURCES:
            raise ConfigError(f"--source {key}: unknown; there are: {', '.join(SOURCES)}")
    places = {key: Source(key, place, SOURCES[key][1]) for key, place in (sources or {}).items()}
    changed: dict[str, dict[str, Any]] = {name: {} for name in wanted}
    for target, values in (options or {}).items():
        for name in task_names([target]):
            if name not in changed:
                raise ConfigError(f"--set {target}: the task {name} is not among those asked for: {', '.join(wanted)}")
            changed[name].update({option: _value(name, option, value) for option, value in values.items()})
    return {name: _build(name, changed[name], places, chat) for name in wanted}


def _build(name: str, options: dict[str, Any], places: Mapping[str, Source], chat: bool) -> Task:
    entry = TASKS[name]
    if not issubclass(entry.cls, OptionTask):
        return entry.make(name=name)
    used = {key: places[key] for key in entry.sources if key in places}
    return entry.make(name=name, chat=chat, **{**options, **used})


def _value(name: str, option: str, value: Any) -> Any:
    """An option's value in its type."""
    entry = TASKS[name]
    known = entry.options
    if option not in known:
        there = f"there are: {', '.join(known)}" if known else "it has none"
        raise ConfigError(f"--set {name}.{option}: no such option; {there}")
    try:
        return TypeAdapter(dict(_fields(entry))[option]).validate_python(value)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(f"--set {name}.{option}={value}: {problem}; the default is {known[option]!r}") from error
