"""Tensors in memory and in files: caps, full disks, and that nothing is left behind."""

from __future__ import annotations

import copy
import errno
import gc
import os
from pathlib import Path

import pytest
import torch

from semkv.errors import CapacityError, ConfigError
from semkv.runtime.host import tier as host_tier
from semkv.runtime.host.tier import HostTier, on_disk


def test_files_have_no_name_and_hold_what_is_written(tmp_path):
    tier = HostTier(disk=True, folder=str(tmp_path))
    x = tier.empty((2, 5, 3), torch.float16)
    x.copy_(torch.arange(30).view(2, 5, 3))
    assert on_disk(x)
    assert on_disk(x[1, 2:])
    assert x.flatten().tolist() == list(range(30))
    assert list(tmp_path.iterdir()) == []


def flags_of(x: torch.Tensor) -> list[str]:
    """What the kernel knows of the mapping that holds `x`."""
    smaps = Path("/proc/self/smaps")
    if not smaps.is_file():
        pytest.skip("mappings are not listed here")
    inside = False
    for line in smaps.read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= x.data_ptr() < high
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("no mapping holds the tensor")


def test_nothing_is_read_around_scattered_pieces(tmp_path):
    tier = HostTier(disk=True, folder=str(tmp_path))
    whole, pieces = (tier.empty((64, 1024), torch.float32, scattered=scattered) for scattered in (False, True))
    assert "rr" in flags_of(pieces)  # read at random
    assert "rr" not in flags_of(whole)


def test_scattered_pieces_in_memory_are_in_large_pages():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.is_file() or "[never]" in setting.read_text():
        pytest.skip("the system has no large pages")
    made = HostTier().empty((4, host_tier.LARGE_PAGE), torch.float32, scattered=True).fill_(2)
    assert "hg" in flags_of(made[1])
    assert bool((made == 2).all())
    assert HostTier().empty((3,), torch.float32, scattered=True).shape == (3,)


@pytest.mark.parametrize("disk", [False, True])
def test_nothing_takes_no_room(tmp_path, disk):
    assert HostTier(disk=disk, folder=str(tmp_path), limit=0).empty((4, 0, 2), torch.float32).shape == (4, 0, 2)


def test_memory_first_then_files(tmp_path):
    tier = HostTier(disk=True, folder=str(tmp_path), limit=100)
    first, second = (tier.empty((20,), torch.float32) for _ in range(2))
    assert [on_disk(first), on_disk(second)] == [False, True]
    part = first[3:]
    del first
    gc.collect()
    assert on_disk(tier.empty((20,), torch.float32)), "a view keeps the memory in use"
    del part
    gc.collect()
    assert not on_disk(tier.empty((25,), torch.float32))


def test_a_cap_without_files_is_an_error():
    tier = HostTier(limit=100)
    kept = tier.empty((20,), torch.float32)
    message = r"needs 24 bytes of host memory; 80 of the 100 bytes of host_memory are in use: raise host_memory, or let host='disk'"
    with pytest.raises(CapacityError, match=message):
        tier.empty((6,), torch.float32)
    assert tier.empty((5,), torch.float32).shape == (5,)
    assert kept.shape == (20,)


def test_a_full_disk_is_an_error_when_the_file_is_made(tmp_path, monkeypatch):
    """A quota of 4,000 bytes in place of the disk's."""

    def reserve(handle: int, start: int, nbytes: int) -> None:
        if nbytes > 4000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.truncate(handle, nbytes)

    monkeypatch.setattr(host_tier.os, "posix_fallocate", reserve)
    tier = HostTier(disk=True, folder=str(tmp_path))
    assert on_disk(tier.empty((1000,), torch.float32))
    with pytest.raises(
        CapacityError, match=rf"a file of 4004 bytes .* cannot be made in {tmp_path} \(No space left on device;"
    ):
        tier.empty((1001,), torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_blocks_are_reserved(tmp_path, monkeypatch):
    taken = []
    original = os.unlink
    monkeypatch.setattr(
        host_tier.os, "unlink", lambda name: (taken.append(os.stat(name).st_blocks * 512), original(name))
    )
    HostTier(disk=True, folder=str(tmp_path)).empty((1 << 18,), torch.float32)
    assert taken[0] >= 1 << 20


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"disk_folder '.*/none' is no folder: make it"):
        HostTier(disk=True, folder=str(tmp_path / "none"))


def test_a_prompt_that_does_not_fit_is_refused_before_it_is_read(double_program, compile_as, prompt):
    ids = prompt(150)
    compiled = compile_as(double_program, "sekv", 0.5)
    need = compiled._host_nbytes(150)
    assert compiled.prefill(ids).full_bytes < need

    def tokens(**config) -> tuple[list, dict]:
        made = compile_as(double_program, "sekv", 0.5, **config)
        state = made.prefill(ids)
        return made.extend(state, prompt(30, seed=2)).argmax(-1).tolist(), state.nbytes

    expected, _ = tokens()
    assert tokens(host_memory=2 * need)[0] == expected
    refused = compile_as(double_program, "sekv", 0.5, host_memory=need - 1)
    with pytest.raises(
        CapacityError, match=rf"a prompt of 150 tokens needs {need} bytes of host memory; 0 of the {need - 1}"
    ):
        refused.prefill(ids)
    found, nbytes = tokens(host_memory=2048, host="disk")
    assert found == expected
    assert nbytes["disk"] > 0


def test_memory_that_cannot_be_page_locked_is_plain(monkeypatch):
    """Slower on a GPU, never an error."""
    plain = torch.empty

    def refusing(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("no memory to lock")
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refusing)
    tier = HostTier(pinned=True)
    with pytest.warns(
        UserWarning, match=r"float32 \(2, 3\) of the host could not be page-locked \(no memory to lock\)"
    ):
        made = tier.empty((2, 3), torch.float32)
    assert made.shape == (2, 3)
    assert not made.is_pinned()
    assert copy.deepcopy(tier).pinned


def test_page_locked_memory_counts_as_what_it_takes():
    tier = HostTier(limit=1000, pinned=True)
    with pytest.raises(CapacityError, match="needs 1024 bytes of host memory"):
        tier.empty((600,), torch.uint8)
