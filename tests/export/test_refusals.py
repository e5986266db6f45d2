"""What cannot be exported is refused before work begins, with what to do."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from semkv.cli.main import app
from semkv.compiled import CompiledModel
from semkv.config import CompileConfig
from semkv.errors import ConfigError
from semkv.export import write


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*_: object, **__: object) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr(torch.export, "export", export)


def test_formats_and_paths(tiny: CompiledModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="format 'gguf': expected one of onnx, aoti"):
        tiny.export(tmp_path / "step", format="gguf")
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConfigError, match="there is something already"):
            tiny.export(path, format="aoti")
    assert (tmp_path / "file").read_text() == "mine"


def test_what_is_not_installed(tiny: CompiledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "find_spec", lambda name: None if name == "onnx" else find_spec(name))
    with pytest.raises(ConfigError, match=r"needs the package onnx, .*pip install 'semkv\[onnx\]'"):
        tiny.export(tmp_path / "step")
    monkeypatch.setattr(write, "compiler", lambda: None)
    with pytest.raises(ConfigError, match=r"format 'aoti': .*format='onnx'"):
        tiny.export(tmp_path / "step", format="aoti")


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("sekv", {"forms": "factored"}, "spans wait as factors"),
        ("sekv", {"router": "oracle"}, "cannot be exported"),
        ("sentencekv", {}, "cannot be exported"),
        ("omnikv", {}, "cannot be exported"),
        ("specontext", {"strict": True}, "strict=False"),
    ],
)
def test_methods(full: CompiledModel, method: str, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    compiled = full.with_method(method, 0.5, config=CompileConfig(floor=0), **options)
    with pytest.raises(ConfigError, match=said):
        compiled.export(tmp_path / "step", format="aoti")


def test_an_example_that_is_exact(full: CompiledModel, tmp_path: Path) -> None:
    compiled = full.with_method("quest", 0.25)
    short = compiled.prefill(torch.zeros(1, 50, dtype=torch.int64))
    with pytest.raises(ConfigError, match="the example has 50 tokens, which the budget holds whole"):
        compiled.export(tmp_path / "step", format="aoti", example=short)
    with pytest.raises(ConfigError, match="example: a state of another compiled model"):
        full.export(tmp_path / "step", format="aoti", example=short)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--format", "gguf"], "expected one of onnx, aoti"),
        (["--method", "nothing"], "unknown method 'nothing'"),
        (["--budget", "0.1,0.2"], "expected one budget"),
        (["--tokens", "0"], "expected at least 1"),
        (["--text", "nowhere.txt"], "no such file"),
    ],
)
def test_the_command(arguments: list[str], said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", "bundled", str(tmp_path / "step"), *arguments])
    assert result.exit_code == 2
    assert said in result.output
