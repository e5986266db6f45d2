"""What a compiled kernel takes of a GPU, read from its machine code, and how many of it fit on one multiprocessor."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from triton import knobs

from semkv.errors import ConfigError

USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor (CUDA C++ programming guide, "Technical specifications per compute capability")."""

    shared_bytes: int
    shared_bytes_per_block: int
    registers: int = 65536
    warps: int = 64
    blocks: int = 32


MULTIPROCESSORS = {
    80: Multiprocessor(164 << 10, 163 << 10),
    90: Multiprocessor(228 << 10, 227 << 10),
    100: Multiprocessor(228 << 10, 227 << 10),
}
"""By compute capability: A100, H100 and H200, B200."""

REGISTERS_PER_WARP_STEP = 256
SHARED_BYTES_OF_THE_SYSTEM = 1024


@dataclass(frozen=True)
class Resources:
    """registers: per thread. stack_bytes: per thread, in local memory: what registers spill to. shared_bytes: per block."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    warps: int

    def blocks(self, capability: int) -> int:
        """Blocks that are resident on one multiprocessor at once; 0: the kernel cannot be launched."""
        if capability not in MULTIPROCESSORS:
            known = ", ".join(map(str, MULTIPROCESSORS))
            raise ConfigError(f"compute capability {capability}: its limits are not known; expected one of {known}")
        limits = MULTIPROCESSORS[capability]
        if self.shared_bytes > limits.shared_bytes_per_block:
            return 0
        per_warp = -(-self.registers * 32 // REGISTERS_PER_WARP_STEP) * REGISTERS_PER_WARP_STEP
        return min(
            limits.blocks,
            limits.warps // self.warps,
            limits.registers // (per_warp * self.warps),
            limits.shared_bytes // (self.shared_bytes + SHARED_BYTES_OF_THE_SYSTEM),
        )

    def occupancy(self, capability: int) -> float:
        """Resident warps as a share of those that a multiprocessor can hold."""
        return self.blocks(capability) * self.warps / MULTIPROCESSORS[capability].warps


def read_resources(code: bytes, *, shared_bytes: int, warps: int) -> Resources:
    """Registers and stack of the one kernel in an ELF file, as `cuobjdump` (which Triton brings) reads them.

    shared_bytes: what the launch asks for beside what the file declares.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(code)
        ran = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)], capture_output=True, text=True, check=True
        )
    found = USAGE.findall(ran.stdout + ran.stderr)
    if len(found) != 1:
        raise ConfigError(f"cuobjdump reported {len(found)} kernels, expected 1: {(ran.stdout + ran.stderr)[:200]!r}")
    registers, stack, static, local = map(int, found[0])
    return Resources(registers, stack + local, shared_bytes + static, warps)
