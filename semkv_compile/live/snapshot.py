"""What a model was at one moment, compared with what it is: cheaply where nothing changed, by name where something did.

Modules and tensors are held weakly: a snapshot keeps no model alive. Where a model is gone, what is left of it is compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from operator import call, eq, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from semkv.capture.identity import IGNORED
from semkv.live.scratch import written_by_forward

SAMPLES = 16
"""Values of a tensor that are compared: an edit through `.data` leaves no other trace."""

ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Enum, type)

NOT_COMPUTED = (IGNORED | set(vars(nn.Module()))) - {"training"} | {
    *(
        "gradient_checkpointing",
        "loss_type",
        "warnings_issued",
        "_compiled_call_impl",
        "_is_hf_initialized",
        "hf_device_map",
    ),
    *(
        "_hf_peft_config_loaded",
        "special_peft_forward_args",
        "active_adapter",
    ),  # layers have their own `_active_adapter`
}
"""Attributes of modules that change nothing of a forward in evaluation mode, or that are looked at apart."""

CONFIG_NOT_COMPUTED = IGNORED | {
    *(
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "_output_attentions",
        "architectures",
        "dtype",
    ),
    *(
        "_attn_implementation",
        "_attn_implementation_internal",
        "_experts_implementation",
        "_experts_implementation_internal",
    ),
    *(
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "sep_token_id",
        "problem_type",
        "id2label",
        "label2id",
        "_commit_hash",
    ),
}
"""The same of configurations."""

HELD = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
_held = itemgetter(*HELD)
_GONE = object()


@dataclass
class Difference:
    """What changed. structure: changes that a captured graph cannot follow, in words. values: names of tensors whose numbers, and
    nothing else, are others."""

    structure: list[str] = field(default_factory=list)
    values: set[str] = field(default_factory=set)


class Snapshot:
    """The modules, plain attributes, hooks and tensors of a model as they were when this was made."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], tensors: Mapping[str, Tensor]) -> None:
        """modules: by path. tensors: parameters, buffers and other tensors that count, by name; one under several names is tied."""
        held = list(modules)
        self._modules = [_Module(path, module) for path, module in held]
        self._configs = [_Attributes(path, config, CONFIG_NOT_COMPUTED) for path, config in _configs(held)]
        names: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        self._tensors = [_Weight(tied, tensors[tied[0]]) for tied in names.values()]
        inside = {path: place for place, (path, _) in enumerate(held)}
        others = [name.rpartition(".") for name in tensors]
        self._loose = [  # tensors that are plain attributes
            (inside[path], leaf) for path, _, leaf in others if path in inside and leaf in vars(held[inside[path]][1])
        ]
        self._getters, self._plain = [one.get for one in self._modules], [one.was for one in self._modules]
        self._held = self._held_by([vars(module) for _, module in held])
        self._parts = [ref for weight in self._tensors for ref in weight.parts]
        parts = self._alive()
        self._traces = _traces(parts)
        self._places = _places(parts)
        self._sample = self._sampled(parts)

    # -- whether anything changed --------------------------------------------------------------------------------------

    def unchanged(self, *, sample: bool) -> bool:
        """Whether everything is certainly as it was; `sample` looks at numbers too. False may be no change that counts."""
        try:
            states = [one.ref().__dict__ for one in self._modules]
            attributes = map(call, self._getters, states)  # one by one: a list of them would be garbage in every step
            if not all(map(eq, attributes, self._plain)):
                return False
            if self._held_by(states) != self._held:
                return False
            if any(one.get(vars(one.ref())) != one.was for one in self._configs):
                return False
            parts = self._alive()
            if _traces(parts) != self._traces:
                return False
            return not sample or all(map(torch.equal, self._sampled(parts), self._sample))
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
            return False  # gone, removed, or not to be compared

    def _held_by(self, states: list[dict[str, Any]]) -> list[Any]:
        """Children, tensors, hooks and functions of the modules by identity, and how many attributes there are."""
        return [
            list(map(len, states)),
            list(map(id, chain.from_iterable(map(dict.values, chain.from_iterable(map(_held, states)))))),
            [id(state.get("forward")) for state in states],
            [id(states[place][name]) for place, name in self._loose],
        ]

    def _alive(self) -> list[Any]:
        """The tensors that hold numbers; None where one is gone."""
        return [ref() for ref in self._parts]

    @torch.no_grad()
    def _sampled(self, parts: list[Tensor]) -> list[Tensor]:
        """Bytes of a few numbers of every tensor, a tensor of them per dtype and device."""
        return [
            torch.cat([parts[part].as_strided(*place) for part, place in group]).view(torch.uint8)
            for group in self._places
        ]

    # -- what changed --------------------------------------------------------------------------------------------------

    def difference(self) -> Difference:
        """Everything that changed, by name. Modules and tensors that are gone count only where somebody else should hold them."""
        found = Difference()
        now: dict[str, Any] = {}
        for one in self._modules:
            module = one.ref()
            if module is not None:
                found.structure += one.changes(module)
                now |= _own_tensors(one.path, module)
        for config in self._configs:
            if (held := config.ref()) is not None:
                found.structure += config.changes(vars(held))
        for place, name in self._loose:
            if (module := self._modules[place].ref()) is not None:
                now[_join(self._modules[place].path, name)] = vars(module).get(name)
        for weight in self._tensors:
            weight.compare(now, found)
        return found

    def left(self) -> Snapshot:
        """Of what is still there, as it is now."""
        modules = [(one.path, module) for one in self._modules if (module := one.ref()) is not None]
        alive = {name: tensor for one in self._tensors if (tensor := one.ref()) is not None for name in one.names}
        return Snapshot(modules, alive)

    def names(self) -> list[str]:
        return [name for weight in self._tensors for name in weight.names]


