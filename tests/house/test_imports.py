"""Imports between the parts of semkv run one way; the order is that of docs/architecture.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"semkv_compile": (), "passes": ("passes",), "kernels": ("kernels",), "profiles": ("profiles",)}

ORDER: tuple[tuple[str, ...], ...] = (
    ("errors", "profiles"),
    ("settings", "io", "model"),
    ("config", "ir", "profiles.bundled"),
    ("profiles.schema",),
    ("passes", "kernels", "artifact"),
    ("capture", "runtime"),
    ("methods", "compiler"),
    ("live", "export"),
    ("generation",),
    ("compile",),
    ("profiles.calibration", "evaluation", "planning", "serving"),
    ("cli",),
)
"""A part may import from itself and from the lines above its own."""

COMPILE = ("", "api", "backend", "bundled", "compiled", "describe", "loading")
"""Modules that together are the part `compile`, the public surface; "" is `semkv` itself."""

FOREIGN = {
    "triton": ("kernels",),
    "matplotlib": ("evaluation", "cli"),
    "typer": ("cli",),
    "vllm": ("serving",),
    "onnx": (),
    "onnx_ir": ("export",),
    "pickle": (),
}
"""Packages that only these parts may import."""


def _modules() -> Iterator[tuple[str, Path]]:
    """(module without the leading `semkv.`, file) of every module of the package."""
    for folder, prefix in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join(prefix + (parts[:-1] if parts[-1] == "__init__" else parts)), path


MODULES = dict(_modules())
PARTS = {part for line in ORDER for part in line}
LEVEL = {part: level for level, line in enumerate(ORDER) for part in line}


def part_of(module: str) -> str:
    """The part that a module (without the leading `semkv.`) belongs to."""
    if module in COMPILE:
        return "compile"
    pieces = module.split(".")
    for length in (2, 1):
        if ".".join(pieces[:length]) in PARTS:
            return ".".join(pieces[:length])
    raise AssertionError(f"semkv.{module} belongs to no part: add it to ORDER in {Path(__file__).name}")


def _absolute(node: ast.ImportFrom, module: str, package: bool) -> str:
    if not node.level:
        return node.module or ""
    pieces = ["semkv", *filter(None, module.split("."))]
    base = pieces[: len(pieces) - node.level + package]
    return ".".join([*base, node.module] if node.module else base)


def imports_of(module: str, path: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of all that a file imports, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, path.name == "__init__.py")
            for name in node.names:
                inner = f"{base}.{name.name}".removeprefix("semkv.")
                yield (f"{base}.{name.name}" if base.startswith("semkv") and inner in MODULES else base), node.lineno


def broken_rules(module: str, path: Path) -> list[str]:
    own = part_of(module)
    found = []
    for name, line in imports_of(module, path):
        place = f"{path.relative_to(ROOT)}:{line}"
        top = name.split(".")[0]
        if top in FOREIGN and own not in FOREIGN[top]:
            found.append(f"{place}: {own} must not import {name}")
        if top != "semkv" or not module:  # `semkv` itself loads its names on first use
            continue
        inner = name.removeprefix("semkv").removeprefix(".")
        if not inner and own != "compile" and LEVEL[own] < LEVEL["compile"]:
            found.append(f"{place}: {own} imports the whole of semkv; import the module that has the name")
            continue
        other = part_of(inner)
        if other != own and LEVEL[other] >= LEVEL[own]:
            found.append(f"{place}: {own} must not import {name}, a part of {other}, which stands above or beside it")
    return found


def test_every_folder_of_the_package_is_looked_at() -> None:
    assert {*FOLDERS, "benchmarks"} == {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert len(MODULES) > 100


def test_imports_run_one_way() -> None:
    assert [line for module, path in MODULES.items() for line in broken_rules(module, path)] == []


def test_passes_and_kernels_do_not_know_each_other() -> None:
    assert LEVEL["passes"] == LEVEL["kernels"] < LEVEL["runtime"]


def circles(modules: Mapping[str, Path]) -> list[list[str]]:
    """Modules that import one another, also inside functions and under TYPE_CHECKING."""
    graph = nx.DiGraph()
    for module, path in modules.items():
        if module:  # `semkv` itself loads its names on first use
            names = {name.removeprefix("semkv.") for name, _ in imports_of(module, path) if name.startswith("semkv.")}
            graph.add_edges_from((module, name) for name in names if name in modules and name != module)
    return [sorted(found) for found in nx.strongly_connected_components(graph) if len(found) > 1]


def test_no_modules_import_one_another() -> None:
    assert circles(MODULES) == []


def test_a_circle_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {
        "ir.one": "from semkv.ir.two import x\n",
        "ir.two": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from semkv.ir.three import y\n",
        "ir.three": "def f():\n    from semkv.ir.one import z\n",
        "ir.four": "from semkv.ir.one import z\n",
    }
    made = {module: tmp_path / f"{module}.py" for module in sources}
    monkeypatch.setitem(globals(), "MODULES", made)
    for module, source in sources.items():
        made[module].write_text(source)
    assert circles(made) == [["ir.one", "ir.three", "ir.two"]]


@pytest.mark.parametrize(
    ("module", "source", "said"),
    [
        (
            "passes.fake",
            "def f():\n    from semkv.runtime.state import State\n",
            "passes must not import semkv.runtime.state",
        ),
        ("passes.fake", "import semkv.kernels\n", "passes must not import semkv.kernels"),
        ("runtime.fake", "from ..methods import sekv\n", "runtime must not import semkv.methods.sekv"),
        ("profiles.schema.fake", "import triton\n", "profiles.schema must not import triton"),
        ("ir.fake", "import semkv\n", "imports the whole of semkv"),
    ],
)
def test_a_broken_rule_is_seen(
    module: str, source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "fake.py"
    path.write_text(source)
    assert any(said in line for line in broken_rules(module, path))
