"""The container of states: any change of any byte is seen, and another's is refused."""

from __future__ import annotations

import random

import pytest
import torch

from semkv.artifact.state_file import load_tensors, save_tensors
from semkv.errors import ArtifactError, ProfileError

TENSORS = {"keys": torch.randn(2, 3, 5).half(), "positions": torch.arange(7), "none": torch.empty(0, 4)}
META = {"rows": [1, 2], "text": '"sha256":"' + "0" * 64 + '"', "é": None, "share": 0.25}


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "talk.state"
    save_tensors(path, "state", META, TENSORS, fingerprint="abc")
    return path


def test_round_trip(saved):
    meta, tensors = load_tensors(saved, "state", "abc")
    assert meta == META
    assert set(tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    tensors["keys"].zero_()
    assert torch.equal(load_tensors(saved, "state", None)[1]["keys"], TENSORS["keys"])


def test_saving_replaces_at_once_and_leaves_nothing_behind(saved):
    save_tensors(saved, "state", {}, {}, fingerprint="abc")
    assert load_tensors(saved, "state", "abc") == ({}, {})
    with pytest.raises(ArtifactError, match="meta cannot be written as JSON"):
        save_tensors(saved, "state", {"x": float("nan")}, {}, fingerprint="abc")
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    with pytest.raises(ArtifactError, match="a folder is not overwritten"):
        save_tensors(saved.parent, "state", {}, {}, fingerprint="abc")


def test_another_kind_program_or_error_class(saved, tmp_path):
    with pytest.raises(ArtifactError, match="holds a 'state', expected a 'profile'"):
        load_tensors(saved, "profile", "abc")
    with pytest.raises(
        ArtifactError, match=r"a state of program abc\.\.\., expected other.*load it with the compiled model"
    ):
        load_tensors(saved, "state", "other")
    with pytest.raises(ProfileError, match="no such file"):
        load_tensors(tmp_path / "gone", "state", None, error=ProfileError)
    with pytest.raises(ArtifactError, match="expected a regular file"):
        load_tensors(tmp_path, "state", None)


def test_plain_safetensors_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "plain")
    with pytest.raises(ArtifactError, match="without a description by semkv"):
        load_tensors(tmp_path / "plain", "state", None)


def test_every_changed_byte_and_every_cut_is_refused(saved):
    data = saved.read_bytes()
    rng = random.Random(0)
    for place in range(0, len(data), 3):
        changed = bytearray(data)
        changed[place] ^= 1 << rng.randrange(8)
        saved.write_bytes(changed)
        with pytest.raises(ArtifactError):
            load_tensors(saved, "state", "abc")
    for cut in range(0, len(data), 7):
        saved.write_bytes(data[:cut])
        with pytest.raises(ArtifactError):
            load_tensors(saved, "state", "abc")
    saved.write_bytes(data + b"x")
    with pytest.raises(ArtifactError, match=r"declares .* bytes and has"):
        load_tensors(saved, "state", "abc")
    saved.write_bytes(data)
    load_tensors(saved, "state", "abc")


@pytest.mark.parametrize("length", [2**63, 2**40, 10**9])
def test_huge_header_lengths_are_refused_before_reading(saved, length):
    saved.write_bytes(length.to_bytes(8, "little") + saved.read_bytes()[8:])
    with pytest.raises(ArtifactError, match="declares a header of"):
        load_tensors(saved, "state", "abc")
