"""CompressKV's semantic retrieval heads (Eq. 5), and the classic retrieval-head score beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.profiles.schema import RetrievalHeads

from .generation import CachedReader
from .measure import Measure, Outcome, Sums, agreed, reliability
from .needles import NeedleQuestion


@dataclass
class Step:
    """What the heads of every site looked at while one token was generated.

    mass: site -> attention on the answer span [Hq]. looked: site -> places of the most attended tokens [Hq, k], the
    first first.
    """

    mass: dict[int, Tensor]
    looked: dict[int, Tensor]
    token: int = -1


def recall(generated: Sequence[int], answer: Sequence[int]) -> float:
    """Share of the answer's tokens that were generated, each as often as it was (ROUGE-1 recall over tokens)."""
    made = Counter(generated)
    return sum(min(count, made[token]) for token, count in Counter(answer).items()) / len(answer)


def generate(reader: CachedReader, question: NeedleQuestion, k: int) -> list[Step]:
    """Greedy answer of as many tokens as the right one has; the reader has read the context."""
    inside = torch.tensor(question.evidence, dtype=torch.int64, device=reader.device)
    steps: list[Step] = []
    current = Step({}, {})

    def watch(site: int, weights: Tensor) -> None:
        last = weights[:, -1]
        current.mass[site] = last[:, inside].sum(-1)
        current.looked[site] = last.topk(min(k, last.shape[-1]), -1).indices

    feed = torch.tensor(question.ids, dtype=torch.int64, device="cpu")
    for _ in question.answer:
        current = Step({}, {})
        current.token = int(reader.read(feed, watch).argmax())
        steps.append(current)
        feed = torch.tensor([current.token], dtype=torch.int64, device="cpu")
    return steps


def answer_scores(
    steps: Sequence[Step], ids: Tensor, evidence: Sequence[int], site: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Semantic, classic top-1 and classic top-k scores [Hq] of a site in one test; ids [n] are the context's tokens.

    Semantic (Eq. 5): attention on the span, summed over the steps that generate a token of the span. Classic: steps whose
    generated token is the one that the head looked at, inside the span. All are divided by the number of steps.
    """
    span = torch.zeros(len(ids) + len(steps), dtype=torch.bool, device="cpu")
    span[list(evidence)] = True
    tokens = set(ids[list(evidence)].tolist())
    semantic, classic, classic_k = (
        torch.zeros(len(steps[0].mass[site]), dtype=torch.float32, device="cpu") for _ in range(3)
    )
    for step in steps:
        if step.token not in tokens:
            continue
        semantic += step.mass[site].cpu()
        looked = step.looked[site].cpu()
        known = looked.clamp(max=len(ids) - 1)
        hits = (looked < len(ids)) & span[known] & (ids[known] == step.token)
        classic += hits[:, 0]
        classic_k += hits.any(-1)
    return semantic / len(steps), classic / len(steps), classic_k / len(steps)


class SemanticRetrieval(Measure):
    """Scores of query heads over needle tests; a unit is one context with its questions."""

    name = "retrieval-heads"
    field = "retrieval_heads"

    @property
    def units(self) -> int:
        return len(self.subject.data.needles)

    def measure(self, unit: int, sums: Sums) -> None:
        """Read a context once, ask each question over its cache, and add the scores of the tests that pass."""
        test = self.subject.data.needles[unit]
        longest = max(len(question.ids) + len(question.answer) for question in test.questions)
        reader = CachedReader(self.subject.program, len(test.context) + longest)
        reader.read(test.context)
        for question in test.questions:
            reader.rewind(len(test.context))
            steps = generate(reader, question, self.settings.classic_top_k)
            got = recall([step.token for step in steps], question.answer)
            sums.add("tests", 1.0)
            sums.add("recall", got)
            sums.add("passed", float(got > self.settings.pass_recall))
            if got <= self.settings.pass_recall:
                continue
            for site in self.subject.program.sites:
                scores = answer_scores(steps, test.context, question.evidence, site.index)
                for kind, score in zip(("semantic", "classic", "classic_k"), scores):
                    sums.add(f"{kind}.{site.index}", score)
                if unit % 2:
                    sums.add(f"odd.{site.index}", scores[0])
            sums.add("odd", float(unit % 2))

    def agreement(self, sums: Sums) -> float | None:
        """Of the semantic scores of all heads."""
        passed, odd = sums.get("passed"), sums.get("odd")
        if passed is None or odd is None or not 0 < odd < passed:
            return None
        total = torch.cat([sums[f"semantic.{site.index}"] for site in self.subject.program.sites])
        half = torch.cat([sums[f"odd.{site.index}"] for site in self.subject.program.sites])
        return reliability((total - half) / (passed - odd), half / odd)

    def figures(self, sums: Sums) -> dict[str, float]:
        return {"passed": float(sums["passed"]), "tests": float(sums["tests"])}

    def finish(self, sums: Sums) -> Outcome:
        """Means over the passing tests; no section where the model passed none."""
        if not self.units or sums.get("tests") is None:
            return Outcome(None, note="no needle test fits the context: pass a larger --length")
        tests, passed = int(sums["tests"]), int(sums["passed"])
        mean = float(sums["recall"]) / tests
        if not passed:
            return Outcome(
                None,
                note=f"none of {tests} needle tests passed (mean recall {mean:.2f}, more than "
                f"{self.settings.pass_recall:g} counts), so retrieval heads cannot be told apart: use text in the model's "
                "language, a smaller --length, or a model that answers from its context",
            )
        rows = {kind: self._rows(sums, kind, passed) for kind in ("semantic", "classic", "classic_k")}
        section = RetrievalHeads(
            semantic=rows["semantic"],
            classic=rows["classic"],
            classic_top_k=rows["classic_k"],
            top_k=self.settings.classic_top_k,
            tests=tests,
            passed=passed,
            pass_recall=self.settings.pass_recall,
        )
        said = [f"{passed} of {tests} needle tests passed, mean recall {mean:.2f}", agreed(self.agreement(sums))]
        return Outcome(section, note="; ".join(filter(None, said)))

    def _rows(self, sums: Sums, kind: str, passed: int) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(round(value, 6) for value in (sums[f"{kind}.{site.index}"] / passed).clamp(0, 1).tolist())
            for site in self.subject.program.sites
        )
