"""Reading and writing the two files of a profile: bounded, hashed, atomic, and without pickle."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import ValidationError
from torch import Tensor

from semkv.errors import ProfileError

from .sections import SCHEMA_VERSION, ProfileInfo, TensorFacts

INFO_FILE = "profile.json"
TENSORS_FILE = "tensors.safetensors"
MAX_INFO_BYTES = 16 << 20
MAX_HEADER_BYTES = 4 << 20
MAX_TENSOR_BYTES = 2 << 30
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "uint8": torch.uint8}
_STORED_NAMES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "uint8": "U8"}
WHOLE = ("sentences.classes", "sketch.books.", "sketch.value_books.")
"""How names of tensors of whole numbers, uint8, begin; all others are of floating point."""
OLD_SKETCH = "sketch"
"""The section of version 1 that is not read any more, and its tensors' prefix."""
REMEDY = "get the profile again or make a new one with semkv-profile"


def canonical(content: dict[str, Any]) -> str:
    """JSON text that depends on the content alone."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def digest(data: bytes) -> str:
    """SHA-256 of `data`, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def write(folder: Path, info: ProfileInfo, tensors: dict[str, Tensor]) -> None:
    """Write a profile folder whole or not at all: files are made in a neighbour folder and moved into place."""
    facts = {name: TensorFacts(shape=tuple(t.shape), dtype=_dtype_name(name, t)) for name, t in tensors.items()}
    data = safetensors.torch.save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    info = info.model_copy(update={"tensors": facts, "tensors_digest": digest(data)})
    content = info.model_dump(mode="json")
    content["digest"] = digest(canonical(content).encode())
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists() and not folder.is_dir():
        raise ProfileError(f"{folder} is a file: a profile is written to a folder, give another name")
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        (made / TENSORS_FILE).write_bytes(data)
        (made / INFO_FILE).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        if not folder.exists():
            made.chmod(0o755)
            os.replace(made, folder)
            return
        # The info file goes last: until then its digest of the tensors does not fit, and loading says so.
        os.replace(made / TENSORS_FILE, folder / TENSORS_FILE)
        os.replace(made / INFO_FILE, folder / INFO_FILE)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _dtype_name(name: str, tensor: Tensor) -> Any:
    for key, dtype in DTYPES.items():
        if tensor.dtype == dtype:
            return key
    raise ProfileError(f"tensor {name!r} has dtype {tensor.dtype}: a profile stores {', '.join(DTYPES)}")


def read(folder: Path) -> tuple[ProfileInfo, dict[str, Tensor]]:
    """The checked content of a profile folder; `ProfileError` names the file, what is wrong, and what to do."""
    if not folder.is_dir():
        raise ProfileError(f"{folder} is no profile folder: expected a folder with {INFO_FILE} and {TENSORS_FILE}")
    info = read_info(folder / INFO_FILE)
    tensors = read_tensors(folder / TENSORS_FILE, info)
    if info.schema_version == SCHEMA_VERSION:
        return info, tensors
    facts = {name: info.tensors[name] for name in tensors}
    return info.model_copy(update={"schema_version": SCHEMA_VERSION, "tensors": facts}), tensors


def _bytes(path: Path, limit: int) -> bytes:
    try:
        if not path.is_file():
            raise ProfileError(f"{path} is missing: {REMEDY}")
        size = path.stat().st_size
        if size > limit:
            raise ProfileError(f"{path} has {size} bytes, more than the {limit} that are allowed: {REMEDY}")
        return path.read_bytes()
    except OSError as error:
        raise ProfileError(f"{path} cannot be read ({error}): check the file and its permissions") from None