def model_tensors(model: nn.Module, also: Iterable[str] = ()) -> dict[str, Tensor]:
    """Parameters and buffers of a model by all their names, and the tensors that are plain attributes of these names."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in also:
        path, _, leaf = name.rpartition(".")
        value = vars(modules[path]).get(leaf) if path in modules else None
        if isinstance(value, Tensor):
            found[name] = value
    return found


class _Attributes:
    """Plain values among the attributes of an object. notes: names of those under which its own code may leave a tensor."""

    notes: frozenset[str] = frozenset()

    def __init__(self, path: str, owner: Any, ignored: frozenset[str] | set[str]) -> None:
        self.path, self.ref, self.ignored = path, weakref.ref(owner), ignored
        state = vars(owner)
        self.names = [name for name, value in state.items() if name not in ignored and _is_plain(value)]
        self.all = frozenset(state)
        self.get: Callable[[dict[str, Any]], Any] = itemgetter(*self.names) if self.names else lambda state: None
        self.was = _copied(self.get(state))

    def changes(self, state: dict[str, Any]) -> Iterator[str]:
        """Attributes of other values, in words."""
        values = self.was if len(self.names) > 1 else (self.was,)
        for name, was in zip(self.names, values):
            value = state.get(name, _GONE)
            noted = was is None and isinstance(value, Tensor) and name in self.notes
            if not noted and not _same(was, value):
                yield f"{_join(self.path, name)}: {_words(was)} -> {_words(value)}"


class _Module(_Attributes):
    """A module with its children, hooks and the names of its tensors."""

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__(path, module, NOT_COMPUTED)
        self.notes = written_by_forward(type(module))  # type: ignore[arg-type]
        self._children = {name: (_weak(child), type(child).__name__) for name, child in module._modules.items()}
        self._tensor_names = set(_own_tensors("", module))
        self._hooks = _hooks(module)
        self._forward = id(vars(module).get("forward"))

    def changes(self, module: Any) -> Iterator[str]:
        state = vars(module)
        yield from super().changes(state)
        yield from self._new_children(module)
        for name in sorted(self._tensor_names ^ _own_tensors("", module).keys()):
            words = "(none) -> a tensor" if name not in self._tensor_names else "a tensor -> (none)"
            yield f"{_join(self.path, name)}: {words}"
        if (hooks := _hooks(module)) != self._hooks:
            yield f"hooks of {self.path or 'the model'}: {_names_of(self._hooks)} -> {_names_of(hooks)}"
        if id(state.get("forward")) != self._forward:
            yield f"{_join(self.path, 'forward')}: replaced by another function"
        for name in state.keys() - self.all - self.ignored - {"forward"}:
            hidden = getattr(type(module), name, _GONE)  # of the class, until the new attribute stands before it
            if (
                hidden is not _GONE
                and (_is_plain(state[name]) or callable(state[name]))
                and not _same(hidden, state[name])
            ):
                yield f"{_join(self.path, name)}: {_words(hidden)} -> {_words(state[name])}"

    def _new_children(self, module: nn.Module) -> Iterator[str]:
        for name in dict.fromkeys((*self._children, *module._modules)):
            ref, kind = self._children.get(name, (_none, "(none)"))
            child = module._modules.get(name)
            if ref() is child and (child is not None or kind in ("NoneType", "(none)")):
                continue
            new = "(none)" if name not in module._modules else type(child).__name__
            yield f"{_join(self.path, name)}: {kind} -> {new if new != kind else f'another {kind}'}"


class _Weight:
    """A tensor under its names; of a subclass that wraps others, those count too."""

    def __init__(self, names: list[str], tensor: Tensor) -> None:
        self.names, self.ref = names, weakref.ref(tensor)
        self.facts = _tensor_facts(tensor)
        plain = list(_plain_tensors(tensor))
        self.parts = [weakref.ref(part) for part in plain]
        self._was = [_trace(part) for part in plain]

    def compare(self, now: Mapping[str, Any], found: Difference) -> None:
        """Append what changed. now: the tensors of the model by name; a name that is in none of its modules any more is left out."""
        known = [(name, now[name]) for name in self.names if name in now]
        for name, tensor in known:
            if not isinstance(tensor, Tensor):
                found.structure.append(f"{name}: a tensor -> {_words(tensor)}")
            elif (facts := _tensor_facts(tensor)) != self.facts:
                old, new = next((a, b) for a, b in zip(self.facts, facts) if a != b)
                found.structure.append(f"{name}: {old} -> {new}")
            elif tensor is not self.ref() and not tensor.is_meta:
                found.values.add(name)
        tensors = {id(x): x for _, x in known if isinstance(x, Tensor)}
        if len({x.data_ptr() for x in tensors.values() if not is_traceable_wrapper_subclass(x)}) > 1:
            found.structure.append(f"{' and '.join(name for name, _ in known)}: one tensor -> several")
        own = self.ref()
        if own is not None and not own.is_meta:
            parts = list(_plain_tensors(own))
            same = [id(part) for part in parts] == [id(ref()) for ref in self.parts]
            if not same or not all(map(_same_trace, map(_trace, parts), self._was)):
                found.values.update(self.names)


def _tensor_facts(tensor: Tensor) -> tuple[Any, ...]:
    """What a graph and its kernels take for granted of a tensor."""
    return type(tensor).__name__, tensor.dtype, tuple(tensor.shape), tensor.device


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the numbers; none of one on the meta device."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(tensor, name))
    elif not tensor.is_meta:
        yield tensor


def _own_tensors(path: str, module: nn.Module) -> dict[str, Tensor]:
    """Its parameters and buffers, those that are None left out."""
    both = (*module._parameters.items(), *module._buffers.items())
    return {_join(path, name): tensor for name, tensor in both if tensor is not None}


# -- numbers -----------------------------------------------------------------------------------------------------------

Trace = tuple[int, int, Tensor | None]
Place = tuple[tuple[int], tuple[int]]


def _trace(part: Tensor) -> Trace:
    """Count of changes, address, and the bytes of a few numbers."""
    place = _place(part)
    few = None if place is None else part.detach().as_strided(*place).clone().view(torch.uint8)
    return -1 if part.is_inference() else part._version, part.data_ptr(), few


def _same_trace(one: Trace, other: Trace) -> bool:
    if one[:2] != other[:2] or one[2] is None or other[2] is None:
        return one[:2] == other[:2]
    return torch.equal(one[2], other[2])


def _traces(parts: list[Tensor]) -> tuple[list[int], list[int]]:
    """What writing to tensors changes: the counts of their changes, which inference tensors lack, or their addresses."""
    return [-1 if x.is_inference() else x._version for x in parts], [x.data_ptr() for x in parts]


def _places(parts: list[Tensor]) -> list[list[tuple[int, Place]]]:
    """Of the tensors of each dtype and device, their numbers and where to look in each."""
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[int, Place]]] = {}
    for number, part in enumerate(parts):
        if (place := _place(part)) is not None:
            groups.setdefault((part.dtype, part.device), []).append((number, place))
    return list(groups.values())


def _place(tensor: Tensor) -> Place | None:
    """Size and stride of at most SAMPLES of its numbers; none where it has none or is not laid out by strides."""
    if tensor.layout != torch.strided or not tensor.numel():
        return None
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    count = min(SAMPLES, extent)
    return (count,), (max(1, (extent - 1) // max(1, count - 1)),)


# -- plain values ------------------------------------------------------------------------------------------------------


def _is_plain(value: Any) -> bool:
    """Whether a value says all about itself: numbers, words, and collections of them."""
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return isinstance(value, ATOMS)


def _copied(value: Any) -> Any:
    """A plain value with collections of its own."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_copied(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return set(value) if isinstance(value, set) else value


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (RuntimeError, ValueError, TypeError):
        return False


