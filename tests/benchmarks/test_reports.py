"""The reports on the papers: verdicts, every option of their grids, figures that resume, heads that are masked and restored."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from semkv import bundled
from semkv.evaluation.schema import Interval
from semkv.methods import find_method


@pytest.fixture
def scripts():
    """The shared module and the three reports, by name."""
    from benchmarks.lib import claims as reports
    from benchmarks.reports import compresskv as reports_compresskv
    from benchmarks.reports import heterocache as reports_heterocache
    from benchmarks.reports import sentencekv as reports_sentencekv

    return reports, reports_heterocache, reports_sentencekv, reports_compresskv


def interval(low: float | None, high: float | None) -> Interval:
    value = 0.0 if low is None or high is None else (low + high) / 2
    return Interval(value=value, low=low, high=high, samples=8, contexts=2)


@pytest.mark.parametrize(
    ("low", "high", "lower", "equal", "higher"),
    [
        (-0.3, -0.1, "seen", "not seen", "not seen"),
        (-0.1, 0.1, "open", "open", "open"),
        (-0.04, 0.049, "open", "seen", "open"),
        (0.01, 0.04, "not seen", "seen", "seen"),
        (0.01, 0.07, "not seen", "open", "seen"),
        (0.1, 0.2, "not seen", "not seen", "seen"),
        (0.0, 0.0, "open", "seen", "open"),
        (None, None, "open", "open", "open"),
    ],
)
def test_a_claim_is_judged_by_the_interval(scripts, low, high, lower, equal, higher):
    reports = scripts[0]
    found = interval(low, high)
    assert [reports.verdict(found, *reports.WAYS[way]) for way in ("lower", "equal", "higher")] == [
        lower,
        equal,
        higher,
    ]
    assert reports.verdict(None) == "open"


def test_what_holds_everywhere_is_judged_together(scripts):
    together = scripts[0].together
    assert together(["seen", "seen"]) == "seen"
    assert together(["seen", "open"]) == "open" == together([])
    assert together(["open", "not seen", "seen"]) == "not seen"


def test_a_slope_and_its_interval(scripts):
    """Against the textbook: points on a line have no spread, a fifth that is off has the residuals'."""
    slope = scripts[0].slope
    line = slope([(x, 2.0 * x + 1) for x in range(5)])
    assert (line.value, line.low, line.high) == pytest.approx((2.0, 2.0, 2.0))
    x, y = [0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.0, 3.0, 9.0]
    found = slope(list(zip(x, y)))
    # Sxx = 10, Sxy = 20; residuals 1, 0, -1, -2, 2 around 2 x - 1: s = sqrt(10 / 3), t(3) = 3.1824
    assert found.value == pytest.approx(2.0)
    assert found.high - found.value == pytest.approx(3.1824 * (10 / 3 / 10) ** 0.5, rel=1e-4)
    assert slope([(1.0, 2.0), (1.0, 3.0), (1.0, 1.0)]).low is None
    assert slope([(1.0, 2.0), (2.0, 3.0)]).low is None


def test_costs_are_judged_over_contexts(scripts):
    from benchmarks.lib import costs

    flat = {1024: [5.0, 5.1, 4.9], 2048: [5.05, 4.95, 5.0], 4096: [5.0, 5.1, 4.95]}
    grown = {1024: [5.0, 5.1, 4.9], 2048: [6.0, 6.1, 5.9], 4096: [7.0, 7.2, 6.9]}
    noisy = {1024: [2.0, 9.0], 2048: [8.0, 3.0], 4096: [9.0, 4.0]}
    assert [costs.LEVEL_OVER_LENGTHS(one) for one in (flat, grown, noisy)] == ["seen", "not seen", "open"]
    assert [costs.RISING(one) for one in (flat, grown, noisy)] == ["open", "seen", "open"]
    assert [costs.within(high=5.5)(one) for one in (flat, grown, noisy)] == ["seen", "not seen", "open"]
    assert [costs.at_the_end(low=6)(one) for one in (flat, grown, noisy)] == ["not seen", "seen", "open"]
    assert costs.within(high=1)({1024: [0.5]}) == "open", "one context tells nothing"
    one = costs.Direction(
        "said", "figure", lambda n, at: at["a"]["step_ms"] / at["full"]["step_ms"], costs.within(high=1)
    )
    cost = {"full": {"step_ms": [2.0, 2.2, 1.9]}, "a": {"step_ms": [1.0, 1.2, 0.9]}}
    assert costs.series_of({512: cost}, one) == {512: pytest.approx([0.5, 1.2 / 2.2, 0.9 / 1.9])}
    assert costs.directions_table({512: cost}, [one]).splitlines()[-1].endswith("| seen |")


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


