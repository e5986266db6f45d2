"""In a long generation the tables of what waits stay as long as what is routed to, and nothing else changes."""

from __future__ import annotations

import torch

from semkv.ir.state_ops import EMPTY


def held_tokens(memory) -> list[dict[int, torch.Tensor]]:
    """Per KV head the keys of the tokens that the slots hold, by position."""
    slots = memory.slots
    return [
        {int(at): k for at, k in zip(positions, keys) if at != EMPTY}
        for positions, keys in zip(slots.positions, slots.k)
    ]


def test_old_segments_leave_the_tables(wide_program, compile_as, prompt, tmp_path):
    compiled = compile_as(wide_program, "quest", 72)
    state = compiled.prefill(prompt(40))
    for chunk in prompt(900, seed=1).split(30, 1):
        compiled.extend(state, chunk)
    memories = list(state.rows[0].budgeted())
    for memory in memories:
        spans = memory.spans
        assert spans.retired.length > 0
        assert spans.count
        assert int(spans.tables.segment_unit[:, 0].max()) >= 0
        assert sorted(spans.waiting_places()[0].tolist()) == list(range(spans.host_tokens.length))
        everything = sorted(
            [
                *spans.waiting_places()[1].tolist(),
                *memory.kept.positions[0].tolist(),
                *memory.recent.positions[0].tolist(),
            ]
        )
        assert everything == list(range(940))
        place = dict(zip(spans.waiting_places()[1].tolist(), spans.waiting_places()[0].tolist()))
        for head, tokens in enumerate(held_tokens(memory)):
            assert tokens
            for at, k in tokens.items():
                assert torch.equal(k, spans.host_tokens.keys(head, torch.tensor([place[at]]))[0])
    state.save(tmp_path / "state")
    again, copy = compiled.load_state(tmp_path / "state"), state.fork()
    for chunk in prompt(24, seed=2).split(4, 1):
        wanted = compiled.extend(state, chunk)
        assert torch.equal(compiled.extend(again, chunk), wanted)
        assert torch.equal(compiled.extend(copy, chunk), wanted)
    assert again.nbytes["host"] == state.nbytes["host"]
