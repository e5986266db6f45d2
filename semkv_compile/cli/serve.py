"""What `semkv serve` does: a model or an artifact becomes a folder that vLLM serves, and vLLM takes over."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from semkv.artifact.manifest import is_artifact
from semkv.cli.models import BUNDLED, load_model, load_tokenizer
from semkv.errors import ConfigError
from semkv.io.cache_folder import cache_folder
from semkv.io.files import sha256_of
from semkv.serving.admission import Admission, units
from semkv.serving.command import BINDING, ENVIRONMENT, Server, check_vllm
from semkv.serving.folder import Served, default_memory
from semkv.serving.ray_application import check_ray, write
from semkv.serving.vllm.names import ARCHITECTURE


@dataclass(frozen=True)
class ServeRequest:
    """Options of the command; memory, host_memory and keep in bytes, longest in tokens. ray: through Ray Serve LLM, with `replicas`.
    processes: that share the model."""

    model: str
    method: str | None
    budget: int | float | None
    profile: Path | None
    tokenizer: str | None
    name: str | None
    host: str
    port: int
    memory: int | None
    host_memory: int | None
    longest: int | None
    dry_run: bool
    extra: Sequence[str]
    ray: bool = False
    keep: int | None = None
    replicas: int | None = None
    processes: int = 1


def run_serve(request: ServeRequest) -> None:
    """Make what is missing, check that the longest request fits, and become vLLM's server; with `dry_run`, print its command."""
    on_host = check_vllm()
    if request.ray:
        check_ray()
    elif request.replicas is not None:
        raise ConfigError(f"--replicas {request.replicas}: one server has no replicas; add --ray")
    artifact, tokenizer, method = _artifact(request)
    served = Served(str(artifact.resolve()), method, request.budget, request.host_memory, request.keep)
    compiled = served.load()
    longest = request.longest or compiled.program.max_positions
    if longest is None:
        raise ConfigError("the model names no context: give --max-model-len")
    if longest > (compiled.program.max_positions or longest):
        raise ConfigError(f"--max-model-len {longest}: the model's context is {compiled.program.max_positions} tokens")
    processes = request.processes
    heads = max(site.q_heads for site in compiled.program.sites)
    if processes < 1 or heads % processes:
        raise ConfigError(f"--tensor-parallel-size {processes}: expected a number that divides the {heads} query heads")
    memory = request.memory or default_memory(cuda=not on_host) // (processes if on_host else 1)
    if processes == 1:  # else each process checks its part, which only it knows
        Admission.of(compiled.request_bytes, longest, host=on_host).check(units(memory), longest)
    key = hashlib.sha256(repr((served, longest)).encode()).hexdigest()[:16]
    folder = cache_folder() / "serving" / key
    served.write(folder, compiled, tokenizer, ARCHITECTURE)
    path = Path(request.model).expanduser()
    server = Server(
        folder,
        request.name or (path.name if path.exists() else request.model),
        str(compiled.dtype).removeprefix("torch."),
        longest,
        memory,
        request.host,
        request.port,
        processes,
        request.extra,
    )
    variables = dict(ENVIRONMENT)
    if on_host and processes > 1:  # vLLM would look for a node of memory for each
        shares = {BINDING: "nobind", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}
        variables |= {name: os.environ.get(name, value) for name, value in shares.items()}
    settings = " ".join(f"{name}={value}" for name, value in variables.items())
    command = (
        write(server, 1 if request.replicas is None else request.replicas, on_host=on_host)
        if request.ray
        else server.command
    )
    typer.echo(f"{settings} {shlex.join(command)}", err=not request.dry_run)
    if not request.dry_run:
        os.execve(command[0], command, {**os.environ, **variables})


def _artifact(request: ServeRequest) -> tuple[Path, Any, str | None]:
    """The folder of the compiled model, its tokenizer, and the method; a model is compiled into the cache's folder, once."""
    path = Path(request.model).expanduser()
    if is_artifact(path):
        if request.tokenizer is None:
            raise ConfigError(f"{request.model} is a compiled model, which has no tokenizer: add --tokenizer MODEL")
        if request.profile is not None:
            raise ConfigError(f"{request.model} is a compiled model with its own profile: leave out --profile")
        return path, load_tokenizer(request.tokenizer), request.method
    loaded = load_model(request.model, request.profile)
    tokenizer = loaded.tokenizer if request.tokenizer is None else load_tokenizer(request.tokenizer)
    from semkv.api import compile as compile_model
    from semkv.artifact.fingerprint import model_fingerprint

    made_of = (model_fingerprint(loaded.model), _digest(request))
    folder = cache_folder() / "serving" / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.semkv"
    if not is_artifact(folder):
        typer.echo(f"compiling {loaded.name} into {folder}", err=True)
        compile_model(loaded.model, loaded.profile, method="full").save(folder)
    best = "auto" if request.budget is not None and loaded.profile is not None else "full"
    return folder, tokenizer, request.method or best


def _digest(request: ServeRequest) -> list[str]:
    """Of the profile's files, which the artifact holds too."""
    if request.profile is None:
        return [request.model] if request.model == BUNDLED else []
    return [sha256_of(path, error=ConfigError) for path in sorted(request.profile.iterdir()) if path.is_file()]


__all__ = ["ServeRequest", "run_serve"]
