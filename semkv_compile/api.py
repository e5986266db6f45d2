"""`semkv.compile`, `semkv.explain`, `semkv.load`."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from semkv.artifact.fingerprint import model_fingerprint
from semkv.capture.checks import check_model
from semkv.capture.device import usable
from semkv.compiled import CompiledModel, uneven_heads
from semkv.compiler.kernel_builds import check_graphs
from semkv.compiler.pipeline import among_ranks
from semkv.config import CompileConfig, check_budget
from semkv.errors import ConfigError
from semkv.generation.arguments import own_configuration
from semkv.ir.ranks import ranks_of
from semkv.live.model import LiveModel, program_of
from semkv.methods import find_method
from semkv.methods.auto import AUTO, measured_best
from semkv.model.wrappers import unwrapped
from semkv.profiles.schema import Profile
from semkv.runtime.modes import undisturbed
from semkv.runtime.state import State

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@undisturbed
def compile(
    model: nn.Module,
    profile: Profile | None = None,
    *,
    method: str | None = None,
    budget: float | int | None = None,
    device: str | torch.device | None = None,
    config: CompileConfig | None = None,
    group: ProcessGroup | None = None,
) -> CompiledModel:
    """Capture `model`, rewrite its attention onto a mixed-resolution memory, and return a model that runs on it.

    The model is not changed, and its weights are shared, not copied, unless `device` is another than theirs. Where it is changed
    afterwards, the compiled one follows or refuses (`CompiledModel`).

    Parameters
    ----------
    model: a Hugging Face causal LM, or any module from ids [B, T] to logits [B, T, vocab], in evaluation mode.
    profile: what `semkv-profile` learned about this model; methods that are trained need it.
    method: a name of `semkv.methods.METHODS`, or `auto`: what the profile measured to be best at this budget. Default: with a profile
        the same; where it measured nothing, `sketch` if it has codes, else `sekv`; `full` without one.
    budget: a fraction in (0, 1] of the full KV, or a whole number of tokens per KV head and layer. A hard cap on what is
        on the device in a decode step.
    device: where to run; default: where the model is.
    config: see `CompileConfig`.
    group: processes that share the model (tensor parallelism): each calls this with the same arguments, gets its heads and weights of
        its own, and runs the same calls on the same tokens. What is compiled then does not follow changes of the model. See
        docs/parallel.md.

    Raises
    ------
    ConfigError, BudgetError: arguments that make no sense, before any work. ProfileError: a profile of another model, or of its
        heads where `config.latents` asks for latents.
    CaptureError: the model cannot be rewritten without risk of a wrong answer.
    """
    _check_types(model, profile, config)
    budget = check_budget(budget)
    settings = config or CompileConfig()
    ranks = None if group is None else ranks_of(group)
    target = None if device is None else usable(device)
    if method == AUTO:
        method = measured_best(profile, budget)
    elif method is None:
        if profile is None and budget is not None:
            raise ConfigError(
                f"budget {budget} without a method: without a profile the default is 'full', which keeps everything; name a method that a "
                "budget is enough for, such as method='sekv', or pass a profile"
            )
        method = _default_method(profile, budget)
    chosen = find_method(method, settings.method_options)
    model = unwrapped(model)
    check_model(model)
    fingerprint = model_fingerprint(model)
    if profile is not None:
        profile.check_model(fingerprint)
    if (chosen.compresses and budget is None) or (not chosen.compresses and budget is not None):
        _refuse_budget(chosen.name, chosen.compresses, budget)
    chosen.check(profile)
    here = next((p.device for p in model.parameters()), torch.device("cpu"))
    check_graphs(settings.cuda_graphs, here if target is None else target)
    program = program_of(model, settings, target, fingerprint)
    if profile is not None:
        profile.check_stores(program.stores)
    live = LiveModel(model, program, target) if ranks is None else None
    if ranks is not None:
        program = among_ranks(program, ranks, uneven_heads(program, profile, chosen, budget, settings))
    return CompiledModel(
        program,
        profile,
        chosen,
        budget,
        settings,
        fingerprint=fingerprint,
        model_config=copy.deepcopy(getattr(model, "config", None)),
        generation_config=own_configuration(getattr(model, "generation_config", None)),
        live=live,
    )


def _check_types(model: object, profile: object, config: object) -> None:
    if isinstance(model, CompiledModel):
        raise ConfigError("this model is compiled already: compiled.with_method(name, budget) is it under another one")
    if profile is not None and not isinstance(profile, Profile):
        raise ConfigError(f"profile is a {type(profile).__name__}: pass semkv.Profile.load(folder)")
    if config is not None and not isinstance(config, CompileConfig):
        raise ConfigError(f"config is a {type(config).__name__}: pass semkv.CompileConfig(...)")


def _default_method(profile: Profile | None, budget: float | int | None) -> str:
    """`full` without a profile, with one the method that was measured to be best."""
    if profile is None:
        return "full"
    if budget is None:
        raise ConfigError("a profile was given but no budget: pass budget=0.1 for example, or method='full'")
    return profile.best_method(budget)


def _refuse_budget(name: str, compresses: bool, budget: Any) -> None:
    from semkv.errors import BudgetError

    if compresses:
        raise BudgetError(
            f"method {name!r} compresses, so it needs a budget: a fraction of the full KV such as 0.1, or tokens per KV head and layer"
        )
    raise BudgetError(f"method {name!r} keeps everything: pass no budget with it (got {budget!r})")


@undisturbed
def load(
    path: str | os.PathLike[str], *, device: str | torch.device = "cpu", group: ProcessGroup | None = None
) -> CompiledModel:
    """A compiled model from an artifact folder written by `CompiledModel.save`.

    group: processes that share the model, as in `compile`; the file is mapped, and each copies its parts of it alone.

    Needs no modelling code and unpickles nothing. Raises `ArtifactError` for anything damaged, altered or foreign.
    """
    from semkv.loading import load_compiled

    return load_compiled(path, device=device, ranks=None if group is None else ranks_of(group))


def explain(compiled: CompiledModel, state: State | None = None, *, verbose: bool = False) -> str:
    """Print and return a table with a row per attention site: what was found, what it became, and why.

    state: one of this model's; adds what its layers held on the device and read in its steps, as shares of their full KV. verbose:
    adds what each pass did.
    """
    from semkv.describe import describe

    if not isinstance(compiled, CompiledModel):
        raise ConfigError(f"explain: a {type(compiled).__name__}; pass what semkv.compile or semkv.load returned")
    return describe(compiled, state, verbose=verbose)
