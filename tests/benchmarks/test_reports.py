"""The reports on the papers: verdicts, every option of their grids, figures that resume, heads that are masked and restored."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from semkv import bundled
from semkv.evaluation.schema import Interval
from semkv.methods import find_method

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    """The shared module and the three reports, by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import reports
    import reports_compresskv
    import reports_heterocache
    import reports_sentencekv

    return reports, reports_heterocache, reports_sentencekv, reports_compresskv


@pytest.mark.parametrize(
    ("low", "high", "lower", "equal", "higher"),
    [
        (-0.3, -0.1, "yes", "no", "no"),
        (-0.1, 0.1, "open", "open", "open"),
        (-0.04, 0.05, "open", "yes", "open"),
        (0.1, 0.2, "no", "no", "yes"),
    ],
)
def test_a_claim_is_judged_by_the_interval(scripts, low, high, lower, equal, higher):
    change = Interval(value=(low + high) / 2, low=low, high=high, samples=8, contexts=2)
    assert [scripts[0].verdict(change, way) for way in ("lower", "equal", "higher")] == [lower, equal, higher]


def test_every_option_exists_and_every_claim_has_its_variants(scripts):
    _, hetero, sentence, compress = scripts
    grids = {
        "hetero": (hetero.ablations(4, 64), hetero.CLAIMS),
        "thresholds": (hetero.thresholds(4, 64), ()),
        "transfer": (hetero.transferred(4, 64), ()),
        "unseen": (sentence.unseen_grid(4, 64, 10), sentence.CLAIMS_UNSEEN),
        "seen": (sentence.seen_grid(4, 64, 10), sentence.CLAIMS_SEEN),
        "compress": (compress.grid(4, 64), compress.CLAIMS),
    }
    for name, (grid, claims) in grids.items():
        known = [(variant.label, variant.budget) for variant in grid.variants]
        assert len(known) == len(set(known)), f"{name}: a label stands for two variants at one budget"
        for variant in grid.variants:
            assert find_method(variant.method, variant.options).name == variant.method
        for claim in claims:
            assert {(claim.label, claim.budget), (claim.base, claim.budget)} <= set(known)


def test_whole_heads_fit_the_budgets_of_the_faithful_method(scripts):
    hetero = scripts[1]
    profile = bundled.profile()
    for _, budgets, options in hetero.VARIANTS:
        roles = find_method("heterocache", options).taxonomy(profile)[0]
        flat = list(itertools.chain(*roles))
        whole = sum(role in ("pivot", "volatile") for role in flat) / len(flat)
        assert options.get("strict") or all(whole + 40 / 4096 <= budget for budget in budgets)


def test_figures_are_measured_once(scripts, tmp_path):
    calls = []

    def measure() -> dict[str, int]:
        calls.append(1)
        return {"value": 7}

    for _ in range(2):
        figures = scripts[0].Figures(tmp_path / "rows.jsonl", "one model")
        assert figures.get("name", {"tau": 0.5}, measure) == {"value": 7}
    assert len(calls) == 1
    figures.get("name", {"tau": 0.6}, measure)
    scripts[0].Figures(tmp_path / "rows.jsonl", "another model").get("name", {"tau": 0.5}, measure)
    assert len(calls) == 3


def test_masked_heads_are_silent_and_come_back(scripts):
    compress = scripts[3]
    model, _ = bundled.load()
    order = compress.ranking("semantic", bundled.profile().info.retrieval_heads)
    assert len(set(order)) == 32
    assert {site for site, _ in order[:8]} == {1}
    heads = [order[0], order[1], order[0]]
    before = {name: x.clone() for name, x in model.state_dict().items()}
    heard: list[torch.Tensor] = []
    projection = model.model.layers[1].self_attn.o_proj
    hook = projection.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    ids = torch.randint(3, 600, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), compress.masked(model, heads):
        model(ids)
        seen = heard[0].clone()
        dim = model.config.head_dim
        for _, head in set(heads):
            seen[..., head * dim : (head + 1) * dim] = 0
        torch.testing.assert_close(
            projection(heard[0]), torch.nn.functional.linear(seen, before["model.layers.1.self_attn.o_proj.weight"])
        )
        assert not torch.equal(seen, heard[0])
    hook.remove()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_parts_of_mixed_are_options_that_there_are(scripts):
    import ablation_mixed

    assert ablation_mixed.grid(10, 256, tuple(ablation_mixed.TASKS)).families == ("perplexity",)
    for variant in ablation_mixed.grid(samples=4, length=256).variants:
        find_method(variant.method, variant.options)


def test_words_are_left_and_numbers_right(scripts):
    import grids

    lines = [["sekv", "3 %", "+1.5 (-2 to +5)", "yes", "1.5 MiB"], ["full", "-", "", "12 to 14", "0 B"]]
    rule = grids.table(["method", "budget", "change", "seen here", "moved"], lines).splitlines()[1]
    assert rule == "| --- | ---: | ---: | --- | ---: |"
    assert grids.table(["", "limit"], [["a", "no limit"]]).splitlines()[1] == "| --- | --- |"


def test_pages_come_from_the_results_alone(scripts):
    _, hetero, _, compress = scripts
    content = compress.read_parts(compress.NAME)
    found = content["masking"]
    assert compress.draws_table(found).count("| yes |") == 4
    assert "hold heads 0.1 and 0.6" in compress.fallen(found)
    with pytest.raises(SystemExit, match="are no longer those that hold"):
        compress.fallen({**found, "random, 4": [{"heads": [[2, 2]], "accuracy": found["random, 4"][3]["accuracy"]}]})
    table = hetero.overlap_table([{"tau_similar": 0.28, "satellites": [5, 8], "both": 5, "heads": 16}], ["a", "b"])
    assert table.splitlines()[-1] == "| 0.28 | 5 | 8 | 5 | 100 | 50 | 62 | 31 | yes, by the larger no |"
