"""Read an EAGLE-3 draft model as a retrieval head: its norms, feature projection, and query and key projections."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from semkv.errors import ProfileError
from semkv.profiles.schema import Profile
from semkv.profiles.schema.retrieval_head import PREFIX, RetrievalHeadSection, Yarn

from .steps import with_section

NAMES = {
    "input_norm": "midlayer.input_layernorm.weight",
    "feature_norm": "midlayer.hidden_norm.weight",
    "projection": "fc.weight",
    "query": "midlayer.self_attn.q_proj.weight",
    "key": "midlayer.self_attn.k_proj.weight",
}
"""The head's tensors and what they are called in a checkpoint (Li et al., 2025, EAGLE-3)."""

TRAINED = 2048
"""Context of the published draft models in tokens (SpeContext Sec. 4.3), beyond which YaRN extends them."""


def import_eagle(profile: Profile, folder: str | os.PathLike[str], *, trained: int = TRAINED) -> Profile:
    """A copy of `profile` whose retrieval head is that of the EAGLE-3 checkpoint in `folder`.

    The folder holds `config.json` and one or more `.safetensors` files. The head keeps the projections of queries and keys, the
    norms before them and the projection of the model's features; the model's own embedding takes the place of the draft's.
    Features are the hidden states that enter a low, a middle and a high layer (2, L/2, L - 3).

    trained: context that the draft model was trained at, in tokens.

    Raises
    ------
    ProfileError: a file or tensor is missing or of another shape, or the draft was made for a model of other heads.
    """
    folder = Path(folder)
    config = _config(folder)
    tensors, count = _tensors(folder)
    missing = [name for name in NAMES.values() if name not in tensors]
    if missing:
        raise ProfileError(f"{folder} has no tensor {missing[0]!r}: expected an EAGLE-3 checkpoint as safetensors")
    own = {short: tensors[name] for short, name in NAMES.items()}
    dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    sites = len(profile.info.model.sites)
    places = (2, sites // 2, sites - 3)
    if sites < 6:
        raise ProfileError(f"this model has {sites} layers: EAGLE-3 reads layers 2, L/2 and L - 3, so at least 6")
    length = max(trained, profile.info.model.max_positions or trained)
    rope: dict[str, Any] = config.get("rope_parameters") or {}
    try:
        section = RetrievalHeadSection(
            hidden=own["input_norm"].shape[0],
            feature_sites=places,
            features=own["projection"].shape[1],
            projected=own["projection"].shape[0],
            q_heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=dim,
            epsilon=config.get("rms_norm_eps", 1e-5),
            theta=config.get("rope_theta") or rope.get("rope_theta", 1e4),
            yarn=Yarn(factor=length / trained, positions=trained),
            source="eagle-3",
            parameters=sum(x.numel() for x in own.values()),
            whole=count,
        )
    except ValueError as error:
        raise ProfileError(f"{folder}: no retrieval head follows from its config.json ({error})") from None
    for name, shape in section.tensor_shapes().items():
        found = tuple(own[name.removeprefix(PREFIX)].shape)
        if found != shape:
            raise ProfileError(f"{folder}: {NAMES[name.removeprefix(PREFIX)]!r} is {found}, expected {shape}")
    wanted = max(site.kv_heads for site in profile.info.model.method_sites)
    if section.kv_heads % wanted and wanted % section.kv_heads:
        raise ProfileError(f"{folder}: a draft with {section.kv_heads} KV heads, but this model has {wanted}")
    stored = {f"{PREFIX}{short}": x for short, x in own.items()}
    return with_section(profile, "retrieval_head", section, PREFIX, stored)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        missing = [name for name in ("hidden_size", "num_attention_heads") if not isinstance(config.get(name), int)]
    except (OSError, ValueError, AttributeError) as error:
        raise ProfileError(f"{folder}/config.json cannot be read ({error}): expected an EAGLE-3 checkpoint") from None
    if missing:
        raise ProfileError(f"{folder}/config.json does not say {missing[0]!r}: expected an EAGLE-3 checkpoint")
    return config


def _tensors(folder: Path) -> tuple[dict[str, Tensor], int]:
    """The tensors that the head needs, and how many numbers the whole checkpoint has, tables of token ids left out."""
    found: dict[str, Tensor] = {}
    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    part = file.get_slice(name)
                    size = 1
                    for length in part.get_shape():
                        size *= length
                    count += size if name not in ("d2t", "t2d") else 0
                    if name in NAMES.values():
                        found[name] = file.get_tensor(name)
        except Exception as error:
            raise ProfileError(f"{path} is damaged ({error})") from None
    return found, count
