"""Specialisations, their machine code and its cache, without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from semkv.errors import ConfigError
from semkv.kernels.generation import BinaryCache, Launch, Specialization, padded
from semkv.kernels.mixed_attention.template import merge_partials
from semkv.kernels.resources import Resources, read_resources


def merge(splits: int = 4, dtype: torch.dtype = torch.bfloat16, warps: int = 4) -> Specialization:
    partial = torch.empty(splits, 32, 128, device="meta")
    row = torch.empty(splits, 32, device="meta")
    out = torch.empty(32, 128, dtype=dtype, device="meta")
    arguments = {"p_partial": partial, "p_top": row, "p_mass": row, "p_out": out, "rows": 32}
    constants = {"VALUE_DIM": 128, "SPLITS": splits, "BLOCK_SPLITS": splits, "BLOCK_VALUE": 128}
    return Launch(merge_partials, (32,), arguments, constants, warps, 1).specialization


def test_an_identity_is_of_what_the_machine_code_depends_on():
    assert merge().identity(80) == merge().identity(80)
    others = [
        merge().identity(90),
        merge(8).identity(80),
        merge(dtype=torch.float16).identity(80),
        merge(warps=8).identity(80),
    ]
    assert len({merge().identity(80), *others}) == 5


def test_machine_code_is_kept_by_identity(tmp_path, monkeypatch):
    cache = BinaryCache(tmp_path / "kernels")
    made = cache.get(merge(), 80)
    assert made.code[:4] == b"\x7fELF"
    assert made.resources.stack_bytes == 0
    assert 0 < made.resources.registers <= 64
    with monkeypatch.context() as patch:
        patch.setattr(Specialization, "compile", lambda *_: pytest.fail("compiled again"))
        assert cache.get(merge(), 80) == made
    (path,) = (tmp_path / "kernels").glob("*.cubin")
    assert path.stem == merge().identity(80)
    path.write_bytes(b"damaged")
    assert cache.get(merge(), 80) == made
    assert path.read_bytes() == made.code


class Compiled:
    """Stands for what Triton compiles, and for the kernel that it compiles."""

    arg_names = ("p_x", "p_none", "count", "scale", "SIZE")

    def __init__(self, *, kernel: bool):
        self.kernel, self.calls, self.made = kernel, [], []

    def __getitem__(self, grid):
        def launch(*args, **named):
            self.calls.append((grid, args, named))
            if self.kernel:
                self.made.append(Compiled(kernel=False))
                return self.made[-1]

        return launch


def test_what_was_compiled_is_launched_as_it_is():
    """Found by all that it was compiled for, with its own arguments in the kernel's order."""
    kernel = Compiled(kernel=True)

    def run(x, count, size=4, grid=(3, 2)):
        Launch(kernel, grid, {"scale": 0.5, "count": count, "p_x": x, "p_none": None}, {"SIZE": size}, 4, 1).run()

    x = torch.zeros(64)
    run(x, 30)
    assert kernel.calls[0][2].items() >= {"p_x": x, "count": 30, "SIZE": 4, "num_warps": 4}.items()
    run(x, 31, grid=(5,))
    other = torch.ones(64)
    run(other, 35)
    assert len(kernel.calls) == 1
    assert [grid for grid, *_ in kernel.made[0].calls] == [(5, 1, 1), (3, 2, 1)]
    assert kernel.made[0].calls[0][1] == (x, None, 31, 0.5, 4)
    assert kernel.made[0].calls[1][1][0] is other
    for changed in ((x[1:], 30), (x, 32), (x, 1), (x, 1 << 40), (x.half(), 30), (x, 30, 8)):
        run(*changed)
    assert len(kernel.calls) == 7


def test_spills_are_seen_in_the_binary():
    """The same kernel held to 24 registers and many partials spills, and the binary says so."""
    wide = merge(64, warps=1)
    constants = dict(wide.constants)
    signature = {
        name: "constexpr" if name in constants else dict(wide.signature)[name] for name in merge_partials.arg_names
    }
    compiled = triton.compile(
        ASTSource(merge_partials, signature, constants),
        target=GPUTarget("cuda", 80, 32),
        options={"num_warps": 1, "maxnreg": 24, "enable_fp_fusion": True},
    )
    assert read_resources(compiled.asm["cubin"], shared_bytes=0, warps=1).stack_bytes > 0


@pytest.mark.parametrize(
    ("resources", "capability", "blocks"),
    [
        (Resources(128, 0, 0, 4), 80, 4),  # 65536 registers / (128 * 128)
        (Resources(129, 0, 0, 4), 80, 3),  # rounded up to 136 a thread
        (Resources(32, 0, 0, 8), 80, 8),  # 64 warps
        (Resources(16, 0, 0, 1), 90, 32),  # 32 blocks
        (Resources(32, 0, 40 << 10, 4), 80, 4),  # 164 KiB, 1 KiB of each block is the system's
        (Resources(32, 0, 40 << 10, 4), 90, 5),  # 228 KiB
        (Resources(32, 0, 164 << 10, 4), 80, 0),  # more than a block may have
    ],
)
def test_blocks_on_a_multiprocessor(resources, capability, blocks):
    assert resources.blocks(capability) == blocks
    assert resources.occupancy(capability) == blocks * resources.warps / 64


def test_what_is_not_known_is_refused():
    with pytest.raises(
        ConfigError, match="compute capability 75: its limits are not known; expected one of 80, 90, 100"
    ):
        Resources(32, 0, 0, 4).blocks(75)
    with pytest.raises(ConfigError, match=r"argument 'x' of a kernel is torch\.float64"):
        _ = Launch(merge_partials, (1,), {"x": torch.empty(1, dtype=torch.float64)}, {}, 4, 1).specialization


@pytest.mark.parametrize(("size", "side"), [(0, 16), (16, 16), (17, 32), (60, 64), (111, 128)])
def test_sides_of_tiles(size, side):
    assert padded(size) == side
