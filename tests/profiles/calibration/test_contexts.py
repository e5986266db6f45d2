"""Teacher contexts against the model's own attention, and their factors."""

import torch

from semkv.profiles.calibration.contexts import left_factors, read_context
from semkv.profiles.calibration.segmentation import Divider
from semkv.profiles.calibration.student import rebuild


def read(program, settings, data):
    return read_context(program, data.held_out[0], settings, Divider(program, settings), 0.5, torch.float32)


def test_teacher_is_the_model(model, program, settings, data):
    context = read(program, settings, data)
    with torch.no_grad():
        logits = model(data.held_out[0][None]).logits[0, settings.length :]
    assert torch.allclose(context.log_probs, torch.log_softmax(logits, -1), atol=1e-4)


def test_tokens_are_kept_or_folded_once(program, settings, data):
    context = read(program, settings, data)
    for site in context.sites:
        folded = site.spans.positions[site.spans.real]
        everything = torch.cat([site.kept_positions, folded]).sort().values
        assert torch.equal(everything, torch.arange(settings.length))


def test_mass_is_the_models_attention_on_spans(model, program, settings, data):
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            attentions = model(data.held_out[0][None], output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    context = read(program, settings, data)
    for site, attention in zip(context.sites, attentions):
        rows = attention[0, :, settings.length :]
        for span in range(0, site.mass.shape[-1], 3):
            places = site.spans.positions[span][site.spans.real[span]]
            assert torch.allclose(site.mass[..., span], rows[..., places].sum(-1), atol=1e-4)


def test_factors_are_those_of_the_svd():
    x = torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(0))
    u, sigma = left_factors(x, 4)
    expected = torch.linalg.svdvals(x)
    assert torch.allclose(sigma, expected, atol=1e-4)
    assert torch.allclose(rebuild(u, torch.ones(2, 3, 4), x), x, atol=1e-4)
    truncated = rebuild(u, torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(2, 3, 4), x)
    full_u, s, vt = torch.linalg.svd(x, full_matrices=False)
    assert torch.allclose(truncated, full_u[..., :2] * s[..., None, :2] @ vt[..., :2, :], atol=1e-4)


def test_a_context_counts_its_bytes(program, settings, data):
    context = read(program, settings, data)
    keys = sum(site.spans.k.nbytes + site.spans.v.nbytes for site in context.sites)
    assert context.nbytes > keys
