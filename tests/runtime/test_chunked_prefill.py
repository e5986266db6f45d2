"""Prompts in chunks leave the record that a prompt in one piece leaves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from semkv.compiled import CompiledModel
from semkv.compiler.pipeline import captured_program
from semkv.config import CompileConfig
from semkv.methods import find_method
from semkv.runtime.decode.steps import prefill_row
from semkv.runtime.host.tier import HostTier, on_disk
from semkv.runtime.prompt.record import OBSERVED_QUERIES, RowRecord
from semkv.runtime.prompt.recorder import Recorder


def read(
    compiled: CompiledModel, ids: Tensor, chunk: int | None, dtype: torch.dtype = torch.float64, **options
) -> RowRecord:
    return prefill_row(compiled.program, ids, dtype, surprisal=True, chunk=chunk, **options)


def same(left: RowRecord, right: RowRecord, tolerance: float) -> None:
    """Everything that a record holds, within `tolerance` of its own size."""
    assert torch.equal(left.ids, right.ids)
    pairs = [(left.logits, right.logits), (left.surprisal, right.surprisal)]
    for name in ("keys", "values", "queries", "features"):
        ours, theirs = getattr(left, name), getattr(right, name)
        assert list(ours) == list(theirs)
        pairs += [(ours[key], theirs[key]) for key in ours]
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def full(double_program, compile_as) -> CompiledModel:
    return compile_as(double_program, "full")


@pytest.mark.parametrize("chunk", [1, 7, 49, 50, 99, 100])
@pytest.mark.parametrize("all_queries", [False, True])
def test_chunks_leave_the_record_of_one_piece(full, prompt, chunk, all_queries):
    """The middle layer has a window of 8; 100 tokens, so that pieces are whole, ragged, and a single token."""
    ids = prompt(100)[0]
    whole, parts = (read(full, ids, size, all_queries=all_queries) for size in (None, chunk))
    same(parts, whole, 1e-6)  # the surprisal's dtype is float32; keys are compared in float64 below
    for store in whole.keys:
        torch.testing.assert_close(parts.keys[store], whole.keys[store], rtol=1e-11, atol=1e-12)
    assert whole.queries[0].shape[1] == (100 if all_queries else OBSERVED_QUERIES)


def test_a_lossy_past_is_noticed(full, prompt, monkeypatch):
    """The control: were the past read in the record's float16, the keys of later layers would show it."""
    ids = prompt(100)[0]
    whole, exact = (read(full, ids, size, torch.float16) for size in (None, 30))
    torch.testing.assert_close(exact.keys[2], whole.keys[2], rtol=1e-3, atol=1e-6)
    assert exact.keys[2].dtype == torch.float16
    original = Recorder._so_far
    monkeypatch.setattr(
        Recorder, "_so_far", lambda self, held, new, first, end: original(self, held, new, first, end).half().double()
    )
    lossy = read(full, ids, 30)
    assert (lossy.keys[2] - read(full, ids, None).keys[2]).abs().max() > 1e-5


def test_the_disk_tier_holds_the_record(full, prompt, tmp_path):
    ids = prompt(100)[0]
    tier = HostTier(disk=True, folder=str(tmp_path))
    for chunk in (None, 30):
        made = read(full, ids, chunk, torch.float32, tier=tier, all_queries=True)
        for held in (made.keys, made.values, made.queries):
            assert all(on_disk(x) for x in held.values())
        same(made, read(full, ids, chunk, torch.float32, all_queries=True), 0.0)


@pytest.mark.parametrize(
    ("method", "budget"), [("full", None), ("snapkv", 0.4), ("h2o", 0.4), ("sekv", 0.5), ("quest", 0.8)]
)
def test_states_of_chunked_prompts(double_program, compile_as, prompt, method, budget):
    """Left-padded rows of three lengths: chunks change no token."""
    lengths = (120, 91, 97)
    ids, mask = torch.full((3, 120), 7), torch.zeros(3, 120, dtype=torch.int64)
    for index, length in enumerate(lengths):
        ids[index, -length:], mask[index, -length:] = prompt(length, seed=length)[0], 1
    tokens = {}
    for chunk in (None, 32):
        compiled = compile_as(double_program, method, budget, prefill_chunk=chunk)
        tokens[chunk] = compiled.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False).tolist()
    assert tokens[None] == tokens[32]


def test_short_prompts_run_in_one_piece(double_program, compile_as, prompt):
    calls = []
    for chunk in (None, 100):
        compiled = compile_as(double_program, "full", prefill_chunk=chunk)
        hook = compiled.program.extend.register_forward_pre_hook(
            lambda module, inputs: calls.append(inputs[0].shape[1])
        )
        compiled.prefill(prompt(150))
        assert calls == ([] if chunk is None else [50])
        hook.remove()


ARCHITECTURES = ("plain: learned absolute positions", "plain: ALiBi", "plain: positions built inside", "llama", "gpt2")
SLOW = ("bloom", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "mixtral", "opt", "phi3")


@pytest.mark.parametrize("name", [*ARCHITECTURES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_architectures(name):
    """Soft-caps, sinks, additive biases, windows, latent attention: whatever the operator has, over chunks."""
    from benchmarks.quality import architecture_sweep as sweep

    model = sweep.Reference(name).model
    compiled = CompiledModel(captured_program(model), None, find_method("full", {}), None, CompileConfig())
    ids = torch.randint(3, compiled.program.vocab_size, (75,), generator=torch.Generator().manual_seed(0))
    dtype = compiled.dtype
    tolerance = 1e-6 if dtype == torch.float64 else 1e-4
    same(read(compiled, ids, 22, dtype), read(compiled, ids, None, dtype), tolerance)
