"""The training loop of SeKV's calibration: one sequence a step, the base model frozen, resumable to the same result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semkv.ir.program import Program

from . import checkpoint as files
from . import losses
from .checkpoint import Checkpoint
from .context_cache import ContextCache
from .contexts import Context, map_tensors, read_context
from .data import CalibrationData
from .initialise import initialise
from .metrics import COVERAGE_SHARE, caught_counts, caught_shares, ratios, zoom_counts
from .parameters import SekvParameters
from .schedule import budget_weight, plan, rate_factor, stage
from .segmentation import Divider
from .settings import CalibrationSettings
from .student import SiteTrace, run_student

Progress = Callable[[str, int, int, dict[str, float]], None]
"""Called with a phase (`teacher`, `train`), what is done and what there is to do, and the latest figures."""

CACHE_BYTES = 4 << 30
HELD_BYTES = 2 << 30
"""Contexts that stay in memory: of training, and held-out ones; the rest is read anew."""

INITIAL_CONTEXTS = 8
CLIP = 1.0


@dataclass
class Result:
    """A finished training: the best parameters and what they reach on the held-out contexts."""

    parameters: SekvParameters
    losses: dict[str, float]
    table: list[dict[str, float]]
    history: list[dict[str, float]]
    steps: int
    stopped_early: bool
    minutes: float


class Trainer:
    """Trains `SekvParameters` of one annotated program on one set of data.

    identity: hash of everything that decides the result; a checkpoint is resumed only where it agrees.
    """

    def __init__(
        self,
        program: Program,
        data: CalibrationData,
        settings: CalibrationSettings,
        *,
        identity: str,
        checkpoint: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.program, self.data, self.settings = program, data, settings
        self.identity, self.path = identity, checkpoint
        self.progress = progress or (lambda *_: None)
        self.device = next((p.device for p in program.body.parameters()), torch.device("cpu"))
        self.store = program.dtype if program.dtype.itemsize <= 4 else torch.float32
        self.divide = Divider(program, settings)
        self.parameters = SekvParameters(program, settings).to(self.device)
        self.optimiser = torch.optim.AdamW(
            self.parameters.groups(settings), lr=settings.learning_rate, betas=(0.9, 0.95)
        )
        self.step = 0
        self.best: dict[str, Tensor] = {}
        self.best_loss = float("inf")
        self.stale = 0
        self.stopped = False
        self.history: list[dict[str, float]] = []
        self.earlier_minutes = 0.0
        self.contexts = ContextCache(CACHE_BYTES)
        self.held_out = ContextCache(HELD_BYTES)

    # -- contexts ----------------------------------------------------------------------------------------------------

    def context(self, length: int, index: int) -> Context:
        """The context of a training sequence, from the cache where it is there; floats are float32."""
        ids = self.data.training[length][index]
        return self._ready(self.contexts.get((length, index), lambda: self._read(ids, index)))

    def _held_out(self) -> Iterator[Context]:
        """The held-out contexts, one at a time."""
        for index, ids in enumerate(self.data.held_out):
            yield self._ready(self.held_out.get((len(ids), index), lambda ids=ids: self._read(ids, 0)))  # type: ignore[misc]

    def read(self, ids: Tensor) -> Context:
        """A sequence outside the training data as a context, divided for the first budget."""
        return self._ready(self._read(ids, 0))

    def _read(self, ids: Tensor, index: int) -> Context:
        budget = self.settings.budgets[index % len(self.settings.budgets)]
        made = read_context(self.program, ids.to(self.device), self.settings, self.divide, budget, self.store)
        return map_tensors(made, lambda t: t.cpu())

    def _ready(self, context: Context) -> Context:
        return map_tensors(context, lambda t: (t.float() if t.is_floating_point() else t).to(self.device))

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Train to the end, from the checkpoint where there is one."""
        started = time.monotonic()
        saved = files.read(self.path, self.identity) if self.path is not None else None
        for index, _ in enumerate(self._held_out()):
            self.progress("teacher", index + 1, len(self.data.held_out), {})
        if saved is None:
            self._start()
        else:
            self._restore(saved)
        self._train(started)
        best = {name: tensor.to(self.device) for name, tensor in self.best.items()}
        self.parameters.load_state_dict(best)
        figures, table = self.evaluate()
        return Result(
            parameters=self.parameters,
            losses=figures,
            table=table,
            history=self.history,
            steps=self.step,
            stopped_early=self.stopped,
            minutes=self._minutes(started),
        )

    def _start(self) -> None:
        length = self.settings.lengths[0]
        count = min(INITIAL_CONTEXTS, len(self.data.training[length]))
        contexts = []
        for index in range(count):
            contexts.append(self.context(length, index))
            self.progress("teacher", index + 1, count, {})
        initialise(self.parameters, contexts, self.settings)
        self._evaluate_and_keep()

    def _train(self, started: float) -> None:
        counts = {length: len(sequences) for length, sequences in self.data.training.items()}
        for step, (length, indices) in enumerate(plan(self.settings, counts)):
            if step < self.step or self.stopped:
                continue
            figures = self._one_step(length, indices)
            self.step = step + 1
            self.progress("train", self.step, self.settings.max_steps, figures)
            if self.step % self.settings.evaluation_interval == 0 or self.step == self.settings.max_steps:
                self._evaluate_and_keep()
                if self.path is not None:
                    files.write(self.path, self._checkpoint(started))
            if stage(self.step, self.settings) != stage(step, self.settings):
                self.contexts.clear()

    def _one_step(self, length: int, indices: list[int]) -> dict[str, float]:
        """The student reads the first context; the losses on teacher queries are means over all of them.

        Gradients are summed up context by context, so that one context and its graph are in memory.
        """
        factor = rate_factor(self.step, self.settings)
        for group in self.optimiser.param_groups:
            group["lr"] = self.settings.learning_rate * factor * group["factor"]
        weight = budget_weight(self.step, self.settings)
        self.optimiser.zero_grad()
        figures: dict[str, float] = {}
        for turn, index in enumerate(indices):
            context = self.context(length, index)
            terms = {name: value / len(indices) for name, value in self._routing_terms(context).items()}
            if not turn:
                terms |= self._student_terms(context)[0]
            total = self._total(terms, weight)
            if total.requires_grad:
                total.backward()
            for name, value in {"loss": total, **terms}.items():
                figures[name] = figures.get(name, 0.0) + float(value.detach())
        torch.nn.utils.clip_grad_norm_(self.parameters.parameters(), CLIP * len(self.parameters.router))
        self.optimiser.step()
        return figures

    # -- losses ------------------------------------------------------------------------------------------------------

    def _student_terms(self, context: Context) -> tuple[dict[str, Tensor], dict[int, SiteTrace]]:
        """The losses that need the student, before their weights, and its decisions."""
        student, traces = run_student(self.program, context, self.parameters)
        zero = torch.zeros((), dtype=torch.float32, device=self.device)
        reconstruction, budget = zero, zero
        for index, trace in traces.items():
            spans = context.sites[index].spans
            reconstruction = reconstruction + losses.reconstruction(trace.key_gates, spans.key_sigma)
            reconstruction = reconstruction + losses.reconstruction(trace.value_gates, spans.value_sigma)
            budget = budget + losses.budget(trace.zoom, (trace.key_gates, trace.value_gates), self.settings.beta)
        terms = {"distill": losses.distillation(context.log_probs, student), "recon": reconstruction, "budget": budget}
        return terms, traces

    def _routing_terms(self, context: Context) -> dict[str, Tensor]:
        """Eq. 13 and the ranking term, on the teacher's queries: their targets are the teacher's too."""
        zoom = torch.zeros((), dtype=torch.float32, device=self.device)
        rank = torch.zeros((), dtype=torch.float32, device=self.device)
        for index, site in enumerate(context.sites):
            if site.spans is None:
                continue
            summaries = self.parameters.summaries(index, site.spans.mean_k)
            relevance = self.parameters.relevance(index, site.q, summaries, site.spans.log_size)
            logits = relevance - self.parameters.offset[str(index)][:, None, None]
            targets, mined = losses.zoom_targets(site.mass, self.settings)
            zoom = zoom + losses.zoom(logits, targets, mined, self.settings.positive_weight)
            rank = rank + losses.ranking(relevance, site.mass, mined)
        return {"zoom": zoom, "rank": rank}

    def _total(self, terms: dict[str, Tensor], weight: float) -> Tensor:
        """The weighted sum of the losses that are there."""
        s = self.settings
        weights = {
            "distill": 1.0,
            "zoom": s.lambda_zoom,
            "rank": s.lambda_rank,
            "recon": s.lambda_recon,
            "budget": weight,
        }
        return torch.stack([weights[name] * value for name, value in terms.items()]).sum()

    @torch.no_grad()
    def evaluate(self) -> tuple[dict[str, float], list[dict[str, float]]]:
        """Mean losses on the held-out contexts (the budget loss at full weight), and figures per site."""
        sums: dict[str, float] = {}
        counts: dict[int, list[dict[str, float]]] = {}
        for context in self._held_out():
            terms, traces = self._student_terms(context)
            terms |= self._routing_terms(context)
            terms["total"] = self._total(terms, self.settings.lambda_budget)
            for name, value in terms.items():
                sums[name] = sums.get(name, 0.0) + float(value) / len(self.data.held_out)
            for index, trace in traces.items():
                site = context.sites[index]
                seen = zoom_counts(site, trace, self.settings)
                seen |= caught_counts(self.parameters, context, index, COVERAGE_SHARE, self.settings)
                counts.setdefault(index, []).append(seen)
        table = [
            {"site": float(index), **ratios(rows), **caught_shares(rows)} for index, rows in sorted(counts.items())
        ]
        return sums, table

    def _evaluate_and_keep(self) -> None:
        figures, _ = self.evaluate()
        self.history.append({"step": float(self.step), **figures})
        if figures["total"] < self.best_loss:
            self.best_loss, self.stale = figures["total"], 0
            self.best = {name: tensor.detach().cpu().clone() for name, tensor in self.parameters.state_dict().items()}
        elif 2 * self.step >= self.settings.max_steps:
            self.stale += 1
            self.stopped = self.stale >= self.settings.patience

    # -- interruptions -----------------------------------------------------------------------------------------------

    def _minutes(self, started: float) -> float:
        return self.earlier_minutes + (time.monotonic() - started) / 60

    def _checkpoint(self, started: float) -> Checkpoint:
        tensors = {f"now.{name}": tensor for name, tensor in self.parameters.state_dict().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        for number, values in self.optimiser.state_dict()["state"].items():
            for name, tensor in values.items():
                tensors[f"optimiser.{number}.{name}"] = tensor
        state: dict[str, Any] = {
            "identity": self.identity,
            "step": self.step,
            "best_loss": self.best_loss,
            "stale": self.stale,
            "stopped": self.stopped,
            "history": self.history,
            "minutes": self._minutes(started),
        }
        return Checkpoint(tensors, state)

    def _restore(self, saved: Checkpoint) -> None:
        def part(prefix: str) -> dict[str, Tensor]:
            return {n.removeprefix(prefix): t for n, t in saved.tensors.items() if n.startswith(prefix)}

        self.parameters.load_state_dict(part("now."))
        self.best = part("best.")
        packed = self.optimiser.state_dict()
        packed["state"] = {}
        for name, tensor in part("optimiser.").items():
            number, field = name.split(".", 1)
            packed["state"].setdefault(int(number), {})[field] = tensor
        self.optimiser.load_state_dict(packed)
        state = saved.state
        self.step, self.best_loss, self.stale = state["step"], state["best_loss"], state["stale"]
        self.stopped, self.history, self.earlier_minutes = state["stopped"], state["history"], state["minutes"]
