"""Storages are written once, and views of them come back as they were."""

from __future__ import annotations

import pytest
import torch

from semkv.artifact.weights import TensorView, check_views, pack, unpack
from semkv.errors import ArtifactError
from semkv.io.tensor_file import read_header, read_tensors, write_tensors


def through_file(tmp_path, tensors):
    stored, views = pack(tensors)
    path = tmp_path / "weights.safetensors"
    write_tensors(path, stored, error=ArtifactError)
    header = read_header(path, error=ArtifactError)
    check_views(views, header.tensors, "manifest")
    return unpack(read_tensors(path, header, error=ArtifactError), views), header


def test_shared_storages_are_stored_once_and_come_back_shared(tmp_path):
    base = torch.randn(6, 8)
    parameter = torch.nn.Parameter(base)
    tensors = {"embed": parameter, "head": parameter, "rows": base[2:4], "turned": base.t(), "own": torch.randn(3)}
    loaded, header = through_file(tmp_path, tensors)
    assert sum(entry.end - entry.begin for entry in header.tensors.values()) == (6 * 8 + 3) * 4
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].stride() == tensor.stride()
    assert loaded["embed"] is loaded["head"]
    assert isinstance(loaded["embed"], torch.nn.Parameter)
    assert not loaded["embed"].requires_grad
    assert loaded["rows"].untyped_storage().data_ptr() == loaded["turned"].untyped_storage().data_ptr()


def test_tensors_that_only_live_in_one_file_map_are_separate(tmp_path):
    storage = torch.randn(1000)
    tensors = {"a": storage[:10], "b": storage[500:520].view(4, 5), "c": storage[990:]}
    loaded, header = through_file(tmp_path, tensors)
    assert set(header.tensors) == {"a", "b", "c"}
    assert header.tensors["b"].shape == (4, 5)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(5),
        torch.tensor([True, False]),
        torch.randn(3, 4).t(),
        torch.randn(3, 4, 5).permute(2, 0, 1),
        torch.randn(3, 1).expand(3, 7),
        torch.randn(4, 6)[:, ::2],
        torch.randn(4).half(),
        torch.randn(4).bfloat16(),
        torch.randn(4).double(),
        torch.randn(4).to(torch.float8_e4m3fn),
    ],
)
def test_layouts_and_dtypes(tmp_path, tensor):
    loaded, _ = through_file(tmp_path, {"t": tensor})
    assert loaded["t"].dtype == tensor.dtype
    assert loaded["t"].shape == tensor.shape
    assert torch.equal(loaded["t"].float(), tensor.float())
    if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
        assert loaded["t"].stride() == tensor.stride()


def test_tensors_without_plain_data_are_refused(tmp_path):
    with pytest.raises(ArtifactError, match=r"'t' has no data \(device meta\); load the model's weights"):
        pack({"t": torch.empty(3, device="meta")})
    with pytest.raises(ArtifactError, match=r"dtype torch\.complex64, expected one of"):
        write_tensors(tmp_path / "x", {"t": torch.zeros(2, dtype=torch.complex64)}, error=ArtifactError)
    with pytest.raises(ArtifactError, match="only plain dense tensors"):
        write_tensors(tmp_path / "x", {"t": torch.eye(3).to_sparse()}, error=ArtifactError)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"stored": "gone"}, "'gone' is not in weights.safetensors"),
        ({"shape": [5, 3]}, "expected .3, 4. at 0"),
        ({"shape": [4, 3], "stride": [1, 4], "offset": 1}, "in 12 elements"),
        ({"shape": [2**40, 2**40], "stride": [0, 0]}, "in 12 elements"),
        ({"shape": [11] * 10, "stride": [1] * 10}, "in 12 elements"),
        ({"shape": [4, -3], "stride": [1, 4]}, "with strides"),
        ({"shape": [4], "stride": [1, 4]}, "with strides"),
    ],
)
def test_views_outside_their_storage_are_refused(tmp_path, change, text):
    path = tmp_path / "weights.safetensors"
    write_tensors(path, {"w": torch.randn(3, 4)}, error=ArtifactError)
    header = read_header(path, error=ArtifactError)
    view = TensorView(**({"stored": "w", "kind": "buffer", "shape": [3, 4]} | change))
    with pytest.raises(ArtifactError, match=text):
        check_views({"t": view}, header.tensors, "manifest.json")
