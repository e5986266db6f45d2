"""Kernels in C++: compiled once, found on disk, and refused with a reason where they cannot be made."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from semkv.kernels import cpp
from semkv.kernels.code_products.cpp import code_library
from semkv.kernels.coding.cpp import coding_library
from semkv.kernels.cpp import BuildError, Library, compiler, library, team
from semkv.kernels.linear.cpp import linear_library
from semkv.kernels.mixed_attention.cpp import attention_library
from semkv.kernels.residual_codes.cpp import residual_codes_library
from semkv.kernels.segments.tape import segments_library
from semkv.kernels.state.coarse import coarse_library
from semkv.kernels.state.factored import factored_library
from semkv.kernels.state.look_up import look_up_library

pytestmark = pytest.mark.skipif(compiler() is None, reason="kernels in C++ need g++ or clang++")

SOURCE = 'extern "C" void twice(double* x) { *x *= 2; }\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEMKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What was compiled."""
    made: list[Path] = []
    compile = Library._compile

    def counted(self: Library, into: Path) -> None:
        made.append(into)
        compile(self, into)

    monkeypatch.setattr(Library, "_compile", counted)
    return made


def doubled(own: Library, number: float) -> float:
    x = ctypes.c_double(number)
    own.function("twice")(ctypes.byref(x))
    return x.value


def test_it_is_compiled_once_and_then_found(folder, compilations):
    first = Library("twice", SOURCE)
    assert doubled(first, 1.5) == 3.0
    assert first.failure() is None
    assert [path.name for path in folder.iterdir()] == [f"twice-{first.identity}.so"]
    assert doubled(Library("twice", SOURCE), 2.0) == 4.0
    assert len(compilations) == 1
    assert Library("twice", SOURCE + "\n").identity != first.identity


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-40], lambda data: b"\x7fELF" + bytes(99)])
def test_a_damaged_object_is_made_anew(folder, compilations, damage):
    own = Library("twice", SOURCE)
    assert doubled(own, 1.0) == 2.0
    whole = own.path.read_bytes()
    own.path.write_bytes(damage(whole))
    assert doubled(Library("twice", SOURCE), 3.0) == 6.0
    assert len(compilations) == 2
    assert own.path.read_bytes()[-32:] != damage(whole)[-32:]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SEMKV_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="kernel twice was not kept .* set SEMKV_CACHE to a folder"):
        assert doubled(Library("twice", SOURCE), 2.0) == 4.0


def test_what_does_not_compile_has_a_reason_and_one_warning(folder):
    own = Library("wrong", "no C++\n")
    with pytest.warns(UserWarning, match=r"kernel wrong: .* failed \(.*error.*\); PyTorch computes in its place"):
        assert own.failure() is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert own.failure().startswith("kernel wrong: ")
    for asked in (lambda: own.failure(asked=True), lambda: own.function("twice")):
        with pytest.raises(BuildError, match=r"kernel wrong: .* failed"):
            asked()
    assert not folder.exists()


def test_what_cannot_be_loaded_has_a_reason_and_one_warning(monkeypatch):
    def refused(path):
        raise OSError(f"{path}: failed to map segment from shared object")

    own = Library("twice", SOURCE)
    assert own.path.name.startswith("twice-")  # which asks the compiler and the processor what they are
    monkeypatch.setattr(ctypes, "CDLL", refused)
    with pytest.warns(
        UserWarning,
        match=r"kernel twice: it cannot be loaded \(.*map segment.*\); set SEMKV_CACHE .*; PyTorch computes",
    ):
        assert own.failure() is not None
    with pytest.raises(BuildError, match="cannot be loaded"):
        own.function("twice")


def test_threads_share_one_library(compilations, tmp_path):
    template = tmp_path / "four" / "template.cpp"
    template.parent.mkdir()
    template.write_text('extern "C" void twice(double* x) { *x *= FACTOR; }\n')
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: doubled(library(template, {"FACTOR": 2}), n), range(4)))
    assert found == [0.0, 2.0, 4.0, 6.0]
    assert len(compilations) == 1
    assert doubled(library(template, {"FACTOR": 3}), 1.0) == 3.0


