"""Kernels from templates: what a launch is specialised for, and its machine code for a GPU that need not be there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from semkv.errors import ConfigError
from semkv.io.files import replace_file
from semkv.kernels.resources import Resources, read_resources

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
ALIGNMENT = 16
"""Bytes that tensors of PyTorch's allocators are aligned to, at least; Triton vectorises loads for it."""


@cache
def padded(size: int) -> int:
    """The next power of two, and at least 16: the smallest side of a tensor core's tile."""
    return max(16, triton.next_power_of_2(size))


def options(warps: int, stages: int, registers: int = 0) -> dict[str, int]:
    """Triton's compile options, the same for a launch and for machine code made ahead of it; registers: the most per thread, 0:
    the compiler's choice."""
    limit = {"maxnreg": registers} if registers else {}
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True, **limit}


@dataclass(frozen=True)
class Specialization:
    """A template with everything fixed that its machine code depends on, but for the GPU.

    signature: (argument, Triton type) with `constexpr` for those that are absent. constants: (name, value).
    """

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int], ...]
    warps: int
    stages: int
    registers: int = 0

    def identity(self, capability: int) -> str:
        """SHA-256 over the template's source and all that it calls, the compiler, the target and every field."""
        parts = (
            triton.__version__,
            self.kernel.cache_key,
            capability,
            self.signature,
            self.constants,
            self.warps,
            self.stages,
            self.registers,
        )
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def compile(self, capability: int) -> Binary:
        """Machine code for compute capability `capability` (80, 90, 100); no GPU is needed."""
        absent = {name: None for name, kind in self.signature if kind == "constexpr"}
        constants = absent | dict(self.constants)
        names = self.kernel.arg_names
        signature = {name: "constexpr" if name in constants else dict(self.signature)[name] for name in names}
        aligned = [["tt.divisibility", ALIGNMENT]]
        attributes = {(place,): aligned for place, name in enumerate(names) if signature[name].startswith("*")}
        compiled = triton.compile(
            ASTSource(self.kernel, signature, constants, attributes),
            target=GPUTarget("cuda", capability, 32),
            options=options(self.warps, self.stages, self.registers),
        )
        code = compiled.asm["cubin"]
        resources = read_resources(code, shared_bytes=compiled.metadata.shared, warps=compiled.metadata.num_warps)
        return Binary(code, resources)


@dataclass(frozen=True)
class Binary:
    """Machine code (an ELF file of one kernel) and what it takes."""

    code: bytes
    resources: Resources


_compiled: dict[tuple[Any, ...], Any] = {}
"""What Triton compiled, by kernel, device, layout, the `_variant` of each argument and constants, in the order of the one place that
launches the kernel."""


def _variant(value: Tensor | float | None) -> Any:
    """What of an argument Triton compiles a kernel anew for: a tensor's dtype and whether it is aligned, whether an integer is 1, a
    multiple of 16, and long."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % ALIGNMENT == 0
    return float if isinstance(value, float) else (value == 1, value % ALIGNMENT == 0, value >> 31)


@dataclass(frozen=True)
class Launch:
    """One call of a kernel: arguments by name (tensors, integers, floats, None where absent) and constants.

    registers: the most per thread, 0: the compiler's choice. held: tensors that it reads without their being arguments.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | float | None]
    constants: Mapping[str, int]
    warps: int
    stages: int
    registers: int = 0
    held: tuple[Tensor, ...] = ()

    def run(self) -> None:
        """Enqueue it on the current stream of its tensors' device; Triton compiles it the first time.

        From then on what Triton compiled is called as it is: finding it by a hundred arguments takes longer than launching it.
        """
        arguments = {**self.arguments, **self.constants}
        where = next(x for x in self.arguments.values() if isinstance(x, Tensor))
        layout = self.warps, self.stages, self.registers
        key = (self.kernel, where.device, layout, *map(_variant, self.arguments.values()), *self.constants.values())
        with torch.cuda.device_of(where):
            if (made := _compiled.get(key)) is not None:
                made[(*self.grid, 1, 1)[:3]](*[arguments[name] for name in self.kernel.arg_names])
                return
            made = self.kernel[self.grid](**arguments, **options(self.warps, self.stages, self.registers))
        if made is not None:  # the interpreter compiles nothing
            _compiled[key] = made

    @property
    def specialization(self) -> Specialization:
        """What its machine code depends on; tensors may be on the `meta` device."""
        signature = tuple((name, _type(name, value)) for name, value in self.arguments.items())
        constants = tuple(sorted(self.constants.items()))
        return Specialization(self.kernel, signature, constants, self.warps, self.stages, self.registers)


def _type(name: str, value: Tensor | float | None) -> str:
    if value is None:
        return "constexpr"
    if isinstance(value, Tensor):
        if value.dtype not in TYPES:
            raise ConfigError(
                f"argument {name!r} of a kernel is {value.dtype}; expected one of {', '.join(map(str, TYPES))}"
            )
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


class BinaryCache:
    """Binaries in a folder, by identity: `IDENTITY.cubin` beside `IDENTITY.json` with the resources."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, specialization: Specialization, capability: int) -> Binary:
        """From the folder, or compiled and kept there; a file whose hash is not the recorded one is compiled anew."""
        identity = specialization.identity(capability)
        code, record = self.folder / f"{identity}.cubin", self.folder / f"{identity}.json"
        if code.is_file() and record.is_file():
            found, said = code.read_bytes(), json.loads(record.read_text())
            if hashlib.sha256(found).hexdigest() == said["sha256"]:
                return Binary(found, Resources(**said["resources"]))
        binary = specialization.compile(capability)
        self.folder.mkdir(parents=True, exist_ok=True)
        with replace_file(code) as path:
            path.write_bytes(binary.code)
        said = {"sha256": hashlib.sha256(binary.code).hexdigest(), "resources": asdict(binary.resources)}
        with replace_file(record) as path:
            path.write_text(json.dumps(said))
        return binary
