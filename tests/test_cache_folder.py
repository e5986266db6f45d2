"""Where what can be made anew is kept."""

from __future__ import annotations

from pathlib import Path

from semkv.io.cache_folder import FOLDER, cache_folder


def test_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv(FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "semkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "semkv"
