"""The folder that a server is given for a compiled model: a configuration that names the artifact, a tokenizer, a chat template."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from semkv.compiled import CompiledModel
from semkv.errors import ConfigError
from semkv.io.files import read_json, replace_folder
from semkv.ir.ranks import Ranks
from semkv.loading import load_compiled
from semkv.methods import find_method
from semkv.methods.auto import AUTO, measured_best

CONFIG, KEY = "config.json", "semkv"


@dataclass(frozen=True)
class Served:
    """An artifact and how it is served.

    method, budget: other ones than those it was saved with; None: its own. host_memory: bytes of the host, over all requests, for prompts
    while they are read and for what is folded; a request that would need more fails alone. None: no limit. keep: bytes for states of
    requests that ended, from which others go on (`semkv.serving.requests.Requests`); None: none are kept.
    """

    artifact: str
    method: str | None = None
    budget: float | int | None = None
    host_memory: int | None = None
    keep: int | None = None

    @classmethod
    def read(cls, folder: Path) -> Served:
        """Of a folder that `write` made. Raises `ConfigError` for another one."""
        value = read_json(folder / CONFIG, error=ConfigError)
        try:
            return cls(**value[KEY])
        except (TypeError, KeyError) as error:
            raise ConfigError(f"{folder / CONFIG}: not of a folder that `semkv serve` wrote; call it again") from error

    def load(self, device: str | torch.device = "cpu", ranks: Ranks | None = None) -> CompiledModel:
        """The compiled model that it describes, or what one of `ranks` has of it. Raises as `semkv.load` and `semkv.compile` do."""
        compiled = load_compiled(self.artifact, device=device, ranks=ranks)
        method = self.method or compiled.method.name
        if method == AUTO:
            method = measured_best(compiled.profile, self.budget)
        if self.budget is not None and not find_method(method, {}).compresses:
            raise ConfigError(f"budget {self.budget}: method {method!r} keeps every token; name one that compresses")
        same = method == compiled.method.name
        budget = compiled.budget if same and self.budget is None else self.budget
        if same and budget == compiled.budget and self.host_memory is None:
            return compiled
        settings: dict[str, Any] = {"host_memory": self.host_memory} | ({} if same else {"method_options": {}})
        return compiled.with_method(method, budget, config=compiled.settings.model_copy(update=settings))

    def write(self, folder: Path, compiled: CompiledModel, tokenizer: Any, architecture: str) -> None:
        """Write the folder, in place of what was there. architecture: the model's name among the server's.

        Raises
        ------
        ConfigError: the model has no configuration of a Hugging Face model.
        """
        if compiled.config is None:
            raise ConfigError(
                f"{self.artifact}: its model had no configuration, so a server cannot know its sizes: compile a Hugging Face model"
            )
        config = compiled.config.to_dict() | {
            "model_type": compiled.config.model_type,  # an artifact's configuration is of no class of its own
            "architectures": [architecture],
            KEY: asdict(self),
        }
        with replace_folder(folder) as new:
            (new / CONFIG).write_text(json.dumps(config, indent=1, default=str), encoding="utf-8")
            compiled.generation_config.save_pretrained(new)
            tokenizer.save_pretrained(new)


def default_memory(*, cuda: bool) -> int:
    """Bytes for requests where nothing else is said: half of the machine's that are free, or half of the GPU's."""
    if cuda:
        return torch.cuda.mem_get_info()[0] // 2
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


__all__ = ["Served", "default_memory"]
