"""Requests of an engine's batches, as the server's worker runs them: each answers as it does alone, and fails alone."""

from __future__ import annotations

import pytest
import torch

from semkv.config import CompileConfig
from semkv.errors import StateError
from semkv.serving.requests import Requests, Row

LENGTHS = (37, 300, 411)
PIECE = 100


@pytest.fixture(scope="module")
def texts(base):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, base.program.vocab_size, (n,), generator=generator) for n in LENGTHS]


@pytest.fixture(scope="module")
def compressed(base):
    return base.with_method("snapkv", 0.3, config=CompileConfig())


def alone(compiled, ids, count):
    """Greedy tokens after a prompt."""
    return compiled.generate(ids[None], max_new_tokens=count, do_sample=False, eos_token_id=None)[
        0, len(ids) :
    ].tolist()


def batch(parts):
    """(ids [T], rows) of (slot, place, ids) as an engine lays them out."""
    rows, start = [], 0
    for slot, place, ids in parts:
        rows.append(Row(slot, start, start + len(ids), place))
        start += len(ids)
    return torch.cat([ids for _, _, ids in parts]), rows


class Engine:
    """A loop with a piece of each unread prompt and a token of each other request in every batch."""

    def __init__(self, compiled, keep=0):
        self.requests, self.texts, self.made, self.read = Requests(compiled, keep), {}, {}, {}

    def add(self, slot, ids, **options):
        self.requests.begin(f"r{slot}", slot, prompt=options.pop("prompt", len(ids)), ids=ids.tolist(), **options)
        self.texts[slot], self.made[slot], self.read[slot] = ids, [], 0

    def turn(self, ids_of=None):
        """One batch. ids_of: other tokens for some slots. Returns names that failed."""
        parts = []
        for slot, ids in self.texts.items():
            read = self.read[slot]
            piece = ids[read : read + PIECE] if read < len(ids) else torch.tensor(self.made[slot][-1:])
            parts.append((slot, read, (ids_of or {}).get(slot, piece)))
        ids, rows = batch(parts)
        logits = self.requests.run(ids, rows)
        failed = self.requests.take_failed()
        for slot in [slot for slot in self.texts if f"r{slot}" in failed]:
            del self.texts[slot]
        for row in rows:
            if row.slot in self.texts:
                self.read[row.slot] += row.end - row.start
                if self.read[row.slot] >= len(self.texts[row.slot]):
                    self.made[row.slot].append(int(logits[row.end - 1].argmax()))
        return failed


def test_batches_answer_as_each_request_alone(compressed, texts):
    engine = Engine(compressed)
    for slot, ids in zip((5, 2, 9), texts):
        engine.add(slot, ids)
    for _ in range(12):
        assert engine.turn() == []
    for slot, ids in zip((5, 2, 9), texts):
        assert engine.made[slot] == alone(compressed, ids, len(engine.made[slot]))
    # the shortest decodes from the second batch on, all of them from the sixth
    assert (engine.requests.steps, engine.requests.stepped_rows) == (11, 11 + 9 + 7)


def test_logits_of_a_whole_prompt(base, texts):
    ids = texts[1]
    requests = Requests(base)
    requests.begin("a", 3, prompt=len(ids), all_logits=True)
    found = []
    for place in range(0, len(ids), PIECE):
        piece = ids[place : place + PIECE]
        made = requests.run(torch.cat([torch.zeros(7, dtype=torch.int64), piece]), [Row(3, 7, 7 + len(piece), place)])
        assert list(made) == list(range(7, 7 + len(piece)))
        found += made.values()
    assert torch.allclose(torch.stack(found), base(ids[None]).logits[0], atol=1e-4)


@pytest.mark.parametrize("failing", ["begin", "feed", "step", "place"])
def test_a_request_that_fails_is_alone(compressed, texts, failing, monkeypatch):
    engine = Engine(compressed)
    engine.add(1, texts[0])
    if failing == "begin":
        monkeypatch.setattr(
            engine.requests.compiled, "begin", lambda tokens: (_ for _ in ()).throw(MemoryError("no room"))
        )
    engine.add(2, texts[1])
    monkeypatch.undo()
    failed = []
    bad = {"feed": 0, "step": 5, "place": 5}.get(failing)
    for number in range(9):
        if failing == "place" and number == bad:
            engine.read[2] += 1
        wrong = {2: torch.tensor([10**6])} if failing != "place" and number == bad else None
        failed += engine.turn(wrong)
    assert failed == ["r2"]
    assert engine.made[1] == alone(compressed, texts[0], 9)
    assert engine.requests.report()["requests"] == 2  # until the engine says that it ended
    engine.requests.end(["r1", "r2", "unknown"])
    assert engine.requests.report() | {"resident": 0} == {
        "requests": 0, "bytes": 0, "resident": 0, "steps": engine.requests.steps, "rows": engine.requests.stepped_rows,
        "sessions": 0, "reused": 0,
    }  # fmt: skip


def test_memory_is_let_go_of_at_the_end(compressed, texts):
    requests = Requests(compressed)
    requests.begin("read", 1, prompt=len(texts[1]))
    requests.begin("half", 2, prompt=len(texts[2]))
    requests.run(*batch([(1, 0, texts[1]), (2, 0, texts[2][:200])]))
    state, prompt = requests._by_name["read"].state, requests._by_name["half"].reading
    assert state.nbytes["device"] > 0
    requests.begin("next", 1, prompt=9)  # its slot is another's now
    requests.end(["half"])
    assert state.released
    with pytest.raises(StateError, match="released"):
        prompt.feed(texts[2][200:])
    assert len(requests) == 1


