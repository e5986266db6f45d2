"""Programs move between devices; `meta` stands in for a GPU, since it refuses most mixtures and needs no hardware."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import semkv
from semkv.capture.device import device_of, moved, on_cpu
from semkv.compiler.pipeline import captured_program
from semkv.errors import ConfigError


class Decoder(nn.Module):
    """One attention layer with tied embeddings; makes its positions and its mask itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(31, 16)
        self.place = nn.Embedding(64, 16)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("gain", torch.ones(16))
        self.alias = self.gain

    def forward(self, ids: Tensor) -> Tensor:
        rows, length = ids.shape
        x = self.embed(ids) + self.place(torch.arange(length, device=ids.device)) * self.gain
        q, k, v = (part.view(rows, length, 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + out.transpose(1, 2).reshape(rows, length, 16))


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder().eval()


def test_a_model_on_the_cpu_is_taken_as_it_is(model: Decoder) -> None:
    source, originals = on_cpu(model)
    assert source is model
    assert originals == {}


def test_a_moved_program_is_on_its_device_and_says_so(model: Decoder) -> None:
    program = captured_program(model)
    there = moved(program, "meta")
    tensors = [*there.body.parameters(), *there.body.buffers(), *there.head.parameters()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    named = {
        x for node in there.body.graph.nodes for x in (*node.args, *node.kwargs.values()) if isinstance(x, torch.device)
    }
    assert named <= {torch.device("meta")}
    assert device_of(program.body).type == "cpu", "the program that was moved must not change"
    ids = torch.zeros(2, 9, dtype=torch.int64, device="meta")
    positions = torch.arange(9, device="meta").expand(2, 9)
    assert there.head(there.body(ids, positions)).shape == (2, 9, 31)


def test_tied_tensors_stay_tied(model: Decoder) -> None:
    there = moved(captured_program(model), "meta")
    (embedding,) = [p for name, p in there.body.named_parameters() if name.endswith("embed.weight")]
    assert any(parameter is embedding for parameter in there.head.parameters())


def test_a_model_elsewhere_is_copied_once_and_its_tensors_are_shared_again(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU is called another device, so that a copy is made of a model that can be looked at."""
    monkeypatch.setattr("semkv.capture.device.device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(Tensor, "cpu", lambda self: self.clone())
    source, originals = on_cpu(model)
    assert source is not model
    assert source.head.weight is source.embed.weight
    assert source.alias is source.gain
    own, copied = dict(model.named_parameters()), dict(source.named_parameters())
    assert all(torch.equal(own[name], copied[name]) and own[name] is not copied[name] for name in own)
    program = captured_program(source)
    back = moved(program, "cpu", originals)
    ids = torch.randint(0, 31, (2, 9))
    positions = torch.arange(9).expand(2, 9)
    shared = {id(p) for p in model.parameters()}
    assert {id(p) for p in (*back.body.parameters(), *back.head.parameters())} <= shared
    torch.testing.assert_close(back.head(back.body(ids, positions)), model(ids))


def test_a_device_that_does_not_exist_is_refused_before_work(model: Decoder) -> None:
    with pytest.raises(
        ConfigError, match=r"device 'cuda:99' cannot be used here \(.+\); pass 'cpu' or a device that is"
    ):
        semkv.compile(model, device="cuda:99")
