"""What documents say about defaults and commands is what the code has."""

from __future__ import annotations

import re
from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import pytest

from semkv.config import CompileConfig
from semkv.methods import METHODS

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| ", re.MULTILINE)


def _section(page: str, heading: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert f"\n## {heading}\n" in text, f"{page} has no section {heading!r}"
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def _value(text: str) -> object:
    text = text.strip("`")
    if text in ("()", "None"):
        return () if text == "()" else None
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"\d+/\d+", text):
        return pytest.approx(float(Fraction(text)))
    return float(text) if re.fullmatch(r"-?[\d.]+", text) else text


@pytest.mark.parametrize("name", list(METHODS))
def test_parameters_of_methods(name: str) -> None:
    section = _section("docs/methods.md", name)
    documented = {match[1]: _value(match[2]) for match in ROW.finditer(section)}
    defaults = {field.name: field.default for field in fields(METHODS[name])}
    assert list(documented) == list(defaults)
    assert {key: value for key, value in defaults.items() if value != documented[key]} == {}


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.compresses])
def test_smallest_budgets(name: str) -> None:
    stated = re.search(r"Smallest\s+budget: (\d+)", _section("docs/methods.md", name))
    assert stated
    assert int(stated[1]) == METHODS[name].minimum_tokens


def test_settings_of_a_compilation() -> None:
    documented = {match[1]: match[2] for match in ROW.finditer(_section("docs/quickstart.md", "Settings"))}
    assert list(documented) == list(CompileConfig.model_fields)
    for name, text in documented.items():
        default = CompileConfig.model_fields[name].default
        if isinstance(default, (int, str)):
            assert text.strip("`") == str(default)


def test_passes_are_documented_in_order() -> None:
    from semkv.compiler.pipeline import AMONG_RANKS, LOWER, ON_LATENTS, PLACE, UNDERSTAND

    rows = re.findall(
        r"^\| [\w →]+ \| `(\w+)` \| ", _section("docs/architecture.md", "From a model to a program"), re.MULTILINE
    )
    assert rows == [step.name for step in (*UNDERSTAND, *ON_LATENTS, *AMONG_RANKS, *LOWER, *PLACE)]


def test_every_command_has_a_row() -> None:
    from semkv.cli.main import app

    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert [c.name for c in app.registered_commands if f"`semkv {c.name}" not in page] == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = [
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md") if path.name != "README.md"
    ]
    assert [page for page in pages if f"]({page})" not in index and f"`{page}`" not in index] == []


def test_the_results_in_the_readme_are_the_committed_ones() -> None:
    from benchmarks.quality import readme_table

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme_table.filled(text) == text, "run `python -m benchmarks.quality.readme_table`"
