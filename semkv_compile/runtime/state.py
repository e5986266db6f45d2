"""The state of a batch of conversations: what `prefill` makes, `extend` and `generate` go on from."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from semkv.errors import ConfigError, InputError, StateError
from semkv.ir.memory import Entries
from semkv.ir.site import AttentionSite
from semkv.runtime.decode.join import stack_rows
from semkv.runtime.modes import undisturbed
from semkv.runtime.placement import Placement
from semkv.runtime.prompt.content import UNKNOWN, Content, Contents
from semkv.runtime.recurrent import keep_states, stacked_states
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.state_file import read_state, write_state
from semkv.runtime.store.site_memory import SiteMemory


@dataclass(frozen=True)
class Stats:
    """Traffic since prefill, over the rows of a state.

    steps: forward calls of the row with the most. moved_bytes_per_step: host to device, mean. overlap: of what steps
    unfolded, the share of bytes that was there from the step before; 0 where nothing stays between steps. peak_bytes: the
    largest device residency of a row's budgeted stores in any step. peak_share: the largest share of its budget that a row, or one
    store of it, held in any step. device_share, attended_share: the largest part of a store's full KV that it had on the device, and
    that its attention read, in any step; device_share_mean, attended_share_mean: over stores and steps; 0 before the first step.
    excess_share, excess_share_mean: likewise, of what a store held beyond its cap, where tokens that follow a prompt stay; else 0.
    zoom_rate:
    per site, float32 [Hq], the share of its spans that each query head unfolded; empty where nothing was folded. alpha: standard
    deviations of surprisal above its mean from which a token bounds a span, in the layer that can afford the fewest; infinite where none
    does, None where surprisal does not decide.
    """

    steps: int
    moved_bytes_per_step: float
    peak_bytes: int
    peak_share: float
    overlap: float
    zoom_rate: dict[int, Tensor]
    short_rows: int = 0
    device_share: float = 0.0
    attended_share: float = 0.0
    device_share_mean: float = 0.0
    attended_share_mean: float = 0.0
    excess_share: float = 0.0
    excess_share_mean: float = 0.0
    alpha: float | None = None


@dataclass
class Turn:
    """One call of `generate`.

    rows, contents: of a prompt or turn whose tokens are more than ids, those of each row, int64 [n], and what they are besides; else None.
    unread: what each row reads first, int64 [n] each, where that is not the call's ids themselves. seen: columns of the call's ids that
    were read. finished: bool [B], the rows that ended; None where they cannot, or before the first token. keeps_prompt: `prompt` is to be
    kept: the state after the prompts that differ, and the place of each row among them.
    """

    rows: list[Tensor] | None = None
    contents: list[Content] | None = None
    unread: list[Tensor] | None = None
    seen: int = 0
    finished: Tensor | None = None
    keeps_prompt: bool = False
    prompt: tuple[State, list[int]] | None = None


class Watch(Protocol):
    """What is told of each layer's turn, while it is set as `State.watch` of a state of one row."""

    def attended(
        self, site: AttentionSite, owner: bool, q: Tensor, k: Tensor, positions: Tensor, parts: Sequence[SiteMemory]
    ) -> None:
        """`site`, the `owner` of its store or not, has chosen what it reads for q [Hq, T, D] at `positions` [T], with the new keys k
        [Hkv, T, D] in its memory, `parts` in the order of its heads."""


