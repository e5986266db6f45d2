"""What Ray Serve LLM is given to run a served folder as several replicas behind one address."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from semkv.errors import ConfigError

from .command import ENVIRONMENT, Server

TESTED = "2.60"
"""Series of Ray that this was tried with: its extra `llm` wants another vLLM than the plugin, so it is installed without it."""
FILE = "ray.yaml"
INSTALL = f"install \"ray[serve]=={TESTED}.*\" pyarrow pandas fsspec 'jsonref>=1.1' beside vLLM, not ray[llm], which brings another vLLM"


def check_ray() -> None:
    """Raise `ConfigError`, which says what to install, where Ray is not there or of another series."""
    try:
        found = version("ray")
    except PackageNotFoundError:
        raise ConfigError(f"--ray: Ray is not installed here: {INSTALL} (docs/serving.md)") from None
    if not found.startswith(f"{TESTED}."):
        raise ConfigError(f"--ray: ray {found} is installed, and this was tried with {TESTED}: {INSTALL}")


def application(server: Server, replicas: int, *, on_host: bool) -> dict[str, Any]:
    """The configuration of Ray Serve: an OpenAI application over `replicas` engines of the folder. on_host: engines are on CPUs."""
    if replicas < 1:
        raise ConfigError(f"--replicas {replicas}: expected at least 1")
    config: dict[str, Any] = {
        "model_loading_config": {"model_id": server.name, "model_source": str(server.folder)},
        "deployment_config": {"num_replicas": replicas},
        "experimental_configs": {"num_ingress_replicas": 1},
        "engine_kwargs": engine_arguments(server),
        "runtime_env": {"env_vars": dict(ENVIRONMENT)},
        "log_engine_metrics": False,  # Ray's wrapper of vLLM's metrics is made for the vLLM of its own extra
    }
    if on_host:  # engines of one machine would all bind their threads to the same cores
        config |= {"accelerator_config": {"kind": "cpu"}, "placement_group_config": {"bundles": [{"CPU": 1}]}}
        config["runtime_env"]["env_vars"]["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return {
        "http_options": {"host": server.host, "port": server.port},
        "applications": [
            {
                "name": "semkv",
                "route_prefix": "/",
                "import_path": "ray.serve.llm:build_openai_app",
                "args": {"llm_configs": [config]},
            }
        ],
    }


def engine_arguments(server: Server) -> dict[str, Any]:
    """vLLM's engine arguments by the names that they have in Python: those of the server, and those of its `extra` words."""
    return {name.replace("-", "_"): value for name, value in {**server.engine, **_options(server.extra)}.items()}


def _options(words: Sequence[str]) -> dict[str, Any]:
    """`--max-num-seqs 4 --flag --no-other` as values by name."""
    found: dict[str, Any] = {}
    name = ""
    for word in (part for one in words for part in (one.split("=", 1) if one.startswith("--") else (one,))):
        if word.startswith("--"):
            name = word[2:].removeprefix("no-")
            found[name] = not word.startswith("--no-")
        elif not name:
            raise ConfigError(f"{word!r} is no option: expected words such as --max-num-seqs 4")
        else:
            found[name], name = _value(word), ""
    return found


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def write(server: Server, replicas: int, *, on_host: bool) -> list[str]:
    """Write the application beside the folder's configuration; the command that runs it, and starts Ray where none runs."""
    path = Path(server.folder) / FILE
    made = application(server, replicas, on_host=on_host)
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")  # JSON is YAML
    return [sys.executable, "-m", "ray.serve.scripts", "run", str(path)]


__all__ = ["application", "check_ray", "engine_arguments", "write"]
