"""`CompiledModel`: a program with a method and a budget, ready to run."""

from __future__ import annotations

import os
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

import semkv.kernels  # noqa: F401 - registers the operators
from semkv.config import CompileConfig, check_budget
from semkv.errors import BudgetError, ConfigError, InputError
from semkv.huggingface import CACHE
from semkv.ir.program import Program
from semkv.kernel_builds import as_run, check_graphs, start_builds
from semkv.kernel_layouts import site_layouts, tune_program
from semkv.kernels.mixed_attention.dispatch import form_of
from semkv.kernels.tuning import Tuning
from semkv.methods import Method, find_method
from semkv.offload import offload_thresholds
from semkv.passes.base import PassOptions
from semkv.pipeline import lower, place
from semkv.profiles.schema import Profile
from semkv.runtime.budget import Budget
from semkv.runtime.heap import return_freed
from semkv.runtime.host_tier import HostTier
from semkv.runtime.modes import without_grad
from semkv.runtime.record import RowRecord
from semkv.runtime.row_memory import Placement, RowMemory, in_pages
from semkv.runtime.spans import waiting_cost_bytes
from semkv.runtime.state import State
from semkv.runtime.steps import extend, prefill_row
from semkv.stopping import FinishedRows

UNCAPPED_CHUNK = 512
"""Tokens that `extend` runs at once where there is no budget."""

PREFILL_CHUNK, PREFILL_CHUNK_CUDA = 2048, 8192
"""Prompt tokens that prefill runs at once; more on CUDA, where the earlier ones cross the link for every chunk."""

QUESTION_TOKENS = 64
"""Up to as many new tokens, each chooses what it unfolds for itself."""


