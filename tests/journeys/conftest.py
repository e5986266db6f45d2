"""The bundled model, compiled once for all journeys."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import semkv

sys.path.insert(0, str(Path(__file__).parent))  # as it is for `python stress.py`, whose modules these are


@pytest.fixture(scope="session")
def bundled() -> tuple[Any, Any]:
    """The bundled model and its tokenizer."""
    return semkv.bundled.load()


@pytest.fixture(scope="session")
def compiled_by(bundled) -> Callable[[str], Any]:
    """`compiled_by(method)`: the bundled model at 10 %, or in full."""
    from journey import Forms

    return Forms(bundled[0])


@pytest.fixture(scope="session")
def workers() -> Iterator[ProcessPoolExecutor]:
    """Two processes that start when they are first used."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def desk(bundled, workers, tmp_path) -> Callable[..., Any]:
    """`desk(method, budget)`: what a program has at hand, with a folder of its own."""
    from journey import Desk

    def at(method: str = "full", budget: float | None = None) -> Any:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return Desk(*bundled, folder, method, budget, workers=workers)

    return at
