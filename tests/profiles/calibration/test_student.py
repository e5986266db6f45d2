"""The student: equal to the teacher when all is open, to the operator when some is, and differentiable."""

import pytest
import torch

from semkv.kernels.mixed_attention import mixed_attention_reference
from semkv.profiles.calibration import student as module
from semkv.profiles.calibration.contexts import read_context
from semkv.profiles.calibration.interpreter import SiteCall
from semkv.profiles.calibration.losses import distillation
from semkv.profiles.calibration.parameters import SekvParameters, straight_through
from semkv.profiles.calibration.segmentation import Divider
from semkv.profiles.calibration.student import run_student


@pytest.fixture
def context(program, settings, data):
    return read_context(program, data.held_out[0], settings, Divider(program, settings), 0.5, torch.float32)


@pytest.fixture
def parameters(program, settings):
    return SekvParameters(program, settings)


def set_thresholds(parameters, value):
    for threshold in parameters.threshold.values():
        threshold.data.fill_(value)


def open_gates(parameters):
    for head in (parameters.gates.key, parameters.gates.value):
        head.bias.data.fill_(30.0)


def test_everything_unfolded_is_the_teacher(program, context, parameters):
    set_thresholds(parameters, -100.0)
    open_gates(parameters)
    student, traces = run_student(program, context, parameters)
    assert all(bool((trace.zoom == 1).all()) for trace in traces.values())
    assert torch.allclose(student, context.log_probs, atol=1e-3)


def test_everything_folded_is_not_the_teacher(program, context, parameters):
    set_thresholds(parameters, 100.0)
    student, traces = run_student(program, context, parameters)
    assert all(bool((trace.zoom == 0).all()) for trace in traces.values())
    assert distillation(context.log_probs, student).item() > 1e-4


def test_attention_agrees_with_the_operator():
    """Half of one site's spans zoomed, per query head and query, against the reference of `semkv::mixed_attention`."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    kv_heads, q_heads, queries, spans, longest, dim, kept = 2, 4, 3, 5, 6, 8, 4
    lengths = torch.tensor([6, 4, 1, 6, 3])
    real = torch.arange(longest) < lengths[:, None]
    starts = kept + lengths.cumsum(0) - lengths
    positions = starts[:, None] + torch.arange(longest)
    n = kept + int(lengths.sum())
    call = SiteCall(
        0,
        draw(q_heads, queries, dim),
        draw(kv_heads, queries, dim),
        draw(kv_heads, queries, dim),
        n + torch.arange(queries),
        draw(q_heads),
        None,
        None,
        dim**-0.5,
        5.0,
        0,
    )
    k, v = draw(kv_heads, spans, longest, dim), draw(kv_heads, spans, longest, dim)
    unused = torch.zeros(0)
    folded = module.Spans(
        k,
        v,
        positions,
        real,
        draw(kv_heads, spans, dim),
        draw(kv_heads, spans, dim),
        starts,
        lengths.float().log(),
        unused,
        unused,
        unused,
        unused,
    )
    site = module.SiteContext(draw(kv_heads, kept, dim), draw(kv_heads, kept, dim), torch.arange(kept), folded)
    zoom = (draw(q_heads, queries, spans) > 0).float()
    got = module._attend(call, site, folded, zoom, k, v)

    closed = torch.where(zoom > 0, 0.0, float("-inf"))
    fine = torch.where(real, closed[..., None], float("-inf")).flatten(2)
    coarse = torch.where(zoom > 0, float("-inf"), 0.0) + folded.log_size
    expected = mixed_attention_reference(
        call.q[None],
        call.positions[None],
        [x[None] for x in (site.kept_k, call.k, k.flatten(1, 2), folded.mean_k)],
        [x[None] for x in (site.kept_v, call.v, v.flatten(1, 2), folded.mean_v)],
        [x.flatten()[None, None] for x in (site.kept_positions, call.positions, positions, starts)],
        [None, None, fine[None], coarse[None]],
        sinks=call.sinks,
        scale=call.scale,
        softcap=call.softcap,
    )[0]
    assert torch.allclose(got, expected, atol=1e-5)


def test_gradients_reach_router_thresholds_and_gates(program, context, parameters):
    set_thresholds(parameters, 0.0)
    student, _ = run_student(program, context, parameters)
    distillation(context.log_probs, student).backward()
    for key in parameters.router:
        assert parameters.router[key].grad.abs().sum() > 0
        assert parameters.threshold[key].grad.abs().sum() > 0
        assert parameters.offset[key].grad is None
    assert parameters.gates.key.bias.grad.abs().sum() > 0
    assert parameters.gates.value.bias.grad.abs().sum() > 0


def test_a_closed_decision_still_has_a_gradient():
    logits = torch.tensor([-3.0, -0.1, 0.1, 3.0], requires_grad=True)
    decided = straight_through(logits)
    assert decided.tolist() == [0.0, 0.0, 1.0, 1.0]
    decided.sum().backward()
    assert torch.allclose(logits.grad, torch.sigmoid(logits.detach()) * torch.sigmoid(-logits.detach()))


def test_the_model_gets_no_gradient(program, context, parameters):
    student, _ = run_student(program, context, parameters)
    student.sum().backward()
    assert all(parameter.grad is None for parameter in program.body.parameters())


def test_the_gate_network_is_small():
    from semkv.methods.rank_gates import RankGates

    assert sum(p.numel() for p in RankGates(32, 32, 64).parameters()) < 100_000
    assert sum(p.numel() for p in RankGates(64, 32, 128).parameters()) < 100_000