class CompiledModel(GenerationMixin, nn.Module):
    """A decoder whose attention reads a mixed-resolution KV memory.

    Made by `semkv.compile` or `semkv.load`. It generates like a Hugging Face model (`generate`), and gives the steps one by
    one (`prefill`, `extend`) on explicit states. It holds no conversation itself: states do.

    Attributes
    ----------
    program: the lowered program. method: the method with its options. budget: as given to `compile`.
    config: the model's own configuration, for generation; a blank one for a plain module.
    settings: the `CompileConfig`. fingerprint: of the model that was compiled; profiles carry the same.
    """

    main_input_name = "input_ids"
    base_model_prefix = ""
    _is_stateful = False
    _supports_cache_class = True
    _can_compile_fullgraph = False
    input_modalities = ("text",)

    program: Program
    _source: Program

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
    ) -> None:
        """`source` is a program with its sites found, or, where `lowered`, one that was already lowered for `method`. `tuning`:
        layouts of kernels that an artifact brought."""
        super().__init__()
        check_budget(budget)
        self.fingerprint = fingerprint
        if method.compresses and budget is None:
            raise BudgetError(
                f"method {method.name!r} compresses, so it needs a budget: a fraction of the full KV such as 0.1, "
                "or tokens per KV head and layer"
            )
        if not method.compresses and budget is not None:
            raise BudgetError(f"method {method.name!r} keeps everything: pass no budget with it (got {budget!r})")
        object.__setattr__(self, "_source", source)
        self.profile, self.method, self.budget, self.settings = profile, method, budget, settings
        self.tuning = tuning
        check_graphs(settings.cuda_graphs, self.device)
        start_builds(source, settings.kernels, self.device, routes=method.compresses)
        dtype = settings.torch_kv_dtype(source.dtype)
        decided = method.for_budget(source, profile, Budget(budget, dtype))
        program = source if lowered else lower(source, _pass_options(source, decided, profile))
        plan = decided.plan(program, profile)
        limits = offload_thresholds(program, plan, profile, Budget(budget, dtype), settings)
        program = place(
            program,
            PassOptions(
                thresholds=limits if limits and not lowered else None, kernels=settings.kernels,
                layouts=site_layouts(program, settings.kernels, self.device, tuning),
            ),
        )  # fmt: skip
        object.__setattr__(self, "program", program)
        self.config = PreTrainedConfig(vocab_size=program.vocab_size) if model_config is None else model_config
        self.generation_config = generation_config or GenerationConfig()
        kernels = form_of(settings.kernels, self.device)[0]
        self.placement = Placement(
            program=program,
            method=method.name,
            plan=plan,
            budget=Budget(budget, dtype),
            minimum_tokens=in_pages(method.minimum_tokens, settings.page_size),
            residency=settings.residency,
            page_size=settings.page_size,
            tier=HostTier(
                disk=settings.host == "disk",
                folder=settings.disk_folder,
                limit=settings.host_memory if settings.offload == "budget" else None,
                pinned=kernels == "triton" and self.device.type == "cuda",
            ),
            device=self.device,
            thresholds=limits,
            rows=settings.rows if limits else None,
            prefetch=settings.prefetches,
            guesses=settings.guesses,
            kernels=kernels == "triton",
        )
        self.eval()

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        for tensor in chain(self._source.body.parameters(), self._source.body.buffers()):
            return tensor.device
        return torch.device("cpu")

    @cached_property
    def _running(self) -> Program:
        """`program` with what only this process can run; made for the first step."""
        return as_run(self.program, self.settings.kernels, self.device, cuda_graphs=self.settings.records(self.device))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters that attention computes in."""
        return self._source.dtype

    @property
    def kernels(self) -> str:
        """What answers the attention of a step: `triton`, `cpp`, or `torch` and why."""
        form, reason = form_of(self.settings.kernels, self.device)
        return f"{form}: {reason}" if reason else form

    def can_generate(self) -> bool:
        return True

    def with_method(
        self, method: str, budget: float | int | None = None, *, config: CompileConfig | None = None, **options: Any
    ) -> CompiledModel:
        """The same program under another method or budget; weights and graphs are shared, nothing is captured again."""
        settings = config or self.settings
        options = (config.method_options if config else {}) | options  # those of `self.settings` are of another method
        source = self._source.evolve(stage="found", prefill=None, extend=None, decode=None, selector=None)
        return CompiledModel(
            source, self.profile, find_method(method, options), budget, settings.model_copy(update={"method_options": options}),
            fingerprint=self.fingerprint, model_config=self.config, generation_config=self.generation_config,
            tuning=self.tuning,
        )  # fmt: skip

    def tune_kernels(self) -> CompiledModel:
        """This model with the layouts of kernels that are the fastest on its device, measured now: seconds to a minute.

        They are kept in the cache's folder, where later compilations find them, and in artifacts. `ConfigError` where Triton's
        kernels do not run.
        """
        tuning = tune_program(self.program, self.settings.kernels, self.device)
        return CompiledModel(
            self.program, self.profile, self.method, self.budget, self.settings,
            fingerprint=self.fingerprint, model_config=self.config, generation_config=self.generation_config,
            lowered=True, tuning=tuning if self.tuning is None else self.tuning.merged(tuning),
        )  # fmt: skip

    def get_experts_implementation(self) -> dict[str, str]:
        """What `generate` asks of mixtures of experts: nothing is to be switched in a program."""
        return {}

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_ids(self, ids: Tensor, past: int = 0) -> Tensor:
        program = self.program
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise InputError(f"input ids: expected an integer tensor [batch, tokens], got {got}")
        if ids.numel() == 0:
            raise InputError(
                f"input ids are empty (shape {tuple(ids.shape)}): a prompt needs at least one token per row"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= program.vocab_size:
            raise InputError(
                f"input ids reach from {low} to {high}; this model's vocabulary is 0 to {program.vocab_size - 1}"
            )
        if program.max_positions is not None and past + ids.shape[1] > program.max_positions:
            raise InputError(
                f"{past + ids.shape[1]} tokens do not fit the model's context of {program.max_positions}: "
                "shorten the prompt or the generation"
            )
        return ids.to(self.device, torch.int64)

    def _rows(self, ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
        """Each row's real tokens."""
        if attention_mask is None:
            return list(ids)
        if attention_mask.shape != ids.shape:
            raise InputError(
                f"attention mask {tuple(attention_mask.shape)} does not match input ids {tuple(ids.shape)}"
            )
        rows = []
        for index, (row, mask) in enumerate(zip(ids, attention_mask.to(self.device).bool())):
            changes = int((mask[1:] != mask[:-1]).sum())
            if changes > (1 if bool(mask[0]) or bool(mask[-1]) else 0):
                raise InputError(
                    f"attention mask of row {index} has holes: padding must be on the left or on the right"
                )
            if not bool(mask.any()):
                raise InputError(f"attention mask of row {index} is all zero: the row has no tokens")
            rows.append(row[mask])
        return rows

    # -- steps ---------------------------------------------------------------------------------------------------------

    @without_grad
    def prefill_record(
        self, ids: Tensor, *, surprisal: bool | None = None, all_queries: bool | None = None
    ) -> RowRecord:
        """Read one prompt ids [n] or [1, n] in full: its KV on the host tier, from which `compress` makes states.

        surprisal: whether to compute it; all_queries: whether to keep every query instead of the last ones; default:
        whether this model's method needs it.
        """
        ids = self._check_ids(ids[None] if ids.dim() == 1 else ids)
        if ids.shape[0] != 1:
            raise InputError(f"a record is of one row, got {ids.shape[0]}")
        plan = self.placement.plan
        return self._read(
            ids[0],
            surprisal=plan.reads_surprisal if surprisal is None else surprisal,
            all_queries=plan.reads_queries if all_queries is None else all_queries,
        )

    def _read(self, ids: Tensor, *, surprisal: bool, all_queries: bool = False) -> RowRecord:
        """Run a prompt ids int64 [n] on the model's device, in chunks."""
        self.placement.tier.check(self._host_nbytes(len(ids)), f"a prompt of {len(ids)} tokens")
        chunk = self.settings.prefill_chunk or (PREFILL_CHUNK_CUDA if self.device.type == "cuda" else PREFILL_CHUNK)
        record = prefill_row(
            self.program, ids, self.placement.budget.dtype,
            surprisal=surprisal, all_queries=all_queries, chunk=chunk, tier=self.placement.tier,
        )  # fmt: skip
        record.model = self.fingerprint
        return record

    def _host_nbytes(self, tokens: int) -> int:
        """Bytes of the host that reading a prompt takes at most: its keys and values, and what is folded of them."""
        placement = self.placement
        token = max(placement.budget.dtype.itemsize, self.dtype.itemsize)
        read = sum(store.values_per_token * token for store in placement.program.stores)
        waiting = sum(
            waiting_cost_bytes(store.part(part.first, part.last, 1.0), part.components, placement.budget.dtype)
            for store in placement.budgeted
            for part in placement.parts(store)
        )
        return tokens * (read + waiting)

    @without_grad
    def compress(self, record: RowRecord | list[RowRecord], *, release: bool = False) -> State:
        """A state of this model's method and budget from records, a row each; records serve any number of states.

        release: they serve this one only, and let go of each layer as it is built, so that both are never held in full.
        """
        return self._state([record] if isinstance(record, RowRecord) else record, release=release)

    def _state(self, records: list[RowRecord], *, release: bool = False) -> State:
        """`compress` of checked records."""
        for one in records:
            if None not in (one.model, self.fingerprint) and one.model != self.fingerprint:
                raise InputError(
                    f"the record was made by another model ({one.model}) than this one ({self.fingerprint}): "
                    "read the prompt with `prefill_record` of a compiled form of this model"
                )
            if self.placement.plan.reads_surprisal and one.surprisal is None:
                raise InputError(
                    f"method {self.method.name!r} divides by surprisal: make the record with surprisal=True"
                )
            if self.placement.plan.reads_queries and not one.all_queries:
                raise InputError(
                    f"method {self.method.name!r} reads all queries of a prompt: make the record with all_queries=True"
                )
            if any(site not in one.features for site in self.placement.plan.features):
                # The record was made for another method, whose program does not keep hidden states.
                again = self._read(one.ids.to(self.device), surprisal=False)
                one.features.update(again.features)
        rows = [RowMemory(self.placement, one.ordered_for(self.program), release=release) for one in records]
        return_freed()
        return State(self.placement, rows, torch.stack([one.logits for one in records]))

    @without_grad
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> State:
        """Read prompts [B, T] (padded on either side where `attention_mask` says so) and return their state.

        Each row runs alone and without its padding, so that its tokens cannot depend on its neighbours.
        """
        ids = self._check_ids(input_ids)
        states = [
            self._state([self.prefill_record(row)], release=True) for row in self._rows(ids, attention_mask)
        ]  # a record at a time
        return State(self.placement, [one.rows[0] for one in states], torch.cat([one.logits for one in states]))

    @without_grad
    def extend(
        self, state: State, input_ids: Tensor, attention_mask: Tensor | None = None, *, all_logits: bool = False
    ) -> Tensor:
        """Add tokens [B, T] to the rows of `state`, in place: a next turn, or a question after compression.

        Returns logits [B, 1, vocab] after each row's last token, or [B, T, vocab] with `all_logits` (unpadded rows only).
        """
        self._check_state(state)
        ids = self._check_ids(input_ids, past=state.get_seq_length() + (state.pending is not None))
        if ids.shape[0] != len(state.rows):
            raise InputError(f"{ids.shape[0]} rows of ids for a state of {len(state.rows)} rows")
        rows = self._rows(ids, attention_mask)
        together = len({len(row) for row in rows}) == 1
        if all_logits and not together:
            raise InputError("all_logits needs rows of one length")
        unread, before = 0, state.lengths
        if state.pending is not None:
            unread = state.pending.shape[1]
            rows = [torch.cat(pair) for pair in zip(state.pending, rows)]
        state.check_room([len(row) for row in rows])
        try:
            if together:
                chunk = self._chunk(ids.shape[1])
                logits = extend(self._running, state, torch.stack(rows), chunk, all_logits=all_logits)
                return logits[:, unread:] if all_logits else logits
            parts = []
            for index, row in enumerate(rows):
                single = State(self.placement, [state.rows[index]], state.logits[index : index + 1])
                parts.append(extend(self._running, single, row[None], self._chunk(len(row))))
            state.logits = torch.cat(parts)[:, 0]
            return torch.cat(parts)
        finally:
            if state.lengths != before:
                state.pending = None

    def _chunk(self, tokens: int) -> int:
        """Tokens of one `extend` step. Where spans are unfolded, tokens of a step share the room for them, so a question
        runs one token at a time and only longer texts in chunks."""
        if self.settings.extend_chunk is not None:
            return self.settings.extend_chunk
        if not self.method.compresses:
            return UNCAPPED_CHUNK
        plan = self.placement.plan
        return 1 if plan.unfolds and tokens <= QUESTION_TOKENS else plan.fold_chunk

    def _check_state(self, state: State) -> None:
        if not isinstance(state, State):
            raise InputError(f"expected a State made by prefill, got {type(state).__name__}")
        if state.placement.program is not self.program:
            raise InputError("this state was made by another compiled model: programs, methods and budgets must match")

    # -- Hugging Face --------------------------------------------------------------------------------------------------

    @without_grad
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: State | None = None,
        cache: State | None = None,
        **ignored: Any,
    ) -> CausalLMOutputWithPast:
        """One step for `generate`: a prefill without a state, else an extension. Logits are of the last tokens.

        past_key_values, cache: the state, under either of the names that transformers has for it.
        """
        state = past_key_values if cache is None else cache
        if state is None:
            state = self.prefill(input_ids, attention_mask)
            state.ids_seen = input_ids.shape[1]
            return _output(state.logits[:, None], state)
        mask = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        if state.finished is not None and bool(state.finished.any()):
            logits = self._extend_running(state, input_ids)
        else:
            logits = self.extend(state, input_ids, mask)
        state.ids_seen += input_ids.shape[1]
        return _output(logits, state)

    def _extend_running(self, state: State, ids: Tensor) -> Tensor:
        """One step of the rows that have not finished; the others read nothing and keep their logits. [B, 1, vocab]"""
        running = torch.nonzero(~state.finished)[:, 0].tolist()
        part = State(self.placement, [state.rows[row] for row in running], state.logits[running])
        if running:
            self.extend(part, ids[running])
        state.logits = state.logits.clone()
        state.logits[running] = part.logits
        return state.logits[:, None]

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: State | None = None,
        attention_mask: Tensor | None = None,
        cache: State | None = None,
        **ignored: Any,
    ) -> dict[str, Any]:
        """The tokens that the state has not read yet."""
        state = past_key_values if cache is None else cache
        seen = 0 if state is None else state.ids_seen
        mask = None if attention_mask is None else attention_mask[:, seen:]
        return {"input_ids": input_ids[:, seen:], "attention_mask": mask, CACHE: state}

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict, *ignored: Any
    ) -> None:
        """States replace caches: none is made ahead."""
        model_kwargs.setdefault(CACHE, None)

    @without_grad
    def generate(self, inputs: Tensor | None = None, *args: Any, state: State | None = None, **kwargs: Any) -> Any:
        """Hugging Face's `generate`, with the same arguments and results.

        state: go on from this state instead of reading a prompt; `inputs` are then the new tokens only (at least one), and
        the state advances in place, so that the next turn needs its own tokens only. It does so row by row: one that ends
        before its neighbours reads none of their padding. Assisted and contrastive decoding need a cache that can be
        cropped and are refused.
        """

        def asked(name: str) -> Any:
            return kwargs.get(name) or getattr(kwargs.get("generation_config"), name, None)

        for name in ("assistant_model", "prompt_lookup_num_tokens", "penalty_alpha", "assistant_early_exit"):
            if asked(name):
                raise ConfigError(
                    f"generate({name}=...): a compressed memory cannot take tokens back; use greedy, sampling or beam search"
                )
        if asked("prefill_chunk_size"):
            raise ConfigError(
                "generate(prefill_chunk_size=...): prompts are read in chunks anyway; CompileConfig(prefill_chunk=...) sets their size"
            )
        if kwargs.get("use_cache", getattr(kwargs.get("generation_config"), "use_cache", None)) is False:
            raise ConfigError("generate(use_cache=False): a compiled model always runs on its state")
        for name in ("num_beams", "num_return_sequences"):
            if state is not None and (asked(name) or 1) > 1:
                raise ConfigError(
                    f"generate(state=..., {name}={asked(name)}): a state goes on one way; make copies with state.select([0, 0, ...])"
                )
        for name in ("past_key_values", "cache"):
            if kwargs.get(name) is not None:
                raise ConfigError(f"generate({name}=...): pass state=..., made by prefill")
        ids = inputs if inputs is not None else kwargs.pop("input_ids", None)
        if ids is None:
            raise InputError("generate needs input_ids: the prompt, or with state=... the new tokens")
        if state is not None:
            self._check_state(state)
        ids = self._check_ids(ids, past=state.get_seq_length() if state is not None else 0)
        if state is not None:
            state.ids_seen = 0
            kwargs[CACHE] = state
        if kwargs.get("attention_mask") is not None:
            self._rows(ids, kwargs["attention_mask"])
        self._check_length(ids, state, kwargs)
        if state is None:
            return super().generate(ids, *args, **kwargs)
        if len(ids) != len(state.rows):
            raise InputError(f"{len(ids)} rows of ids for a state of {len(state.rows)} rows")
        rows = kwargs["stopping_criteria"] = FinishedRows(kwargs.get("stopping_criteria") or [], state)
        try:
            return super().generate(ids, *args, **kwargs)
        finally:
            rows.close()

    def _get_stopping_criteria(
        self, generation_config: GenerationConfig, stopping_criteria: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Hugging Face's list; where a state lives on, one that also tells it which rows ended."""
        criteria = super()._get_stopping_criteria(generation_config, stopping_criteria, *args, **kwargs)
        return stopping_criteria.take(criteria) if isinstance(stopping_criteria, FinishedRows) else criteria

    def _check_length(self, ids: Tensor, state: State | None, kwargs: dict[str, Any]) -> None:
        """Refuse what would leave the model's context half-way; the last generated token is never read."""
        limit = self.program.max_positions
        if limit is None:
            return
        config = kwargs.get("generation_config") or self.generation_config
        new = kwargs.get("max_new_tokens") or config.max_new_tokens
        if not isinstance(new, int):
            longest = kwargs.get("max_length")
            new = longest - ids.shape[1] if isinstance(longest, int) else 1
        past = 0 if state is None else state.get_seq_length() + (state.pending is not None)
        if past + ids.shape[1] + new > limit + 1:
            raise InputError(
                f"{past + ids.shape[1]} tokens and {new} new ones do not fit the model's context of {limit}"
            )

    def _reorder_cache(self, state: State, beam_idx: Tensor) -> State:
        state.reorder_cache(beam_idx)
        return state

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an artifact folder that `semkv.load` runs without the modelling code; see docs/artifact.md."""
        from semkv.saving import save_compiled

        save_compiled(self, path)

    def load_state(self, path: str | os.PathLike[str]) -> State:
        """A state that this model, or one compiled alike, saved with `State.save`."""
        from semkv.saving import load_state

        return load_state(self, path)

    def __repr__(self) -> str:
        sites = len(self.program.sites)
        return f"CompiledModel(method={self.method.name!r}, budget={self.budget!r}, sites={sites}, kv_dtype={self.placement.budget.dtype})"


__all__ = ["CompiledModel"]


def _output(logits: Tensor, state: State) -> CausalLMOutputWithPast:
    return CausalLMOutputWithPast(logits=logits, **{CACHE: state})


def _pass_options(source: Program, method: Method, profile: Profile | None) -> PassOptions:
    return PassOptions(
        method=method.name, layer_shares=method.layer_shares(source, profile), head_roles=method.head_roles(source, profile),
        retrieval_head=method.retrieval_head(profile),
    )  # fmt: skip
