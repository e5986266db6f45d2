"""States: rows do not see each other, forks are independent, turns continue, files give back what they took."""

from __future__ import annotations

import pytest
import torch

from semkv.errors import ArtifactError, InputError
from semkv.ir.memory import Entries
from semkv.ir.plain_memory import PlainMemory
from semkv.ir.site import AttentionSite
from semkv.kernels.mixed_attention import mixed_attention_reference
from semkv.runtime.decode.join import stack_rows
from semkv.runtime.step import Step
from semkv.runtime.store.factors import FactorsRead
from semkv.runtime.store.quantization import quantize
from tests.conftest import quick_ones

SETTINGS = {
    "full": ("full", None, {}),
    "streaming_llm": ("streaming_llm", 0.4, {}),
    "snapkv": ("snapkv", 0.4, {}),
    "h2o": ("h2o", 0.4, {}),
    "pyramidkv": ("pyramidkv", 0.4, {}),
    "chunkkv": ("chunkkv", 0.4, {"options": {"chunk": 3}}),
    "cake": ("cake", 0.4, {}),
    "semanticache": ("semanticache", 0.6, {"options": {"delimiters": (3, 8, 21)}}),
    "compresskv": ("compresskv", 0.5, {}),
    "compresskv, recoverable": ("compresskv", 0.6, {"options": {"recoverable": True, "span": 4}}),
    "sekv": ("sekv", 0.5, {}),
    "sekv, factored": ("sekv", 0.5, {"options": {"forms": "factored", "max_rank": 3}}),
    "sekv, thresholds": ("sekv", 0.5, {"options": {"fill": False, "bits": 8}}),
}


@pytest.fixture(params=list(SETTINGS))
def compiled(request, double_program, compile_as):
    method, budget, config = SETTINGS[request.param]
    return compile_as(double_program, method, budget, **config)


@pytest.fixture
def full(double_program, compile_as):
    return compile_as(double_program, "full")


def plain_logits(program, ids: torch.Tensor) -> torch.Tensor:
    """Stateless logits [B, T, vocab]."""
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    return program.head(program.body(ids, positions))


def decode(compiled, state, steps: int) -> torch.Tensor:
    """Greedy tokens [B, steps] and, on the way, what the state reads."""
    out = []
    for _ in range(steps):
        out.append(state.logits.argmax(-1, keepdim=True))
        compiled.extend(state, out[-1])
    return torch.cat(out, 1)


def same(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-10)


def test_full_equals_the_stateless_forward_and_a_naive_memory(full, prompt):
    ids = prompt(70, rows=2)
    state = full.prefill(ids[:, :30])
    memory = PlainMemory(full.program.sites)
    where = torch.arange(70).expand(2, -1)
    full.program.prefill(ids[:, :30], where[:, :30], memory)
    expected = plain_logits(full.program, ids)
    same(state.logits, expected[:, 29])
    for start, end in ((30, 31), (31, 44), (44, 45), (45, 70)):
        got = full.extend(state, ids[:, start:end], all_logits=True)
        naive = full.program.head(full.program.extend(ids[:, start:end], where[:, start:end], memory))
        same(got, expected[:, start:end])
        same(got, naive)
    half = PlainMemory(full.program.sites, keep=lambda positions: positions[0] % 2 == 0)
    full.program.prefill(ids[:, :30], where[:, :30], half)
    lossy = full.program.head(full.program.extend(ids[:, 30:31], where[:, 30:31], half))
    assert (lossy - expected[:, 30:31]).abs().max() > 1e-3