def test_masked_heads_are_compared_on_the_same_questions(scripts):
    compress = scripts[3]
    base = {"outcomes": [("one", context, 1.0) for context in range(6)]}
    masked = {"outcomes": [("one", context, float(context == 0)) for context in range(6)]}
    change = compress.change_of(masked, base)
    assert change.value == pytest.approx(-5 / 6)
    assert change.high < 0
    assert compress.change_of(masked, {"accuracy": {}}) is None


def test_satellites_found_again_are_judged_by_an_interval(scripts):
    from benchmarks.reports import head_transfer

    assert head_transfer.seen_again(3, 3) == "open"
    assert head_transfer.seen_again(99, 100) == "seen"
    assert head_transfer.seen_again(30, 100) == "not seen"
    assert head_transfer.seen_again(0, 0) == "open"


def test_triggers_are_live_in_the_sweeps(scripts):
    """A threshold above every overlap, or a look at every step, would bypass what is measured."""
    hetero = scripts[1]
    for grid in (hetero.thresholds(4, 64), hetero.transferred(4, 64)):
        for variant in grid.variants[1:]:
            method = find_method(variant.method, variant.options)
            assert (method.every, method.tau_drift) == (5, 0.5)
    uniform = next(one for one in hetero.ablations(4, 64).variants if one.options.get("uniform"))
    assert {key: uniform.options.get(key) for key in ("every", "tau_drift")} == {"every": None, "tau_drift": 0.5}


def test_another_model_has_pages_of_its_own(scripts):
    from benchmarks.lib import grids

    arguments = grids.parser("what").parse_args(["--model", "/models/SmolLM2-135M-Instruct.Q4_1.gguf"])
    assert grids.named("reports_sekv", arguments) == "reports_sekv_smollm2_135m_instruct"
    assert grids.named("reports_sekv", grids.parser("what").parse_args([])) == "reports_sekv"


def test_answers_and_texts_are_as_long_as_asked(scripts, tmp_path):
    from benchmarks.lib import grids

    text = tmp_path / "text.txt"
    text.write_text("Some words of a text. " * 40, encoding="utf-8")

    def lengths(*asked):
        arguments = grids.parser("what").parse_args(
            ["--model", "x", "--source", str(text), "--haystack", str(text), *asked]
        )
        bench = SimpleNamespace(is_bundled=False, arguments=arguments, tokenizer=None)
        tasks = grids.Bench.tasks.func(bench)
        return {tasks[name].new_tokens for name in grids.NEEDLES.split(",")}, tasks["perplexity"].tokens

    assert lengths() == ({128}, 256)
    assert lengths("--answer", "32", "--going-on", "64") == ({32}, 64)


def test_parts_of_mixed_are_options_that_there_are(scripts):
    from benchmarks.quality import ablation_mixed

    assert ablation_mixed.grid(10, 256, tuple(ablation_mixed.TASKS)).families == ("perplexity",)
    for variant in ablation_mixed.grid(samples=4, length=256).variants:
        find_method(variant.method, variant.options)


def test_words_are_left_and_numbers_right(scripts):
    from benchmarks.lib import grids

    lines = [["sekv", "3 %", "+1.5 (-2 to +5)", "yes", "1.5 MiB"], ["full", "-", "", "12 to 14", "0 B"]]
    rule = grids.table(["method", "budget", "change", "seen here", "moved"], lines).splitlines()[1]
    assert rule == "| --- | ---: | ---: | --- | ---: |"
    assert grids.table(["", "limit"], [["a", "no limit"]]).splitlines()[1] == "| --- | --- |"


def test_pages_come_from_the_results_alone(scripts):
    _, hetero, _, compress = scripts
    content = compress.read_parts(compress.NAME)
    found = content["masking"]
    assert compress.draws_table(found).count("| yes |") == 4
    assert compress.counts_in(found, "semantic") == [0, *compress.MASKED]
    assert "open" in compress.masking_verdicts(found), "without outcomes nothing is paired"
    assert "hold heads 0.1 and 0.6" in compress.fallen(found)
    with pytest.raises(SystemExit, match="are no longer those that hold"):
        compress.fallen({**found, "random, 4": [{"heads": [[2, 2]], "accuracy": found["random, 4"][3]["accuracy"]}]})
    table = hetero.overlap_table([{"tau_similar": 0.28, "satellites": [5, 8], "both": 5, "heads": 16}], ["a", "b"])
    assert table.splitlines()[-1] == "| 0.28 | 5 | 8 | 5 | 100 | 50 | 62 | 31 | open |"
