"""`Profile`: what calibration learned about one model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from semkv.errors import ProfileError
from semkv.ir.site import AttentionSite

from . import hub, storage
from .sections import Choice, ProfileInfo


@dataclass(frozen=True)
class Profile:
    """A checked profile: `info` (the content of `profile.json`) and `tensors` by name.

    A profile is a folder with `profile.json` and `tensors.safetensors`. It belongs to one model, whose fingerprint it
    holds; `semkv.compile` refuses it for another. Which tensors there are: see the sections' docstrings.
    """

    info: ProfileInfo
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        storage.check_tensors(self.tensors, self.info, "profile")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile folder. Never unpickles; `ProfileError` for anything damaged, altered or of another schema."""
        return cls(*storage.read(Path(path)))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the profile folder, each file whole or not at all; return its path."""
        folder = Path(path)
        storage.write(folder, self.info, self.tensors)
        return folder

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
    ) -> Profile:
        """Load a profile from a local folder or from a Hub repository (its two files only)."""
        if Path(name).is_dir():
            return cls.load(name)
        return cls.load(
            hub.download(
                str(name), revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only
            )
        )

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **kwargs: Any,
    ) -> Path:
        """`save`, and `push_to_hub` to `repo_id` (default: the folder's name) where asked for."""
        folder = self.save(save_directory)
        if push_to_hub:
            hub.upload(folder, repo_id or folder.name, **kwargs)
        return folder

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload semkv profile",
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Upload to a Hub model repository, made where it does not exist; return the commit's address."""
        return hub.upload_profile(
            self.save,
            repo_id,
            commit_message=commit_message,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
        )

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model that was calibrated."""
        return self.info.fingerprint

    def check_model(self, fingerprint: str) -> None:
        """Raise `ProfileError` unless `fingerprint` (of `semkv.artifact.fingerprint`) is the calibrated model's."""
        if fingerprint != self.info.fingerprint:
            raise ProfileError(
                f"this profile belongs to another model: it was calibrated for {self.info.model.name!r} "
                f"(fingerprint {self.info.fingerprint[:16]}), this model has fingerprint {fingerprint[:16]}; "
                "calibrate this model with semkv-profile"
            )

    def check_stores(self, stores: Sequence[AttentionSite]) -> None:
        """Raise `ProfileError` unless the program's KV `stores` have the heads and dimensions that were calibrated."""
        for known, store in zip(self.info.model.stores, stores, strict=True):
            was, now = ((x.kv_heads, x.key_dim, x.value_dim) for x in (known, store))
            if was != now:
                raise ProfileError(
                    f"this profile was calibrated with {was[0]} KV heads of {was[1]} + {was[2]} numbers in {known.name}, and the "
                    f"program has {now[0]} of {now[1]} + {now[2]} there: calibrate with `semkv-profile --latents` for "
                    "CompileConfig(latents=True), and without it for latents=False"
                )

    def best_method(self, budget: float | int | None = None) -> str:
        """The method that was measured best for this model at `budget` (a fraction; tokens or None: over all budgets).

        Read from the cells of the measured budget nearest to `budget` in ratio; a method's score is the mean over
        lengths that every method was measured at. Of equal scores, the one that was asked more questions, then the one
        that moves less. Where nothing was measured: `sketch` of a profile that has codes, else `sekv`.
        """
        cells = self.info.choices
        if not cells:
            return "sekv" if self.info.sketch is None else "sketch"
        if isinstance(budget, float):  # the table is of fractions
            nearest = min({cell.budget for cell in cells}, key=lambda b: max(b / budget, budget / b))
            cells = tuple(cell for cell in cells if cell.budget == nearest)
        measured: dict[str, dict[tuple[float, int], Choice]] = {}
        for cell in cells:
            measured.setdefault(cell.method, {})[cell.budget, cell.length] = cell
        shared = set.intersection(*(set(found) for found in measured.values()))

        def standing(method: str) -> tuple[float, float, float]:
            found = [measured[method][key] for key in shared or measured[method]]
            return (
                fmean(cell.score for cell in found),
                fmean(cell.samples for cell in found),
                -fmean(cell.moved for cell in found),
            )

        return max(sorted(measured), key=standing)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())