def test_surprisal_is_that_of_the_stateless_logits(full, prompt):
    ids = prompt(40)
    record = full.prefill_record(ids, surprisal=True)
    logp = plain_logits(full.program, ids)[0].detach().log_softmax(-1)
    expected = [0.0] + [-float(logp[place, ids[0, place + 1]]) for place in range(39)]
    torch.testing.assert_close(record.surprisal, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", quick_ones(["left", "right"], ["left"]))
def test_rows_do_not_see_each_other(compiled, prompt, side):
    """Four lengths, padded on either side: each row's tokens are those of the row alone."""
    lengths = (81, 110, 97, 100)
    ids, mask = torch.full((4, 110), 7), torch.zeros(4, 110, dtype=torch.int64)
    rows = [prompt(length, seed=length)[0] for length in lengths]
    for index, row in enumerate(rows):
        place = slice(110 - len(row), 110) if side == "left" else slice(0, len(row))
        ids[index, place], mask[index, place] = row, 1
    state = compiled.prefill(ids, mask)
    assert state.lengths == list(lengths)
    together = decode(compiled, state, 9)
    for index, row in enumerate(rows):
        alone = compiled.prefill(row[None])
        assert decode(compiled, alone, 9)[0].tolist() == together[index].tolist()
        same(alone.logits[0], state.logits[index])


def test_ragged_extension_equals_rows_alone(compiled, prompt):
    state = compiled.prefill(prompt(90, rows=2))
    ids, mask = prompt(9, rows=2, seed=3), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    got = compiled.extend(state, ids, mask)
    for index in range(2):
        alone = compiled.prefill(prompt(90, rows=2)[index : index + 1])
        same(compiled.extend(alone, ids[index : index + 1, 4 * (1 - index) :])[0], got[index])
    assert state.lengths == [95, 99]
    with pytest.raises(InputError, match="all_logits needs rows of one length"):
        compiled.extend(state, ids, mask, all_logits=True)


def test_a_fork_is_independent(compiled, prompt):
    state = compiled.prefill(prompt(100))
    decode(compiled, state, 3)
    fork = state.fork()
    untouched = state.fork()
    compiled.extend(fork, prompt(20, seed=5))
    assert decode(compiled, state, 10).tolist() == decode(compiled, untouched, 10).tolist()
    same(state.logits, untouched.logits)


def test_states_side_by_side(compiled, prompt):
    first, second = compiled.prefill(prompt(100)), compiled.prefill(prompt(90, seed=1))
    alone = compiled.prefill(prompt(100))
    for step in range(6):
        compiled.extend(first, prompt(1, seed=step))
        compiled.extend(second, prompt(1, seed=50 + step))
    for step in range(6):
        compiled.extend(alone, prompt(1, seed=step))
    assert torch.equal(first.logits, alone.logits)


def test_one_record_serves_many_states(compiled, prompt):
    record = compiled.prefill_record(prompt(100))
    states = [compiled.compress(record) for _ in range(2)]
    compiled.extend(states[0], prompt(30, seed=2))
    direct = compiled.prefill(prompt(100))
    assert decode(compiled, states[1], 6).tolist() == decode(compiled, direct, 6).tolist()


def test_selecting_and_reordering_rows(compiled, prompt):
    state = compiled.prefill(prompt(90, rows=2))
    state.pending = torch.tensor([[3], [4]])
    chosen = state.select([1, 1, 0])
    assert chosen.pending.tolist() == [[4], [4], [3]]
    chosen.pending = state.pending = None
    compiled.extend(chosen, torch.tensor([[5], [6], [5]]))
    compiled.extend(state, torch.tensor([[5], [5]]))
    same(chosen.logits[0], state.logits[1])
    same(chosen.logits[2], state.logits[0])
    assert not torch.allclose(chosen.logits[0], chosen.logits[1])
    chosen.reorder_cache(torch.tensor([2, 0, 0]))
    compiled.extend(chosen, torch.tensor([[8], [8], [9]]))
    compiled.extend(state, torch.tensor([[8], [8]]))
    same(chosen.logits[0], state.logits[0])
    same(chosen.logits[1], state.logits[1])


def test_a_saved_state_goes_on_bit_for_bit(compiled, prompt, tmp_path):
    state = compiled.prefill(prompt(100, rows=2))
    decode(compiled, state, 5)
    state.save(tmp_path / "turn.state")
    loaded = compiled.load_state(tmp_path / "turn.state")
    assert loaded.nbytes | {"peak": 0, "workspace": 0, "device": 0, "reserved": 0} == state.nbytes | {
        "peak": 0,
        "workspace": 0,
        "device": 0,
        "reserved": 0,
    }
    for step in range(12):
        compiled.extend(state, prompt(1, rows=2, seed=step))
        compiled.extend(loaded, prompt(1, rows=2, seed=step))
        assert torch.equal(state.logits, loaded.logits)


def test_a_state_of_another_compilation_is_refused(double_program, compile_as, prompt, tmp_path):
    small, large = compile_as(double_program, "snapkv", 0.4), compile_as(double_program, "snapkv", 0.5)
    state = small.prefill(prompt(100))
    with pytest.raises(InputError, match="made by another compiled model"):
        large.extend(state, prompt(1))
    with pytest.raises(InputError, match="expected a State made by prefill, got dict"):
        small.extend({}, prompt(1))
    state.save(tmp_path / "s")
    with pytest.raises(ArtifactError, match=r"compiled otherwise: budget 0\.4, expected 0\.5; compile with"):
        large.load_state(tmp_path / "s")


def test_a_state_of_another_router_is_refused(double_program, compile_as, prompt, tmp_path):
    """What spans keep for routing follows from the router."""
    coarse = compile_as(double_program, "sekv", 0.5)
    untrained = compile_as(double_program, "sekv", 0.5, options={"router": "untrained"})
    coarse.prefill(prompt(100)).save(tmp_path / "s")
    with pytest.raises(ArtifactError, match=r"otherwise: router 'CoarseRouter', expected 'GateRouter'; compile"):
        untrained.load_state(tmp_path / "s")


def test_chunks_of_any_size_give_the_same_for_full(full, prompt):
    ids = prompt(60, rows=2)
    by_token, whole = full.prefill(ids[:, :20]), full.prefill(ids[:, :20])
    for place in range(20, 60):
        full.extend(by_token, ids[:, place : place + 1])
    full.extend(whole, ids[:, 20:])
    same(by_token.logits, whole.logits)
    same(by_token.logits, plain_logits(full.program, ids)[:, -1])


@pytest.mark.parametrize("options", [{"forms": "raw"}, {"forms": "int8"}, {"forms": "factored", "max_rank": 8}])
def test_a_step_moves_what_the_one_before_did_not(double_program, compile_as, prompt, options):
    """With room for everything, all of it crosses once, and what the slots hold are the entries of a step that fetches all anew."""
    compiled = compile_as(
        double_program, "sekv", 2000, options=options | {"window": 8, "fixed_share": 0.03}, kv_dtype="float64"
    )
    kept, anew = compiled.prefill(prompt(200)), compiled.prefill(prompt(200))
    assert kept.rows[0].stores[0][0].spans.count > 3
    for _ in range(10):
        for memory in anew.rows[0].memories():
            memory.slots, memory.factors = None, FactorsRead()
        decode(compiled, anew, 1)
        decode(compiled, kept, 1)
        same(kept.logits, anew.logits)
    assert 0 < kept.stats.moved_bytes_per_step < 0.5 * anew.stats.moved_bytes_per_step
    assert kept.stats.overlap > 0.5 > anew.stats.overlap == 0
    assert kept.nbytes["workspace"] > 0


def test_everything_unfolded_raw_is_full_attention(double_program, compile_as, full, prompt):
    """No approximation is left when all spans are unfolded from raw tokens: layer by layer the entries are all tokens."""
    compiled = compile_as(
        double_program, "sekv", 0.97, options={"forms": "raw", "window": 8, "fixed_share": 0.2}, kv_dtype="float64"
    )
    state, reference = compiled.prefill(prompt(300)), full.prefill(prompt(300))
    row = state.rows[0]
    site = compiled.program.sites[0]
    memory = row.stores[0][0]
    assert memory.spans.count > 3
    torch.manual_seed(0)
    q = torch.randn(4, 1, 8, dtype=torch.float64)
    entries = memory.entries(site, q, float("inf"), Step.alone(site, q))
    whole = reference.rows[0].stores[0][0].recent
    expected = mixed_attention_reference(
        q[None], torch.tensor([[299]]), [whole.k[None]], [whole.v[None]], [whole.positions[None]], scale=0.35
    )
    got = mixed_attention_reference(q[None], torch.tensor([[299]]), *stack_rows([entries], site, 1), scale=0.35)
    same(got, expected)
    folded = memory.entries(site, q, 0.0, Step.alone(site, q))
    lossy = mixed_attention_reference(q[None], torch.tensor([[299]]), *stack_rows([folded], site, 1), scale=0.35)
    assert (lossy - expected).abs().max() > 1e-4


def test_disk_tier_gives_the_same_tokens(double_program, compile_as, prompt):
    results = {}
    for host in ("ram", "disk"):
        compiled = compile_as(double_program, "sekv", 0.5, host=host)
        state = compiled.prefill(prompt(150))
        results[host] = (decode(compiled, state, 12).tolist(), state.nbytes)
    assert results["ram"][0] == results["disk"][0]
    ram, disk = (results[host][1] for host in ("ram", "disk"))
    assert ram["host"] == disk["disk"] + disk["host"]
    assert disk["disk"] > 4 * disk["host"]  # the tables of what waits are in memory
    assert ram["disk"] == 0


def test_rows_in_a_batch_attend_as_each_alone():
    torch.manual_seed(0)
    rows = []
    for exact, coarse, spans in ((5, 3, 2), (9, 0, 0), (2, 4, 1)):
        blocks = [torch.randn(2, exact, 6)], [torch.randn(2, exact, 6)], [torch.zeros(1, exact).long()]
        more = {}
        if coarse:
            means = quantize(torch.randn(2, coarse, 6), 8), quantize(torch.randn(2, coarse, 6), 4)
            for given, x in zip(blocks, (*(packed.codes for packed in means), torch.zeros(1, coarse).long())):
                given.append(x)
            more |= {
                "block_bias": [None, torch.randn(4, 1, coarse)],
                "block_k_scale": [None, means[0].scale],
                "block_v_scale": [None, means[1].scale],
            }
        if spans:
            length, rank = 3 + spans, 1 + spans
            for side in ("key", "value"):
                more |= {
                    f"{side}_u": torch.randn(2, spans, length, rank),
                    f"{side}_s": torch.rand(2, spans, rank),
                    f"{side}_v": torch.randn(2, spans, 6, rank),
                }
            more |= {
                "factored_positions": torch.zeros(2, spans, length).long(),
                "factored_bias": torch.randn(4, 1, spans, length),
            }
        rows.append(Entries(*blocks, **more))
    site = AttentionSite(0, "layer", 0, 4, 2, 6, 6, scale=0.4)
    q, where = torch.randn(3, 4, 1, 6), torch.ones(3, 1).long()
    together = mixed_attention_reference(q, where, *stack_rows(rows, site, 1), scale=0.4)
    for index, row in enumerate(rows):
        alone = stack_rows([row], site, 1)
        expected = mixed_attention_reference(q[index : index + 1], where[:1], *alone, scale=0.4)[0]
        torch.testing.assert_close(together[index], expected, rtol=1e-4, atol=1e-5)
