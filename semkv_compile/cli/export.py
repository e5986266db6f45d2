"""What `semkv export` does."""

from __future__ import annotations

import shutil
from pathlib import Path

from semkv.cli.common import read_text
from semkv.errors import ConfigError, SemkvError

DEFAULT_BUDGET = 0.1


def run_export(
    model: str,
    out: Path,
    profile: Path | None,
    method: str,
    budget: int | float | None,
    form: str,
    text: Path | None,
    tokens: int,
) -> None:
    """Export a decode step into the folder `out`, and the state of a prompt, the file `text`, with room for `tokens` more. What can be
    refused is refused before; nothing is left of an export that fails."""
    from semkv.export.write import check_path, check_tools
    from semkv.methods import METHODS

    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}; there are: {', '.join(METHODS)}")
    check_tools(form)
    check_path(out)
    words = None if text is None else read_text(text, "--text")
    from semkv.api import compile as compile_model
    from semkv.cli.models import load_model

    loaded = load_model(model, profile)
    if budget is None and METHODS[method].compresses:
        budget = DEFAULT_BUDGET
    compiled = compile_model(loaded.model, loaded.profile, method=method, budget=budget)
    state = None
    if words is not None:
        ids = loaded.tokenizer(words, return_tensors="pt").input_ids
        longest = compiled.program.max_positions
        if longest is not None and ids.shape[1] + tokens > longest:
            raise ConfigError(
                f"--text {text} has {ids.shape[1]} tokens: with --tokens {tokens} behind them they are more than the model's {longest} "
                "positions"
            )
        state = compiled.prefill(ids)
        state.reserve(tokens)
    compiled.export(out, format=form)
    if state is not None:
        try:
            compiled.export_state(state, out / "state.safetensors")
        except SemkvError:
            shutil.rmtree(out)  # a retry finds nothing in its way
            raise
    for file in sorted(out.iterdir()):
        print(f"{file}  {file.stat().st_size / 1e6:.1f} MB")


__all__ = ["run_export"]
