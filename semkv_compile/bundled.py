"""The trained model that comes with semkv: small, with a real retrieval skill, for demos, tests and comparisons."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from semkv.errors import ProfileError
from semkv.profiles.schema import Profile


def folder() -> Path:
    """The installed folder of the bundled model and its profile."""
    return Path(str(files("semkv.profiles.bundled")))


def load(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The bundled `LlamaForCausalLM` in evaluation mode, and its tokenizer.

    dtype: of the parameters; they are stored in float16. Its text is lower-case words and marks set apart by spaces.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM

    path = folder() / "model"
    model = LlamaForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)


def profile() -> Profile:
    """The bundled model's profile, as `semkv-profile bundled` makes it."""
    path = folder() / "profile"
    if not path.is_dir():
        raise ProfileError(
            f"this installation has no profile of the bundled model: make one with `semkv-profile bundled -o {path}`"
        )
    return Profile.load(path)
