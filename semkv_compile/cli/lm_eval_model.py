"""The model `semkv` of lm-evaluation-harness: a context is read and compressed, its continuation is read or generated over the state.

Importing this module registers it. One forward over context and continuation would never read what was compressed, so there is none.
"""

from __future__ import annotations

import warnings
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from semkv.artifact.manifest import is_artifact
from semkv.cli.models import load_model, load_tokenizer
from semkv.compiled import CompiledModel
from semkv.config import CompileConfig
from semkv.errors import ConfigError
from semkv.evaluation.continuations import is_compressed, score_continuations

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""Context and continuation as text, where there are any, and as ids."""

HARNESS = (
    "max_length",
    "truncation",
    "add_bos_token",
    "prefix_token_id",
    "softmax_dtype",
    "think_end_token",
    "enable_thinking",
    "chat_template_args",
)
"""Arguments that are the harness's own, as for its model `hf`."""


@register_model("semkv")
class SemkvLM(HFLM):
    """A compiled model in the harness; tokenizing, chat templates, stop sequences and windows are those of `hf`.

    pretrained: a folder that `compiled.save` wrote, or a model as all commands take it. method, budget: default: of a saved model its own,
    else `full`. profile: a folder. tokenizer: a folder or name; needed with a saved model, which has none. dtype, device: of a model.
    options: settings of a `CompileConfig`, options of the method, and `HARNESS`.
    """

    def __init__(
        self,
        pretrained: str,
        method: str | None = None,
        budget: float | int | None = None,
        profile: str | None = None,
        tokenizer: str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        """Raises ConfigError, BudgetError, ProfileError or ArtifactError, as the commands do."""
        if str(batch_size).startswith("auto"):
            raise ConfigError(
                f"batch_size={batch_size!r}: rows are read one at a time, so none is the largest that fits; give a number"
            )
        own = {name: options.pop(name) for name in HARNESS if name in options}
        device = None if device is None else _usable(device)
        compiled, words = _compiled(pretrained, method, budget, profile, tokenizer, dtype, device, options)
        super().__init__(pretrained=compiled, backend="causal", tokenizer=words, batch_size=batch_size or 1, **own)
        self.compiled, self.source = compiled, str(pretrained)

    # -- likelihood ----------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """(log likelihood, whether it is what greedy decoding gives) of each request; a context that several have is read once."""
        from tqdm import tqdm

        fitted = [_fitted(context, continuation, self.max_length) for _, context, continuation in requests]
        order = sorted(range(len(requests)), key=lambda number: (-len(fitted[number][0]), fitted[number][0]))
        scores: dict[int, tuple[float, bool]] = {}
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests")
        short = contexts = 0
        for context, group in groupby(order, key=lambda number: fitted[number][0]):
            numbers = list(group)
            found = score_continuations(
                self.compiled, context, [fitted[number][1] for number in numbers], dtype=self.softmax_dtype
            )
            scores |= dict(zip(numbers, found))
            for number, score in zip(numbers, found):
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], score)
            contexts += 1
            longest = max(len(fitted[number][1]) for number in numbers)  # a text that is read over a single token, say
            short += not is_compressed(self.compiled, len(context) + longest - 1)
            bar.update(len(numbers))
        bar.close()
        self._warn(short, contexts)
        return [scores[number] for number in range(len(requests))]

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        raise ConfigError(
            "one forward over context and continuation never reads a compressed memory: score with score_continuations"
        )

    # -- generation ----------------------------------------------------------------------------------------------------

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        mask = generation_kwargs.get("attention_mask")
        lengths = [context.shape[1]] * len(context) if mask is None else mask.sum(1).tolist()
        self._warn(sum(not is_compressed(self.compiled, length) for length in lengths), len(lengths))
        return super()._model_generate(context, max_length, stop, **generation_kwargs)

    # -- what reports say ----------------------------------------------------------------------------------------------

    def get_model_info(self) -> dict[str, Any]:
        """What was evaluated, for the harness's report."""
        return {
            "model_num_parameters": sum(x.numel() for x in self.compiled.parameters()),
            "model_dtype": self.compiled.dtype,
            "semkv_method": self.compiled.method.name,
            "semkv_budget": self.compiled.budget,
        }

    def _warn(self, short: int, contexts: int) -> None:
        """Say that some contexts were held whole, where a method was to compress them."""
        if not short or not self.compiled.method.compresses:
            return
        floor = self.compiled.placement.budget.floor
        why = f"a row may always hold {floor} tokens (floor={floor})" if floor else "they fit"
        warnings.warn(
            f"{short} of {contexts} contexts are so short that budget {self.compiled.budget} holds them whole ({why}): nothing is "
            f"compressed, so these scores are those of method 'full'. Take a task with longer contexts, or a smaller budget or floor",
            stacklevel=3,
        )


def _usable(device: str) -> str:
    """The harness asks for CUDA where nobody says anything: without it, the CPU."""
    return device if torch.cuda.is_available() or not device.startswith("cuda") else "cpu"


def _fitted(context: list[int], continuation: list[int], limit: int) -> tuple[list[int], list[int]]:
    """Both within `limit` tokens, the last of which nothing follows: what is too long loses its beginning, as in `hf`."""
    if len(continuation) > limit:
        raise ConfigError(f"a continuation of {len(continuation)} tokens does not fit max_length={limit}")
    return context[-(limit + 1 - len(continuation)) :], continuation


def _compiled(
    pretrained: str,
    method: str | None,
    budget: float | int | None,
    profile: str | None,
    tokenizer: str | None,
    dtype: str | None,
    device: str | None,
    options: dict[str, Any],
) -> tuple[CompiledModel, Any]:
    """The compiled model and its tokenizer."""
    import semkv

    path = Path(pretrained).expanduser()
    settings = {name: options.pop(name) for name in list(options) if name in CompileConfig.model_fields}
    if path.is_dir() and is_artifact(path):
        if tokenizer is None:
            raise ConfigError(f"{pretrained} is a compiled model, which has no tokenizer: add tokenizer=FOLDER_OR_NAME")
        if profile is not None or dtype is not None:
            raise ConfigError(
                f"{pretrained} is a compiled model with its own profile and dtype: leave out profile= and dtype="
            )
        compiled = semkv.load(path, device=device or "cpu")
        if method is not None or budget is not None or settings or options:
            config = compiled.settings.model_copy(update=settings) if settings else None
            chosen = compiled.method.name if method is None else method
            kept = compiled.budget if budget is None and method is None else budget
            compiled = compiled.with_method(chosen, kept, config=config, **options)
        return compiled, load_tokenizer(tokenizer)
    loaded = load_model(pretrained, None if profile is None else Path(profile), dtype=dtype, device=device)
    config = CompileConfig.model_validate({**settings, "method_options": options})
    chosen = method or ("auto" if budget is not None and loaded.profile is not None else "full")
    compiled = semkv.compile(loaded.model, loaded.profile, method=chosen, budget=budget, config=config)
    return compiled, loaded.tokenizer if tokenizer is None else load_tokenizer(tokenizer)


__all__ = ["SemkvLM"]
