"""SeKV's calibration, layer by layer: records of a few contexts, then each layer's router on them, then the rank gates of all layers.

No optimiser step runs the model. What interrupts the run loses at most the context or the layer that was at work.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from semkv.io.ranks import ALONE, Ranks
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.rank_gates import RankGates

from . import checkpoint as files
from . import losses
from .checkpoint import Checkpoint
from .contexts import SiteRecord, mass_of, read_context
from .data import CalibrationData
from .initialise import initialise
from .layer import layer_output, output_error
from .metrics import caught_counts, shares, zoom_counts
from .parameters import RouterParameters, routing_rows, straight_through, summaries
from .segmentation import Divider
from .settings import CalibrationSettings

Progress = Callable[[str, int, int, dict[str, float]], None]
"""Called with a phase (`teacher`, `train`), what is done and what there is to do, and the latest figures."""

CLIP = 1.0

SETTLING = 32
"""Steps on the thresholds alone."""


@dataclass
class Result:
    """A finished training. tensors: of the profile's `sekv` section, without its prefix. table: figures per site on the held-out
    contexts. history: mean figures of all sites after so many steps. steps: the most that a site took."""

    tensors: dict[str, Tensor]
    figures: dict[str, float]
    table: list[dict[str, float]]
    history: list[dict[str, float]]
    steps: int
    stopped_early: bool
    minutes: float


@dataclass(frozen=True)
class Lesson:
    """A record on the training device with what follows from it alone: mass and targets [Hq, T, S], mined [Hq, T], and the teacher's
    output [Hq, T, Dv]."""

    record: SiteRecord
    mass: Tensor
    targets: Tensor
    mined: Tensor
    output: Tensor

    @classmethod
    def of(cls, record: SiteRecord, settings: CalibrationSettings) -> Lesson:
        mass = mass_of(record.share, record.span, record.far)
        targets, mined = losses.zoom_targets(mass, record.far, settings)
        everything = torch.arange(len(record.where), dtype=torch.int64, device=mass.device)
        return cls(record, mass, targets, mined, layer_output(record, None, everything))


class Trainer:
    """Trains the `sekv` section of one annotated program on one set of data.

    identity: hash of everything that decides the result; an interrupted run is resumed only where it agrees. work: folder of records
    and finished layers; without one they lie in a temporary folder. ranks: share contexts, then sites; each keeps the records of its
    contexts, the first keeps the layers.
    """

    def __init__(
        self,
        program: Program,
        data: CalibrationData,
        settings: CalibrationSettings,
        *,
        identity: str,
        work: Path | None = None,
        progress: Progress | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.ranks = ranks
        self.program, self.data, self.settings, self.identity = program, data, settings, identity
        self.temporary = tempfile.TemporaryDirectory(prefix="semkv-") if work is None else None
        self.work = work or Path(self.temporary.name)
        self.progress = progress or (lambda *_: None)
        self.device = next((p.device for p in program.body.parameters()), torch.device("cpu"))
        self.sites = [site for site in program.sites if site.treatment == "method"]
        self.divide = Divider(program, settings)

    def run(self) -> Result:
        """Train to the end, from where an earlier run stopped."""
        started, earlier = time.monotonic(), self.ranks.from_first(self._minutes)
        self._read_contexts()
        trained = []
        for place, made in enumerate(self._train_sites()):
            trained.append(made)
            self.progress("train", place + 1, len(self.sites), trained[-1][1][-1])
            self._keep_minutes(earlier + (time.monotonic() - started) / 60)
        tensors = {f"{part}.{site.index}": made[part] for site, (made, _) in zip(self.sites, trained) for part in made}
        gates, ranks = self._train_gates([made["router"] for made, _ in trained])
        tensors |= {f"gates.{name}": tensor for name, tensor in gates.state_dict().items()}
        table = [
            {"site": float(site.index), **rows[-1], **rank, "threshold": float(made["threshold"].mean())}
            for site, (made, rows), rank in zip(self.sites, trained, ranks)
        ]
        for row in table:
            row.pop("step")
        steps = max(int(rows[-2]["step"]) for _, rows in trained)
        figures = {
            name: sum(row[name] for row in table) / len(table)
            for name in ("caught", "coarse", "oracle", "key_loss", "value_loss")
        }
        return Result(
            {name: tensor.detach().cpu() for name, tensor in tensors.items()},
            figures,
            table,
            _means([rows[:-1] for _, rows in trained]),
            steps,
            any(rows[-2]["step"] < self.settings.max_steps for _, rows in trained),
            earlier + (time.monotonic() - started) / 60,
        )

    # -- contexts ----------------------------------------------------------------------------------------------------

    def _read_contexts(self) -> None:
        """Records of all contexts and sites, each in a file; those of an earlier run stay."""
        for number, _ in self.ranks.deal(range(self._contexts), self._read_context):
            self.progress("teacher", number + 1, self._contexts, {})

    @property
    def _contexts(self) -> int:
        return len(self.data.training) + len(self.data.held_out)

    def _read_context(self, number: int) -> list[None]:
        paths = {site.index: self._path(number, site.index) for site in self.sites}
        if not all(path.exists() for path in paths.values()):
            budget = (
                self.settings.budgets[number % len(self.settings.budgets)]
                if number < len(self.data.training)
                else self.settings.budgets[0]
            )
            ids = (self.data.training + self.data.held_out)[number].to(self.device)

            def keep(index: int, record: SiteRecord) -> None:
                files.write(paths[index], Checkpoint(record.tensors(), {"identity": self.identity}))

            read_context(self.program, ids, self.settings, self.divide, budget, keep)
        return [None]

    def _path(self, number: int, site: int) -> Path:
        return self.work / f"context-{number}-{site}.safetensors"

    def _read(self, number: int, site: int) -> dict[str, Tensor]:
        saved = files.read(self._path(number, site), self.identity)
        assert saved is not None
        return saved.tensors

    @property
    def _own(self) -> range:
        """The contexts that this process has read."""
        return range(self.ranks.rank, self._contexts, self.ranks.count)

    def _records(self, site: int, to: int) -> list[SiteRecord]:
        """A site's records of all contexts, in the process `to`."""
        found = self.ranks.send({number: self._read(number, site) for number in self._own}, to)
        known = {number: tensors for part in found for number, tensors in part.items()}
        return [SiteRecord(**known[number]).to(self.device) for number in sorted(known)]

    # -- a site ------------------------------------------------------------------------------------------------------

    def _train_sites(self) -> Iterator[tuple[dict[str, Tensor], list[dict[str, float]]]]:
        """Of each site in turn router, offset and threshold, and its held-out figures: a row per evaluation, then one of the best
        parameters."""
        paths = [self.work / f"site-{site.index}.safetensors" for site in self.sites]
        known = self.ranks.from_first(lambda: [files.read(path, self.identity) for path in paths])
        for saved in known:
            if saved is None:
                break
            yield saved.tensors, saved.state["rows"]
        done = next((place for place, saved in enumerate(known) if saved is None), len(known))
        for start in range(done, len(self.sites), self.ranks.count):
            turn = self.sites[start : start + self.ranks.count]
            records = [self._records(site.index, to) for to, site in enumerate(turn)]
            for place, (tensors, state) in self.ranks.deal(range(len(turn)), partial(self._site, turn, records)):
                if self.ranks.first:
                    files.write(paths[start + place], Checkpoint(tensors, state | {"identity": self.identity}))
                yield tensors, state["rows"]

    def _site(
        self, turn: Sequence[AttentionSite], records: Sequence[Sequence[SiteRecord]], place: int
    ) -> list[tuple[dict[str, Tensor], dict[str, list[dict[str, float]]]]]:
        """Of the site at a place of a turn, from its own records."""
        first, own = len(self.data.training), records[place]
        tensors, state = train_site(turn[place], own[:first], own[first:], self.settings)
        return [({name: tensor.cpu() for name, tensor in tensors.items()}, state)]

    # -- rank gates --------------------------------------------------------------------------------------------------

    def _train_gates(self, routers: Sequence[Tensor]) -> tuple[RankGates, list[dict[str, float]]]:
        """Eq. 14 and the second term of Eq. 15 on pieces of all sites and sizes; figures per site on the last context."""
        s = self.settings
        dim = max(routing_rows(site, s) for site in self.sites)
        gates = RankGates(s.max_rank, dim, s.gate_hidden, torch.Generator(device="cpu").manual_seed(s.seed)).to(
            self.device
        )
        count = len(self.data.training)
        pieces = {
            (number, place): {name: x.to(self.device) for name, x in found.items()}
            for number, (place, found) in self.ranks.deal(range(self._contexts), partial(self._pieces_of, routers))
        }
        optimiser = torch.optim.AdamW(gates.parameters(), lr=s.gate_rate, weight_decay=s.weight_decay)
        generator = torch.Generator(device="cpu").manual_seed(s.seed)
        for step in range(s.gate_steps):
            for group in optimiser.param_groups:
                group["lr"] = s.gate_rate * rate_factor(step, s.gate_steps, s.warmup)
            at = [
                int(torch.randint(n, (), generator=generator, dtype=torch.int64, device="cpu"))
                for n in (count, len(self.sites))
            ]
            loss = sum(
                gate_terms(gates, pieces[at[0], at[1]], s)[0].values(),
                start=torch.zeros((), dtype=torch.float32, device=self.device),
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        with torch.no_grad():
            ranks = [
                gate_terms(gates, pieces[count + len(self.data.held_out) - 1, place], s)[1]
                for place in range(len(self.sites))
            ]
        return gates, ranks

    def _pieces_of(self, routers: Sequence[Tensor], number: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Of a context that is trained on or looked at, by site."""
        if number < len(self.data.training) or number == self._contexts - 1:
            for place, site in enumerate(self.sites):
                pieces = self._pieces(number, site, routers[place])
                yield place, {name: x.cpu() for name, x in pieces.items()}

    def _pieces(self, number: int, site: AttentionSite, router: Tensor) -> dict[str, Tensor]:
        record = SiteRecord(**self._read(number, site.index)).to(self.device)
        averaged = summaries(router.to(self.device), record.piece_k).unflatten(0, (site.kv_heads, -1)).mean(1)
        return {
            "key": record.key_sigma,
            "value": record.value_sigma,
            "summary": averaged,
            "size": record.pieces.float().log(),
        }

    # -- interruptions -----------------------------------------------------------------------------------------------

    def _minutes(self) -> float:
        saved = files.read(self.work / "minutes.safetensors", self.identity)
        return 0.0 if saved is None else float(saved.state["minutes"])

    def _keep_minutes(self, minutes: float) -> None:
        if self.ranks.first:
            files.write(
                self.work / "minutes.safetensors", Checkpoint({}, {"identity": self.identity, "minutes": minutes})
            )


def gate_terms(
    gates: RankGates, pieces: dict[str, Tensor], settings: CalibrationSettings
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The losses of the rank gates on one site's pieces, weighted, and mean rank and relative error of keys and of values."""
    terms, figures = {}, {}
    for kind in ("key", "value"):
        sigma = pieces[kind]
        made = gates(sigma, pieces["summary"], pieces["size"].expand(sigma.shape[:2]), kind)
        lost, rank = losses.reconstruction(made, sigma), losses.retained_rank(made, sigma)
        terms[kind] = settings.lambda_recon * lost + settings.lambda_budget * settings.beta * rank
        figures[f"{kind}_rank"] = float(rank.detach()) / sigma.shape[0]
        figures[f"{kind}_loss"] = float(lost.detach()) / sigma.shape[0]
    return terms, figures


def train_site(
    site: AttentionSite, records: Sequence[SiteRecord], held_out: Sequence[SiteRecord], settings: CalibrationSettings
) -> tuple[dict[str, Tensor], dict[str, list[dict[str, float]]]]:
    """The best `router`, `offset` and `threshold` of a site by the attention that they catch on the held-out records.

    rows: `caught`, `coarse`, `oracle` after so many steps; the last row has the other figures of the best ones.
    """
    device = records[0].q.device
    parameters = RouterParameters(site, settings).to(device)
    initialise(parameters, records, site.scale, settings)
    lessons = [Lesson.of(record, settings) for record in records]
    optimiser = torch.optim.AdamW(parameters.groups(settings), lr=settings.learning_rate, betas=(0.9, 0.95))
    generator = torch.Generator(device="cpu").manual_seed(settings.seed + site.index)
    best: dict[str, Tensor] = {}
    rows: list[dict[str, float]] = []
    stale = 0
    for step in range(settings.max_steps + 1):
        if step % settings.evaluation_interval == 0 or step == settings.max_steps:
            rows.append({"step": float(step), **shares([caught_counts(parameters, one, settings) for one in held_out])})
            if not best or rows[-1]["caught"] > max(row["caught"] for row in rows[:-1]):
                best = {name: tensor.detach().clone() for name, tensor in parameters.state_dict().items()}
                stale = 0
            else:
                stale += 1
            if stale >= settings.patience and 2 * step >= settings.max_steps:
                break
        if step == settings.max_steps:
            break
        for group in optimiser.param_groups:
            group["lr"] = (
                settings.learning_rate * rate_factor(step, settings.max_steps, settings.warmup) * group["factor"]
            )
        lesson = lessons[step % len(lessons)]
        picked = torch.randperm(len(lesson.record.where), generator=generator, dtype=torch.int64, device="cpu")
        loss = torch.stack(
            list(router_terms(parameters, lesson, picked[: settings.batch].to(device), step, settings).values())
        ).sum()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.parameters(), CLIP)
        optimiser.step()
    parameters.load_state_dict(best)
    settle_thresholds(parameters, lessons, site.kv_heads, settings)
    best = {name: tensor.detach() for name, tensor in parameters.state_dict().items()}
    counts = [caught_counts(parameters, one, settings) | zoom_counts(parameters, one, settings) for one in held_out]
    rows.append({"step": rows[-1]["step"], **shares(counts)})
    return best, {"rows": rows}


def settle_thresholds(
    parameters: RouterParameters, lessons: Sequence[Lesson], kv_heads: int, settings: CalibrationSettings
) -> None:
    """Move the thresholds, those of a query group together, to where the output error and the budget loss balance. The order of spans,
    by which the best router was chosen, stays."""
    moved = torch.zeros(kv_heads, requires_grad=True, dtype=torch.float32, device=parameters.threshold.device)
    optimiser = torch.optim.Adam([moved], lr=0.0)
    groups = len(parameters.threshold) // kv_heads
    for step in range(SETTLING):
        record = lessons[step % len(lessons)].record
        rows = torch.arange(step % 2, len(record.where), 2, dtype=torch.int64, device=moved.device)
        margins = parameters.margins(record).detach()[:, rows] - moved.repeat_interleave(groups)[:, None, None]
        zoomed, far = straight_through(margins), record.far[rows]
        share = (zoomed * far).sum((1, 2)) / far.sum().clamp(min=1)
        error = output_error(layer_output(record, zoomed, rows), lessons[step % len(lessons)].output[:, rows])
        for group in optimiser.param_groups:
            group["lr"] = 0.5 * rate_factor(step, SETTLING, settings.warmup)
        optimiser.zero_grad()
        (error + settings.lambda_budget * share.sum()).backward()
        optimiser.step()
    with torch.no_grad():
        parameters.threshold.add_(moved.repeat_interleave(groups))


def router_terms(
    parameters: RouterParameters, lesson: Lesson, rows: Tensor, step: int, settings: CalibrationSettings
) -> dict[str, Tensor]:
    """The weighted losses of some of a lesson's queries, int64 [b]."""
    record = lesson.record
    far, mined, mass = record.far[rows], lesson.mined[:, rows], lesson.mass[:, rows]
    scores = parameters.relevance(record.q[:, rows], record.mean_k, record.log_size)
    gate = scores - parameters.offset[:, None, None]
    # The offset is trained by the zoom loss alone: it says what a gate of one half means, not how much to zoom.
    zoomed = straight_through(scores - (parameters.offset.detach() + parameters.threshold)[:, None, None])
    wanted = losses.zoom(gate, lesson.targets[:, rows], mined, far, settings.positive_weight)
    share = (zoomed * far).sum((1, 2)) / far.sum().clamp(min=1)
    return {
        "output": output_error(layer_output(record, zoomed, rows), lesson.output[:, rows]),
        "zoom": settings.lambda_zoom * wanted,
        "rank": settings.lambda_rank * losses.ranking(scores, mass, mined, far),
        "budget": budget_weight(step, settings) * share.sum(),
    }


def rate_factor(step: int, steps: int, warmup: float) -> float:
    """Factor on the learning rate: linear warm-up over a share of the steps, then cosine decay to zero."""
    warm = warmup * steps
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1.0, steps - warm)))


def budget_weight(step: int, settings: CalibrationSettings) -> float:
    """lambda_3 at a step: from 0 to its target over the first half, constant from there on."""
    return settings.lambda_budget * min(1.0, 2 * step / settings.max_steps)


def _means(histories: Sequence[Sequence[dict[str, float]]]) -> list[dict[str, float]]:
    """Mean figures of all sites at every evaluation; a site that stopped counts with what it had last."""
    longest = max(histories, key=len)
    made = []
    for place, row in enumerate(longest):
        rows = [history[min(place, len(history) - 1)] for history in histories]
        made.append(
            {"step": row["step"]} | {name: sum(r[name] for r in rows) / len(rows) for name in row if name != "step"}
        )
    return made
