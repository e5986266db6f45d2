"""What `semkv explain` and `semkv info` do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from semkv.errors import ConfigError


def run_explain(model: str, profile: Path | None, method: str | None, budget: int | float, verbose: bool) -> None:
    """Compile `model` and print a line per attention site."""
    from semkv.methods import METHODS

    if method is not None and method not in METHODS:
        raise ConfigError(f"unknown method {method!r}; there are: {', '.join(METHODS)}")
    from semkv.api import compile as compile_model
    from semkv.api import explain
    from semkv.cli.models import load_model

    loaded = load_model(model, profile)
    compresses = loaded.profile is not None if method is None else METHODS[method].compresses
    compiled = compile_model(loaded.model, loaded.profile, method=method, budget=budget if compresses else None)
    explain(compiled, verbose=verbose)


def run_info(path: Path) -> None:
    """Print what the folder at `path` is and holds. Raises ConfigError where it is neither profile nor artifact."""
    if not path.is_dir():
        said = "a file" if path.exists() else "no such folder"
        raise ConfigError(f"{path}: {said}; give the folder of a profile or of a compiled artifact")
    from semkv.artifact.manifest import is_artifact

    if is_artifact(path):
        lines = artifact_lines(path)
    elif (path / "profile.json").is_file():
        lines = profile_lines(path)
    else:
        said = (
            "is an exported step"
            if (path / "step.json").is_file()
            else "holds neither profile.json nor a semkv manifest.json"
        )
        raise ConfigError(f"{path}: {said}; give a profile or an artifact")
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in lines:
        table.add_row(name, value)
    Console(highlight=False).print(table)


def profile_lines(path: Path) -> list[tuple[str, str]]:
    """Name and value of what there is to say about a profile."""
    from semkv.evaluation.tables import size
    from semkv.profiles.schema import Profile

    profile = Profile.load(path)
    info = profile.info
    lines = [
        ("profile", f"{path} (schema {info.schema_version}, {size(profile.nbytes)} of tensors)"),
        ("model", f"{info.model.name}, {len(info.model.sites)} attention sites, {info.model.dtype}"),
        ("fingerprint", info.fingerprint),
    ]
    if info.sekv is not None:
        state = "trained" if info.sekv.trained else "untrained"
        lines.append(("sekv", f"router {state}, ranks up to {info.sekv.max_rank}"))
    for step, record in info.measured.items():
        note = f"; {record.note}" if record.note else ""
        lines.append((step, f"{record.created}, {record.units} samples in {record.wall_minutes:.1f} minutes{note}"))
    if info.memory_model is not None:
        memory = info.memory_model
        lines.append(
            (
                "memory model",
                f"a device of {size(memory.device_bytes)} holds all of {memory.thresholds[0]:,} tokens, "
                f"{memory.thresholds[-1]:,} with every layer on the host",
            )
        )
    for choice in info.choices:
        lines.append((f"measured at {100 * choice.budget:g} %", _choice(choice)))
    made = info.provenance
    if made is not None:
        lines += [
            ("made", f"{made.created}, {made.steps} steps in {made.wall_minutes:.1f} minutes, seed {made.seed}"),
            ("data", f"{made.data}; {made.tokens} tokens"),
            ("command", made.command),
            ("versions", ", ".join(f"{name} {version}" for name, version in made.versions.items())),
        ]
        lines += [(f"loss {name}", f"{value:.4g}") for name, value in made.losses.items()]
    return lines


def _choice(choice: Any) -> str:
    return f"{choice.method}: {100 * choice.score:.1f} % at {choice.length} tokens, {choice.samples} questions"


def artifact_lines(path: Path) -> list[tuple[str, str]]:
    """Name and value of what there is to say about a compiled artifact."""
    from semkv.artifact.manifest import read_manifest
    from semkv.evaluation.tables import size

    manifest = read_manifest(path)
    compiled, versions = manifest.compile, manifest.versions
    budget = "none" if compiled.budget is None else f"{compiled.budget}"
    options = ", ".join(f"{name}={value!r}" for name, value in compiled.method_options.items())
    program = manifest.program
    return [
        (
            "artifact",
            f"{path} (schema {manifest.schema_version}), {size(sum(f.bytes for f in manifest.files.values()))}",
        ),
        ("method", compiled.method + (f" ({options})" if options else "")),
        ("budget", budget),
        ("settings", ", ".join(f"{k}={v!r}" for k, v in compiled.config.model_dump(mode="json").items() if v)),
        (
            "program",
            f"{program.stage}, {', '.join(program.graphs)}; {len(program.sites)} attention sites, {program.dtype}",
        ),
        ("model", f"fingerprint {manifest.model.fingerprint or 'unknown'}, vocabulary {program.vocab_size}"),
        ("profile", "inside" if manifest.profile else "none"),
        ("made with", f"semkv {versions.semkv}, torch {versions.torch}, Python {versions.python}"),
    ]
