"""`CompiledModel`: a program with a method and a budget, ready to run."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig

import semkv.kernels  # noqa: F401 - registers the operators
from semkv.artifact.json_values import plain
from semkv.artifact.save import save_program
from semkv.capture.device import device_of
from semkv.compiler.kernel_builds import as_between, as_step, as_turns, check_graphs, recorded_steps, start_builds
from semkv.compiler.kernel_layouts import site_layouts, tune_program
from semkv.compiler.offload import offload_thresholds
from semkv.compiler.pipeline import lower, place
from semkv.config import CompileConfig, check_budget
from semkv.errors import ArtifactError, BudgetError, ConfigError
from semkv.export.write import export_state, export_step
from semkv.generation.generate import Generation
from semkv.ir.program import Program
from semkv.kernels.mixed_attention.dispatch import form_of
from semkv.kernels.tuning import Tuning
from semkv.live.model import LiveModel
from semkv.methods import Method, find_method
from semkv.methods.auto import AUTO, measured_best
from semkv.model.huggingface import register_causal_lm
from semkv.passes.base import PassOptions
from semkv.profiles.schema import Profile
from semkv.runtime.budgets.budget import Budget
from semkv.runtime.budgets.floor import Demand, with_floor
from semkv.runtime.budgets.part_shares import head_nbytes
from semkv.runtime.choices import check_choices
from semkv.runtime.components import Plan
from semkv.runtime.decode.row_turns import GraphedSteps, serves
from semkv.runtime.host.tier import HostTier
from semkv.runtime.modes import undisturbed
from semkv.runtime.placement import Placement, in_pages
from semkv.runtime.state import State

KERNELS = "kernels"
"""Under which a manifest's `extra` keeps tuned layouts."""


