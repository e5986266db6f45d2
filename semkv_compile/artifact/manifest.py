"""manifest.json: what an artifact holds, which versions made it, and the hash of every file in it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PrivateAttr,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    field_validator,
)

from semkv.artifact.recurrences import NAME, BodyFacts, SiteFacts
from semkv.artifact.weights import TensorView
from semkv.config import CompileConfig, check_budget
from semkv.errors import ArtifactError
from semkv.io.files import check_sha256, describe, dump_json, file_size, member, parse_json, read_bytes, validate
from semkv.ir.seams import Seams
from semkv.ir.site import AttentionSite

FORMAT = "semkv-artifact"
ARTIFACT_SCHEMA = 3
"""Version of the folder's layout and manifest; a reader refuses any other."""

MANIFEST = "manifest.json"
SEAL = "manifest.sha256"
WEIGHTS = "weights.safetensors"
PROFILE = "profile"
GRAPHS = ("body", "head", "prefill", "extend", "decode", "selector")
MAX_MANIFEST_BYTES = 16 << 20
DROPPED = {"prefetch"}
"""Settings that earlier versions wrote and that changed no result. They are left out; any other unknown setting is refused."""

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
GraphName = Annotated[str, StringConstraints(pattern=rf"^({'|'.join(GRAPHS)}|{NAME})$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Part):
    """A file of the artifact: its size in bytes and SHA-256."""

    bytes: int = Field(ge=0)
    sha256: Sha256


class Versions(_Part):
    """What wrote the artifact; for messages, and for who wants to reproduce it."""

    semkv: str
    torch: str
    transformers: str | None
    python: str


class ProgramFacts(_Part):
    """The fields of `semkv.ir.program.Program` that are not graphs. `sites` are `AttentionSite` fields by name."""

    stage: Literal["captured", "found", "annotated", "lowered"]
    graphs: list[GraphName] = Field(max_length=10_000)
    sites: list[dict[str, JsonValue]] = Field(max_length=10_000)
    vocab_size: int = Field(ge=1, lt=2**31)
    max_positions: int | None = Field(ge=1, lt=2**62)
    dtype: Literal["float64", "float32", "float16", "bfloat16"]
    batched: bool
    recurrences: list[SiteFacts] = Field(default_factory=list, max_length=10_000)
    bodies: list[BodyFacts] = Field(default_factory=list, max_length=10_000)
    evaluated: list[str] = Field(default_factory=list, max_length=10_000)
    seams: Seams = Seams()
    notes: list[str] = Field(max_length=10_000)

    @field_validator("sites")
    @classmethod
    def _sites(cls, value: list[dict[str, JsonValue]]) -> list[dict[str, JsonValue]]:
        parse_sites(value)
        return value


class CompileFacts(_Part):
    """What `semkv.compile` was asked for."""

    method: str = Field(max_length=100)
    method_options: dict[str, JsonValue] = Field(default_factory=dict)
    budget: int | float | None = None
    config: CompileConfig = Field(default_factory=CompileConfig)

    @field_validator("budget")
    @classmethod
    def _budget(cls, value: float | int | None) -> float | int | None:
        return check_budget(value)

    @field_validator("config", mode="before")
    @classmethod
    def _config(cls, value: Any) -> Any:
        return {name: x for name, x in value.items() if name not in DROPPED} if isinstance(value, dict) else value


class ModelFacts(_Part):
    """What `generate` needs of the user's model.

    fingerprint: `model_fingerprint` of the model before compilation; profiles carry the same. config and
    generation_config: `to_dict()` of the Hugging Face objects, None for a plain module.
    """

    fingerprint: str | None = Field(default=None, max_length=200)
    config: dict[str, JsonValue] | None = None
    generation_config: dict[str, JsonValue] | None = None


class Manifest(_Part):
    """The whole of manifest.json. `extra` is the writer's; `program_fingerprint` names the program for states."""

    format: Literal[FORMAT]  # type: ignore[valid-type]
    schema_version: Literal[ARTIFACT_SCHEMA] = Field(alias="schema")  # type: ignore[valid-type]
    versions: Versions
    files: dict[str, FileEntry] = Field(max_length=1000)
    program: ProgramFacts
    program_fingerprint: Sha256
    tensors: dict[str, TensorView] = Field(max_length=200_000)
    compile: CompileFacts
    model: ModelFacts
    profile: Literal[PROFILE] | None  # type: ignore[valid-type]
    extra: dict[str, JsonValue] = Field(default_factory=dict)

    _folder: Path | None = PrivateAttr(default=None)

    @property
    def profile_path(self) -> Path | None:
        """The folder of the profile in a loaded artifact, None where it has none."""
        return None if self.profile is None or self._folder is None else self._folder / PROFILE


def current_versions() -> Versions:
    """The versions in this process."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return Versions(
        semkv=installed("semkv") or "unknown",
        torch=installed("torch") or "unknown",
        transformers=installed("transformers"),
        python=platform.python_version(),
    )


def parse_sites(values: list[dict[str, Any]]) -> tuple[AttentionSite, ...]:
    """Attention sites from their fields; ValueError names the site and what is wrong with it."""
    names = {field.name for field in dataclasses.fields(AttentionSite)}
    sites = []
    for index, value in enumerate(values):
        if unknown := set(value) - names:
            raise ValueError(f"site {index} has unknown fields {sorted(unknown)}")
        try:
            site = _SITE.validate_python(value, strict=False)
        except ValidationError as cause:
            raise ValueError(f"site {index}: {describe(cause)}") from cause
        sizes = (site.q_heads, site.kv_heads, site.key_dim, site.value_dim)
        numbers = (site.scale, site.softcap, site.budget_share)
        if site.index != index or not 0 <= site.store < len(values):
            raise ValueError(f"site {index} has index {site.index} and store {site.store}, of {len(values)} sites")
        if not all(0 < size < 2**20 for size in sizes) or site.q_heads % site.kv_heads:
            raise ValueError(f"site {index} has q_heads, kv_heads, key_dim, value_dim = {sizes}")
        if not all(map(math.isfinite, numbers)) or site.softcap < 0 or not 0 <= site.window < 2**62:
            raise ValueError(f"site {index} has scale, softcap, budget_share = {numbers} and window {site.window}")
        if site.host_from is not None and not 0 < site.host_from < 2**62:
            raise ValueError(f"site {index} waits on the host from {site.host_from} tokens on")
        if not 0 <= site.budget_share <= 1 + 1e-6 or len(site.roles) not in (0, site.kv_heads):
            raise ValueError(f"site {index} has budget_share {site.budget_share} and {len(site.roles)} roles")
        sites.append(site)
    return tuple(sites)


def site_values(sites: tuple[AttentionSite, ...]) -> list[dict[str, Any]]:
    """The fields of sites as JSON values; `parse_sites` reads them."""
    return [_SITE.dump_python(site, mode="json", exclude={"among"}) for site in sites]


_SITE = TypeAdapter(AttentionSite)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json and its hash, in the form that `sha256sum -c` reads."""
    data = dump_json(manifest.model_dump(mode="json", by_alias=True), folder / MANIFEST, error=ArtifactError)
    (folder / MANIFEST).write_bytes(data)
    (folder / SEAL).write_text(f"{hashlib.sha256(data).hexdigest()}  {MANIFEST}\n")


def is_artifact(folder: Path) -> bool:
    """Whether a folder holds a manifest of this format, of whatever version and in whatever state of repair."""
    try:
        raw = parse_json(
            read_bytes(folder / MANIFEST, error=ArtifactError, limit=MAX_MANIFEST_BYTES), folder, error=ArtifactError
        )
    except ArtifactError:
        return False
    return isinstance(raw, dict) and raw.get("format") == FORMAT


def read_manifest(folder: Path) -> Manifest:
    """The checked manifest of an artifact whose files have the sizes and hashes it says.

    Raises
    ------
    ArtifactError: no artifact, another schema version, a damaged manifest, or a file that is missing or altered.
    """
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: no such folder; expected one that CompiledModel.save wrote")
    path = folder / MANIFEST
    data = read_bytes(path, error=ArtifactError, limit=MAX_MANIFEST_BYTES)
    raw = parse_json(data, path, error=ArtifactError)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ArtifactError(f"{path}: not the manifest of a {FORMAT}; expected a folder that CompiledModel.save wrote")
    if raw.get("schema") != ARTIFACT_SCHEMA:
        raise ArtifactError(
            f"{path}: schema {str(raw.get('schema'))[:40]}, expected {ARTIFACT_SCHEMA}; compile and save the model "
            "again with this version of semkv, or load it with the one that wrote it"
        )
    seal = read_bytes(folder / SEAL, error=ArtifactError, limit=1000)
    if seal != f"{hashlib.sha256(data).hexdigest()}  {MANIFEST}\n".encode():
        raise ArtifactError(
            f"{path}: its hash is not the one in {SEAL}; the file is damaged or was edited, copy it again"
        )
    manifest = validate(Manifest, raw, path, error=ArtifactError)
    _check_files(folder, manifest)
    manifest._folder = folder
    return manifest


def graph_file(name: str) -> str:
    """The file of a graph, relative to the artifact."""
    return f"programs/{name}.json"


def _check_files(folder: Path, manifest: Manifest) -> None:
    needed = {WEIGHTS, *(graph_file(name) for name in manifest.program.graphs)}
    if missing := needed - set(manifest.files):
        raise ArtifactError(f"{folder / MANIFEST}: does not list {', '.join(sorted(missing))}; save the model again")
    for name, entry in manifest.files.items():
        path = member(folder, name, error=ArtifactError)
        size = file_size(path, error=ArtifactError)
        if size != entry.bytes:
            raise ArtifactError(f"{path}: {size} bytes, expected {entry.bytes}; the file is damaged, copy it again")
    for name, entry in manifest.files.items():
        check_sha256(member(folder, name, error=ArtifactError), entry.sha256, error=ArtifactError)
