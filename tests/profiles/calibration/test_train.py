"""The training step in parts: what is summed up context by context is the gradient of the whole loss."""

import sys

import pytest
import torch

from semkv.profiles.calibration import calibrate, losses
from semkv.profiles.calibration import train as module
from semkv.profiles.calibration.context_cache import ContextCache
from semkv.profiles.calibration.schedule import budget_weight
from semkv.profiles.calibration.student import run_student
from semkv.profiles.calibration.train import Trainer

calibration = sys.modules["semkv.profiles.calibration.calibrate"]  # the package exports a function of that name


def reference_loss(trainer, contexts, weight):
    """Eq. 10 with the ranking term, all contexts in one graph."""
    s, parameters = trainer.settings, trainer.parameters
    student, traces = run_student(trainer.program, contexts[0], parameters)
    total = losses.distillation(contexts[0].log_probs, student)
    for index, trace in traces.items():
        spans = contexts[0].sites[index].spans
        total = total + s.lambda_recon * losses.reconstruction(trace.key_gates, spans.key_sigma)
        total = total + s.lambda_recon * losses.reconstruction(trace.value_gates, spans.value_sigma)
        total = total + weight * losses.budget(trace.zoom, (trace.key_gates, trace.value_gates), s.beta)
    for context in contexts:
        for index, site in enumerate(context.sites):
            summaries = parameters.summaries(index, site.spans.mean_k)
            relevance = parameters.relevance(index, site.q, summaries, site.spans.log_size)
            targets, mined = losses.zoom_targets(site.mass, s)
            logits = relevance - parameters.offset[str(index)][:, None, None]
            zoom = losses.zoom(logits, targets, mined, s.positive_weight)
            total = total + s.lambda_zoom * zoom / len(contexts)
            total = total + s.lambda_rank * losses.ranking(relevance, site.mass, mined) / len(contexts)
    return total


def test_a_step_has_the_gradient_of_the_whole_loss(program, settings, data, monkeypatch):
    monkeypatch.setattr(module, "CLIP", 1e9)
    trainer = Trainer(program, data, settings.model_copy(update={"mined_mass": 0.0, "mined_share": 1.0}), identity="")
    monkeypatch.setattr(trainer.optimiser, "step", lambda: None)
    trainer.step = 6  # the budget loss has its full weight
    length = settings.lengths[-1]
    figures = trainer._one_step(length, [0, 1])
    got = {name: parameter.grad.clone() for name, parameter in trainer.parameters.named_parameters()}
    trainer.optimiser.zero_grad()
    contexts = [trainer.context(length, index) for index in (0, 1)]
    whole = reference_loss(trainer, contexts, budget_weight(6, trainer.settings))
    whole.backward()
    assert figures["loss"] == pytest.approx(whole.item(), rel=1e-5)
    for name, parameter in trainer.parameters.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-7)
        assert "router" not in name or float(got[name].abs().max()) > 0


def test_what_the_caches_hold_does_not_change_the_result(model, captured, settings, make_data, monkeypatch):
    monkeypatch.setattr(calibration, "captured_program", lambda model: captured)
    short = settings.model_copy(update={"max_steps": 3})
    cached = calibrate(model, make_data(short), short, name="tiny")
    monkeypatch.setattr(module, "CACHE_BYTES", 0)
    monkeypatch.setattr(module, "HELD_BYTES", 0)
    anew = calibrate(model, make_data(short), short, name="tiny")
    assert anew.history == cached.history
    assert all(torch.equal(tensor, anew.profile.tensors[name]) for name, tensor in cached.profile.tensors.items())


class Sized:
    def __init__(self, nbytes):
        self.nbytes = nbytes


def test_a_cache_keeps_what_fits_and_makes_the_rest_anew():
    cache, made = ContextCache(10), []

    def ask(number, nbytes):
        def make():
            made.append(number)
            return Sized(nbytes)

        return cache.get((1, number), make)

    first = ask(0, 6)
    ask(1, 5)
    assert ask(0, 6) is first
    ask(1, 5)
    ask(2, 4)
    ask(2, 4)
    assert made == [0, 1, 1, 2]
    assert cache.nbytes == 10
    cache.clear()
    assert ask(0, 6) is not first
    assert cache.nbytes == 6
