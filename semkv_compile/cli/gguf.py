"""Models in GGUF files, as llama.cpp has them: read by transformers, their weights as plain tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from semkv.errors import ConfigError


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that `path` is, or that a folder without a configuration of its own holds; None where there is none.

    Raises
    ------
    ConfigError: no such file, or a folder that holds several.
    """
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"model {path}: no such file")
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise ConfigError(
            f"model {path}: holds {len(found)} GGUF files ({', '.join(x.name for x in found)}); name one of them"
        )
    return found[0] if found else None


def load_gguf(path: Path) -> tuple[Any, Any]:
    """The model in float32, its weights dequantised, in evaluation mode, and its tokenizer.

    Raises
    ------
    ConfigError: the package `gguf` is missing, the file is damaged, or transformers does not know its architecture.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except Exception as error:  # a parser of binary files raises whatever it stumbles over
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = "; pip install gguf" if "gguf" in first and isinstance(error, ImportError) else ""
        raise ConfigError(
            f"model {path}: this GGUF file cannot be loaded ({type(error).__name__}: {first}){hint}"
        ) from error
    model.hf_quantizer, model.is_quantized = None, False  # of the file; the weights are plain now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.eval(), tokenizer


def gguf_config(path: Path) -> Any:
    """The configuration that a GGUF file holds. Raises ConfigError where transformers cannot read it."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # as above
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"model {path}: this GGUF file cannot be read ({type(error).__name__}: {first})") from error


__all__ = ["gguf_config", "gguf_file", "load_gguf"]
