"""Prompts that are more than ids: embeddings, images and whatever else the user's model takes.

The contract, for `generate`, `forward`, `prefill`, `extend` and `Prompt.feed` alike. A row's tokens are ids, or come with

- `inputs_embeds` [B, T, H], in the place of what `get_input_embeddings` of the model makes of ids, in the dtype of its parameters. Then
  there are no ids, and `generate` returns the new tokens alone, as in transformers.
- `position_ids`: [B, T] must be the tokens' places, which a memory counts; [axes, B, T] are rotary positions of a model that has several
  axes, or [1 + axes, B, T], of which the first is that of text and not read. Left out, they go on from the row's.
- `layer_inputs`: by attention site, what is added to the hidden states that enter its layer, [B, T, H].
- `both_ways`: of each row, runs of columns (first, behind the last) whose tokens attend to one another both ways; in prompts, not in turns.
- what the model's forward takes besides, by its processor's names (`pixel_values`, `image_grid_thw`, ...). The model's own code, up to its
  layers, makes the four above of it (`semkv.generation.eager_prompt`), for ids of this call alone; so this takes the model that was
  compiled.

`attention_mask` [B, T] cuts the padding off, and each row is read alone and without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from semkv.errors import ConfigError, InputError
from semkv.generation.arguments import BROUGHT
from semkv.generation.eager_prompt import DecoderInputs, decoder_inputs, inputs_of
from semkv.generation.input_ids import check_positions, real_tokens
from semkv.live.following import Following
from semkv.passes.insert_retrieval_head import token_embedding
from semkv.runtime.modes import undisturbed
from semkv.runtime.prompt.content import UNKNOWN, Content
from semkv.runtime.state import State

OF_IMAGES = ("pixel_", "image_", "video_", "audio_", "input_features", "mm_token_type_ids", "token_type_ids")
"""How names of inputs that only a model with other modalities has begin."""


class PromptInputs(Following):
    """What a call was given, as rows of tokens and what they are besides ids."""

    @undisturbed
    def prompt_inputs(
        self, model: nn.Module | None = None, *, state: State | None = None, **inputs: Any
    ) -> dict[str, Any]:
        """What a compiled model reads of a prompt with images, made by the model's own code: arguments of `generate` and `prefill`.

        model: None for the one that was compiled; an artifact has none, and a program that was saved is read on where the model is not.
        state: whose next turn it is, so that rotary positions go on from there. inputs: as the model's processor made them, `input_ids`
        among them.

        Returns
        -------
        `inputs_embeds` [B, T, H], `attention_mask` where there is one, `position_ids` [axes, B, T] where positions have several axes, and
        `layer_inputs` where features enter layers, and `both_ways` where tokens of an image attend to one another.
        """
        model = self._model_of("prompt_inputs", list(inputs)) if model is None else model
        made = decoder_inputs(model, self.program, inputs)
        rotary = made.rotary
        if rotary is not None and state is not None:
            rotary = rotary + torch.tensor(state.next_rotary, dtype=torch.int64, device=rotary.device)[:, None]
        found: dict[str, Any] = {"inputs_embeds": made.embeds, "attention_mask": inputs.get("attention_mask")}
        found |= {"position_ids": rotary, "layer_inputs": made.entering or None, "both_ways": made.blocks}
        return {name: value for name, value in found.items() if value is not None}

    def _model_of(self, call: str, names: list[str]) -> nn.Module:
        if self._live is None:
            raise ConfigError(
                f"{call}({names[0]}=...): this compiled model holds the text decoder alone (it was loaded, or made of a program), and what "
                "an image is to it takes the model's own code: pass what compiled.prompt_inputs(model, **inputs) makes of a model that "
                "is loaded, here or elsewhere"
            )
        return self._live.model

    def _takes(self, name: str) -> bool:
        """Whether the model that was compiled has an input of this name, or it is one of a model with images."""
        if self._live is None:
            return name.startswith(OF_IMAGES)
        return name in inputs_of(self._live.model)

    def _brought(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Take out of `kwargs` what a prompt brings besides ids and mask; the caller refuses what is left."""
        found = {name: kwargs.pop(name) for name in list(kwargs) if name in BROUGHT or self._takes_more(name)}
        return {name: value for name, value in found.items() if value is not None and not _all_text(name, value)}

    def _only_brought(self, call: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """`_brought` where nothing else may be given; `ConfigError` by its name."""
        rest = dict(kwargs)
        brought = self._brought(rest)
        for name, value in rest.items():
            if value is not None:
                raise ConfigError(f"{call}({name}=...): neither an argument of {call} nor an input of this model")
        return brought

    def _takes_more(self, name: str) -> bool:
        return self.program.seams.reads_more and name not in OWN and self._takes(name)

    def _given(
        self,
        call: str,
        input_ids: Tensor | None,
        mask: Tensor | None,
        brought: Mapping[str, Any],
        next_rotary: list[int] | None = None,
    ) -> tuple[Tensor, list[Content] | None]:
        """Ids int64 [B, T], `UNKNOWN` where there is none, and what each row's real tokens are besides; None where they are ids alone.

        next_rotary: of each row, the rotary position of the next token; the model's own code counts from 0. None: that is right.

        Raises
        ------
        InputError: ids and embeddings, none of both, sizes and dtypes that do not fit. ConfigError: what this program or its method cannot
            read. Errors of the model's own code.
        """
        more = {name: value for name, value in brought.items() if name not in BROUGHT}
        embeds, positions = brought.get("inputs_embeds"), brought.get("position_ids")
        if embeds is None and input_ids is None:
            raise InputError(f"{call} needs input_ids [B, T] or inputs_embeds [B, T, H]")
        if embeds is not None and (input_ids is not None or more):
            other = "input_ids" if input_ids is not None else next(iter(more))
            raise InputError(
                f"{call}: inputs_embeds and {other} were given; pass one of them, or two turns one after the other"
            )
        several = isinstance(positions, Tensor) and positions.dim() == 3
        if not (more or several or embeds is not None or brought.get("layer_inputs") or brought.get("both_ways")):
            assert input_ids is not None
            return input_ids, None
        made = self._made(call, input_ids, mask, brought, more)
        if embeds is not None:
            self._check_embeds(call, embeds)
            ids = torch.full(embeds.shape[:2], UNKNOWN, dtype=torch.int64, device=self.device)
        else:
            assert input_ids is not None
            known = (input_ids >= 0) & (input_ids < self.program.vocab_size)
            ids = input_ids if not more else torch.where(known, input_ids, UNKNOWN)
        if not self.program.seams.embeddings and made.embeds is not None:
            why = self.program.seams.reason or "as it was captured before embeddings were known of"
            raise ConfigError(f"{call}: this program takes ids alone, {why}: pass input_ids")
        if self.placement.plan.before is not None and bool((ids == UNKNOWN).any()):
            raise ConfigError(
                f"{call}: method {self.method.name!r} looks at token ids before the first layer, which embeddings have not: take "
                "another method"
            )
        return ids, _contents(ids, mask, made, next_rotary if more else None)

    def _made(
        self, call: str, ids: Tensor | None, mask: Tensor | None, brought: Mapping[str, Any], more: dict[str, Any]
    ) -> DecoderInputs:
        if more:
            model = self._model_of(call, list(more))
            own = {"input_ids": ids, "attention_mask": mask, "position_ids": brought.get("position_ids")}
            return decoder_inputs(model, self.program, {n: x for n, x in own.items() if x is not None} | more)
        positions, axes = brought.get("position_ids"), self.program.seams.axes
        rotary = None
        if isinstance(positions, Tensor) and positions.dim() == 3:
            if axes == 1 or positions.shape[0] not in (axes, axes + 1):
                raise InputError(
                    f"position ids {tuple(positions.shape)}: positions of this model have {axes} axes, so "
                    + ("[B, T] is expected" if axes == 1 else f"[{axes}, B, T] or [{axes + 1}, B, T] is expected")
                )
            rotary = positions[-axes:]
        entering = brought.get("layer_inputs") or {}
        places = {site for site, _ in self.program.seams.streams}
        if not isinstance(entering, Mapping) or not set(entering) <= places:
            raise InputError(
                f"layer_inputs: expected a dict by attention site, of {sorted(places)}, got {entering!r:.80}"
            )
        embeds = brought.get("inputs_embeds")
        like = ids if embeds is None else embeds
        for name, x in [
            ("position ids", None if rotary is None else rotary[0]),
            *(("layer_inputs", x) for x in entering.values()),
        ]:
            if x is not None and like is not None and x.shape[:2] != like.shape[:2]:
                raise InputError(f"{name} {tuple(x.shape)} do not match a prompt {tuple(like.shape[:2])} [B, T]")
        blocks = brought.get("both_ways")
        if blocks is not None and like is not None and not _are_runs(blocks, *like.shape[:2]):
            raise InputError(
                f"both_ways: expected for each of {len(like)} rows runs (first, behind the last), got {blocks!r:.80}"
            )
        return DecoderInputs(embeds, rotary, entering, blocks)

    def _check_embeds(self, call: str, embeds: Any) -> None:
        hidden = token_embedding(self.program.body)[1].shape[1]
        if not isinstance(embeds, Tensor) or embeds.dim() != 3 or embeds.shape[2] != hidden or not embeds.numel():
            got = f"{tuple(embeds.shape)}" if isinstance(embeds, Tensor) else type(embeds).__name__
            raise InputError(
                f"{call}: inputs_embeds {got}: expected embeddings [batch, tokens, {hidden}] of this model"
            )
        if embeds.dtype != self.program.dtype:
            raise InputError(
                f"{call}: inputs_embeds are {embeds.dtype}, the model computes in {self.program.dtype}: convert "
                "them with .to(...)"
            )
        if not bool(embeds.isfinite().all()):
            raise InputError(f"{call}: inputs_embeds have numbers that are infinite or NaN; expected finite ones")

    def _check_places(self, brought: Mapping[str, Any], ids: Tensor, mask: Tensor | None, first: list[int]) -> None:
        """Raise `InputError` where position ids [B, T] are not the tokens' places."""
        positions = brought.get("position_ids")
        if not isinstance(positions, Tensor) or positions.dim() != 3:
            check_positions(positions, ids, mask, first)


OWN = frozenset(
    [
        "input_ids",
        "attention_mask",
        "past_key_values",
        "cache",
        "cache_position",
        "labels",
        "use_cache",
        "logits_to_keep",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
    ]
)
"""Inputs of a model that a compiled one has of its own, or has not."""


def _all_text(name: str, value: Any) -> bool:
    """Whether these are types of tokens that say that all of them are text: as good as none."""
    return name.endswith("token_type_ids") and isinstance(value, Tensor) and not bool(value.any())


def _are_runs(blocks: Any, rows: int, columns: int) -> bool:
    """Whether these are, for each row, runs of columns one behind the other."""
    try:
        edges = [[edge for first, end in runs for edge in (first, end - 1)] for runs in blocks]
    except (TypeError, ValueError):
        return False
    return len(edges) == rows and all(
        own == sorted(own) and (not own or (own[0] >= 0 and own[-1] < columns)) for own in edges
    )


def _contents(ids: Tensor, mask: Tensor | None, made: DecoderInputs, shifts: list[int] | None) -> list[Content]:
    """Of each row's real tokens."""
    places = torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device).expand(ids.shape)
    contents = []
    for row, where in enumerate(real_tokens(places, mask)):
        rotary = None
        if made.rotary is not None:
            rotary = made.rotary[:, row].index_select(1, where.to(made.rotary.device)) + (shifts[row] if shifts else 0)
        contents.append(
            Content(
                None if made.embeds is None else made.embeds[row].index_select(0, where.to(made.embeds.device)),
                rotary,
                {site: x[row].index_select(0, where.to(x.device)) for site, x in made.entering.items()},
                [(a - int(where[0]), b - int(where[0])) for a, b in made.blocks[row]] if made.blocks else [],
            )
        )
    return contents


__all__ = ["PromptInputs"]
