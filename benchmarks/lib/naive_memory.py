"""What some methods leave of a text, written for reading: one attention layer of one conversation, with Python lists of positions over
all of its keys and values. Nothing is shared with the package, so that it can be held against it.

Every layer has a budget: bytes, a share of what its keys and values would take in float32. Tokens lie in pages of 8, each with a position
of 4 bytes. What a method does with them stands in docs/methods.md, what is counted in docs/architecture.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

PAGE, SINKS = 8, 4


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def step_of(count: int) -> int:
    """Buffers grow by a power of two, of which at least 16 are in them."""
    return 1 << max(0, (count // 16).bit_length() - 1)


def room_for(count: int) -> int:
    return -(-count // step_of(count)) * step_of(count)


def rounded(x: Tensor, bits: int) -> Tensor:
    """x [..., D] as whole multiples of a half-precision scale per vector."""
    top = 2 ** (bits - 1) - 1
    scale = (x.abs().amax(-1, keepdim=True) / top).clamp(min=2**-24, max=65504).half().float()
    return (x / scale).round().clamp(-top, top) * scale


@dataclass
class Layer:
    """scale: of the softmax. budget: a share. number: which of the model's attention layers it is. kept: positions of each KV head that
    stay for good; first: of the recent window.

    q [Hq, T, D] are the queries of a call, k [Hkv, n, D] and v [Hkv, n, Dv] all keys and values so far.
    """

    scale: float
    budget: float
    number: int = 0
    kept: list[list[int]] = field(default_factory=list)
    first: int = 0
    read: int = 0

    turn_chunk = 8
    """Tokens of a turn that run at once."""

    def measure(self, k: Tensor, v: Tensor) -> None:
        self.heads = k.shape[0]
        self.token = k.element_size() * (k.shape[2] + v.shape[2])  # bytes of a token in one head

    def cap(self, tokens: int) -> float:
        return int(self.budget * tokens * self.heads * self.token)

    @property
    def kept_rows(self) -> int:
        """Heads with positions of their own."""
        return 1

    def kept_nbytes(self) -> int:
        return pages(len(self.kept[0])) * PAGE * (self.heads * self.token + 4 * self.kept_rows)

    def window_nbytes(self, tokens: int) -> int:
        return pages(tokens) * PAGE * (self.heads * self.token + 4)

    def chunk(self) -> int:
        """Tokens that may run at once now."""
        free = self.cap(self.read) - self.kept_nbytes()
        return min(self.turn_chunk, max(1, PAGE * int(free // self.window_nbytes(PAGE))))

    # -- what a method says --------------------------------------------------------------------------------------------

    def divide(self, q: Tensor, k: Tensor, v: Tensor, surprisal: Tensor) -> None:
        """A prompt was read, with attention to all of it."""
        raise NotImplementedError

    def make_room(self, new: int, k: Tensor, v: Tensor, surprisal: Tensor) -> None:
        """Before `new` tokens are stored: whole pages of the oldest recent tokens go."""
        tokens = self.read + new
        most = PAGE * int((self.cap(tokens) - self.kept_nbytes()) // self.window_nbytes(PAGE))
        over = tokens - self.first - most
        if over > 0:
            self.first = min(self.read, self.first + (over if most <= PAGE else PAGE * pages(over)))

    def unfolded(self, q: Tensor, k: Tensor, v: Tensor) -> list[list[int]]:
        """Per KV head, the positions of folded tokens that these queries bring back."""
        return [[] for _ in self.kept]

    # -- attention -----------------------------------------------------------------------------------------------------

    def prompt(self, q: Tensor, k: Tensor, v: Tensor, surprisal: Tensor) -> None:
        self.measure(k, v)
        self.read = k.shape[1]
        self.divide(q, k, v, surprisal)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, surprisal: Tensor) -> Tensor:
        """[Hq, T, Dv] for new tokens."""
        new = q.shape[1]
        self.make_room(new, k, v, surprisal)
        self.read += new
        assert self.read == k.shape[1]
        brought = self.brought = self.unfolded(q, k, v)
        group, out = q.shape[0] // self.heads, []
        for head in range(q.shape[0]):
            own = head // group
            exact = [*self.kept[own], *range(self.first, self.read)]
            assert not set(exact) & set(brought[own])
            keys = torch.cat([k[own, exact], rounded(k[own, brought[own]], 8)])
            values = torch.cat([v[own, exact], rounded(v[own, brought[own]], 8)])
            positions = torch.tensor([*exact, *brought[own]])
            asked = torch.arange(self.read - new, self.read)
            logits = (q[head] @ keys.T * self.scale).masked_fill(positions > asked[:, None], float("-inf"))
            out.append(logits.softmax(-1) @ values)
        return torch.stack(out)


@dataclass
class Streaming(Layer):
    """First tokens, and as many recent ones as fit."""

    def divide(self, q: Tensor, k: Tensor, v: Tensor, surprisal: Tensor) -> None:
        room = PAGE * int(self.cap(self.read) / self.heads / (self.token + 4) // PAGE)
        self.kept = [list(range(SINKS)) for _ in range(self.heads)]
        self.first = max(SINKS, self.read - max(PAGE, room - PAGE))


@dataclass
class Snap(Layer):
    """Per KV head, what the prompt's last queries attend to, by the largest vote of seven neighbours, and those last tokens."""

    @property
    def kept_rows(self) -> int:
        return self.heads

    def divide(self, q: Tensor, k: Tensor, v: Tensor, surprisal: Tensor) -> None:
        n, group = self.read, q.shape[0] // self.heads
        room = PAGE * int(self.cap(n) / self.heads / (self.token + 4) // PAGE)
        tail = max(PAGE, PAGE * (min(32, room // 2) // PAGE))
        self.first = n - tail
        for head in range(self.heads):
            votes = torch.zeros(self.first)
            for mine in range(head * group, (head + 1) * group):
                for back in range(1, min(32, tail) + 1):
                    seen = n - back + 1
                    weights = (k[head, :seen] @ q[mine, -back] * self.scale).softmax(0)
                    votes += weights[: self.first] / group
            best = torch.stack([votes[max(0, i - 3) : i + 4].max() for i in range(self.first)])
            self.kept.append(sorted(best.topk(room - tail).indices.tolist()))


@dataclass
class Unit:
    """Folded tokens that come back together. parts: what is kept of them on the device, by name."""

    tokens: list[int]
    parts: dict[str, Tensor]
    mass: float = 0.0


@dataclass
class Folding(Layer):
    """First tokens, a recent window, and units of folded tokens, the best of which come back as far as there is room."""

    units: list[Unit] = field(default_factory=list)
    folded: int = 0

    turn_chunk = 1
    window, window_share, fold_chunk = 64, 1 / 3, 16

    def unit_nbytes(self) -> float:
        """On the device, over all heads."""
        raise NotImplementedError

    def make_unit(self, tokens: list[int], k: Tensor, surprisal: Tensor) -> Unit:
        raise NotImplementedError

    def merged(self, first: Unit, second: Unit) -> Unit:
        raise NotImplementedError

    def scores(self, q: Tensor, head: int) -> list[float]:
        """Of each unit, by the best of the queries q [group, D]."""
        raise NotImplementedError

    def part(self, name: str, head: int) -> Tensor:
        """What is kept of all units, [units, D]."""
        return torch.stack([unit.parts[name][head] for unit in self.units])

    def fold_oldest(self, allowance: float, k: Tensor, surprisal: Tensor) -> None:
        raise NotImplementedError

    def kept_nbytes(self) -> int:
        return self.window_nbytes(len(self.kept[0]))

    def fixed(self, tokens: int) -> float:
        """Bytes for all that stays between steps: half of the budget, or 32 tokens."""
        return min(self.cap(tokens), max(0.5 * self.cap(tokens), 32 * self.heads * self.token))

    def in_tokens(self, allowance: float) -> tuple[float, float]:
        """(room of fixed parts, cost of a unit), in tokens of a head with their positions."""
        return allowance / self.heads / (self.token + 4), self.unit_nbytes() / self.heads / (self.token + 4)

    def window_in(self, room: float) -> int:
        return max(PAGE, min(self.window, PAGE * (int(room * self.window_share) // PAGE)))

    def fold(self, tokens: list[int], k: Tensor, surprisal: Tensor) -> None:
        self.units.append(self.make_unit(tokens, k, surprisal))
        self.folded += len(tokens)

    def make_room(self, new: int, k: Tensor, v: Tensor, surprisal: Tensor) -> None:
        tokens = self.read + new
        allowance = self.fixed(tokens)
        widest = PAGE * int(allowance * self.window_share // self.window_nbytes(PAGE))
        most = max(PAGE, min(self.window, widest)) + self.fold_chunk
        while self.read - self.first >= self.fold_chunk:
            after = tokens - self.first
            if after <= most and self.kept_nbytes() + self.window_nbytes(after) <= allowance:
                break
            self.fold_oldest(allowance, k, surprisal)
        self.shrink(
            allowance - self.window_nbytes(tokens - self.first), 15 / 16 * (self.cap(tokens) - allowance) / self.heads
        )

    def units_nbytes(self) -> float:
        return self.unit_nbytes() * room_for(len(self.units))

    def shrink(self, room: float, limit: float) -> None:
        """Neighbours merge, the shortest together first; where none may, the oldest are not found any more."""
        longest = max(1, int(limit // (self.token + 8)))
        while self.units and self.kept_nbytes() + self.units_nbytes() > room:
            held = self.units_nbytes()
            excess = self.kept_nbytes() + held - room
            pairs = max(1, int(excess / max(1.0, held / len(self.units))) + 1)
            if not self.merge(pairs, longest):
                del self.units[:pairs]

    def merge(self, pairs: int, longest: int) -> bool:
        together = [len(a.tokens) + len(b.tokens) for a, b in zip(self.units, self.units[1:])]
        lefts: list[int] = []
        for left in sorted(range(len(together)), key=lambda i: together[i]):
            if len(lefts) == pairs or together[left] > longest:
                break
            if not {left - 1, left, left + 1} & set(lefts):
                lefts.append(left)
        for left in sorted(lefts, reverse=True):
            self.join(left)
        return bool(lefts)

    def join(self, left: int) -> None:
        self.units[left : left + 2] = [self.merged(*self.units[left : left + 2])]

    def unfolded(self, q: Tensor, k: Tensor, v: Tensor) -> list[list[int]]:
        free = self.cap(self.read) - self.kept_nbytes() - self.window_nbytes(self.read - self.first)
        slots = int((free - self.units_nbytes()) / (self.heads * (self.token + 8)))
        slots = min(slots // step_of(slots) * step_of(slots), room_for(self.folded))
        group, out = q.shape[0] // self.heads, []
        for head in range(self.heads):
            found: list[int] = []
            scores = self.scores(q[head * group : (head + 1) * group, 0], head)
            for place in sorted(range(len(scores)), key=lambda at: -scores[at]):
                if len(found) + len(self.units[place].tokens) > slots:
                    break
                found += self.units[place].tokens
            out.append(found)
        return out


@dataclass
class Quest(Folding):
    """Pages, of which the smallest and the largest number of each channel is known, in 8 bits."""

    def unit_nbytes(self) -> float:
        return self.heads * 2 * (self.dim + 2)

    def divide(self, q: Tensor, k: Tensor, v: Tensor, surprisal: Tensor) -> None:
        self.dim = k.shape[2]
        room, cost = self.in_tokens(self.fixed(self.read))
        window, around = self.window_in(room), self.fold_chunk + PAGE
        shorter = max(PAGE, window - PAGE)  # a page of memory for the index
        counted = max(shorter, min(self.window, room / 3) - PAGE)
        size = 16
        while True:
            for first, left in ((self.read - window, room - window), (self.read - shorter, room - counted)):
                if -(-(first - SINKS) // size) <= max(1, int(max(0.0, left - around) / cost)):
                    self.first = first
                    self.kept = [list(range(SINKS)) for _ in range(self.heads)]
                    for start in range(SINKS, first, size):
                        self.fold(list(range(start, min(start + size, first))), k, surprisal)
                    return
            size *= 2

    def make_unit(self, tokens: list[int], k: Tensor, surprisal: Tensor) -> Unit:
        page = k[:, tokens]
        return Unit(tokens, {"low": rounded(page.amin(1), 8), "high": rounded(page.amax(1), 8)})

    def merged(self, first: Unit, second: Unit) -> Unit:
        low = torch.minimum(first.parts["low"], second.parts["low"])
        high = torch.maximum(first.parts["high"], second.parts["high"])
        return Unit(first.tokens + second.tokens, {"low": rounded(low, 8), "high": rounded(high, 8)})

    def scores(self, q: Tensor, head: int) -> list[float]:
        """No key of a page can give a query more than this; heads of a group are compared by their probabilities over all pages."""
        low, high = self.part("low", head), self.part("high", head)
        bound = torch.maximum(q[:, None] * low, q[:, None] * high).sum(-1) * self.scale  # [group, pages]
        return bound.log_softmax(-1).amax(0).tolist()

    def fold_oldest(self, allowance: float, k: Tensor, surprisal: Tensor) -> None:
        self.fold(list(range(self.first, self.first + 16)), k, surprisal)
        self.first += 16


@dataclass
class SeKV(Folding):
    """Spans between surprising tokens, the strongest of which stay exact; a span's mean key in 4 bits, weighted by surprisal, says by its
    direction whether a query wants it."""

    level: float = 0.0
    """Surprisal from which on a token bounds a span, nats."""

    window, window_share, fold_chunk = 512, 1 / 6, 8
    shortest, longest = 4, 16

    def unit_nbytes(self) -> float:
        return self.heads * ((self.dim + 1) // 2 + 2) + 8

    def anchors_in(self, left: float) -> int:
        return PAGE * (int(0.1 * left) // PAGE)

    def left_in(self, room: float) -> float:
        return max(0.0, room - self.window_in(room) - self.fold_chunk - PAGE)

    def divide(self, q: Tensor, k: Tensor, v: Tensor, surprisal: Tensor) -> None:
        self.dim = k.shape[2]
        room, cost = self.in_tokens(self.fixed(self.read))
        left = self.left_in(room)
        self.first = self.read - self.window_in(room)
        text = surprisal[SINKS : self.first].tolist()
        anchors = self.anchors_in(left)
        most = max(1, min(int((left - anchors) / cost), len(text) // self.shortest))
        begins = self.begins(text, most)
        strong = sorted(begins[1:], key=lambda at: -text[at])[:anchors]
        self.kept = [sorted([*range(SINKS), *(SINKS + at for at in strong)]) for _ in range(self.heads)]
        for begin, end in zip(begins, [*begins[1:], len(text)]):
            inside = [SINKS + at for at in range(begin, end) if at not in strong]
            if inside:
                self.fold(inside, k, surprisal)

    def begins(self, text: list[float], most: int) -> list[int]:
        """First tokens of at most `most` spans: those that surprise most, no two of them near each other, then the middle of what is too
        long."""
        x = torch.tensor(text)
        natural = float(x.mean() + x.std(unbiased=False))
        self.level = math.nextafter(natural, math.inf)
        found = [0]
        for at in sorted(range(len(text)), key=lambda place: -text[place]):
            if text[at] <= natural:
                break
            if len(found) >= max(1, most * 3 // 5):
                self.level = text[at]
                break
            if all(abs(at - other) >= self.shortest for other in found) and len(text) - at >= self.shortest:
                found.append(at)
        while len(found) < most:
            found.sort()
            spans = [(end - begin, begin) for begin, end in zip(found, [*found[1:], len(text)])]
            size, begin = max(spans, key=lambda span: (span[0], -span[1]))
            if size <= self.longest:
                break
            places = range(begin + self.shortest, begin + size - self.shortest + 1)
            found.append(max(places, key=lambda at: text[at]))
        return sorted(found)

    def make_unit(self, tokens: list[int], k: Tensor, surprisal: Tensor) -> Unit:
        weights = surprisal[tokens]
        mass = float(weights.sum())
        weights = weights / mass if mass > 0 else torch.full_like(weights, 1 / len(tokens))
        return Unit(tokens, self.parts((k[:, tokens] * weights[:, None]).sum(1)), mass)

    def parts(self, mean: Tensor) -> dict[str, Tensor]:
        """What is kept of a span with this mean key."""
        return {"mean": rounded(mean, 4)}

    def merged(self, first: Unit, second: Unit) -> Unit:
        mass = first.mass + second.mass
        share = first.mass / mass if mass > 0 else len(first.tokens) / (len(first.tokens) + len(second.tokens))
        mean = first.parts["mean"] * share + second.parts["mean"] * (1 - share)
        return Unit(first.tokens + second.tokens, self.parts(mean), mass)

    def scores(self, q: Tensor, head: int) -> list[float]:
        mean = self.part("mean", head)
        return (q @ (mean / mean.norm(dim=-1, keepdim=True).clamp(min=1e-12)).T).amax(0).tolist()

    def fold_oldest(self, allowance: float, k: Tensor, surprisal: Tensor) -> None:
        """Eight tokens are cut as the prompt was, the span under way going on; where there are places, what surprises stays exact."""
        room = allowance / (self.heads * self.token + 4)
        places = max(0, self.anchors_in(self.left_in(room)) + SINKS - len(self.kept[0]))
        last = self.units[-1].tokens if self.units else [-1]
        going_on = last[-1] == self.first - 1
        size, span, goes_on = (len(last) if going_on else 0), [], going_on
        pieces: list[list[int]] = []
        for token in range(self.first, self.first + self.fold_chunk):
            surprising = float(surprisal[token]) >= self.level and size >= self.shortest
            if surprising or size >= self.longest:
                goes_on = goes_on and token > self.first
                if span:
                    pieces.append(span)
                span, size = [], 0
                if surprising and places:
                    places -= 1
                    for own in self.kept:
                        own.append(token)
                    continue
            span.append(token)
            size += 1
        if span:
            pieces.append(span)
        at = len(self.units)
        for piece in pieces:
            self.fold(piece, k, surprisal)
        self.first += self.fold_chunk
        if goes_on and pieces and len(last) + len(pieces[0]) <= self.longest:
            self.join(at - 1)


@dataclass
class Gated(SeKV):
    """Spans are scored by projections of queries and means with random numbers, one matrix for each query head, and by their sizes."""

    def divide(self, q: Tensor, k: Tensor, v: Tensor, surprisal: Tensor) -> None:
        heads, dim = q.shape[0], k.shape[2]
        random = torch.Generator().manual_seed(0)
        for _ in range(self.number + 1):
            numbers = torch.randn(heads, max(1, min(32, dim // 4)), dim, generator=random)
        self.gates = numbers / dim**0.5
        super().divide(q, k, v, surprisal)

    def unit_nbytes(self) -> float:
        return super().unit_nbytes() + 2 * len(self.gates)  # a norm in half precision for each query head

    def parts(self, mean: Tensor) -> dict[str, Tensor]:
        own = mean.repeat_interleave(len(self.gates) // self.heads, 0)
        lengths = (self.gates @ own[..., None])[..., 0].norm(dim=-1).clamp(1e-4, 6e4)
        return super().parts(mean) | {"lengths": lengths.half().float().view(self.heads, -1)}

    def scores(self, q: Tensor, head: int) -> list[float]:
        mean, lengths = self.part("mean", head), self.part("lengths", head)
        gates = self.gates.view(self.heads, len(q), *self.gates.shape[1:])[head]
        sizes = torch.tensor([float(len(unit.tokens)) for unit in self.units]).log()
        logits = [mean @ gate.T @ (gate @ query) / len(gate) ** 0.5 for query, gate in zip(q, gates)]
        return (torch.stack(logits) / lengths.T + sizes).amax(0).tolist()


METHODS: dict[str, type[Layer]] = {
    "streaming_llm": Streaming,
    "snapkv": Snap,
    "quest": Quest,
    "sekv": SeKV,
    "sekv, untrained": Gated,
}

__all__ = ["METHODS", "Layer"]
