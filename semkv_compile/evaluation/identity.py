"""What a row of results belongs to: this model, this profile, these settings."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import nn

from semkv.artifact.fingerprint import model_fingerprint, weights_digest
from semkv.config import CompileConfig
from semkv.profiles.schema import Profile

UNTOLD = {"method_options", "cache", "disk_folder", "prefill_chunk", "kernels", "cuda_graphs"}
"""Settings that do not change what is computed (or, for options, that cells tell): rows measured under others count."""
LATER = {"latents": False, "floor": 0}
"""Settings that came when there were rows already, and the value under which those were measured: left out where it is that."""


def subject_identity(model: nn.Module, profile: Profile | None, config: CompileConfig | None, dtype: Any = None) -> str:
    """A hash of the model's weights, the profile's content and how memory is stored; methods are part of cells.

    config: None: the defaults without a floor, so that a cell's budget is what it says. dtype: of the model's computation, where it
    differs from what the weights tell.
    """
    settings = (config or CompileConfig(floor=0)).model_dump(mode="json", exclude=UNTOLD)
    settings = {name: value for name, value in settings.items() if name not in LATER or LATER[name] != value}
    parts: dict[str, Any] = {"model": model_fingerprint(model), "settings": settings, "dtype": str(dtype)}
    if profile is not None:
        # How it came to be and measured choices do not change what a compiled model computes; what a file says of its
        # tensors is not there before the profile was saved.
        told = {"provenance", "measured", "choices", "tensors", "tensors_digest"}
        info = profile.info.model_dump(mode="json", exclude=told)
        if (sketch := profile.info.sketch) is not None:  # not there in rows from before
            for name in [name for name, first in (("balanced", False), ("form", 1)) if getattr(sketch, name) == first]:
                del info["sketch"][name]
        parts["profile"] = [info, weights_digest(profile.tensors)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]
