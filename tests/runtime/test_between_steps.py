"""What a row knows from the step before spares it work between steps, and changes nothing."""

from __future__ import annotations

import weakref

import pytest
import torch

from semkv.runtime.store.site_memory import SiteMemory

METHODS = {"quest": 0.4, "sekv": 0.2}


def sizes(memory: SiteMemory) -> tuple[int, ...]:
    units = 0 if memory.spans is None else memory.spans.count
    return memory.kept.length, memory.recent.length, units, memory.device_nbytes, memory.attended_nbytes


def stepped(compiled, ids: torch.Tensor, steps: int) -> tuple[torch.Tensor, list[tuple[int, ...]], int]:
    """Logits, sizes of all memories after each step, and how many of them knew then of room for another token."""
    state = compiled.prefill(ids)
    logits, held, known = [], [], 0
    for step in range(steps):
        logits.append(compiled.extend(state, ids[:, step : step + 1]))
        for memory in state.rows[0].memories():
            held.append(sizes(memory))
            known += memory._quiet is not None and memory.recent.length < memory._quiet[0]
    return torch.cat(logits, 1), held, known


@pytest.mark.parametrize("method", METHODS)
def test_room_that_is_known_is_the_room_that_there_is(compile_as, wide_program, monkeypatch, method):
    """Looking in every step whether something has to leave gives the same memories and the same numbers."""
    compiled = compile_as(wide_program, method, METHODS[method])
    ids = torch.randint(61, (1, 600), generator=torch.Generator().manual_seed(1))
    got, held, known = stepped(compiled, ids, 40)
    assert known > 40
    make_room = SiteMemory._make_room

    def anew(memory, *arguments):
        memory._quiet = None
        make_room(memory, *arguments)

    monkeypatch.setattr(SiteMemory, "_make_room", anew)
    expected, others, _ = stepped(compiled, ids, 40)
    assert held == others
    assert torch.equal(got, expected)


def test_a_row_that_is_gone_leaves_nothing_behind(compile_as, wide_program):
    compiled = compile_as(wide_program, "quest", 0.4)
    state = compiled.prefill(torch.arange(600)[None] % 61)
    compiled.extend(state, torch.tensor([[1]]))
    memory = next(state.rows[0].memories())
    gone = [weakref.ref(x) for x in (memory, memory.recent.tensors["k"], memory.slots.tensors["k"])]
    assert len(compiled.placement.steps.layers.last) == 1
    state.release()
    del memory
    assert [x() for x in gone] == [None] * 3
    assert not compiled.placement.steps.layers.last


def test_what_was_replaced_is_let_go_of(compile_as, wide_program):
    """A window that folds has new buffers; the step that made them holds no old ones."""
    compiled = compile_as(wide_program, "quest", 0.4)
    state = compiled.prefill(torch.arange(600)[None] % 61)
    replaced = 0
    for token in range(40):
        before = [weakref.ref(memory.recent.tensors["k"]) for memory in state.rows[0].memories()]
        compiled.extend(state, torch.tensor([[token]]))
        for old, memory in zip(before, state.rows[0].memories()):
            assert old() is None or old() is memory.recent.tensors["k"]
            replaced += old() is None
    assert replaced > 2
