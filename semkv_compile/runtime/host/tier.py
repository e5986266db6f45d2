"""Where tensors of the host tier are made: in memory, or in files that are mapped into it."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import warnings
import weakref
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from semkv.errors import CapacityError, ConfigError

LARGE_PAGE = 1 << 21
"""Bytes of a large page on x86 and ARM: what is smaller is not in any."""


class HostTier:
    """Memory of the host, or files in its place.

    Parameters
    ----------
    disk: whether tensors may lie in files. folder: where those are made; None: the system's temporary folder.
    limit: bytes of memory that the tensors made here may take together. What does not fit goes to a file where `disk`, else it
        is refused. None: everything fits, or, where `disk`, everything is in files. pinned: whether that memory is page-locked, so that a
        GPU reads it at its own address; where the system refuses to lock it, it is not, and a warning says so.

    A file loses its name as soon as it is mapped: its blocks are freed with the last tensor that reads it, however the process
    ends. They are reserved when it is made, so that a full disk is an error then, and no signal when a page is written later.
    `ConfigError` where the folder is none.
    """

    def __init__(
        self, *, disk: bool = False, folder: str | None = None, limit: int | None = None, pinned: bool = False
    ) -> None:
        self.disk, self.limit, self.pinned = disk, limit, pinned
        self.folder = Path(folder or (tempfile.gettempdir() if disk else "."))
        if disk and not self.folder.is_dir():
            raise ConfigError(f"disk_folder {str(self.folder)!r} is no folder: make it, or name one that exists")
        self._used = 0
        self._lock = threading.Lock()

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False, scattered: bool = False
    ) -> Tensor:
        """An uninitialised tensor; `pinned`: in page-locked memory, where it is not in a file; `scattered`: it will be read in small
        pieces here and there, so that nothing around them is to be read from a disk, and memory is in large pages.

        Raises
        ------
        CapacityError: neither memory nor disk has room for it.
        """
        count, pinned = torch.Size(shape).numel(), pinned or self.pinned
        nbytes = count * dtype.itemsize
        if pinned:
            nbytes = 1 << max(0, nbytes - 1).bit_length()  # PyTorch locks powers of two
        if count and not self._take(nbytes):
            if not self.disk:
                self.check(nbytes, f"a tensor {dtype} {tuple(shape)}")
            mapped = self._mapped(count, dtype)
            if scattered:
                _read_pieces_alone(mapped)
            return mapped.view(shape)
        made = self._in_memory(shape, dtype, pinned)
        if scattered and not pinned:
            _in_large_pages(made)
        if count and self.limit is not None:
            weakref.finalize(made.untyped_storage(), self._release, nbytes).atexit = False
        return made

    def __deepcopy__(self, memo: dict[int, object]) -> HostTier:
        """A tier of the same settings that nothing was made in: what its tensors are copied to is memory of the copies."""
        return HostTier(disk=self.disk, folder=str(self.folder), limit=self.limit, pinned=self.pinned)

    def check(self, nbytes: int, purpose: str) -> None:
        """Raise `CapacityError` where `nbytes` more for `purpose` cannot fit."""
        if self.limit is not None and not self.disk and self._used + nbytes > self.limit:
            raise CapacityError(
                f"{purpose} needs {nbytes} bytes of host memory; {self._used} of the {self.limit} bytes of host_memory are in use: "
                "raise host_memory, or let host='disk' take what does not fit"
            )

    @staticmethod
    def _in_memory(shape: tuple[int, ...], dtype: torch.dtype, pinned: bool) -> Tensor:
        if pinned:
            try:
                return torch.empty(shape, dtype=dtype, pin_memory=True, device="cpu")
            except RuntimeError as cause:
                warnings.warn(
                    f"a tensor {dtype} {tuple(shape)} of the host could not be page-locked ({cause}): what a GPU reads of it is copied "
                    "on the way, which is slower",
                    stacklevel=3,
                )
        return torch.empty(shape, dtype=dtype, device="cpu")

    def _take(self, nbytes: int) -> bool:
        """Count `nbytes` of memory in, where they fit."""
        if self.limit is None:
            return not self.disk
        with self._lock:
            fits = self._used + nbytes <= self.limit
            self._used += nbytes if fits else 0
        return fits

    def _release(self, nbytes: int) -> None:
        with self._lock:
            self._used -= nbytes

    def _mapped(self, count: int, dtype: torch.dtype) -> Tensor:
        nbytes = count * dtype.itemsize
        try:
            handle, name = tempfile.mkstemp(prefix="semkv-host-", suffix=".bin", dir=self.folder)
            try:
                os.posix_fallocate(handle, 0, nbytes)
                return torch.from_file(name, shared=True, size=count, dtype=dtype)
            finally:
                os.close(handle)
                os.unlink(name)
        except OSError as error:
            free = "unknown"
            with suppress(OSError):
                room = os.statvfs(self.folder)
                free = str(room.f_bavail * room.f_frsize)
            raise CapacityError(
                f"a file of {nbytes} bytes for folded tokens cannot be made in {self.folder} ({error.strerror}; {free} bytes are "
                "free): free some, or choose another disk_folder"
            ) from error


def _read_pieces_alone(x: Tensor) -> None:
    """Advise the kernel not to read ahead in the file behind `x`, which takes megabytes around each token on some machines."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.nbytes), mmap.MADV_RANDOM)


def _in_large_pages(x: Tensor) -> None:
    """Ask for large pages where `x` will be, before it is written: a processor remembers where few pages are, and looks up each of the
    others when a piece of it is read. A request: systems without them ignore it."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    begin = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (x.data_ptr() + x.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end - begin >= LARGE_PAGE:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


def on_disk(x: Tensor) -> bool:
    """Whether the tensor's bytes are those of a mapped file."""
    return x.untyped_storage().filename is not None


__all__ = ["HostTier", "on_disk"]