def test_a_request_that_was_preempted_is_read_again(compressed, texts):
    """Its prompt is compressed as before, and what it had generated is read behind it."""
    ids, count = texts[2], 12
    expected = alone(compressed, ids, count)
    known = torch.cat([ids, torch.tensor(expected[:8])])
    engine = Engine(compressed)
    engine.add(4, known, prompt=len(ids), known=len(known))
    while len(engine.made[4]) < 4:
        assert engine.turn() == []
    assert engine.made[4] == expected[8:]
    fresh = compressed.prefill(ids[None])
    assert engine.requests._by_name["r4"].state.nbytes["device"] - fresh.nbytes["device"] < fresh.nbytes["device"] / 2


def test_a_step_that_is_refused_as_a_whole_runs_one_by_one(compressed, texts, monkeypatch):
    engine = Engine(compressed)
    engine.add(1, texts[0])
    engine.add(2, texts[0])
    step = compressed.step

    def refusing(states, ids):
        if len(states) > 1:
            raise MemoryError("not so many rows")
        return step(states, ids)

    monkeypatch.setattr(compressed, "step", refusing)
    for _ in range(4):
        assert engine.turn() == []
    assert engine.made[1] == engine.made[2] == alone(compressed, texts[0], 4)


def test_tokens_of_an_unknown_slot_are_an_error(compressed):
    with pytest.raises(StateError, match="tokens of slot 3, and no request was begun there"):
        Requests(compressed).run(torch.tensor([5]), [Row(3, 0, 1, 0)])


def turns(engine, slot, ids, count, keep=True):
    """The tokens that a request makes, which then ends."""
    engine.add(slot, ids)
    while len(engine.made[slot]) < count:
        assert engine.turn() == []
    del engine.texts[slot]
    engine.requests.end([f"r{slot}"], keep=keep)
    return engine.made[slot]


def test_a_session_goes_on_and_nothing_is_read_twice(base, compressed, texts):
    """Of `full` with the same tokens as without sessions, of a method with those of the state that was compressed before."""
    ids, more = texts[2], texts[0]
    for compiled in (base, compressed):
        engine = Engine(compiled, keep=1 << 30)
        first = turns(engine, 1, ids, 6)
        assert first == alone(compiled, ids, 6)
        second = torch.cat([ids, torch.tensor(first), more])
        made = turns(engine, 2, second, 6)
        state = compiled.prefill(ids[None])
        for token in first[:-1]:
            compiled.step([state], torch.tensor([token]))
        compiled.extend(state, second[None, len(ids) + 5 :])
        assert made == [int(state.logits.argmax()), *following(compiled, state, 5)]
        if compiled is base:
            assert made == alone(base, second, 6)
        report = engine.requests.report()
        assert (report["sessions"], report["reused"]) == (2, len(ids) + 5)
        assert turns(engine, 3, second, 6) == made
        assert engine.requests.report()["reused"] == 2 * (len(ids) + 5)


def following(compiled, state, count):
    made = []
    token = int(state.logits.argmax())
    for _ in range(count):
        token = int(compiled.step([state], torch.tensor([token])).argmax())
        made.append(token)
    return made


def test_sessions_that_are_none(compressed, texts):
    """Without `keep`, of preempted requests, of texts that differ or end where the session does, and where all logits are wanted."""
    ids = texts[1]
    engine = Engine(compressed)
    turns(engine, 1, ids, 3)
    assert engine.requests.report()["sessions"] == 0
    engine = Engine(compressed, keep=1 << 30)
    turns(engine, 1, ids, 3, keep=False)
    assert engine.requests.report()["sessions"] == 0
    made = turns(engine, 1, ids, 3)
    read = torch.cat([ids, torch.tensor(made[:2])])
    other = read.clone()
    other[7] += 1
    for number, text in enumerate((ids[:50], read, torch.cat([other, ids]))):
        turns(engine, 10 + number, text, 2)
    assert engine.requests.report()["reused"] == 0
    engine.requests.begin("all", 5, prompt=len(read) + 1, ids=[*read.tolist(), 4], all_logits=True)
    assert engine.requests._by_name["all"].reading is not None


def test_sessions_stay_within_their_bytes(compressed, texts):
    engine = Engine(compressed, keep=1 << 30)
    turns(engine, 1, texts[1], 2)
    one = engine.requests.sessions.nbytes
    assert one > 0
    engine = Engine(compressed, keep=2 * one)
    for slot, start in ((1, 0), (2, 1), (3, 2)):  # of nearly the same length
        turns(engine, slot, texts[1][start:], 2)
    held = engine.requests.sessions.held
    assert [ids[0] for ids in held] == texts[1][1:3].tolist()
    assert engine.requests.sessions.nbytes <= 2 * one
    states = [session.state for session in held.values()]
    turns(engine, 4, texts[2], 2)  # larger than one of the others
    assert states[0].released
    small = Engine(compressed, keep=one // 2)
    turns(small, 1, texts[1], 2)
    assert small.requests.report()["sessions"] == 0


def test_sessions_make_room_for_requests(base, texts):
    """Where the host's memory is full of them, they are let go of, and the request begins."""
    roomy = base.with_method("quest", 0.5, config=CompileConfig(floor=0))
    probe = Engine(roomy, keep=1 << 30)
    turns(probe, 1, texts[2], 2)
    waiting = next(iter(probe.requests.sessions.held.values())).state.nbytes["host"]
    room = roomy._host_nbytes(len(texts[2])) + waiting // 2
    tight = base.with_method("quest", 0.5, config=CompileConfig(floor=0, host_memory=room))
    engine = Engine(tight, keep=1 << 30)
    turns(engine, 1, texts[2], 2)
    assert engine.requests.report()["sessions"] == 1
    assert turns(engine, 2, texts[2].flip(0), 2) == alone(roomy, texts[2].flip(0), 2)
    assert len(engine.requests.sessions.held) == 1
