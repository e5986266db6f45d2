"""Tuned layouts of kernels for a program's sites: from the cache's folder and from artifacts, and measured anew."""

from __future__ import annotations

from pathlib import Path

import torch

from semkv.errors import ConfigError
from semkv.io.cache_folder import cache_folder
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.kernels.mixed_attention.dispatch import form_of
from semkv.kernels.tuning import Problem, Tuning

ENTRIES = 16384
"""Exact entries per KV head that layouts are timed with."""


def tuning_file() -> Path:
    """Where layouts are kept between processes, by the GPU's name."""
    return cache_folder() / "kernels.json"


def site_layouts(
    program: Program, kernels: str, device: torch.device, carried: Tuning | None
) -> tuple[tuple[int, ...], ...]:
    """Per site the layout that was measured for `device`, carried by an artifact or kept on disk; empty where there is none."""
    if form_of(kernels, device)[0] != "triton":
        return ()
    known = Tuning.load(tuning_file()) if carried is None else Tuning.load(tuning_file()).merged(carried)
    if not known.layouts:
        return ()
    layouts = tuple(known.layout(device, _problem(program, site)) for site in program.sites)
    return layouts if any(layouts) else ()


def tune_program(program: Program, kernels: str, device: torch.device, *, entries: int = ENTRIES) -> Tuning:
    """Measure the layouts of a program's sites on `device`, and keep them on disk.

    Raises
    ------
    ConfigError: Triton's kernels do not run there.
    """
    form, reason = form_of(kernels, device)
    if form != "triton":
        raise ConfigError(f"there is nothing to tune: {reason or 'kernels in C++ have one layout'}")
    from semkv.kernels.mixed_attention.tune import tune

    made = Tuning({})
    for problem, kv_heads in {_problem(program, site): site.kv_heads for site in program.sites}.items():
        made = made.with_layout(device, problem, tune(problem, kv_heads, entries, device)[0])
    Tuning.load(tuning_file()).merged(made).save(tuning_file())
    return made


def _problem(program: Program, site: AttentionSite) -> Problem:
    return program.dtype, site.key_dim, site.value_dim, site.group_size
