"""Models, tokenizers and profiles by what people write on a command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semkv.cli.common import quiet_libraries, refuse
from semkv.cli.gguf import gguf_file, load_gguf
from semkv.errors import ConfigError

BUNDLED = "bundled"


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer, its profile where there is one, and the name to show for it."""

    model: Any
    tokenizer: Any
    profile: Any
    name: str


def load_model(
    name: str, profile: Path | None = None, *, dtype: str | None = None, device: str | None = None
) -> Loaded:
    """The bundled model, a local folder, a GGUF file or a folder with one, or a Hugging Face name, in evaluation mode.

    profile: as in `load_profile`.
    Raises ConfigError where the model or its tokenizer cannot be loaded or there is no such device, ProfileError for a damaged profile.
    """
    if device is not None:
        from semkv.capture.device import usable

        usable(device)
    loaded_profile = load_profile(name, profile)
    model, tokenizer = load_weights(name)
    if dtype is not None:
        import torch

        model = model.to(getattr(torch, dtype))
    if device is not None:
        model = model.to(device)
    return Loaded(model.eval(), tokenizer, loaded_profile, Path(name).name if Path(name).exists() else name)


def load_profile(name: str, folder: Path | None = None) -> Any:
    """The profile in `folder`; without one the bundled model brings its own, another model has None. Raises ProfileError for a
    damaged one."""
    from semkv.profiles.schema import Profile

    if folder is not None:
        if not folder.is_dir():
            refuse(f"profile {folder}: no such folder; make one with `semkv-profile MODEL -o {folder}`")
        return Profile.load(folder)
    if name == BUNDLED:
        from semkv import bundled

        if (bundled.folder() / "profile").is_dir():
            return bundled.profile()
    return None


def load_weights(name: str) -> tuple[Any, Any]:
    """The model of that name alone, in evaluation mode, and its tokenizer. Raises ConfigError where one cannot be loaded."""
    quiet_libraries()
    if name != BUNDLED:
        return _pretrained(name)
    from semkv import bundled

    return bundled.load()


def _pretrained(name: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(name).expanduser()
    weights = gguf_file(path)
    if weights is not None:
        return load_gguf(weights)
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not path.is_dir():
        raise ConfigError(
            f"model {name}: no such folder; give a folder, a GGUF file, a Hugging Face name, or `bundled`"
        )
    source = str(path) if path.is_dir() else name
    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval(), AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model {name}: cannot be loaded ({first}); give a folder, a Hugging Face name, or `bundled`"
        ) from error


def load_tokenizer(name: str) -> Any:
    """The tokenizer of that folder, GGUF file or Hugging Face name, or the bundled one. Raises ConfigError where it cannot be loaded."""
    quiet_libraries()
    if name == BUNDLED:
        from semkv import bundled

        return bundled.load()[1]
    from transformers import AutoTokenizer

    path = Path(name).expanduser()
    weights = gguf_file(path)
    try:
        if weights is not None:
            return AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
        return AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer {name}: cannot be loaded ({str(error).splitlines()[0]})") from error
