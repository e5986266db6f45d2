"""The token sketch: residual codebooks of each KV head's keys, and how much far attention codes of 1, 2, 3 ... bytes find."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.profiles.schema import SketchSection
from semkv.profiles.schema.codes import Codebooks

from .codebooks import balance_of, learn, space_of
from .interpreter import SiteCall, full_attention
from .measure import Measure, Outcome, Subject, Sums
from .weights import weight_blocks

SINKS, WINDOW = 4, 32
"""First and last tokens that are exact in every method: attention to them needs no code."""


PARTS = ("mean", "balance", "root", "back", "books", "scale", "value_mean", "value_books", "value_scale")
"""Of each site, as they are named in a profile."""


def chosen_tokens(scores: Tensor, kv_heads: int, count: int) -> Tensor:
    """Bool [Hkv, T, n]: the `count` best tokens of each KV head by the maximum over its query heads of scores [Hq, T, n].

    scores: of a softmax, so that query heads can be compared.
    """
    best = scores.unflatten(0, (kv_heads, -1)).amax(1)
    return torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(count, -1).indices, True)


def caught_mass(weights: Tensor, chosen: Tensor) -> Tensor:
    """Attention [Hq, T, n] on chosen tokens [Hkv, T, n], summed over the group and the queries: [Hkv]."""
    return (weights.unflatten(0, (chosen.shape[0], -1)) * chosen[:, None]).sum((1, 2, 3))


class Sketch(Measure):
    """Keys and queries of the samples first, then the codebooks of one site after the other, then what they find on held-out samples."""

    name = "sketch"
    field = "sketch"
    prefix = "sketch."

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.sites = {site.index: site for site in subject.program.sites if site.treatment == "method"}
        self.known: dict[int, Codebooks] = {}

    @property
    def rank(self) -> int:
        """R of the largest site."""
        return self.settings.directions(max(site.key_dim for site in self.sites.values()))

    @property
    def stages(self) -> int:
        """S of all sites, by the largest."""
        return self.settings.key_bytes(max(site.key_dim for site in self.sites.values()))

    @property
    def samples(self) -> list[Tensor]:
        """What codebooks are learned from: records as well as the text, of which prose has few numbers and names."""
        return [*(ids for _, ids in self.subject.data.measured), *self.subject.data.records]

    @property
    def units(self) -> int:
        return len(self.samples) + len(self.sites) + len(self.subject.data.held_out)

    def stage(self, unit: int) -> int:
        """Samples, sites, held-out samples."""
        samples = len(self.samples)
        ends = (samples, samples + len(self.sites), self.units)
        return next(end for end in ends if unit < end)

    def measure(self, unit: int, sums: Sums) -> None:
        samples = self.samples
        learned = len(samples) + len(self.sites)
        if unit < len(samples):
            self._pass(samples[unit], sums, self._collect)
        elif unit < learned:
            self._learn(list(self.sites)[unit - len(samples)], sums)
        else:
            self._pass(self.subject.data.held_out[unit - learned][1], sums, self._catch)

    def _pass(self, ids: Tensor, sums: Sums, look) -> None:
        context = len(ids) - self.settings.steps

        def attend(call: SiteCall) -> Tensor:
            if call.site in self.sites:
                look(call, context, sums)
            return full_attention(call)

        self.subject.run(ids, attend)

    def _collect(self, call: SiteCall, context: int, sums: Sums) -> None:
        """Keys of the context, evenly spread, and the second moment of queries that have far tokens, pooled over each group: of all
        positions, as rotary embedding turns both with them."""
        kv_heads, site = call.k.shape[0], call.site
        q = call.q[:, min(SINKS + WINDOW, context) :].double().unflatten(0, (kv_heads, -1)).flatten(1, 2)
        sums.add(f"queries.{site}", q.transpose(1, 2) @ q / q.shape[1])
        first = min(SINKS, context - 1)
        count = min(-(-self.settings.sketch_vectors // len(self.samples)), context - first)
        places = torch.linspace(first, context - 1, count, dtype=torch.float64, device="cpu").long()
        sums.append(f"keys.{site}", call.k[:, places.to(call.k.device)].half())
        sums.append(f"values.{site}", call.v[:, places.to(call.v.device)].half())

    def _learn(self, site: int, sums: Sums) -> None:
        """The site's tensors as the profile stores them; its keys and values are not needed after that."""
        keys, values = (sums.pop(f"{name}.{site}").float() for name in ("keys", "values"))
        mean = keys.mean(1)
        moment = (keys - mean[:, None]).mT @ (keys - mean[:, None])
        root, back = (x.half() for x in space_of(sums[f"queries.{site}"], moment, min(keys.shape[-1], self.rank)))
        generator = torch.Generator(device="cpu").manual_seed(self.settings.seed + site)
        x = (keys - mean[:, None]) @ root.float()
        books, scale = learn(x, self.stages, self.settings.sketch_rounds, generator)
        own = values.mean(1)
        others = learn(values - own[:, None], self.settings.sketch_value_stages, self.settings.sketch_rounds, generator)
        balance = balance_of(sums[f"queries.{site}"], (keys - mean[:, None]).square().mean(1))
        made = dict(zip(PARTS, (mean, balance, root, back, books, scale, own, *others), strict=True))
        for name, tensor in made.items():
            sums.append(f"sketch.{name}.{site}", tensor)

    def _books(self, site: int, sums: Sums, device: torch.device) -> Codebooks:
        if site not in self.known:
            stored = SketchSection(stages=self.stages, rank=self.rank, form=2, caught=())
            heads = list(range(self.sites[site].kv_heads))
            tensors = {name: sums[name].to(device) for name in (f"sketch.{part}.{site}" for part in PARTS)}
            self.known[site] = stored.codebooks(tensors, site, heads, stored.stages)
        return self.known[site]

    def _catch(self, call: SiteCall, context: int, sums: Sums) -> None:
        """Far attention that the best tokens hold, and that the tokens whose codes score best hold, by stages."""
        kv_heads, device, site = call.k.shape[0], call.k.device, call.site
        books = self._books(site, sums, device)
        far = slice(min(SINKS, context - 1), max(context - WINDOW, min(SINKS, context - 1) + 1))
        count = min(max(1, round(self.settings.sketch_share * context)), far.stop - far.start)
        codes = books.encode(call.k[:, far])
        tables = books.tables(call.q[:, context:].unflatten(0, (kv_heads, -1)).flatten(1, 2)) * call.scale
        tables = tables.unflatten(1, (-1, call.q.shape[1] - context))  # [Hkv, G, T, S, V]
        best = torch.zeros(kv_heads, dtype=torch.float32, device=device)
        caught = torch.zeros(books.stages, kv_heads, dtype=torch.float32, device=device)
        for start, weights in weight_blocks(call, context, self.settings.block):
            weights = weights[..., far]
            best += caught_mass(weights, chosen_tokens(weights, kv_heads, count))
            asked = tables[:, :, start - context : start - context + weights.shape[1]]
            logits = torch.zeros_like(weights).unflatten(0, (kv_heads, -1))
            for stage in range(books.stages):
                at = codes[:, None, None, :, stage].long().expand(*asked.shape[:3], -1)
                logits += asked[:, :, :, stage].gather(-1, at)
                chosen = chosen_tokens(torch.softmax(logits.flatten(0, 1), -1), kv_heads, count)
                caught[stage] += caught_mass(weights, chosen)
        sums.add(f"best.{site}", best)
        sums.add(f"caught.{site}", caught)

    def finish(self, sums: Sums) -> Outcome:
        """The codebooks, and what they caught."""
        tensors: dict[str, Tensor] = {}
        rows: list[tuple[float, ...]] = []
        for site in self.subject.program.sites:
            at = site.index
            if at not in self.sites:
                rows.append(())
                continue
            for part in PARTS:
                tensors[f"sketch.{part}.{at}"] = sums[f"sketch.{part}.{at}"]
            shares = (sums[f"caught.{at}"] / sums[f"best.{at}"].clamp(min=1e-12)).clamp(0, 1)
            tensors[f"sketch.caught.{at}"] = shares.T.float().contiguous()
            rows.append(tuple(round(value, 6) for value in shares[-1].tolist()))
        section = SketchSection(
            stages=self.stages,
            value_stages=self.settings.sketch_value_stages,
            rank=self.rank,
            balanced=True,
            form=2,
            caught=tuple(rows),
            share=self.settings.sketch_share,
            sinks=SINKS,
            window=WINDOW,
        )
        return Outcome(section, tensors)
