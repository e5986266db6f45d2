"""Steps that stop when the halves of what they saw agree."""

from dataclasses import replace

import pytest
import torch

from semkv.profiles.calibration.measure import Measure, Outcome, Sums, reliability, run_measure
from semkv.profiles.calibration.retrieval_heads import SemanticRetrieval
from semkv.profiles.calibration.taxonomy import Taxonomy


def test_the_reliability_is_that_of_the_whole():
    """Figures with noise: the correlation of two sets of n contexts is what two halves of one set foretell."""
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(20_000, generator=generator)
    halves = [true + torch.randn(20_000, generator=generator) for _ in range(4)]
    whole = torch.corrcoef(torch.stack([halves[0] + halves[1], halves[2] + halves[3]]))[0, 1]
    assert reliability(halves[0], halves[1]) == pytest.approx(float(whole), abs=0.02)
    assert reliability(torch.zeros(5), torch.zeros(5)) == 0.0


class Counting(Measure):
    name = field = "counting"
    units = 20

    def measure(self, unit, sums):
        sums.add("seen", 1.0)

    def agreement(self, sums):
        return float(sums["seen"]) / 10

    def finish(self, sums):
        return Outcome(int(sums["seen"]))


def test_a_step_ends_when_its_halves_agree(subject):
    own = subject.settings.model_copy(update={"least": 3, "agreement": 0.7})
    seen = []
    outcome = run_measure(
        Counting(replace(subject, settings=own)), identity="x", path=None, report=lambda *a: seen.append(a[1])
    )
    assert (outcome.section, outcome.units, seen[-1]) == (7, 7, 7)
    patient = replace(subject, settings=own.model_copy(update={"least": 12}))
    assert run_measure(Counting(patient), identity="x", path=None, report=lambda *_: None).units == 12
    all_of_it = replace(subject, settings=own.model_copy(update={"agreement": 1.0, "least": 20}))
    assert run_measure(Counting(all_of_it), identity="x", path=None, report=lambda *_: None).units == 20


@pytest.mark.parametrize("kind", [Taxonomy, SemanticRetrieval])
def test_halves_are_of_all_data_sets_and_add_up(subject, kind):
    step, sums = kind(subject), Sums()
    assert step.units >= 4
    for unit in range(4):
        step.measure(unit, sums)
    found = step.agreement(sums)
    assert 0.0 <= found <= 1.0
    if kind is Taxonomy:
        # Units 0 and 1 are of the two data sets, and the even half; 2 and 3 the odd one.
        again = Sums()
        for unit in (2, 3):
            step.measure(unit, again)
        total = sum(again[f"stability.{name}.0"] for name in subject.data.set_names)
        torch.testing.assert_close(sums["odd.stability.0"], total)
        assert float(sums["odd.count"]) == 2
