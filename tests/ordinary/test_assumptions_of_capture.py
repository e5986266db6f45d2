"""What export assumes of sizes and values holds wherever a program runs, or the program is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import semkv
from semkv.capture.export import capture
from semkv.compiler.pipeline import captured_program
from semkv.errors import CaptureError, InputError
from semkv.ir.program import Program

VOCAB, DIM = 199, 32


class Decoder(nn.Module):
    """One layer of attention, and `after`, which the tests give an assumption."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.eval()

    def attend(self, x):
        q, k, v = (f(x).unflatten(-1, (2, DIM // 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, input_ids):
        return self.head(self.after(self.attend(self.embed(input_ids)), input_ids))

    def after(self, x, ids):
        return x


class InBlocksOf64(Decoder):
    """Goes through the tokens in blocks: export unrolls the loop for the one block of its example."""

    def after(self, x, ids):
        rows, length, _ = x.shape
        padding = (64 - length % 64) % 64
        blocks = F.pad(x, (0, 0, 0, padding)).reshape(rows, -1, 64, DIM)
        out = torch.zeros_like(blocks)
        for i in range((length + padding) // 64):
            out[:, i] = torch.tanh(blocks[:, i])
        return out.reshape(rows, -1, DIM)[:, :length]


class SplitBy64(Decoder):
    def after(self, x, ids):
        return torch.cat([torch.tanh(part) for part in x.split(64, 1)], 1)


class LongDiffers(Decoder):
    def after(self, x, ids):
        return x * 2 if ids.shape[1] > 100 else x


class ChecksItsLength(Decoder):
    def after(self, x, ids):
        torch._check(ids.shape[1] <= 80)
        return x


class MaskOf96(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("causal", torch.ones(96, 96, dtype=torch.bool).tril())

    def attend(self, x):
        length = x.shape[1]
        scores = (self.q(x) @ self.k(x).mT).masked_fill(~self.causal[:length, :length], float("-inf"))
        return x + scores.softmax(-1) @ self.v(x)


class TableOf70(Decoder):
    """Its positions are looked up: no size says that the table ends."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(70, DIM).eval()

    def after(self, x, ids):
        return x + self.places(torch.arange(ids.shape[1]))


class TableOf70Given(TableOf70):
    def forward(self, input_ids, position_ids):
        return self.head(self.attend(self.embed(input_ids)) + self.places(position_ids))


class ChecksPositions(Decoder):
    def forward(self, input_ids, position_ids):
        torch._check(position_ids.max().item() < 75)
        return self.head(self.attend(self.embed(input_ids)))


def compared(program: Program, model: nn.Module, rows: int, length: int) -> None:
    """The program's logits at this size are the model's."""
    ids = torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(length))
    positions = torch.arange(length).expand(rows, length)
    with torch.no_grad():
        given = (ids, positions) if isinstance(model, (TableOf70Given, ChecksPositions)) else (ids,)
        torch.testing.assert_close(program.body(ids, positions), model(*given), rtol=1e-4, atol=1e-5)


def test_a_loop_over_blocks_ends_the_context_with_its_first_block() -> None:
    model = InBlocksOf64()
    compiled = semkv.compile(model, method="full", config=semkv.CompileConfig(kernels="torch"))
    assert compiled.program.max_positions == 64
    ids = torch.randint(0, VOCAB, (1, 150), generator=torch.Generator().manual_seed(0))
    for length in (60, 64):
        with torch.no_grad():
            expected = model(ids[:, :length])[:, -1]
        torch.testing.assert_close(compiled.prefill(ids[:, :length]).logits, expected, rtol=1e-4, atol=1e-5)
    for length in (65, 150):
        with pytest.raises(InputError, match=f"{length} tokens do not fit the model's context of 64"):
            compiled.prefill(ids[:, :length])
    text = semkv.explain(compiled, verbose=True)
    assert "context 64, none declared" in text.replace("\n", " ")
    assert "// 64) == 1`" in text


@pytest.mark.parametrize(
    ("kind", "context", "reason"),
    [
        (SplitBy64, 64, "`((tokens + 63) // 64) == 1`, which does not hold at 65 tokens"),
        (LongDiffers, 100, "`tokens <= 100` (test_assumptions_of_capture.py:"),
        (ChecksItsLength, 80, "`tokens <= 80`"),
        (MaskOf96, 96, "`tokens <= 96`, which does not hold at 97 tokens"),
        (TableOf70Given, 70, "position 70 cannot be read (index out of range"),
        (ChecksPositions, 75, "position 75 cannot be read (Runtime assertion failed for expression"),
    ],
)
def test_what_fails_from_some_length_on_ends_the_context_there(kind, context, reason) -> None:
    model = kind()
    program = capture(model)
    assert program.max_positions == context
    assert f"context {context}, none declared: " in program.notes[0]
    assert reason in program.notes[0]
    for rows, length in ((1, 1), (1, context), (3, context - 1)):
        compared(program, model, rows, length)


def test_a_table_that_the_model_reads_by_itself_ends_the_context() -> None:
    program = captured_program(TableOf70())
    assert program.max_positions == 70
    assert "reach: context 70, as position 70 cannot be read (index out of range in self)" in program.notes


def test_a_context_that_the_model_declares_shrinks_no_further_than_is_useful() -> None:
    model = LongDiffers()
    model.config = type("Config", (), {"max_position_embeddings": 100, "vocab_size": VOCAB})()
    program = capture(model)
    assert program.max_positions == 100
    assert "declared" not in program.notes[0]
    model.config.max_position_embeddings = 4096
    with pytest.raises(CaptureError, match=r"`tokens <= 100` .* does not hold at 101 tokens"):
        capture(model)


class OddDiffers(Decoder):
    def after(self, x, ids):
        return x * 2 if ids.shape[1] % 2 else x


class EveryFiftiethDiffers(Decoder):
    def after(self, x, ids):
        return x * 2 if ids.shape[1] % 50 == 0 else x


class NinetyDiffers(Decoder):
    def after(self, x, ids):
        return x * 2 if ids.shape[1] == 90 else x


class PiecesOf16(Decoder):
    def after(self, x, ids):
        return x * sum(2.0 for _ in range(ids.shape[1] // 16))


class OneRowDiffers(Decoder):
    def after(self, x, ids):
        return x * 2 if ids.shape[0] == 1 else x


class OneTokenDiffers(Decoder):
    def after(self, x, ids):
        return x * 2 if ids.shape[1] == 1 else x


class ChecksTokens(Decoder):
    def after(self, x, ids):
        torch._check(ids.max().item() < 150)
        return x


class NeedsTypes(Decoder):
    def forward(self, input_ids, token_type_ids):
        return super().forward(input_ids)


class NeedsPixels(Decoder):
    def forward(self, input_ids, attention_mask=None, pixel_values=None):
        return super().forward(input_ids) + pixel_values.mean()


class NeedsAnImage(Decoder):
    def forward(self, input_ids, pixel_values=None, image_sizes=None):
        if pixel_values is None:
            raise ValueError("You have to specify pixel_values")
        return super().forward(input_ids)


REFUSED = [
    (OddDiffers, r"export took a branch where `\(tokens % 2\) != 0` .* does not hold at 2 tokens"),
    (EveryFiftiethDiffers, r"`\(tokens % 50\) != 0` .* does not hold at 50 tokens"),
    (NinetyDiffers, r"`tokens != 90` .* does not hold at 90 tokens\. Write it so that sizes follow the input"),
    (PiecesOf16, r"`\(tokens // 16\) == 2` .* does not hold at 2 tokens"),
    (OneRowDiffers, "of OneRowDiffers is not the model at 1 tokens: the logits of 100% of the tokens differ"),
    (OneTokenDiffers, "of OneTokenDiffers is not the model at 1 tokens: the logits of 100% of the tokens differ"),
    (ChecksTokens, r"asserts something of values that follow from the tokens: .* u0 <= 149.*remove the assertion"),
    (NeedsTypes, "the forward of NeedsTypes requires token_type_ids; a program takes token ids and positions only"),
    (NeedsPixels, "NeedsPixels does not run on token ids alone; it reads pixel_values, which a program does not take"),
    (NeedsAnImage, "it reads pixel_values, which .* It raised ValueError: You have to specify pixel_values"),
]


@pytest.mark.parametrize(("kind", "message"), REFUSED, ids=[kind.__name__ for kind, _ in REFUSED])
def test_a_forward_that_is_not_one_computation_is_refused(kind, message) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(kind())


class ManyRowsDiffer(Decoder):
    def after(self, x, ids):
        return x * 2 if ids.shape[0] > 8 else x


def test_a_guard_on_the_batch_makes_rows_run_one_at_a_time() -> None:
    model = ManyRowsDiffer()
    program = capture(model)
    assert not program.batched
    assert program.max_positions is None
    compared(program, model, 1, 63)


class BranchDecidesNothing(Decoder):
    """The guard breaks at every even length, and the operations are the same on both sides."""

    def after(self, x, ids):
        if ids.shape[1] % 2:
            return torch.tanh(x)
        return x.tanh()


@pytest.mark.parametrize("kind", [Decoder, BranchDecidesNothing])
def test_what_assumes_nothing_that_matters_is_captured(kind) -> None:
    model = kind()
    program = capture(model)
    assert program.batched
    assert program.max_positions is None
    assert program.notes[0].endswith("equal to the model at 1 x 1, 3 x 5, 1 x 160 tokens")
    for rows, length in ((1, 1), (2, 2), (3, 64), (1, 700)):
        compared(program, model, rows, length)


def test_long_rope_crosses_its_original_context_as_the_model_does() -> None:
    factors = [1.0 + 0.1 * i for i in range(4)]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": [4 * f for f in factors],
    }
    rope |= {"original_max_position_embeddings": 48, "factor": 2.0}
    settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **settings,
        vocab_size=VOCAB,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters=rope,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4)  # so that the positions are seen in the tokens
    compiled = semkv.compile(model, method="full", config=semkv.CompileConfig(kernels="torch"))
    for length in (44, 60):
        ids = torch.randint(5, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
        assert torch.equal(compiled.generate(ids, **options), model.generate(ids, **options))
