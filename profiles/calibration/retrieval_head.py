"""SpeContext's retrieval head, distilled from the model's own attention (SpeContext Sec. 4.3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from semkv.errors import ConfigError
from semkv.ir.graph import shape_of
from semkv.passes.insert_retrieval_head import token_embedding
from semkv.passes.residual_stream import stream_before_sites
from semkv.passes.retrieval_graph import EMBEDDING, FREQUENCIES, queries_and_keys
from semkv.profiles.schema.retrieval_head import (
    PREFIX,
    RetrievalHeadSection,
    Yarn,
    group_scores,
    matched_heads,
    rotary_frequencies,
)

from .interpreter import SiteCall, full_attention, run_body
from .measure import Building, Outcome, Subject, Sums
from .weights import weight_blocks

WARMUP = 0.1
SINKS = 4
UNSEEN = -1e9
"""Logit of a token that is later than the query: finite, so that gradients are."""

THETA = 1e7
"""Base of the head's rotary positions: most of its dimensions hardly turn, as what is asked for may stand anywhere."""


class Distillation(Building):
    """Optimiser steps first, a sample at a time, then what the head finds on held-out samples.

    The teacher is the model: per KV head, the largest attention weight over layers and the query group on every token that is
    neither among the first nor near the query, for the decode steps' queries. What exceeds `head_floor` times an even share is
    to be foretold: the loss is the cross-entropy of that and the head's weights on all earlier tokens, the largest of its query
    group as at run time (`group_scores`), weighted by how much attention there is. Memory is one layer's attention of a block
    of queries at a time, and one [Hkv, steps, T] target.
    """

    name = "retrieval-head"
    field = "retrieval_head"
    prefix = PREFIX

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        body, settings = subject.program.body, self.settings
        self.embedding = token_embedding(body)[1]
        self.stream = stream_before_sites(body)
        self.rounds = [sample for _ in range(settings.head_rounds) for sample in range(len(subject.data.measured))]
        self.section = self._section()
        self.weights: dict[str, Tensor] = {}
        self.taught: dict[int, tuple[Tensor, Tensor | None]] = {}

    @property
    def units(self) -> int:
        return len(self.rounds) + len(self.subject.data.held_out)

    def measure(self, unit: int, sums: Sums) -> None:
        """Train on a sample, or with training done, look what the head finds in one."""
        if not self.weights:
            self._start(sums)
        if unit < len(self.rounds):
            self._train(self._sample(unit), unit, sums)
        else:
            self._look(self.subject.data.held_out[unit - len(self.rounds)][1], sums)

    def stage(self, unit: int) -> int:
        """Training, then held-out samples."""
        return self.building if unit < self.building else self.units

    @property
    def building(self) -> int:
        """Training goes on from the sample before; what it learns from is the model's, and shared."""
        return len(self.rounds)

    def prepare(self, unit: int) -> tuple[Tensor, Tensor | None]:
        """Target and features of the sample of a training unit, on the CPU."""
        target, features = self._teach(self._sample(unit))
        return target.cpu(), None if features is None else features.cpu()

    def prepared(self, unit: int, found: tuple[Tensor, Tensor | None]) -> None:
        """See `prepare`."""
        device = self.subject.device
        self.taught[unit] = found[0].to(device), None if found[1] is None else found[1].to(device)

    def _sample(self, unit: int) -> Tensor:
        """The ids that a training unit reads, in an order that each round draws."""
        count = len(self.subject.data.measured)
        order = torch.randperm(count, generator=self._generator(unit // count), dtype=torch.int64, device="cpu")
        return self.subject.data.measured[int(order[unit % count])][1]

    def figures(self, sums: Sums) -> dict[str, float]:
        loss, caught = sums.get("loss"), sums.get("caught")
        found = {} if loss is None else {"loss": float(loss)}
        return found if caught is None else found | {"caught": float(caught / sums["best"].clamp(min=1e-12))}

    # -- the head --------------------------------------------------------------------------------------------------------

    def _section(self) -> RetrievalHeadSection:
        settings = self.settings
        owners = self.subject.owners
        kv_heads = max(site.kv_heads for site in owners)
        widest = next(site for site in owners if site.kv_heads == kv_heads)
        sites = self._feature_sites() if settings.head_input == "features" else ()
        shapes = [shape_of(self.stream[site]) for site in sites]
        features = sum(int(shape[-1]) for shape in shapes if shape is not None)
        hidden = self.embedding.shape[1]
        groups, dim = settings.head_group or widest.group_size, settings.head_dim or widest.key_dim
        trained = settings.length + settings.steps
        inputs, norms = hidden + features, hidden + features
        return RetrievalHeadSection(
            hidden=hidden,
            feature_sites=sites,
            features=features,
            q_heads=groups * kv_heads,
            kv_heads=kv_heads,
            head_dim=dim + dim % 2,
            theta=THETA,
            yarn=Yarn(positions=trained),
            parameters=(groups + 1) * kv_heads * (dim + dim % 2) * inputs + norms,
            whole=self._whole_model(),
            share=settings.sketch_share,
            steps=len(self.rounds) * settings.head_steps,
        )

    def extended(self) -> RetrievalHeadSection:
        """The section with YaRN's extension from the trained length to the model's context, which needs no training."""
        trained = self.settings.length + self.settings.steps
        factor = max(1.0, (self.subject.program.max_positions or trained) / trained)
        return self.section.model_copy(update={"yarn": Yarn(factor=factor, positions=trained)})

    def _feature_sites(self) -> tuple[int, ...]:
        """Those that were asked for, else EAGLE-3's: a low, a middle and a high layer; of few layers the second."""
        count, asked = len(self.subject.program.sites), self.settings.head_sites
        sites = asked or ((2, count // 2, count - 3) if count >= 8 else (min(1, count - 1),))
        missing = [site for site in sites if site not in self.stream]
        if missing:
            raise ConfigError(
                f"no tensor of this model holds all that enters site {missing[0]}: set head_input='embedding', or head_sites to "
                f"some of {sorted(self.stream)}"
            )
        return tuple(dict.fromkeys(sites))

    def _whole_model(self) -> int:
        """Parameters of a one-layer model of this architecture: embedding, a mean layer and the vocabulary projection."""
        program = self.subject.program
        head = {p.data_ptr(): p.numel() for p in program.head.parameters()} if program.head is not None else {}
        tied = self.embedding.data_ptr() in head
        body = sum(p.numel() for p in program.body.parameters()) - self.embedding.numel()
        whole = self.embedding.numel() * (2 if tied else 1) + body // len(program.sites)
        return whole + sum(count for place, count in head.items() if place != self.embedding.data_ptr())

    def _start(self, sums: Sums) -> None:
        """Initial weights, or those of an interrupted run."""
        generator = self._generator(-1)
        self.weights = {EMBEDDING: self.embedding.detach()}
        for name, shape in self.section.tensor_shapes().items():
            short = name.removeprefix(PREFIX)
            made = (
                torch.ones(shape, dtype=torch.float32, device="cpu")
                if len(shape) == 1
                else torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * shape[1] ** -0.5
            )
            saved = sums.get(f"weight.{short}")
            self.weights[short] = (made if saved is None else saved.clone()).requires_grad_()
        self.optimizer = torch.optim.AdamW(self._trained.values(), lr=self.settings.head_rate, weight_decay=0.01)
        for short, parameter in self._trained.items():
            if sums.get(f"weight.{short}") is not None:
                # Cloned: products differ in their last bits where tensors of a file are aligned in another way.
                self.optimizer.state[parameter] = {
                    "step": sums["step"].clone(),
                    "exp_avg": sums[f"first.{short}"].clone(),
                    "exp_avg_sq": sums[f"second.{short}"].clone(),
                }

    @property
    def _trained(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.weights.items() if name != EMBEDDING}

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator(device="cpu").manual_seed(self.settings.seed * 1_000_003 + number + 1)

    # -- a sample ----------------------------------------------------------------------------------------------------------

    def _teach(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """(the target [Hkv, steps, T], features float32 [T, F] of the token before each) of one sample."""
        n, context = len(ids), len(ids) - self.settings.steps
        heads, device = self.section.kv_heads, self.subject.device
        target = torch.zeros(heads, n - context, n, dtype=torch.float32, device=device)
        served = {site.index for site in self.subject.program.sites if site.treatment == "method"}

        def attend(call: SiteCall) -> Tensor:
            if call.site in served:
                for start, weights in weight_blocks(call, context, self.settings.block):
                    rows = slice(start - context, start - context + weights.shape[1])
                    best = weights.unflatten(0, (call.k.shape[0], -1)).amax(1)
                    target[:, rows] = torch.maximum(target[:, rows], matched_heads(best, heads))
            return full_attention(call)

        watched = {self.stream[site].name: site for site in self.section.feature_sites}
        seen: dict[int, Tensor] = {}
        with torch.no_grad():
            positions = torch.arange(n, dtype=torch.int64, device=device)
            run_body(self.subject.program.body, ids.to(device), positions, attend, watched, seen)
        asked = positions[context:, None]
        target.masked_fill_((positions < SINKS) | (positions > asked - self.settings.head_near), 0.0)
        if not seen:
            return target, None
        features = torch.cat([seen[site].float() for site in self.section.feature_sites], -1)
        return target, torch.nn.functional.pad(features, (0, 0, 1, 0))[:-1]

    def _scores(
        self, ids: Tensor, features: Tensor | None, rows: Tensor, section: RetrievalHeadSection | None = None
    ) -> Tensor:
        """[Hkv, len(rows), T] of the queries at `rows`, as `group_scores`; later tokens are out of reach."""
        positions = torch.arange(len(ids), dtype=torch.int64, device=self.embedding.device)
        given, section = None if features is None else features[None], section or self.section
        weights = self.weights | {FREQUENCIES: rotary_frequencies(section)[0].to(positions.device)}
        q, k = queries_and_keys(section, weights, ids[None].to(positions.device), positions[None], given, rows)
        logits = q[0].unflatten(0, (self.section.kv_heads, -1)) @ k[0][:, None].transpose(2, 3)
        return group_scores(logits.masked_fill(positions > rows[:, None], UNSEEN))

    def _train(self, ids: Tensor, unit: int, sums: Sums) -> None:
        """`head_steps` optimiser steps, each on some of the sample's queries in an order fixed by the seed."""
        target, features = self.taught.pop(unit, None) or self._teach(ids)
        target = (target - self.settings.head_floor / len(ids)).clamp(min=0)
        context, steps = len(ids) - self.settings.steps, self.settings.head_steps
        order = torch.randperm(
            self.settings.steps, generator=self._generator(unit + 1000), dtype=torch.int64, device="cpu"
        ).to(target.device)
        total = len(self.rounds) * steps
        for number, part in enumerate(order.tensor_split(steps)):
            done = unit * steps + number
            rate = min(1.0, (done + 1) / (WARMUP * total)) * 0.5 * (1 + math.cos(math.pi * done / total))
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.head_rate * rate
            wanted = target[:, part]
            foretold = self._scores(ids, features, context + part)
            loss = -(wanted * foretold).sum() / wanted.sum().clamp(min=1e-6)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        sums.tensors["loss"] = loss.detach().double().cpu()
        sums.tensors["step"] = torch.tensor(float((unit + 1) * steps), dtype=torch.float32, device="cpu")
        for short, parameter in self._trained.items():
            state = self.optimizer.state[parameter]
            sums.tensors[f"weight.{short}"] = parameter.detach().cpu().clone()
            sums.tensors[f"first.{short}"] = state["exp_avg"].cpu().clone()
            sums.tensors[f"second.{short}"] = state["exp_avg_sq"].cpu().clone()

    @torch.no_grad()
    def _look(self, ids: Tensor, sums: Sums) -> None:
        """Attention that the best tokens of a held-out sample hold, and those that the head chooses."""
        target, features = self._teach(ids)
        context = len(ids) - self.settings.steps
        count = max(1, round(self.section.share * context))
        rows = torch.arange(context, len(ids), dtype=torch.int64, device=target.device)
        weights = self._scores(ids, features, rows, self.extended()).exp()
        near = torch.arange(len(ids), dtype=torch.int64, device=target.device)
        resident = (near < SINKS) | (near > rows[:, None] - self.settings.head_near)
        weights = weights.masked_fill(resident, -1.0)
        target = (target - self.settings.head_floor / len(ids)).clamp(min=0)
        sums.add("best", target.topk(count, -1).values.sum())
        sums.add("caught", target.gather(-1, weights.topk(count, -1).indices).sum())
        one = weights.mean(0).topk(count, -1).indices.expand(target.shape[0], -1, -1)
        sums.add("caught_batch", target.gather(-1, one).sum())

    def finish(self, sums: Sums) -> Outcome:
        """The section, its tensors in half precision, and what was found."""
        if not self.weights:
            self._start(sums)
        best = sums["best"].clamp(min=1e-12)
        found = {name: round(min(1.0, float(sums[name] / best)), 6) for name in ("caught", "caught_batch")}
        section = self.extended().model_copy(update=found)
        tensors = {f"{PREFIX}{name}": x.detach().to("cpu", torch.float16) for name, x in self._trained.items()}
        saved = 1 - section.parameters / section.whole
        note = (
            f"{section.parameters:,} parameters, {saved:.1%} fewer than the one-layer model of {section.whole:,}; finds "
            f"{section.caught:.0%} of the attention that {section.share:.0%} of the tokens can hold"
        )
        return Outcome(section, tensors, note)
