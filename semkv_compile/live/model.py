"""The user's model after its compilation: it lives on, is trained, merged, loaded anew; a compiled model follows or refuses."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from semkv.artifact.fingerprint import model_fingerprint, program_weights
from semkv.capture.device import moved
from semkv.compiler.pipeline import captured_program, on_latents
from semkv.compiler.program_cache import cached_program
from semkv.config import CompileConfig
from semkv.errors import StaleModelError, StateError
from semkv.ir.graph import copy_graph_module
from semkv.ir.program import Program
from semkv.live.snapshot import Snapshot, model_tensors
from semkv.model.plain_tensors import place, plain_tensors

NAMED = 3
"""Changes that an error names."""


def program_of(model: nn.Module, settings: CompileConfig, device: torch.device | None, fingerprint: str) -> Program:
    """The captured program of `model` on `device`, None for the model's own, whose tensors it then shares.

    Raises
    ------
    InputError, CaptureError, ConfigError: as `semkv.compile`.
    """
    program = cached_program(model, fingerprint) if settings.cache else captured_program(model)
    if settings.latents:
        program = on_latents(program)
    if device is not None and any(p.device != device for p in model.parameters()):
        program = moved(program, device)
    return program


@dataclass(frozen=True, eq=False)
class LiveWeights:
    """The weights that a live model had between two changes of them. number: of the changes before."""

    live: LiveModel
    number: int

    def precede(self, other: LiveWeights) -> bool:
        """Whether they are of the same model, and not the same."""
        return self.live.family is other.live.family and self.number != other.number

    def check(self, what: str) -> None:
        """Raise `StateError` where the model has other weights by now, `StaleModelError` where it is another model."""
        if self.precede(self.live.look()):
            raise outdated(what)


def outdated(what: str) -> StateError:
    return StateError(f"{what} was made before the model's weights changed: read the text again")


class LiveModel:
    """The model that was compiled, held weakly, with what it was when it was captured.

    Compiled models of one program share it (`CompiledModel.with_method`), and each compares `weights` with those that it was made
    of. A deep copy has weights of its own and nothing to follow.
    """

    def __init__(
        self, model: nn.Module, program: Program, device: torch.device | None, *, after: LiveModel | None = None
    ) -> None:
        """program: made by `program_of` with the same `device`. after: what followed the same model up to now."""
        self.device = device
        self.family: Any = object() if after is None else after.family
        self.weights: LiveWeights = LiveWeights(self, 0 if after is None else after.weights.number + 1)
        self.lock = threading.RLock()
        self._model: Callable[[], nn.Module | None] = weakref.ref(model)
        self._read = tuple(_paths(program))
        self._snapshot: Snapshot | None = _snapshot(model, self._read)
        self._changed: dict[str, int] = {}
        """Names of tensors that changed, with the number of the last change."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LiveModel:
        twin = object.__new__(LiveModel)
        memo[id(self)] = twin
        twin.device, twin.family, twin.lock = self.device, self.family, threading.RLock()
        twin._model, twin._read, twin._snapshot, twin._changed = _nothing, (), None, {}
        twin.weights = copy.deepcopy(self.weights, memo)
        return twin

    @property
    def model(self) -> nn.Module:
        """The model. `StaleModelError` where it is gone."""
        model = self._model()
        if model is None:
            raise StaleModelError(
                "the model that was compiled is gone, so it cannot be captured again: keep it, or compile the one that there is"
            )
        return model

    def look(self, *, sample: bool = True) -> LiveWeights:
        """The weights of now; new ones where any changed since the last look.

        sample: compare a few numbers of every tensor, which is how an edit through `.data` shows.

        Raises
        ------
        StaleModelError: something else than the numbers of tensors changed; nothing is noted, so that the change can be undone.
        """
        snapshot, weights = self._snapshot, self.weights
        if snapshot is None or snapshot.unchanged(sample=sample):
            return weights
        with self.lock:
            if self._snapshot is not snapshot:  # another thread saw it too
                return self.look(sample=sample)
            found = snapshot.difference()
            if found.structure:
                more = len(found.structure) - NAMED
                raise StaleModelError(
                    f"the model changed after it was compiled: {'; '.join(found.structure[:NAMED])}"
                    f"{f'; and {more} more' if more > 0 else ''}. compiled.refresh() captures it as it is now; or undo the change"
                )
            model = self._model()
            if found.values and model is None:
                raise StaleModelError(
                    f"the model that was compiled is gone, and its weights were changed since ({min(found.values)}): keep the module "
                    "that is passed to semkv.compile, or compile the one that has them now"
                )
            self._snapshot = snapshot.left() if model is None else _snapshot(model, self._read)
            if found.values:
                self.weights = LiveWeights(self, self.weights.number + 1)
                self._changed.update(dict.fromkeys(found.values, self.weights.number))
            return self.weights

    def followed(self, source: Program, since: LiveWeights, settings: CompileConfig) -> tuple[Program, str]:
        """The captured program `source`, made with the weights `since`, on the weights of now, and their fingerprint.

        It shares the model's tensors as before, and is `source` itself where those are the same tensors; copies on another device
        are written anew, in place. Where numbers of the graph were made of weights that changed, the model is captured again.
        """
        model = self.model
        fingerprint = model_fingerprint(model)
        changed = self._changed_since(since)
        if _touched(source.evaluated, changed):
            return program_of(model, settings, self.device, fingerprint), fingerprint
        held = model_tensors(model, self._read)
        tensors = dict(pair for name, tensor in held.items() for pair in plain_tensors(name, tensor))
        body = _on(source.body, tensors, changed)
        head = None if source.head is None else _on(source.head, tensors, changed)
        same = body is source.body and head is source.head
        return source if same else source.evolve(body=body, head=head), fingerprint

    def copied(self, program: Program, source: Program, since: LiveWeights) -> bool:
        """Whether `program`, lowered from `source`, holds tensors of its own that may have been made of weights that changed."""
        held = _paths(source)
        if any(not isinstance(held.get(name), nn.Parameter) for name in _touched(held, self._changed_since(since))):
            return True  # constants are folded of buffers
        own = {id(x) for x in held.values()}
        return any(isinstance(x, nn.Parameter) and id(x) not in own for x in program_weights(program).values())

    def _changed_since(self, weights: LiveWeights) -> set[str]:
        return {name for name, number in self._changed.items() if number > weights.number}

    def again(self, settings: CompileConfig) -> tuple[LiveModel, Program, str]:
        """The model captured as it is now: what follows it from now on, its program, and its fingerprint."""
        model = self.model
        fingerprint = model_fingerprint(model)
        program = program_of(model, settings, self.device, fingerprint)
        return LiveModel(model, program, self.device, after=self), program, fingerprint


