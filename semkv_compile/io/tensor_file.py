"""Tensors in safetensors files, with the header checked before anything is allocated.

Reading costs no more memory than the file has bytes: every tensor's declared dtype and shape must fill exactly its part
of the file, and the parts must fill the file. Files written here are ordinary safetensors files.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from semkv.errors import SemkvError
from semkv.io.files import file_size, parse_json

MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 1_000_000

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of the format that semkv writes and reads, by the format's names."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its dtype, shape and place in the data section (bytes, end exclusive)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The checked header of a file: tensors by name, free metadata strings, and where the data section begins."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_begin: int


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, error: type[SemkvError]
) -> None:
    """Write a safetensors file, one tensor after the other, so that at most one is held twice.

    Raises `error` where a tensor is of a dtype outside `DTYPES`, a subclass, sparse, or without data.
    """
    for name, tensor in tensors.items():
        _check_writable(name, tensor, error)
    # Wide elements first, so that every tensor begins at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)))
        stream.write(text)
        for name in order:
            data = tensors[name].detach().to("cpu").contiguous().reshape(-1)
            if data.numel():
                stream.write(data.view(torch.uint8).numpy().data)


def read_header(path: Path, *, error: type[SemkvError]) -> Header:
    """Check a safetensors file's header against the file's size and return it; no tensor is read."""
    size = file_size(path, error=error)

    def refuse(problem: str) -> SemkvError:
        return error(f"{path}: {problem}; the file is damaged or was edited, so copy it again or write it anew")

    if size < 8:
        raise refuse(f"{size} bytes, expected a safetensors file")
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise refuse(f"declares a header of {length} bytes in a file of {size} (at most {MAX_HEADER_BYTES})")
        text = stream.read(length)
    raw = parse_json(text, f"{path} (header)", error=error)
    if not isinstance(raw, dict) or len(raw) > MAX_TENSORS:
        raise refuse("its header is not an object of tensors")
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refuse("its metadata is not an object of strings")
    tensors = {}
    for name, value in raw.items():
        entry = _parse_entry(value)
        if entry is None:
            raise refuse(
                f"tensor {name[:80]!r} is {repr(value)[:120]}, expected dtype, shape and data_offsets that agree"
            )
        tensors[name] = entry
    end = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise refuse(f"tensor {name[:80]!r} begins at byte {entry.begin}, expected {end}")
        end = entry.end
    if 8 + length + end != size:
        raise refuse(f"declares {8 + length + end} bytes and has {size}")
    return Header(tensors, metadata, 8 + length)


def read_tensors(
    path: Path, header: Header, *, error: type[SemkvError], device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """All tensors of a file whose header `read_header` returned, on `device`; on a CPU they are mapped, not copied."""
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as stream:
            names = set(stream.keys())
            if names != set(header.tensors):
                raise error(f"{path}: changed while it was read; load it again")
            tensors = {name: stream.get_tensor(name) for name in header.tensors}
    except (SafetensorError, OSError, ValueError) as cause:
        raise error(f"{path}: cannot be read as safetensors ({cause}); copy it again or write it anew") from cause
    for name, entry in header.tensors.items():
        if tensors[name].dtype != entry.dtype or tuple(tensors[name].shape) != entry.shape:
            raise error(f"{path}: tensor {name[:80]!r} changed while it was read; load it again")
    return tensors


def _parse_entry(value: Any) -> TensorEntry | None:
    """A header's declaration of one tensor, or None where its parts do not agree."""
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        return None
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    shape, offsets = value["shape"], value["data_offsets"]
    if dtype is None or not _sizes(shape) or not _sizes(offsets) or len(shape) > 16 or len(offsets) != 2:
        return None
    begin, end = offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        return None
    return TensorEntry(dtype, tuple(shape), begin, end)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**62 for item in value)


def _check_writable(name: str, tensor: Tensor, error: type[SemkvError]) -> None:
    plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if not plain or tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise error(
            f"tensor {name!r} is a {type(tensor).__name__} ({tensor.layout}, {tensor.device.type}); only plain dense "
            "tensors with data can be saved, so dequantise or materialise it first"
        )
    if tensor.dtype not in _CODES:
        raise error(
            f"tensor {name!r} has dtype {tensor.dtype}, expected one of {', '.join(map(str, _CODES))}; cast it first"
        )
