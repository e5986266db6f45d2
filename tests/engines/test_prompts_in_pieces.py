"""`begin`, `feed`, `finish`: a prompt in pieces gives the state of the prompt as a whole."""

from __future__ import annotations

import pytest
import torch

import semkv
from semkv.errors import CapacityError, ConfigError, InputError, StaleModelError, StateError

METHODS = ("full", "snapkv", "h2o", "quest", "sekv", "sketch", "specontext", "compresskv")
TOKENS, PIECES = 301, (1, 130, 64, 106)


@pytest.fixture(scope="module")
def ids(base):
    return torch.randint(3, base.program.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(0))


def made(base, method):
    return base if method == "full" else base.with_method(method, 0.4)


def read(compiled, ids, sizes=PIECES, tokens=None):
    prompt = compiled.begin(tokens)
    for piece in ids.split(sizes):
        prompt.feed(piece)
    return prompt.finish()


def decode(compiled, state, steps=10):
    out = []
    for _ in range(steps):
        out.append(state.logits.argmax(-1, keepdim=True))
        compiled.extend(state, out[-1])
    return torch.cat(out, 1).tolist(), state.logits


@pytest.mark.parametrize(
    ("method", "tokens"), [*((method, None) for method in METHODS), ("quest", TOKENS), ("specontext", TOKENS)]
)
def test_pieces_give_the_state_of_the_whole(base, ids, method, tokens):
    compiled = made(base, method)
    whole, parts = compiled.prefill(ids[None]), read(compiled, ids, tokens=tokens)
    assert parts.lengths == [TOKENS]
    assert parts.nbytes == whole.nbytes
    torch.testing.assert_close(parts.logits, whole.logits, atol=2e-4, rtol=1e-4)
    (ours, last), (theirs, expected) = decode(compiled, parts), decode(compiled, whole)
    assert ours == theirs
    torch.testing.assert_close(last, expected, atol=2e-3, rtol=1e-3)


def test_compressing_every_piece_is_another_state(base, ids):
    """The control: what was compressed on the way is not the whole."""
    compiled = base.with_method("snapkv", 0.2)
    whole = compiled.prefill(ids[None])
    early = compiled.prefill(ids[None, :131])
    compiled.extend(early, ids[None, 131:])
    assert (early.logits - whole.logits).abs().max() > 0.05
    torch.testing.assert_close(read(compiled, ids).logits, whole.logits, atol=2e-4, rtol=1e-4)


def test_logits_of_all_tokens(base, ids):
    with torch.no_grad():
        expected = base(ids[None]).logits[0]
    prompt = base.begin()
    pieces = [prompt.feed(piece, all_logits=True) for piece in ids.split(PIECES)]
    assert [len(piece) for piece in pieces] == list(PIECES)
    torch.testing.assert_close(torch.cat(pieces), expected, atol=2e-4, rtol=1e-4)
    last = base.begin().feed(ids[None])
    torch.testing.assert_close(last, expected[-1:], atol=2e-4, rtol=1e-4)


def test_long_pieces_run_in_chunks(base, ids):
    """Logits of the last token, and of all, though a piece is several calls of the program."""
    chunked = base.with_method("snapkv", 0.4, config=semkv.CompileConfig(floor=0, prefill_chunk=50))
    plain = made(base, "snapkv")
    prompt = chunked.begin(TOKENS)
    logits = prompt.feed(ids, all_logits=True)
    assert logits.shape == (TOKENS, base.program.vocab_size)
    torch.testing.assert_close(logits[-1:], chunked.begin().feed(ids), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(prompt.finish().logits, plain.prefill(ids[None]).logits, atol=2e-4, rtol=1e-4)


def test_other_requests_run_between_pieces(base, ids):
    compiled = made(base, "quest")
    other = compiled.prefill(ids[None, :200])
    expected, _ = decode(compiled, other.fork(), 2 * len(PIECES))
    alone, _ = decode(compiled, compiled.prefill(ids[None]))
    prompt, second, told = compiled.begin(), compiled.begin(), []
    for piece in ids.split(PIECES):
        prompt.feed(piece)
        second.feed(piece.flip(0))
        told += decode(compiled, other, 2)[0][0]
    assert told == expected[0]
    assert decode(compiled, prompt.finish())[0] == alone


def test_refusals_read_nothing(base, ids):
    compiled = made(base, "snapkv")
    with pytest.raises(ConfigError, match=r"begin\(0\): expected the number of tokens"):
        compiled.begin(0)
    limit = compiled.program.max_positions
    with pytest.raises(InputError, match=f"{limit + 1} tokens do not fit the model's context of {limit}"):
        compiled.begin(limit + 1)
    prompt = compiled.begin(200)
    prompt.feed(ids[:150])
    for given, text in (
        (ids[:51], "201 tokens of a prompt that was begun with tokens=200"),
        (ids[:8].reshape(2, 4), "a prompt is one row"),
        (torch.tensor([compiled.program.vocab_size]), "vocabulary"),
        (ids[:0], "empty"),
        ("text", "integer tensor"),
    ):
        with pytest.raises(InputError, match=text):
            prompt.feed(given)
    assert prompt.read == 150
    prompt.feed(ids[150:200])
    torch.testing.assert_close(prompt.finish().logits, compiled.prefill(ids[None, :200]).logits, atol=2e-4, rtol=1e-4)


def test_a_prompt_ends_once(base, ids):
    compiled = made(base, "snapkv")
    with pytest.raises(StateError, match="no tokens has no state"):
        compiled.begin().finish()
    prompt = compiled.begin()
    prompt.feed(ids)
    prompt.finish()
    for use in (prompt.finish, lambda: prompt.feed(ids[:1])):
        with pytest.raises(StateError, match="has ended: it was finished: go on from its state"):
            use()
    given_up = compiled.begin()
    given_up.feed(ids[:40])
    compiled.release(given_up)
    compiled.release(given_up)
    assert given_up.read == 0
    with pytest.raises(StateError, match="it was released"):
        given_up.feed(ids[:1])


def test_a_piece_that_fails_ends_its_prompt(base, ids, monkeypatch):
    from semkv.runtime.prompt.recorder import Recorder

    compiled, keep = made(base, "snapkv"), Recorder.record
    prompt, other = compiled.begin(), compiled.begin()
    for one in (prompt, other):
        one.feed(ids[:40])
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "record", lambda self, site, *x: keep(self, site, *x) if site < 1 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prompt.feed(ids[40:80])
    with pytest.raises(StateError, match="a piece of it did not come to its end: begin it again"):
        prompt.feed(ids[40:80])
    other.feed(ids[40:])
    assert other.finish().lengths == [TOKENS]


def test_host_memory_is_asked_for_ahead(base, ids):
    config = semkv.CompileConfig(floor=0, offload="budget", host_memory="300KB")
    compiled = base.with_method("quest", 0.4, config=config)
    with pytest.raises(CapacityError, match="a prompt of 2000 tokens needs"):
        compiled.begin(2000)
    prompt = compiled.begin()
    with pytest.raises(CapacityError, match="a prompt of 301 tokens needs"):
        prompt.feed(ids)
    assert prompt.read == 0


def test_weights_that_change_between_pieces(ids):
    model, _ = semkv.bundled.load()
    compiled = semkv.compile(model, method="full")
    prompt = compiled.begin()
    prompt.feed(ids[:40])
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    with pytest.raises((StateError, StaleModelError), match="weights changed"):
        prompt.feed(ids[40:80])
