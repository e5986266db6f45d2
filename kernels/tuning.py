"""Layouts of launches that were measured to be the fastest, by GPU and by what a specialisation fixes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

import torch

from semkv.errors import ConfigError
from semkv.io.files import parse_json, read_bytes, replace_file
from semkv.kernels.mixed_attention.configuration import Configuration

Problem = tuple[torch.dtype, int, int, int]
"""Of mixed attention: dtype of the queries, head dim of keys and of values, query heads per KV head."""


def device_name(device: torch.device) -> str:
    """What layouts of a device are kept under: the GPU's name, or `cpu` for Triton's interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def problem_name(problem: Problem) -> str:
    """`bfloat16, head dims 128 and 128, group 4`."""
    dtype, dim, value_dim, group = problem
    return f"{str(dtype).removeprefix('torch.')}, head dims {dim} and {value_dim}, group {group}"


@dataclass(frozen=True)
class Tuning:
    """layouts: by `device_name`, then by `problem_name`."""

    layouts: Mapping[str, Mapping[str, Configuration]]

    def layout(self, device: torch.device, problem: Problem) -> tuple[int, ...]:
        """The fields of the configuration that was measured for it; none where none was."""
        found = self.layouts.get(device_name(device), {}).get(problem_name(problem))
        return () if found is None else astuple(found)

    def with_layout(self, device: torch.device, problem: Problem, configuration: Configuration) -> Tuning:
        """One more, or another one."""
        return self.merged(Tuning({device_name(device): {problem_name(problem): configuration}}))

    def merged(self, other: Tuning) -> Tuning:
        """Both; the other's where both have one."""
        names = [*self.layouts, *(name for name in other.layouts if name not in self.layouts)]
        return Tuning({name: {**self.layouts.get(name, {}), **other.layouts.get(name, {})} for name in names})

    def to_json(self) -> dict[str, dict[str, dict[str, int]]]:
        return {gpu: {name: asdict(one) for name, one in own.items()} for gpu, own in self.layouts.items()}

    @classmethod
    def from_json(cls, value: object, source: str) -> Tuning:
        """`ConfigError` names `source` where the value is not what `to_json` gives."""
        known = {field.name for field in fields(Configuration)}
        made: dict[str, dict[str, Configuration]] = {}
        try:
            for gpu, own in value.items():  # type: ignore[attr-defined]
                made[gpu] = {}
                for name, numbers in own.items():
                    if set(numbers) - known or not all(type(x) is int and 0 <= x <= 1 << 16 for x in numbers.values()):
                        raise ValueError(f"{name!r} is {numbers}")
                    made[gpu][name] = Configuration(**numbers)
        except (AttributeError, TypeError, ValueError) as cause:
            raise ConfigError(f"{source}: no layouts of kernels ({cause}); delete it and tune again") from cause
        return cls(made)

    @classmethod
    def load(cls, path: Path) -> Tuning:
        """What `save` wrote; nothing where there is no such file."""
        if not path.exists():
            return cls({})
        return cls.from_json(parse_json(read_bytes(path, error=ConfigError), path, error=ConfigError), str(path))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as part:
            part.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
