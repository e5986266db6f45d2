"""What pages name in a sentence is there: `semkv.compile` and its like can be imported, and `benchmarks/quality/grid.py` is a file."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from semkv.ir.memory import GRAPH_FUNCTIONS

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"semkv(\.\w+)+")
FILE = re.compile(r"(?:semkv_compile|passes|kernels|profiles|benchmarks|tests|docs|examples)/[\w./-]*")
PLACEHOLDER = re.compile(r"(?<![A-Za-z])[A-Z]{3,}(?![a-z])")
"""NAME, OPERATION: what a reader puts in; README is none."""


def is_there(name):
    """Whether a dotted name is a module, or what a module holds."""
    value = importlib.import_module("semkv")
    path = "semkv"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if hasattr(value, part):
            value = getattr(value, part)
            continue
        try:
            value = importlib.import_module(path)
        except ModuleNotFoundError:
            return False
    return True


def missing(page):
    """Names and files of a page that are not there; `GRAPH_FUNCTIONS` are names within artifacts."""
    found = []
    for text in page.inline:
        name, file = NAME.match(text), FILE.fullmatch(text)
        if PLACEHOLDER.search(text.removesuffix("README.md")):
            continue
        if (name and name[0] not in GRAPH_FUNCTIONS and not is_there(name[0])) or (file and not (ROOT / text).exists()):
            found.append(text)
    return found


def test_what_is_named_is_there(page):
    assert missing(page) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("semkv.compile(model, budget=0.1)", True),
        ("semkv.profiles.schema.roles.head_roles", True),
        ("semkv.memory.record", True),
        ("semkv.compiled_model", False),
        ("semkv.profiles.schema.roles.heads", False),
        ("semkv.runtimes", False),
        ("benchmarks/quality/grid.py", True),
        ("docs/results/", True),
        ("benchmarks/grind.py", False),
        ("kernels/attention/template.py", False),
        ("semkv.kernels.OPERATION", True),
        ("a semkv.nothing in a sentence", True),
    ],
)
def test_what_is_missing_is_found(read, text, found):
    assert missing(read(f"It is `{text}`.\n")) == ([] if found else [text])