def test_a_forked_process_does_not_wait_for_its_parents_compiler():
    own = Library("twice", SOURCE)
    own._future, own._process = Future(), os.getppid()
    assert doubled(own, 2.0) == 4.0


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(cpp, "compiler", lambda: None)
    with pytest.raises(
        BuildError, match=r"kernel twice: no C\+\+ compiler was found \(g\+\+ or clang\+\+\); install one"
    ):
        Library("twice", SOURCE).function("twice")


def test_a_compiler_is_looked_for_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler.__wrapped__() is None
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/false\n")
    broken.chmod(0o755)
    assert compiler.__wrapped__() is None


HALVES = """
extern "C" void widened(const uint16_t* from, float* into) { store(into, from_float16(loaded<LANES, Shorts>(from))); }
extern "C" void exponentials(const float* from, float* into) { store(into, exponential(load(from))); }
extern "C" void tangents(const float* from, float* into) { store(into, hyperbolic_tangent(load(from))); }
"""


def applied(function, x: torch.Tensor) -> torch.Tensor:
    """A function of 16 numbers, on float32 or half-precision numbers."""
    out = torch.full(x.shape, float("nan"), dtype=torch.float32)
    for at in range(0, len(x), 16):
        function(ctypes.c_void_p(x[at:].data_ptr()), ctypes.c_void_p(out[at:].data_ptr()))
    return out


def test_arithmetic_of_vectors():
    """Half-precision numbers, all of them, by instruction and by hand; e^x and tanh to two units in the last place."""
    halves = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)
    for first in ("", "#undef __F16C__\n"):
        own = Library("halves", first + cpp.SHARED[0].read_text() + HALVES)
        torch.testing.assert_close(
            applied(own.function("widened"), halves), halves.float(), rtol=0, atol=0, equal_nan=True
        )
    low = -torch.linspace(0, 87, 1600)
    wanted = low.double().exp()
    assert ((applied(own.function("exponentials"), low) - wanted).abs() <= 2**-22 * wanted).all()
    ends = torch.tensor([0.0, -88.0, -1e30, float("-inf")] * 4)
    assert applied(own.function("exponentials"), ends).tolist() == [1.0, 0.0, 0.0, 0.0] * 4
    x = torch.cat([torch.linspace(-30, 30, 1600), torch.linspace(-0.7, 0.7, 160), torch.logspace(-30, 0, 16)])
    assert ((applied(own.function("tangents"), x) - x.double().tanh()).abs() <= 2**-21 * x.double().tanh().abs()).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_kernels_compute_with_the_threads_of_pytorch():
    """One OpenMP is loaded, and it is the one whose address kernels are given."""
    code = """if True:
        import ctypes, torch
        from semkv.kernels.cpp import team
        lines = open("/proc/self/maps").read().splitlines()
        found = {line.split()[-1] for line in lines if "gomp" in line or "libomp" in line or "iomp" in line}
        own = [line for line in lines if int(line.split("-")[0], 16) <= team() < int(line.split()[0].split("-")[1], 16)]
        print(len(found), own[0].split()[-1] in found)
    """
    assert team() is not None
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["1", "True"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v2", "haswell", "skylake-avx512"])
def test_every_form_of_the_vectors_compiles(processor: str) -> None:
    """Registers of 16, 32 and 64 bytes; a machine runs one of these forms."""
    found = compiler()
    assert found is not None
    for made in (
        linear_library(4),
        attention_library(64, 64, 3),
        *(made(size) for made in (coarse_library, look_up_library) for size in (4, 8)),
        code_library(),
        factored_library(),
        coding_library(),
        residual_codes_library(),
        segments_library(),
    ):
        flags = [flag for flag in cpp.flags_of(found) if flag not in ("-O3", "-march=native")]
        command = [str(found.path), *flags, f"-march={processor}", "-fsyntax-only", "-x", "c++", "-"]
        done = subprocess.run(command, input=made.source, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{made.name}: {done.stderr[:2000]}"
