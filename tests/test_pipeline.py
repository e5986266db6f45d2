"""The list of passes, the manager that runs it, and the whole road on a model."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from semkv.compiler import pipeline
from semkv.compiler.pipeline import LOWER, UNDERSTAND, captured_program, check_order, lower, run_passes
from semkv.errors import CaptureError, SpecError
from semkv.ir.graph import copy_graph_module
from semkv.ir.plain_memory import PlainMemory
from semkv.ir.rewritten import Rewritten
from semkv.passes.base import Pass, PassOptions
from semkv.passes.surprisal_head import SurprisalHead


class Nothing(Pass):
    """Leaves the program as it is."""

    name = "nothing"
    needs = "found"
    leaves = "found"

    def run(self, program, options):
        return program.evolve("nothing: done")


class LosesSites(Nothing):
    """Breaks the spec: the graph keeps its attention, the program forgets it."""

    name = "loses_sites"

    def run(self, program, options):
        return program.evolve(sites=())


class LiesAboutStage(Nothing):
    name = "lies_about_stage"
    leaves = "annotated"


class Tunable(Nothing):
    name = "tunable"
    LIMIT: ClassVar[int] = 3


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def program(llama):
    return captured_program(llama)


def test_the_list_is_in_order():
    check_order([*UNDERSTAND, *LOWER])
    names = [step.name for step in (*UNDERSTAND, *LOWER)]
    assert names == [
        "canonicalise",
        "pin_defaults",
        "find_attention",
        "lift_positions",
        "dependence",
        "reach",
        "surprisal_head",
        "find_seams",
        "assign_budgets",
        "group_heads",
        "balance_keys",
        "rewrite_attention",
        "insert_retrieval_head",
        "open_seams",
        "lower_kernels",
        "stream_weights",
    ]


def test_every_broken_constraint_is_reported_at_once():
    backwards = list(reversed([*UNDERSTAND, *LOWER]))
    with pytest.raises(SpecError) as caught:
        check_order(backwards)
    text = str(caught.value)
    assert "rewrite_attention must run after assign_budgets, which has not run by then" in text
    assert "stream_weights needs stage 'lowered', but the program is at 'captured' by then" in text
    assert "surprisal_head must run after find_attention" in text
    with pytest.raises(SpecError, match="nothing runs twice"):
        check_order([Nothing(), Nothing()], stage="found")


def test_order_is_checked_before_anything_runs(decoder_program):
    class Explodes(Nothing):
        name = "explodes"

        def run(self, program, options):
            raise AssertionError("ran")

    rewrite = next(step for step in LOWER if step.name == "rewrite_attention")
    with pytest.raises(SpecError, match="rewrite_attention needs stage 'annotated'"):
        run_passes(decoder_program, [Explodes(), rewrite], PassOptions())


def test_the_result_of_a_pass_is_checked(decoder_program):
    with pytest.raises(SpecError, match=r"(?s)after loses_sites: .*expected \[\]"):
        run_passes(decoder_program, [LosesSites()], PassOptions())
    with pytest.raises(SpecError, match="lies_about_stage left stage 'found', expected 'annotated'"):
        run_passes(decoder_program, [LiesAboutStage()], PassOptions())


def test_notes_tell_what_was_done(decoder_program):
    result = run_passes(decoder_program, [Nothing(), SurprisalHead()], PassOptions(), ran=["find_attention"])
    assert result.notes[0] == "nothing: done"
    assert result.notes[1].startswith("surprisal_head: split at aten.linear.default")


def test_dumps_before_and_after(decoder_program, tmp_path):
    run_passes(decoder_program, [SurprisalHead()], PassOptions(), ran=["find_attention"], dump=tmp_path)
    before, after = ((tmp_path / f"00-surprisal_head-{when}.txt").read_text() for when in ("before", "after"))
    assert "# head" not in before
    assert "# head" in after
    assert "semkv.attention" in before


def test_identity_depends_on_passes_and_their_constants(monkeypatch):
    first = pipeline.identity()
    assert first == pipeline.identity()
    assert len(first) == 16
    monkeypatch.setattr(pipeline, "LOWER", (*LOWER, Nothing()))
    assert pipeline.identity() != first
    before = Tunable().identity()
    monkeypatch.setattr(Tunable, "LIMIT", 4)
    assert Tunable().identity() != before


def test_captured_program_of_llama(program, llama):
    assert program.stage == "found"
    assert program.batched
    assert [site.name for site in program.sites] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert [(site.q_heads, site.kv_heads) for site in program.sites] == [(8, 4), (8, 4)]
    assert [note.split(":")[0] for note in program.notes] == ["capture", *(step.name for step in UNDERSTAND)]
    own = {tensor.data_ptr() for tensor in llama.state_dict().values()}
    assert {parameter.data_ptr() for parameter in program.body.parameters()} <= own


def test_one_capture_serves_several_methods(program):
    full, sekv = lower(program, PassOptions(method="full")), lower(program, PassOptions(method="sekv"))
    assert [site.treatment for site in full.sites] == ["exact", "exact"]
    assert [site.budget_share for site in sekv.sites] == [0.5, 0.5]
    assert program.stage == "found"


def test_methods_that_leave_the_body_alone_share_its_lowered_graphs(program):
    """Weights are permuted for roles, so those graphs are others; so are those of another body. Notes are as if all had been made anew."""
    fresh, mixed = replace(program, rewritten=Rewritten()), (("b", "a", "b", "a"),) * 2
    first, second = (lower(fresh, PassOptions(method=name)) for name in ("full", "sekv"))
    roles = lower(fresh, PassOptions(method="sekv", head_roles=mixed))
    assert roles.sites[0].head_order != (0, 1, 2, 3)
    again = lower(fresh, PassOptions(method="snapkv"))
    assert again.decode is first.decode, "those of roles were not kept"
    for name in ("prefill", "extend", "decode", "head"):
        assert getattr(second, name) is getattr(first, name)
        assert getattr(roles, name) is not getattr(first, name)
    anew = lower(replace(program, rewritten=Rewritten()), PassOptions(method="sekv"))
    assert second.notes == anew.notes
    assert second.stage == anew.stage
    assert str(second.decode.graph) == str(anew.decode.graph)
    assert copy.deepcopy(fresh).rewritten.of(fresh.body, fresh.head) is None
    other = replace(fresh, body=copy_graph_module(fresh.body))
    assert lower(other, PassOptions()).decode is not again.decode


@pytest.mark.parametrize("roles", [None, (("b", "a", "b", "a"), ("a", "b", "b", "a"))])
def test_lowered_llama_equals_the_model(program, llama, roles):
    lowered = lower(replace(program), PassOptions(method="sekv", head_roles=roles))
    ids = torch.randint(0, 61, (2, 30), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(30).expand(2, 30).contiguous()
    memory = PlainMemory(lowered.sites)
    with torch.no_grad():
        hidden = [lowered.prefill(ids[:, :17], positions[:, :17], memory)]
        hidden.append(lowered.extend(ids[:, 17:25], positions[:, 17:25], memory))
        hidden += [lowered.decode(ids[:, t : t + 1], positions[:, t : t + 1], memory) for t in range(25, 30)]
        logits = lowered.head(torch.cat(hidden, 1))
        torch.testing.assert_close(logits, llama(ids, use_cache=False).logits, rtol=1e-10, atol=1e-10)


def test_a_model_that_mixes_tokens_is_refused():
    class Convolution(nn.Module):
        """Attention, and a short convolution that no site knows of."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
            self.conv = nn.Conv1d(16, 16, 3, padding=2)

        def forward(self, ids):
            x = self.embed(ids)
            q = x.view(*x.shape[:2], 2, 8).transpose(1, 2)
            y = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            x = x + y.transpose(1, 2).reshape(x.shape)
            return self.head(x + self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))

    with pytest.raises(CaptureError, match=r"conv.* mixes tokens outside an attention site"):
        captured_program(Convolution().eval())
