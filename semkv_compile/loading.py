"""Compiled models from artifact folders: what `semkv.load` does."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig

from semkv.artifact.json_values import restored
from semkv.artifact.load import load_program
from semkv.capture.device import usable
from semkv.compiled import KERNELS, CompiledModel, pass_options, uneven_heads
from semkv.compiler.pipeline import lowered_among_ranks
from semkv.errors import ArtifactError, SemkvError
from semkv.ir.ranks import Ranks
from semkv.kernels.tuning import Tuning
from semkv.methods import find_method
from semkv.profiles.schema import Profile
from semkv.runtime.budgets.budget import Budget
from semkv.runtime.modes import undisturbed


@undisturbed
def load_compiled(
    path: str | os.PathLike[str], *, device: str | torch.device = "cpu", ranks: Ranks | None = None
) -> CompiledModel:
    """The compiled model of an artifact folder, or what one of `ranks` has of it; `ArtifactError`: damaged, altered or foreign."""
    program, manifest = load_program(path, device if ranks is None else "cpu")
    if program.stage != "lowered" or program.head is None:
        raise ArtifactError(f"{path}: holds a program at stage {program.stage!r}, expected a compiled model")
    profile = None if manifest.profile_path is None else Profile.load(manifest.profile_path)
    if profile is not None and manifest.model.fingerprint is not None:
        profile.check_model(manifest.model.fingerprint)
    facts, model = manifest.compile, manifest.model
    try:
        method = find_method(facts.method, facts.method_options)
        config = None if model.config is None else PreTrainedConfig.from_dict(restored(model.config))
        generation = None if model.generation_config is None else GenerationConfig.from_dict(model.generation_config)
        layouts = manifest.extra.get(KERNELS)
        settings = facts.config
        if ranks is not None:
            dtype = settings.torch_kv_dtype(program.dtype)
            decided = method.for_budget(program, profile, Budget(facts.budget, dtype, page_size=settings.page_size))
            heads = uneven_heads(program, profile, method, facts.budget, settings, lowered=True)
            options = replace(pass_options(program, decided, profile), head_nbytes=heads)
            program = lowered_among_ranks(program, ranks, options, usable(device))
        if settings.cuda_graphs and torch.device(device).type != "cuda":
            warnings.warn(
                f"{path} was saved with cuda_graphs={settings.cuda_graphs!r}; on {device} it runs without", stacklevel=3
            )
            settings = settings.model_copy(update={"cuda_graphs": False})
        return CompiledModel(
            program,
            profile,
            method,
            facts.budget,
            settings,
            fingerprint=model.fingerprint,
            model_config=config,
            generation_config=generation,
            lowered=True,
            tuning=None if layouts is None else Tuning.from_json(layouts, f"{path}: extra.{KERNELS}"),
        )
    except SemkvError:
        raise
    except Exception as error:
        raise ArtifactError(
            f"{path}: its settings do not describe a compiled model ({error}); save it again"
        ) from error