class CompiledModel(Generation):
    """A decoder whose attention reads a mixed-resolution KV memory.

    Made by `semkv.compile` or `semkv.load`. It generates like a Hugging Face model (`generate`), and gives the steps one by
    one (`prefill`, `extend`) on explicit states. It holds no conversation itself: states do.

    Attributes
    ----------
    program: the lowered program. method: the method with its options. budget: as given to `compile`.
    config: the model's own configuration, for generation; a blank one for a plain module.
    settings: the `CompileConfig`. fingerprint: of the model that was compiled; profiles carry the same.

    The model that was compiled may live on. Each call looks whether it changed: new weights are followed, states of the old ones
    refused (`StateError`), and what takes another capture is refused (`StaleModelError`) until `refresh`, or until it is undone.
    """

    def __init__(
        self,
        source: Program,
        profile: Profile | None,
        method: Method,
        budget: float | int | None,
        settings: CompileConfig,
        *,
        fingerprint: str | None = None,
        model_config: Any = None,
        generation_config: GenerationConfig | None = None,
        lowered: bool = False,
        tuning: Tuning | None = None,
        live: LiveModel | None = None,
    ) -> None:
        """`source` is a program with its sites found, or, where `lowered`, one that was already lowered for `method`. `tuning`:
        layouts of kernels that an artifact brought. `live`: the model that it was captured from, to be followed."""
        super().__init__()
        register_causal_lm(CompiledModel)
        budget = check_budget(budget)
        if method.compresses and budget is None:
            raise BudgetError(
                f"method {method.name!r} compresses, so it needs a budget: a fraction of the full KV such as 0.1, "
                "or tokens per KV head and layer"
            )
        if not method.compresses and budget is not None:
            raise BudgetError(f"method {method.name!r} keeps everything: pass no budget with it (got {budget!r})")
        if source.ranks is not None and not method.shares_heads:
            raise ConfigError(
                f"method {method.name!r} does not run on processes that share a model yet (docs/parallel.md says why): take another "
                "method, or compile without group="
            )
        self.method, self.budget, self.settings, self.tuning = method, budget, settings, tuning
        self._live, self._lowered = live, lowered
        self._assemble(source, profile, fingerprint)
        self.config = PreTrainedConfig(vocab_size=source.vocab_size) if model_config is None else model_config
        self.generation_config = generation_config or GenerationConfig()
        self.eval()

    def _assemble(self, source: Program, profile: Profile | None, fingerprint: str | None) -> None:
        """See `Following`; an error leaves everything as it was."""
        method, budget, settings, lowered = self.method, self.budget, self.settings, self._lowered
        device = device_of(source.body)
        check_graphs(settings.cuda_graphs, device)
        start_builds(source, settings.kernels, device, routes=method.compresses)
        program, plan, cap, minimum = planned(source, profile, method, budget, settings, lowered=lowered)
        limits = offload_thresholds(program, plan, profile, cap, settings)
        program = place(
            program,
            PassOptions(
                thresholds=limits if limits and not lowered else None,
                kernels=settings.kernels,
                layouts=site_layouts(program, settings.kernels, device, self.tuning),
            ),
        )
        kernels = form_of(settings.kernels, device)[0]
        steps = None
        if settings.steps_as_graphs(device) and serves(plan) and not program.restricted:
            prepared = [partial(made, settings.kernels, program.dtype) for made in (as_step, as_between, as_turns)]
            steps = GraphedSteps(
                program, *prepared if device.type == "cpu" else [recorded_steps(settings.kernels, device)]
            )
        placement = Placement(
            program=program,
            method=method.name,
            plan=plan,
            budget=cap,
            minimum_tokens=minimum,
            page_size=settings.page_size,
            tier=HostTier(
                disk=settings.host == "disk",
                folder=settings.disk_folder,
                limit=settings.host_memory if settings.offload == "budget" else None,
                pinned=device.type == "cuda" and (kernels == "triton" or steps is not None),
            ),
            device=device,
            thresholds=limits,
            rows=settings.rows if limits else None,
            kernels=kernels == "triton",
            weights=None if self._live is None else self._live.weights,
            steps=steps,
        )
        object.__setattr__(self, "_source", source)
        object.__setattr__(self, "program", program)
        self.profile, self.fingerprint, self.placement = profile, fingerprint, placement
        self.__dict__.pop("_running", None)

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def kernels(self) -> str:
        """What answers the attention of a step: `triton`, `cpp`, or `torch` and why."""
        form, reason = form_of(self.settings.kernels, self.device)
        return f"{form}: {reason}" if reason else form

    def with_method(
        self, method: str, budget: float | int | None = None, *, config: CompileConfig | None = None, **options: Any
    ) -> CompiledModel:
        """The same program under another method or budget; weights and graphs are shared, nothing is captured again. `auto`: what the
        profile measured to be best at this budget."""
        self._follow()
        if method == AUTO:
            method = measured_best(self.profile, budget)
        settings = config or self.settings
        options = (config.method_options if config else {}) | options  # those of `self.settings` are of another method
        source = self._source.evolve(stage="found", prefill=None, extend=None, decode=None, selector=None)
        return CompiledModel(
            source,
            self.profile,
            find_method(method, options),
            budget,
            settings.model_copy(update={"method_options": options}),
            fingerprint=self.fingerprint,
            model_config=self.config,
            generation_config=self.generation_config,
            tuning=self.tuning,
            live=self._live,
        )

    def tune_kernels(self) -> CompiledModel:
        """This model with the layouts of kernels that are the fastest on its device, measured now: seconds to a minute.

        They are kept in the cache's folder, where later compilations find them, and in artifacts. `ConfigError` where Triton's
        kernels do not run.
        """
        self._follow()
        tuning = tune_program(self.program, self.settings.kernels, self.device)
        return CompiledModel(
            self._source,
            self.profile,
            self.method,
            self.budget,
            self.settings,
            fingerprint=self.fingerprint,
            model_config=self.config,
            generation_config=self.generation_config,
            lowered=self._lowered,
            tuning=tuning if self.tuning is None else self.tuning.merged(tuning),
            live=self._live,
        )

    # -- files ---------------------------------------------------------------------------------------------------------

    @undisturbed
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an artifact folder that `semkv.load` runs without the modelling code; see docs/artifact.md."""
        self._alone("saved")
        self._follow()
        if self.profile is not None and self.fingerprint is not None:
            self.profile.check_model(self.fingerprint)  # who loads it checks it as well
        config = self.config
        save_program(
            self.program,
            path,
            method=self.method.name,
            method_options=self.settings.method_options,
            budget=self.budget,
            config=self.settings,
            profile=self.profile,
            model_fingerprint=self.fingerprint,
            model_config=None if config is None else plain(config.to_dict()),
            generation_config=plain(self.generation_config.to_dict()),
            extra=None if self.tuning is None else {KERNELS: self.tuning.to_json()},
        )

    def export(self, path: str | os.PathLike[str], format: str = "onnx", *, example: State | None = None) -> Path:
        """Write the decode step as a folder that runs without semkv: the step, and `step.json`, which says what each input and output is.
        See docs/export.md.

        format: `onnx`, standard operators with the weights in a file beside (needs `semkv[onnx]`); `aoti`, a package for this kind of CPU
        that needs torch alone. example: a state whose form the step is for, of at least one row that the method compresses; None: that of
        a prompt of random tokens. Rows, lengths and sizes are not those of the example: they may differ from call to call.

        Returns
        -------
        The folder, which must not exist or be empty.

        Raises
        ------
        ConfigError: an unknown format, a missing package, a method that cannot be exported, a path that is taken; before work begins.
        """
        self._alone("exported")
        self._follow()
        return export_step(self.placement, self.prefill, path, format, example=example)

    def export_state(
        self, state: State, path: str | os.PathLike[str], *, step: str | os.PathLike[str] | None = None
    ) -> Path:
        """Write the rows of `state` as the inputs of an exported step, a safetensors file: another host goes on from it.

        Call `state.reserve(n)` before: n steps are what the file has room for (its metadata `steps`). `ids` int64 [B, 1] are the tokens
        that follow, the unread ones of `generate` or the largest of `logits` [B, vocab], which are there as well. step: the folder that
        `export` wrote; None: the one that `path` lies in.

        Raises
        ------
        ConfigError: no room was reserved. StateError: a row whose form is not that of the step. ArtifactError: a step of another model.
        """
        self._follow()
        return export_state(self.placement, state, path, step)

    def load_state(self, path: str | os.PathLike[str]) -> State:
        """A state that this model, or one compiled alike, saved with `State.save`."""
        self._follow()
        return State.load(path, self.placement)

    def _alone(self, what: str) -> None:
        if self.program.ranks is not None:
            raise ArtifactError(
                f"this is what process {self.program.ranks.rank} of {self.program.ranks.size} has of a model, which cannot be {what}: "
                "compile the model without group=, save that, and load it with semkv.load(path, group=...)"
            )

    def __repr__(self) -> str:
        sites = len(self.program.sites)
        return f"CompiledModel(method={self.method.name!r}, budget={self.budget!r}, sites={sites}, kv_dtype={self.placement.budget.dtype})"


__all__ = ["CompiledModel"]


def planned(
    source: Program,
    profile: Profile | None,
    method: Method,
    budget: float | int | None,
    settings: CompileConfig,
    *,
    lowered: bool,
) -> tuple[Program, Plan, Budget, int]:
    """`source` lowered for a method, unless it is, the method's plan for it, the budget with its floor, and the fewest tokens per head."""
    dtype = settings.torch_kv_dtype(source.dtype)
    cap = Budget(budget, dtype, page_size=settings.page_size)
    decided = method.for_budget(source, profile, cap)
    program = source if lowered else lower(source, pass_options(source, decided, profile))
    plan = decided.plan(program, profile)
    check_choices(program, plan, method.name)
    minimum = in_pages(method.minimum_tokens, settings.page_size)
    counted = tuple(store for store in program.stores if store.treatment == "method")
    demand = Demand.of(method.name, *plan.of_all(counted), cap, minimum, program.max_positions, method.keeps_less)
    return program, plan, with_floor(cap, demand, settings.floor), minimum


def uneven_heads(
    source: Program,
    profile: Profile | None,
    method: Method,
    budget: float | int | None,
    settings: CompileConfig,
    *,
    lowered: bool = False,
) -> dict[int, tuple[float, ...]] | None:
    """By store, what each KV head of the user's model takes of a budget that heads divide; None where the method's heads do not."""
    if not method.divides_heads:
        return None
    program, plan, cap, minimum = planned(source, profile, method, budget, settings, lowered=lowered)
    where = device_of(source.body)
    return head_nbytes(Placement(program, method.name, plan, cap, minimum, settings.page_size, HostTier(), where))


def pass_options(source: Program, method: Method, profile: Profile | None) -> PassOptions:
    return PassOptions(
        method=method.name,
        layer_shares=method.layer_shares(source, profile),
        head_roles=method.head_roles(source, profile),
        retrieval_head=method.retrieval_head(profile),
        key_balance=method.key_balance(source, profile),
    )
