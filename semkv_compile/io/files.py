"""Files that came from elsewhere: read with bounds and checks, written atomically.

Everything that semkv loads (artifacts, profiles, states) goes through this module and `semkv.io.tensor_file`. No function
here unpickles, follows a path out of its folder, or reads more than a limit says. The caller gives the error class to
raise (`ArtifactError`, `ProfileError`) so that one hardening serves all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from semkv.errors import SemkvError

MAX_JSON_BYTES = 64 << 20
"""No JSON file of semkv is larger: the graph of a decoder with 100 layers takes about 2 MB."""

_CHUNK = 1 << 20
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxdict = 2, 60, 60, 2
_DAMAGED = "the file is damaged or was edited; copy it again from its source or write it anew"

Model = TypeVar("Model", bound=BaseModel)


def read_bytes(path: Path, *, error: type[SemkvError], limit: int = MAX_JSON_BYTES) -> bytes:
    """The content of a regular file of at most `limit` bytes; `error` where it is missing, not a file, or larger."""
    size = file_size(path, error=error)
    if size > limit:
        raise error(f"{path}: {size} bytes, expected at most {limit}; {_DAMAGED}")
    try:
        with path.open("rb") as stream:
            data = stream.read(limit + 1)
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror}); check its permissions") from cause
    if len(data) != size:
        raise error(f"{path}: {size} bytes by its folder, {len(data)} read; {_DAMAGED}")
    return data


def file_size(path: Path, *, error: type[SemkvError]) -> int:
    """Size in bytes of a regular file (a link to one counts); `error` where there is none."""
    try:
        status = path.stat()
    except (OSError, ValueError) as cause:
        raise error(f"{path}: no such file; expected one written by semkv, so check the path") from cause
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{path}: expected a regular file; check the path")
    return status.st_size


def sha256_of(path: Path, *, error: type[SemkvError]) -> str:
    """SHA-256 of a regular file's content, in hexadecimal, read in chunks of 1 MiB."""
    file_size(path, error=error)
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror}); check its permissions") from cause
    return digest.hexdigest()


def check_sha256(path: Path, expected: str, *, error: type[SemkvError]) -> None:
    """Raise `error` unless the file's SHA-256 is `expected`."""
    found = sha256_of(path, error=error)
    if found != expected:
        raise error(f"{path}: sha256 {found[:12]}..., expected {expected[:12]}...; {_DAMAGED}")


def parse_json(data: bytes, name: str | Path, *, error: type[SemkvError]) -> Any:
    """Parse strict JSON: UTF-8, no NaN or Infinity, no duplicate keys, bounded depth. `name` is for the message."""

    def refuse_constant(text: str) -> Any:
        raise ValueError(f"{text} is not JSON")

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("an object names a key twice")
        return result

    try:
        return json.loads(data.decode("utf-8"), parse_constant=refuse_constant, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as cause:
        raise error(f"{name}: not valid JSON ({cause}); {_DAMAGED}") from cause


def read_json(path: Path, *, error: type[SemkvError], limit: int = MAX_JSON_BYTES) -> Any:
    """`read_bytes`, then `parse_json`."""
    return parse_json(read_bytes(path, error=error, limit=limit), path, error=error)


def dump_json(value: Any, name: str | Path, *, error: type[SemkvError], indent: int | None = 1) -> bytes:
    """Readable, deterministic JSON; `error` where `value` holds what JSON cannot (NaN, objects)."""
    try:
        text = json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)
        return text.encode("utf-8") + b"\n"
    except (TypeError, ValueError, RecursionError) as cause:
        raise error(
            f"{name}: cannot be written as JSON ({cause}); pass plain numbers, strings, lists and dicts"
        ) from cause


def validate(
    model: type[Model], value: Any, name: str | Path, *, error: type[SemkvError], remedy: str = _DAMAGED
) -> Model:
    """`value` as the pydantic `model`; `error` names the first wrong fields, what was expected, and `remedy`."""
    try:
        return model.model_validate(value)
    except ValidationError as cause:
        raise error(f"{name}: {describe(cause)}; {remedy}") from cause
    except RecursionError as cause:
        raise error(f"{name}: nested too deeply; {remedy}") from cause


def describe(problem: ValidationError, limit: int = 3) -> str:
    """The first `limit` problems of a pydantic error, in one line."""
    if problem.error_count() > 10_000:  # a list of them would take gigabytes where a file is filled with nonsense
        return f"{problem.error_count()} fields are not what the schema says"
    found = problem.errors(include_url=False, include_context=False, include_input=True)
    parts = []
    for item in found[:limit]:
        where = ".".join(str(part) for part in item["loc"]) or "the document"
        parts.append(f"{where[:120]} = {_SHORT.repr(item['input'])}: {item['msg'][:200]}")
    more = f" (and {len(found) - limit} more)" if len(found) > limit else ""
    return "; ".join(parts) + more


def member(folder: Path, name: str, *, error: type[SemkvError]) -> Path:
    """The path of file `name` in `folder`, refusing names that could lead out of it."""
    parts = name.split("/")
    if len(name) > 200 or not all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", part) for part in parts):
        raise error(f"{folder}: file name {name[:80]!r} is not a plain relative one; {_DAMAGED}")
    return folder.joinpath(*parts)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it becomes `path`, on an exception it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`; on success it takes the place of `path`, on an exception it is removed.

    The caller has made sure that a folder at `path` may be replaced. Readers see the old one or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    old = temporary.with_suffix(".old")
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(temporary, path)
        except OSError:
            if old.exists():
                os.replace(old, path)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