class State(Contents):
    """Rows of one compiled model, each with its own memory and length; independent of every other state.

    `logits` [B, vocab] are those after the last token of each row. `pending` int64 [B, 1] is the last token that `generate`
    made, read at the start of the next turn. `watch`: is told what layers read. A state belongs to the model, method
    and budget that made it, and to one thread at a time. `turn`: of the `generate` call that runs on it.
    """

    # what `generate` asks of a cache
    is_compileable = is_croppable = False
    is_linear = (False,)  # of each layer, whether it holds one state for all tokens

    def __init__(self, placement: Placement, rows: list[RowMemory], logits: Tensor) -> None:
        placement.check_rows(len(rows))
        self.placement = placement
        self.rows = rows
        self.logits = logits
        self.turn: Turn | None = None
        self.pending: Tensor | None = None
        self.watch: Watch | None = None
        self.released = False
        self.failures: dict[int, Exception] | None = None
        """By row, why it left the step that runs; None: a row that fails ends the step."""
        self._ids: Tensor | None = None
        self._surprisal: Tensor | None = None
        program = placement.program
        self._owners = {store.index for store in program.stores}
        self._user = threading.RLock()

    # -- what people ask -----------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> list[int]:
        """Tokens so far, per row."""
        return [row.tokens for row in self.rows]

    @property
    def ids(self) -> list[Tensor]:
        """The text of each row, int64 [n]: the tokens that it has read, and the pending one."""
        read = [row.text.ids for row in self.rows]
        return read if self.pending is None else [torch.cat(pair) for pair in zip(read, self.pending.cpu())]

    @property
    def next_places(self) -> list[int]:
        """The place of the next token of each row: how many it has, the pending one among them."""
        return [length + (self.pending is not None) for length in self.lengths]

    @property
    def next_rotary(self) -> list[int]:
        """The rotary position of that token, in all axes."""
        return [place + row.turned for place, row in zip(self.next_places, self.rows)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest row, under the name that Hugging Face caches give it."""
        return max(self.lengths, default=0)

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.placement.budget.dtype

    @property
    def full_bytes(self) -> int:
        """Bytes of the full KV of the budgeted stores, over the rows: the budget's denominator."""
        stores = self.placement.budgeted or self.placement.program.stores
        return sum(self.placement.budget.full_bytes(store, row.tokens) for row in self.rows for store in stores)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes now, over the rows, measured from the tensors that exist.

        device: what the budget counts, between steps (all stores where there is no budget), with charged notes. peak: the sum over rows of
        the largest residency of a step so far. workspace: unfolded spans that stay between steps. window: sliding-window
        stores, which the budget does not count. resident: folded tokens of layers that have not left the device yet
        (`CompileConfig(offload="progressive")`), beside what the budget counts. reserved: device memory allocated ahead.
        host, disk: folded tokens that wait there, the tables of both in memory; of rows that are exact still, what their method
        will need. floor: of `device`, what rows hold above the fraction of their length because of the budget's floor. excess: of
        `device`, what stores hold beyond their caps, where tokens that follow a prompt stay. recurrent: states of recurrent layers and
        short convolutions, and the keys of the model's own indexers, which no budget counts.
        """
        names = (
            "device",
            "peak",
            "workspace",
            "window",
            "resident",
            "reserved",
            "host",
            "disk",
            "floor",
            "excess",
            "recurrent",
        )
        out = dict.fromkeys(names, 0)
        for row in self.rows:
            for memory in row.memories():
                where = "window" if memory.site.treatment == "window" else "device"
                out[where] += memory.fixed_nbytes
                out["resident"] += memory.resident_nbytes
                out["reserved"] += memory.reserved_nbytes
                disk = memory.spans.disk_nbytes if memory.spans is not None else 0
                out["disk"] += disk
                out["host"] += memory.host_nbytes - disk
                out["workspace"] += memory.workspace_nbytes
            out["device"] += row.charged_nbytes
            out["peak"] += row.traffic.peak_bytes
            out["host"] += 0 if row.past is None else row.past.nbytes
            out["floor"] += row.above_fraction_nbytes
            out["excess"] += row.excess_nbytes
            out["recurrent"] += sum(x.nbytes for states in row.recurrent.values() for x in states)
        out["device"] += out["workspace"]
        out["peak"] = max(out["peak"], out["device"])
        return {
            name: round(nbytes) for name, nbytes in out.items()
        }  # processes that share heads count parts of what these have in common

    @property
    def stats(self) -> Stats:
        traffic = [row.traffic for row in self.rows]
        steps = sum(t.steps for t in traffic)
        moved, held = sum(t.moved_bytes for t in traffic), sum(t.held_bytes for t in traffic)
        most = max((t.steps for t in traffic), default=0)
        full = max(1, sum(t.full_bytes for t in traffic))
        zooms: dict[int, Tensor] = {}
        for site in sorted({site for t in traffic for site in t.zooms}):
            counts = [t.zooms[site] for t in traffic if site in t.zooms]
            unfolded, taken = torch.tensor(counts, dtype=torch.float32, device="cpu").sum(0)
            zooms[site] = unfolded / taken.clamp(min=1)
        return Stats(
            steps=most,
            moved_bytes_per_step=moved / max(1, steps),
            peak_bytes=max((t.peak_bytes for t in traffic), default=0),
            peak_share=max((t.peak_share for t in traffic), default=0.0),
            overlap=held / max(1, moved + held),
            zoom_rate=zooms,
            short_rows=sum(row.is_short for row in self.rows),
            device_share=max((t.device_share for t in traffic), default=0.0),
            attended_share=max((t.attended_share for t in traffic), default=0.0),
            device_share_mean=sum(t.device_bytes for t in traffic) / full,
            attended_share_mean=sum(t.attended_bytes for t in traffic) / full,
            excess_share=max((t.excess_share for t in traffic), default=0.0),
            excess_share_mean=sum(t.excess_bytes for t in traffic) / full,
            alpha=max((b.alpha for row in self.rows for b in row.boundaries()), default=None),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all tiers of all rows as one file; `CompiledModel.load_state` reads it."""
        with self.in_use():
            self.check_whole()
            write_state(path, self.placement, self.rows, self.logits, self.pending)

    @classmethod
    def load(cls, path: str | os.PathLike[str], placement: Placement) -> State:
        """The state in a file that `save` wrote, of a model compiled as this `placement` says; `ArtifactError` for any other."""
        rows, logits, pending = read_state(path, placement)
        state = cls(placement, rows, logits)
        state.pending = pending
        return state

    # -- copies --------------------------------------------------------------------------------------------------------

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While it is entered, other threads that enter it are refused with `StateError`; the same thread may enter again."""
        if not self._user.acquire(blocking=False):
            raise StateError(
                "another thread is using this state: a state is one conversation and goes on one way at a time; give each thread its "
                "own copy (state.fork()), or wait for the other to end"
            )
        try:
            if self.released:
                raise StateError(
                    "this state was released, its memory is gone: read the text again, or go on from a copy that was made before "
                    "(state.fork())"
                )
            yield
        finally:
            self._user.release()

    def release(self) -> None:
        """Let go of all memory of this state now, whoever still holds it: each later use is a `StateError`. Copies are not touched.
        Calling it again does nothing; `StateError` while another thread uses the state."""
        if self.released:
            return
        with self.in_use():
            self.rows, self.logits, self.pending, self._ids, self._surprisal = (
                [],
                self.logits[:0].clone(),
                None,
                None,
                None,
            )
            self.released = True

    def fork(self) -> State:
        """An independent copy: either may go on without the other noticing."""
        return self.select(list(range(len(self.rows))))

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        return self.fork()

    def __copy__(self) -> NoReturn:
        raise StateError("a shallow copy of a state would share its memory: state.fork() makes an independent one")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(
            "states are not pickled: state.save(path) writes one, compiled.load_state(path) reads it in this or another process"
        )

    @undisturbed
    def select(self, rows: Sequence[int] | Tensor) -> State:
        """A state of the given rows, copied; a row may be taken several times. `InputError` where there is none, or not that one."""
        rows = rows.tolist() if isinstance(rows, Tensor) else rows
        if not isinstance(rows, (list, tuple)) or any(isinstance(x, bool) or not isinstance(x, int) for x in rows):
            raise InputError(f"select({rows!r}): expected a list of whole numbers, such as [0, 0, 1]")
        with self.in_use():
            self.check_whole()
            wrong = [row for row in rows if not -len(self.rows) <= row < len(self.rows)]
            if wrong or not rows:
                said = f"row {wrong[0]}" if wrong else "no rows"
                raise InputError(f"select: {said} of a state whose rows are 0 to {len(self.rows) - 1}")
            rows = list(rows)
            copy = State(self.placement, [self.rows[row].clone() for row in rows], self.logits[rows].clone())
            copy.pending = None if self.pending is None else self.pending[rows].clone()
            return copy

    def chunk_limit(self) -> int:
        """The most tokens that one step may add within the budget of every row."""
        return min(row.chunk_limit() for row in self.rows)

    def outgrow(self, more: int) -> None:
        """Methods take over the rows that `more` tokens take beyond the budget's floor."""
        for row in self.rows:
            row.outgrow(more)

    def exact_tokens(self, most: int) -> int:
        """Of `most` tokens, those that may follow before a method has anything to do with any of the rows."""
        return min(min(most, row.exact_tokens) for row in self.rows)

    def alike(self, more: int) -> bool:
        """Whether `more` tokens of each row may run in the same steps as they would if the row were alone."""
        return more == 1 or len({min(more, row.exact_tokens) for row in self.rows}) == 1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the rows by copies of those at `beam_idx` int64 [B], in place, as beam search asks."""
        chosen = self.select(beam_idx.tolist())
        self.rows, self.logits = chosen.rows, chosen.logits

    @undisturbed
    def reserve(self, tokens: int) -> None:
        """Make room now for `tokens` more tokens per row: while they follow, nothing is folded or dropped, and no tensor changes its size.

        What would have to leave a row's window within the budget leaves now. The budget counts the room from now on, so that fewer folded
        tokens are unfolded meanwhile. Afterwards, or with a call of more tokens than are left of it, memory is managed as ever. Copies
        keep it, saved states do not; another call replaces it, and 0 gives it up.

        Raises
        ------
        ConfigError: no whole number from 0 on. BudgetError: the budget has no room for so many; the state is as it was.
        """
        if not isinstance(tokens, int) or tokens < 0:
            raise ConfigError(f"reserve({tokens!r}): expected a number of tokens from 0 on")
        with self.in_use():
            self.check_room([tokens] * len(self.rows))
            rows = [row.clone() for row in self.rows]  # an error leaves the state as it was
            for row in rows:
                row.reserve(tokens)
            self.rows = rows

    @property
    def reserved(self) -> int:
        """Tokens that may follow in each row before anything is folded, dropped or changes its size."""
        return min((memory.reserved for row in self.rows for memory in row.memories()), default=0)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def check_whole(self) -> None:
        """Raise `StateError` where a step has begun that did not end: it failed in a layer, or another thread is in it."""
        if any(row.stepping for row in self.rows):
            raise StateError(
                "a step of this state did not come to its end, so that some layers or rows hold tokens that others do not: go on "
                "from a copy that was made before (state.fork()), or read the text again"
            )

    def check_room(self, tokens: Sequence[int]) -> None:
        """Raise `StateError` or `BudgetError`, before anything is changed, where the rows cannot take so many tokens each."""
        self.check_whole()
        for row, more in zip(self.rows, tokens, strict=True):
            row.check_length(row.tokens + more)

    def with_pending(self, rows: list[Tensor]) -> tuple[list[Tensor], int]:
        """Tokens int64 [n] to add to each row, the pending ones before them, and how many those are in a row."""
        if self.pending is None:
            return rows, 0
        return [torch.cat(pair) for pair in zip(self.pending.to(rows[0].device), rows)], self.pending.shape[1]

    def begin(self, other: State) -> None:
        """Take the rows of `other`, which is used up: this one has read nothing yet."""
        self.rows, self.logits = other.rows, other.logits

    def begin_step(self, ids: Tensor, content: Content | None = None) -> None:
        """Note the tokens `ids` [B, T] about to run and their surprisal: the first follows from `logits`, the rest come later. content:
        what those of a single row are besides ids."""
        self.check_room([ids.shape[1]] * len(self.rows))
        self.outgrow(ids.shape[1])
        self.content = content
        self._ids = ids.cpu()  # once, for all rows
        for index, row in enumerate(self.rows):
            with self.apart(index):
                row.begin_step(ids[index])
        if not self.placement.plan.reads_surprisal:
            self._surprisal = torch.zeros(ids.shape, dtype=torch.float32, device="cpu")
            return
        first = torch.nn.functional.cross_entropy(
            self.logits.float(), ids[:, 0], reduction="none", ignore_index=UNKNOWN
        )
        self._surprisal = torch.cat(
            [first[:, None], torch.zeros(ids.shape[0], ids.shape[1] - 1, dtype=torch.float32, device=first.device)], 1
        ).cpu()

    @contextmanager
    def apart(self, row: int) -> Iterator[None]:
        """What a row alone does in a step; where rows fail for themselves (`failures`), an error in it leaves the others to go on."""
        try:
            yield
        except Exception as error:
            if self.failures is None:
                raise
            self.failures[row] = error

    def steps_as_graph(self, tokens: int) -> bool:
        """Whether the step of so many tokens that has begun is one graph of tensors."""
        steps = self.placement.steps
        if tokens > 1 or steps is None or self.watch is not None:
            return False
        for index, row in enumerate(self.rows):
            if not self.failures or index not in self.failures:
                with self.apart(index):
                    row.fold_ahead()
        own, ranks, plan = steps.serves(self.rows), self.placement.program.ranks, self.placement.plan
        if ranks is None or not plan.together or not plan.at_site:
            return own
        # What sites exchange comes within one kind of step, and behind the other: all processes take the same.
        return bool(ranks.reduce(torch.tensor([own], dtype=torch.int64, device="cpu"), "min"))

    def graph_step(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The step that has begun, over ids int64 [B, 1] at `positions` int64 [B, 1], as one graph -> hidden [B, 1, H]."""
        steps = self.placement.steps
        assert steps is not None
        if self.placement.program.batched:
            return steps.step(self.rows, ids, positions, self._ids, self.failures)
        rows = [slice(row, row + 1) for row in range(len(self.rows))]
        return torch.cat([steps.step(self.rows[r], ids[r], positions[r], self._ids[r]) for r in rows])

    def alone(self, row: int) -> State:
        """One row in the step that has begun: for programs that take one at a time."""
        one = State(self.placement, [self.rows[row]], self.logits[row : row + 1])
        one._ids = self._ids[row : row + 1]
        return one

    def end_step(self, ids: Tensor, logits: Tensor) -> None:
        """Count the tokens `ids` [B, T] in, given the logits [B, T|1, vocab] after them."""
        self.logits = logits[:, -1]
        tokens = ids.shape[1]
        if tokens > 1 and self.placement.plan.reads_surprisal:  # of the first it was known before
            self._surprisal[:, 1:] = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none", ignore_index=UNKNOWN
            )
        turned = self.turned_behind([row.tokens + tokens for row in self.rows], tokens)
        for index, row in enumerate(self.rows):
            if self.failures and index in self.failures:
                continue
            row.tokens += tokens
            row.turned = turned[index]
            row.text.add(self._ids[index], self._surprisal[index])
            row.traffic.steps += 1
            row.stepping = False

    def turned_rows(self) -> list[int]:
        """See `semkv.runtime.prompt.content.Contents`."""
        return [row.turned for row in self.rows]

    def record(
        self, site: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor
    ) -> None:  # pragma: no cover - protocol
        raise RuntimeError("a state serves extend and decode programs; prefill programs take a recorder")

    def read_states(self, site: int) -> list[Tensor]:
        """See `semkv.ir.memory.States.read_states`."""
        return stacked_states(self.rows, site)

    def write_states(self, site: int, states: Sequence[Tensor]) -> None:
        """See `semkv.ir.memory.States.write_states`."""
        keep_states(self.rows, site, states)

    def take_choice(self, site: int, places: Tensor) -> None:
        """See `semkv.ir.memory.States.take_choice`."""
        for index, row in enumerate(self.rows):
            row.chosen[site] = places[index]

    def observe(self, site: int, hidden: Tensor) -> None:
        """See `semkv.ir.memory.Observer.observe`."""
        for index, row in enumerate(self.rows):
            row.observe(site, hidden[index])

    def entries(self, site: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Entries:
        """See `semkv.ir.memory.Memory.entries`."""
        place = self.placement.program.sites[site]
        owner = site in self._owners
        rows = []
        for index, row in enumerate(self.rows):
            # what a row that has failed reads, and gives, is nobody's
            made = Entries([k[index]], [v[index]], [positions[index : index + 1]])
            with self.apart(index):
                if not self.failures or index not in self.failures:
                    made = row.entries(
                        place,
                        owner,
                        q[index],
                        k[index],
                        v[index],
                        positions[index],
                        self._ids[index],
                    )
            rows.append(made)
        if self.watch is not None:
            (row,) = self.rows
            self.watch.attended(place, owner, q[0], k[0], positions[0], row.stores[place.store])
        return stack_rows(rows, place, q.shape[2])

    def __repr__(self) -> str:
        parts = ", ".join(f"{tier} {size}" for tier, size in self.nbytes.items() if size)
        return f"State(rows={len(self.rows)}, tokens={self.lengths}, method={self.placement.method!r}, bytes: {parts})"


__all__ = ["State", "Stats"]
