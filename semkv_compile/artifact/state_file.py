"""One file of tensors with a sealed description: what saved states are made of.

An ordinary safetensors file whose metadata has two entries: `semkv`, JSON of kind, schema, fingerprint and free
metadata; and `sha256`, over all bytes of the file with the digest's own 64 characters read as zeros.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, JsonValue
from torch import Tensor

from semkv.artifact.schema import Strict
from semkv.errors import ArtifactError, SemkvError
from semkv.io.files import parse_json, replace_file, validate
from semkv.io.tensor_file import read_header, read_tensors, write_tensors

STATE_SCHEMA = 1
"""Version of the container; a reader refuses any other."""

_ZEROS = "0" * 64
_CHUNK = 1 << 20


class _Description(Strict):
    kind: str = Field(max_length=100)
    schema_version: Literal[STATE_SCHEMA] = Field(alias="schema")  # type: ignore[valid-type]
    fingerprint: str = Field(max_length=200)
    meta: dict[str, JsonValue]


def save_tensors(
    path: str | os.PathLike[str],
    kind: str,
    meta: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    fingerprint: str,
    error: type[SemkvError] = ArtifactError,
) -> None:
    """Write tensors and JSON `meta` as one file, replacing what was there at once.

    Parameters
    ----------
    kind: what the file is, `state` for example; `load_tensors` refuses another.
    meta: plain JSON: no NaN, string keys.
    tensors: plain dense tensors, of any device; strides are not kept.
    fingerprint: of what the tensors belong to, `program_fingerprint` for a state.
    """
    path = Path(path)
    if path.is_dir():
        raise error(f"{path}: a folder is not overwritten; choose another path")
    description = {"kind": kind, "schema": STATE_SCHEMA, "fingerprint": fingerprint, "meta": dict(meta)}
    try:
        text = json.dumps(description, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as cause:
        raise error(
            f"{path}: meta cannot be written as JSON ({cause}); pass plain numbers, strings, lists and dicts"
        ) from cause
    validate(_Description, json.loads(text), path, error=error)
    try:
        with replace_file(path) as temporary:
            write_tensors(temporary, tensors, {"sha256": _ZEROS, "semkv": text}, error=error)
            place = _digest_place(temporary, _ZEROS, error)
            digest = _digest(temporary, place)
            with temporary.open("r+b") as stream:
                stream.seek(place)
                stream.write(digest.encode())
    except OSError as cause:
        raise error(f"{path}: cannot be written ({cause}); choose another path or make room") from cause


def load_tensors(
    path: str | os.PathLike[str],
    kind: str,
    expected_fingerprint: str | None,
    *,
    device: str | torch.device = "cpu",
    error: type[SemkvError] = ArtifactError,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`meta` and tensors of a file that `save_tensors` wrote.

    On a CPU the tensors are a private map of the file: reading them costs no copy, writing to them does not reach it.

    Parameters
    ----------
    expected_fingerprint: the file's must equal it; None accepts any.

    Raises
    ------
    error: missing, of another kind or version, damaged, altered, or with another fingerprint.
    """
    path = Path(path)
    header = read_header(path, error=error)
    if "semkv" not in header.metadata or "sha256" not in header.metadata:
        raise error(f"{path}: safetensors without a description by semkv; expected a saved {kind}")
    raw = parse_json(header.metadata["semkv"].encode("utf-8", "replace"), path, error=error)
    found = raw.get("schema") if isinstance(raw, dict) else None
    if found != STATE_SCHEMA:
        raise error(f"{path}: schema {str(found)[:40]}, expected {STATE_SCHEMA}; save the {kind} again with this semkv")
    description = validate(_Description, raw, path, error=error)
    if description.kind != kind:
        raise error(f"{path}: holds a {description.kind!r}, expected a {kind!r}; check the path")
    digest = header.metadata["sha256"]
    if not re.fullmatch(r"[0-9a-f]{64}", digest) or _digest(path, _digest_place(path, digest, error)) != digest:
        raise error(
            f"{path}: its content does not have the sha256 {digest[:12]!r} it names; the file is damaged or was edited"
        )
    if expected_fingerprint is not None and description.fingerprint != expected_fingerprint:
        raise error(
            f"{path}: a {kind} of program {description.fingerprint[:12]}..., expected {expected_fingerprint[:12]}...; "
            "load it with the compiled model that saved it (same weights, method and passes)"
        )
    return dict(description.meta), read_tensors(path, header, error=error, device=device)


def _digest_place(path: Path, digest: str, error: type[SemkvError]) -> int:
    """Where in the file the digest's characters begin. Quotes inside JSON strings are escaped, so it is found once."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length)
    needle = f'"sha256":"{digest}"'.encode()
    if text.count(needle) != 1:
        raise error(
            f"{path}: its header does not hold the digest as semkv writes it; the file is damaged or was edited"
        )
    return 8 + text.index(needle) + len('"sha256":"')


def _digest(path: Path, place: int) -> str:
    """SHA-256 of the file with the 64 bytes at `place` read as zeros."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        digest.update(stream.read(place))
        stream.read(64)
        digest.update(_ZEROS.encode())
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
