"""Profiles on the Hugging Face Hub: two files in a model repository."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from semkv.errors import ProfileError

from .storage import INFO_FILE, TENSORS_FILE


def download(repo_id: str, **options: Any) -> Path:
    """Fetch a profile's two files and return their local folder; `ProfileError` where that fails."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=[INFO_FILE, TENSORS_FILE], **options))
    except Exception as error:
        raise ProfileError(
            f"{repo_id!r} is neither a local profile folder nor a Hub repository that can be reached "
            f"({type(error).__name__}): check the name and the network, or download the folder and pass its path"
        ) from error


def upload(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    commit_message: str = "Upload semkv profile",
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> str:
    """Upload a profile folder and return the commit's address; `ProfileError` where that fails."""
    from huggingface_hub import HfApi

    try:
        api = HfApi(token=token)
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=os.fspath(folder),
            allow_patterns=[INFO_FILE, TENSORS_FILE],
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )
    except Exception as error:
        raise ProfileError(
            f"the profile could not be uploaded to {repo_id!r} ({type(error).__name__}: {error}): check the name, "
            "the network and that you are logged in (hf auth login)"
        ) from error
    return str(commit.commit_url)


def upload_profile(save: Callable[[Path], Path], repo_id: str, **options: Any) -> str:
    """`upload` of what `save` writes into a temporary folder."""
    with tempfile.TemporaryDirectory() as parent:
        return upload(save(Path(parent) / "profile"), repo_id, **options)
