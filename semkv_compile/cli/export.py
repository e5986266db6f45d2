"""What `semkv export` does."""

from __future__ import annotations

from pathlib import Path

from semkv.errors import ConfigError


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
    """Export a decode step into the folder `out`, and the state of a prompt, the file `text`, with room for `tokens` more."""
    from semkv.export.write import check_path, check_tools
    from semkv.methods import METHODS

    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}; there are: {', '.join(METHODS)}")
    check_tools(form)
    check_path(out)
    if text is not None and not text.is_file():
        raise ConfigError(f"--text {text}: no such file")
    from semkv.api import compile as compile_model
    from semkv.cli.models import load_model

    loaded = load_model(model, profile)
    compiled = compile_model(
        loaded.model, loaded.profile, method=method, budget=budget if METHODS[method].compresses else None
    )
    compiled.export(out, format=form)
    if text is not None:
        words = text.read_text(encoding="utf-8")
        state = compiled.prefill(loaded.tokenizer(words, return_tensors="pt").input_ids)
        state.reserve(tokens)
        compiled.export_state(state, out / "state.safetensors")
    for file in sorted(out.iterdir()):
        print(f"{file}  {file.stat().st_size / 1e6:.1f} MB")


__all__ = ["run_export"]