def read_info(path: Path) -> ProfileInfo:
    """Parse and check `profile.json`."""
    data = _bytes(path, MAX_INFO_BYTES)

    def refuse(constant: str) -> None:
        raise ValueError(f"the constant {constant}")

    try:
        content = json.loads(data.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} is damaged, it is not valid JSON ({error}): {REMEDY}") from None
    if not isinstance(content, dict):
        raise ProfileError(f"{path} is damaged, it holds no JSON object: {REMEDY}")
    version = content.get("schema_version")
    if version not in (1, SCHEMA_VERSION):
        raise ProfileError(
            f"{path} has schema version {version!r}, this version of semkv reads 1 and {SCHEMA_VERSION}: "
            "make the profile again with this version's semkv-profile"
        )
    stated = content.pop("digest", None)
    try:
        actual = digest(canonical(content).encode())
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} is damaged ({error}): {REMEDY}") from None
    if stated != actual:
        raise ProfileError(f"{path} was altered or damaged, its content does not match its digest: {REMEDY}")
    if version == 1 and content.get(OLD_SKETCH):
        content[OLD_SKETCH] = None
        content["measured"] = {
            step: record for step, record in content.get("measured", {}).items() if step != OLD_SKETCH
        }
        warnings.warn(
            f"{path} is of an earlier version of semkv, whose token sketch is not read any more; its other sections are: make a sketch "
            f"with `semkv-profile MODEL --steps sketch -o {path.parent}`",
            stacklevel=2,
        )
    try:
        return ProfileInfo.model_validate_json(canonical(content))
    except (ValidationError, ValueError, RecursionError) as error:
        raise ProfileError(f"{path} does not follow the profile schema: {_first_problem(error)}; {REMEDY}") from None


def _first_problem(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, problem['loc'])) or 'profile'}: {problem['msg']}"
    return str(error)


def read_tensors(path: Path, info: ProfileInfo) -> dict[str, Tensor]:
    """Load `tensors.safetensors` after checking its header, its digest, and every shape, dtype and value."""
    data = _bytes(path, MAX_TENSOR_BYTES)
    _check_header(path, data, info)
    if digest(data) != info.tensors_digest:
        raise ProfileError(f"{path} was altered or damaged, its digest does not match the one in {INFO_FILE}: {REMEDY}")
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:
        raise ProfileError(f"{path} is damaged ({error}): {REMEDY}") from None
    if info.schema_version == 1:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{OLD_SKETCH}.")}
    check_tensors(tensors, info, str(path))
    return tensors


def _check_header(path: Path, data: bytes, info: ProfileInfo) -> None:
    """Compare the declared tensors with the file's own header before anything is allocated for them."""
    size = int.from_bytes(data[:8], "little") if len(data) >= 8 else -1
    if not 0 < size <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise ProfileError(f"{path} is damaged, its header is truncated or too large: {REMEDY}")
    try:
        header = json.loads(data[8 : 8 + size].decode("utf-8"))
        found = {
            name: (str(entry["dtype"]), tuple(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise ProfileError(f"{path} is damaged, its header cannot be read: {REMEDY}") from None
    expected = {name: (_STORED_NAMES[facts.dtype], facts.shape) for name, facts in info.tensors.items()}
    if found != expected:
        names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise ProfileError(
            f"{path} does not hold the tensors that {INFO_FILE} declares (first difference: {names[0]!r}): {REMEDY}"
        )
    needed = sum(math.prod(facts.shape) * DTYPES[facts.dtype].itemsize for facts in info.tensors.values())
    if len(data) != 8 + size + needed:
        raise ProfileError(f"{path} has {len(data)} bytes where its tensors need {8 + size + needed}: {REMEDY}")


def check_tensors(tensors: dict[str, Tensor], info: ProfileInfo, where: str) -> None:
    """Raise `ProfileError` unless `tensors` are exactly what the sections need, and finite."""
    try:
        needed = info.tensor_shapes()
    except ValueError as error:
        raise ProfileError(f"{where}: {error}; {REMEDY}") from None
    for name, shape in needed.items():
        if name not in tensors:
            raise ProfileError(f"{where} lacks the tensor {name!r}: {REMEDY}")
        if tuple(tensors[name].shape) != shape:
            found = tuple(tensors[name].shape)
            raise ProfileError(f"{where}: tensor {name!r} has shape {found}, expected {shape}: {REMEDY}")
    for name, tensor in tensors.items():
        if name not in needed:
            raise ProfileError(f"{where} holds the tensor {name!r}, which no section uses: {REMEDY}")
        if name.startswith(WHOLE) != (tensor.dtype == torch.uint8):
            wanted = "uint8" if name.startswith(WHOLE) else "floating-point numbers"
            raise ProfileError(f"{where}: tensor {name!r} is {tensor.dtype}, expected {wanted}: {REMEDY}")
        if not torch.isfinite(tensor).all():
            raise ProfileError(f"{where}: tensor {name!r} holds values that are not finite: {REMEDY}")