def _nothing() -> None:
    return None


def _snapshot(model: nn.Module, read: tuple[str, ...]) -> Snapshot:
    return Snapshot(model.named_modules(), model_tensors(model, read))


def _paths(program: Program) -> dict[str, Tensor]:
    """The tensors of a captured program; those that are the model's have the names that they have there."""
    return {
        path: x
        for module in (program.body, program.head)
        if module is not None
        for path, x in model_tensors(module).items()
    }


def _touched(paths: Iterable[str], changed: set[str]) -> set[str]:
    """Those of `paths` that changed, or are a part of a tensor that did."""
    return {path for path in paths if path in changed or any(name in changed for name in _outer(path))}


def _outer(path: str) -> Iterator[str]:
    while path := path.rpartition(".")[0]:
        yield path


def _on(module: GraphModule, tensors: dict[str, Tensor], changed: set[str]) -> GraphModule:
    """The graph on the model's `tensors` by name; on another device, with those that `changed` copied there."""
    others: dict[str, Tensor] = {}
    for path, held in model_tensors(module).items():
        tensor = tensors.get(path)
        if tensor is None or tensor.is_meta or place(tensor) == place(held):
            continue
        if tensor.device == held.device:
            others[path] = tensor
        elif _touched((path,), changed):
            held.detach().copy_(tensor)
    if not others:
        return module
    result = copy_graph_module(module)
    for path in others.keys() & model_tensors(result).keys():
        owner, _, leaf = path.rpartition(".")
        setattr(result.get_submodule(owner), leaf, others[path])
    return result


__all__ = ["LiveModel", "LiveWeights", "outdated", "program_of"]
