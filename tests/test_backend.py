"""`torch.compile(model, backend="semkv")` for stateless forwards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from transformers import LlamaConfig, LlamaForCausalLM

from semkv import bundled
from semkv.backend import semkv
from semkv.ir.graph import attention_nodes


def tiny(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=41,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        **changes,
    )
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(0, 41, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def compiled(model: nn.Module, **options):
    return torch.compile(model, backend="semkv", **({"dynamic": True, "fullgraph": True} | options))


def test_logits_equal_the_eager_models_at_every_length():
    model = tiny()
    fast = compiled(model)
    for rows, tokens in ((2, 9), (3, 30), (2, 64)):
        with torch.no_grad():
            got, expected = (
                fast(ids(rows, tokens), use_cache=False).logits,
                model(ids(rows, tokens), use_cache=False).logits,
            )
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("shapes", "recorded"),
    [
        ([(1, 2), (3, 9)], True),
        pytest.param([(1, 9), (1, 30)], False, marks=pytest.mark.slow),
        pytest.param([(2, 9), (1, 9)], False, marks=pytest.mark.slow),
    ],
)
def test_a_row_alone_may_come_first_or_last(shapes, recorded):
    """A graph of Dynamo that is for one row does not export for two, and what is tried then may not be Dynamo again."""
    model = tiny()
    fast = compiled(model)
    for rows, tokens in shapes:
        with torch.set_grad_enabled(recorded):
            got, expected = fast(ids(rows, tokens), use_cache=False), model(ids(rows, tokens), use_cache=False)
        torch.testing.assert_close(got.logits, expected.logits, rtol=1e-9, atol=1e-10)


def test_trials_at_sizes_that_do_not_fit_print_nothing(capfd):
    model, _ = bundled.load()
    with torch.no_grad():
        compiled(model, fullgraph=False)(input_ids=ids(1, 64), use_cache=False)
        with pytest.raises(BackendCompilerFailed, match="with prompts of at least two tokens first"):
            compiled(tiny())(ids(2, 1), use_cache=False)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("part", [(slice(None), slice(-9, None)), (slice(1, 2), slice(3, 12))])
def test_ids_may_be_a_part_of_others(part):
    model = tiny()
    given = ids(3, 20)[part]
    with torch.no_grad():
        got, expected = compiled(model)(given, use_cache=False).logits, model(given, use_cache=False).logits
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


def test_each_attention_becomes_one_operator(monkeypatch):
    import semkv.backend as backend

    found = []
    original = backend._with_weights_as_inputs
    monkeypatch.setattr(backend, "_with_weights_as_inputs", lambda body: found.append(body) or original(body))
    with torch.no_grad():
        compiled(tiny())(ids(2, 9), use_cache=False)
    assert [len(attention_nodes(body.graph)) for body in found] == [2]


def test_position_ids_are_read():
    model = tiny()
    where = torch.arange(12).expand(2, -1) + 3
    with torch.no_grad():
        got = compiled(model)(ids(2, 12), position_ids=where, use_cache=False).logits
        expected = model(ids(2, 12), position_ids=where, use_cache=False).logits
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


def test_gradients_reach_the_models_parameters():
    model = tiny()
    other = copy.deepcopy(model)
    compiled(model)(ids(2, 9), use_cache=False).logits.square().sum().backward()
    other(ids(2, 9), use_cache=False).logits.square().sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-7, atol=1e-8, msg=name)


def test_updated_weights_are_used():
    model = tiny()
    fast = compiled(model)
    with torch.no_grad():
        before = fast(ids(2, 9), use_cache=False).logits
        for parameter in model.parameters():
            parameter.mul_(1.1)
        after, expected = fast(ids(2, 9), use_cache=False).logits, model(ids(2, 9), use_cache=False).logits
    torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-10)
    assert (after - before).abs().max() > 1e-3


class Bag(nn.Module):
    """A model without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(41, 8), nn.Linear(8, 41)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compiled(Bag().eval())(ids(2, 9)), "no attention found"),
        (lambda: compiled(tiny(), dynamic=False)(ids(2, 9), use_cache=False), r"fixed the length at 9 .* dynamic=True"),
        (lambda: compiled(tiny(), options={"budget": 0.1})(ids(2, 9), use_cache=False), "no option 'budget'"),
        (
            lambda: compiled(tiny())(ids(2, 9), attention_mask=torch.ones(2, 9, dtype=torch.bool), use_cache=False),
            "pass no padding mask",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(call, message):
    with pytest.raises(BackendCompilerFailed, match=message), torch.no_grad():
        call()


def test_the_backend_is_registered():
    assert "semkv" in torch._dynamo.list_backends(exclude_tags=())
    assert torch._dynamo.lookup_backend("semkv") is semkv
