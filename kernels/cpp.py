"""Kernels in C++: a template with its constants, compiled by the system's compiler when first used and kept on disk.

Templates know neither PyTorch nor OpenMP: they are given addresses, and threads of the pool that PyTorch computes with. So an
object takes a second to compile, and is called through ctypes, which lets other Python threads go on.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from threading import Lock, Thread

import torch

from semkv.errors import ConfigError
from semkv.io.cache_folder import FOLDER, cache_folder
from semkv.io.files import replace_file

COMPILERS = ("g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-w")
GCC_FLAGS = ("-fno-if-conversion",)
"""Branches stay branches: tuned for Skylake and what followed it, GCC 12 puts an increment, which changes the processor's flags, between a
comparison and the conditional move that goes by it, so that the other function of two was called."""
MISSING = f"no C++ compiler was found ({' or '.join(COMPILERS)})"
SHARED = tuple(Path(__file__).parent / name for name in ("vectors.h", "threads.h", "products.h"))
"""What comes before every template."""
SECONDS = 300
"""After which a compiler is given up."""

_lock = Lock()
"""Held while a `Library` is looked up, so that threads share one."""


class BuildError(ConfigError):
    """A kernel in C++ that cannot be made here."""


@dataclass(frozen=True)
class Compiler:
    """path, and what it says of its version."""

    path: str
    version: str


@cache
def compiler() -> Compiler | None:
    """The first of `COMPILERS` on the path that runs; None: there is none. Looked for once a process."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        try:
            said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=SECONDS)
        except (OSError, subprocess.SubprocessError):
            continue
        return Compiler(path, said.stdout)
    return None


def flags_of(found: Compiler) -> tuple[str, ...]:
    """What a compiler is given. Clang, which is what g++ is on some systems, does not know all of it."""
    return FLAGS if "clang" in found.version else (*FLAGS, *GCC_FLAGS)


@cache
def processor() -> str:
    """What the machine code of `-march=native` depends on: the architecture and the instructions that there are."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    said = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0] if lines else "")
    return f"{platform.machine()} {said}"


@cache
def team() -> int | None:
    """Address of `GOMP_parallel` of the OpenMP that PyTorch computes with, so that kernels use the same threads; None: there is none,
    and kernels run in one thread."""
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None


class Library:
    """The object of one source: found on disk, or compiled in the background from `start` on."""

    def __init__(self, name: str, source: str) -> None:
        """name: of the operation, for messages and the file."""
        self.name, self.source = name, source
        self._future: Future[ctypes.CDLL] | None = None
        self._process = 0
        self._warned = False

    @cached_property
    def identity(self) -> str:
        """SHA-256 over the source, the compiler, its flags and the processor."""
        found = compiler()
        parts = (self.source, found and found.version, found and flags_of(found), processor())
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def path(self) -> Path:
        """Where the object is kept, followed by the SHA-256 of its bytes; it may be deleted at any time."""
        return cache_folder() / "kernels" / f"{self.name}-{self.identity}.so"

    def start(self) -> Future[ctypes.CDLL]:
        """Begin to load it, and to compile it where it is not on disk; returns at once."""
        future = self._future
        if future is not None and future.done():
            return future
        with _lock:
            # Threads do not outlive a fork: what was on its way in the parent never comes here.
            forked = self._process != os.getpid()
            if self._future is None or (forked and not self._future.done()):
                self._future, self._process = Future(), os.getpid()
                Thread(target=_settle, args=(self._future, self.name, self._load), name=f"compile {self.name}").start()
            return self._future

    def failure(self, *, asked: bool = False) -> str | None:
        """Why it cannot be used, after a wait for the compiler; None where it can. The first time it warns.

        asked: by name; then it raises `BuildError` instead.
        """
        reason = self.start().exception()
        if reason is None:
            return None
        if asked or not isinstance(reason, BuildError):
            raise reason
        if not self._warned:
            self._warned = True
            warnings.warn(f"{reason}; PyTorch computes in its place, slower", stacklevel=2)
        return str(reason)

    def function(self, name: str) -> Callable[..., None]:
        """One of its functions, after a wait for the compiler. Raises `BuildError`."""
        return getattr(self.start().result(), name)

    def _load(self) -> ctypes.CDLL:
        if not _whole(self.path):
            return self._made()
        return ctypes.CDLL(str(self.path))

    def _made(self) -> ctypes.CDLL:
        with tempfile.TemporaryDirectory(prefix="semkv-") as folder:
            made = Path(folder) / "kernel.so"
            self._compile(made)
            code = made.read_bytes()
            try:
                with replace_file(self.path) as path:
                    path.write_bytes(code + hashlib.sha256(code).digest())
            except OSError as reason:
                warnings.warn(
                    f"kernel {self.name} was not kept ({reason}); set {FOLDER} to a folder that can be written",
                    stacklevel=2,
                )
            try:
                return ctypes.CDLL(str(made))
            except OSError:  # from a temporary folder nothing may be loaded
                return ctypes.CDLL(str(self.path))

    def _compile(self, into: Path) -> None:
        found = compiler()
        if found is None:
            raise BuildError(f"kernel {self.name}: {MISSING}; install one")
        command = [found.path, *flags_of(found), "-x", "c++", "-", "-o", str(into)]
        try:
            done = subprocess.run(
                command,
                input=self.source,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                env={**os.environ, "LC_ALL": "C"},
            )
        except (OSError, subprocess.SubprocessError) as reason:
            raise BuildError(f"kernel {self.name}: {found.path} does not run ({reason})") from reason
        if done.returncode:
            said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-300:])
            raise BuildError(f"kernel {self.name}: {found.path} failed ({said.strip()})")


def library(template: Path, constants: Mapping[str, int], headers: Sequence[Path] = ()) -> Library:
    """The object of a template with these constants, one in a process; named after the template's folder, and its file where that is
    another than `template.cpp`.

    headers: what comes before it, after what comes before every one.
    """
    with _lock:
        return _library(template, tuple(sorted(constants.items())), tuple(headers))


@cache
def _library(template: Path, constants: tuple[tuple[str, int], ...], headers: tuple[Path, ...]) -> Library:
    defined = [f"#define {name} {value}\n" for name, value in constants]
    parts = [path.read_text() for path in (*SHARED, *headers, template)]
    name = template.parent.name if template.stem == "template" else f"{template.parent.name}-{template.stem}"
    return Library(name, "".join([*defined, *parts]))


def _settle(future: Future[ctypes.CDLL], name: str, load: Callable[[], ctypes.CDLL]) -> None:
    try:
        future.set_result(load())
    except BuildError as reason:
        future.set_exception(reason)
    except (OSError, RuntimeError) as reason:  # no room for it, no home, or a folder from which nothing may be loaded
        future.set_exception(
            BuildError(f"kernel {name}: it cannot be loaded ({reason}); set {FOLDER} to a folder that allows it")
        )
    except BaseException as reason:
        future.set_exception(reason)


def _whole(path: Path) -> bool:
    """Whether a file is there and ends with the SHA-256 of what comes before."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-32]).digest() == data[-32:]