def _words(value: Any) -> str:
    if value is _GONE:
        return "(none)"
    return repr(value) if _is_plain(value) else f"a {type(value).__name__}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _none() -> None:
    return None


def _weak(child: nn.Module | None) -> Callable[[], Any]:
    return _none if child is None else weakref.ref(child)


def _hooks(module: nn.Module) -> list[Any]:
    """Hooks that may change what a forward computes, by name; those of transformers only look on."""
    found = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    named = [
        (getattr(hook, "__module__", ""), getattr(hook, "__qualname__", type(hook).__name__), id(hook))
        for hook in found
    ]
    return [hook for hook in named if not str(hook[0]).startswith("transformers.")]


def _names_of(hooks: list[Any]) -> str:
    return ", ".join(hook[1] for hook in hooks) or "(none)"


def _configs(modules: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, Any]]:
    """Configurations that modules hold, and those inside of them, each once."""
    seen: set[int] = set()
    waiting = [(path, vars(module)) for path, module in modules]
    for path, state in waiting:  # which grows
        for name, value in state.items():
            if name in IGNORED or id(value) in seen or isinstance(value, (*ATOMS, dict, nn.Module)):
                continue
            if callable(getattr(value, "to_dict", None)) and hasattr(type(value), "__weakref__"):
                seen.add(id(value))
                yield _join(path, name), value
                waiting.append((_join(path, name), vars(value)))


__all__ = ["Difference", "Snapshot", "model_tensors"]
