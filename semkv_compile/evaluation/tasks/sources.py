"""Data that users bring: local files, folders and archives, or files of a data set on the Hugging Face Hub."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zipfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from semkv.errors import ConfigError

HOW = "give a file (.jsonl, .json, .parquet, .txt; .gz too), a folder, a .zip, or a Hub name such as owner/name/file.jsonl"


class Source:
    """One place with data, read when it is first asked for.

    key: what `--source` called it. place: a local path; or `owner/name`, a data set on the Hub, with the file in it
    after another slash. defaults: the file to take from a Hub data set where none is named.
    """

    def __init__(self, key: str, place: str, defaults: Sequence[str] = ()):
        self.key, self.place, self.defaults = key, place, tuple(defaults)

    def __repr__(self) -> str:
        return f"Source({self.key}={self.place})"

    @cached_property
    def path(self) -> Path:
        """The local file or folder; downloads from the Hub. Raises ConfigError where there is none."""
        local = Path(self.place).expanduser()
        if local.exists():
            return local
        parts = self.place.split("/")
        if self.place.startswith((".", "/", "~")) or len(parts) < 2 or not all(parts):
            raise ConfigError(f"--source {self.key}={self.place}: no such file or folder; {HOW}")
        names = ["/".join(parts[2:])] if len(parts) > 2 else list(self.defaults)
        if not names:
            raise ConfigError(f"--source {self.key}={self.place}: name the file in it, {self.place}/FILE")
        return self._download("/".join(parts[:2]), names[0])

    def _download(self, repository: str, name: str) -> Path:
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(repository, name, repo_type="dataset"))
        # The Hub's client raises errors of its own, of requests and of the file system; all mean that it is not there.
        except Exception as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(
                f"--source {self.key}={self.place}: {name} of the data set {repository} cannot be had ({first}); {HOW}"
            ) from error

    @cached_property
    def digest(self) -> str:
        """Hash of the content, which is part of what a result belongs to."""
        hasher = hashlib.sha256()
        path = self.path
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                if path.is_dir():
                    hasher.update(file.relative_to(path).as_posix().encode())
                hasher.update(file.read_bytes())
        return hasher.hexdigest()[:16]

    @cached_property
    def text(self) -> str:
        """The source as one text; of JSON rows the fields `text`, `content` or `context`, a blank line between."""
        return "\n\n".join(self.texts)

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """One text for each file of a folder in the order of their paths, else one in all; of JSON rows the fields `text`, `content` or
        `context`, a blank line between."""
        path = self.path
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".md"))
            texts = tuple(p.read_text(encoding="utf-8", errors="replace") for p in files)
            found = tuple(text for text in texts if text.strip())
            if found:
                return found
            text = ""
        elif _suffix(path.name) in (".txt", ".md"):
            text = _content(path).decode("utf-8", errors="replace")
        else:
            text = "\n\n".join(_text_of(row) for row in self.rows())
        if not text.strip():
            raise ConfigError(
                f"--source {self.key}={self.place}: holds no text (.txt, .md, or rows with a field text, content or "
                "context)"
            )
        return (text,)

    def rows(self, member: str | None = None) -> list[dict[str, Any]]:
        """The rows of the file, or of the file whose name begins with `member` in a folder or a .zip.

        Raises ConfigError where the file is missing, of another format or damaged.
        """
        path = self.path
        if path.is_dir():
            found = [p for p in sorted(path.rglob("*")) if member is not None and _stem(p.name) == member]
            if not found:
                raise self._missing(member)
            return self._parse(found[0].name, _content(found[0]))
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                names = [n for n in archive.namelist() if not n.endswith("/")]
                wanted = [n for n in names if member is None or _stem(PurePosixPath(n).name) == member]
                if not wanted or (member is None and len(names) > 1):
                    raise self._missing(member)
                return self._parse(wanted[0], archive.read(wanted[0]))
        return self._parse(path.name, _content(path))

    def _missing(self, member: str | None) -> ConfigError:
        wanted = f"{member}.jsonl" if member else "a single file"
        return ConfigError(f"--source {self.key}={self.place}: expected {wanted} in it; {HOW}")

    def _parse(self, name: str, content: bytes) -> list[dict[str, Any]]:
        suffix = _suffix(name)
        try:
            if suffix == ".parquet":
                return _parquet(content)
            if suffix == ".jsonl":
                rows = [json.loads(line) for line in content.decode("utf-8").split("\n") if line.strip()]
            elif suffix == ".json":
                data = json.loads(content.decode("utf-8"))
                rows = data if isinstance(data, list) else [data]
            elif suffix in (".txt", ".md"):
                rows = [{"text": content.decode("utf-8", errors="replace")}]
            else:
                raise ConfigError(f"--source {self.key}={self.place}: {name} has no known format; {HOW}")
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"--source {self.key}={self.place}: {name} is damaged ({error}); {HOW}") from error
        if not rows or not all(isinstance(row, dict) for row in rows):
            raise ConfigError(f"--source {self.key}={self.place}: {name} holds no rows with named fields; {HOW}")
        return rows

    def fields(self, row: dict[str, Any], names: Sequence[str], number: int) -> None:
        """Refuse a row that lacks one of `names`."""
        lacking = [name for name in names if name not in row]
        if lacking:
            raise ConfigError(
                f"--source {self.key}={self.place}, row {number}: no field {lacking[0]!r}; expected rows with "
                f"{', '.join(names)}, found {', '.join(row)}"
            )


def _stem(name: str) -> str:
    """`qasper` of `qasper.jsonl.gz`."""
    return name.removesuffix(".gz").rsplit(".", 1)[0]


def _suffix(name: str) -> str:
    return PurePosixPath(name.removesuffix(".gz")).suffix


def _content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def _text_of(row: dict[str, Any]) -> str:
    return next((str(row[name]) for name in ("text", "content", "context") if name in row), "")


def _parquet(content: bytes) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(
            "a .parquet file needs the package pyarrow: `pip install pyarrow`, or give the data as JSON lines"
        ) from error
    return parquet.read_table(io.BytesIO(content)).to_pylist()
