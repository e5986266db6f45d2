"""Names, groups, options and keys of tasks."""

import pytest

from semkv.errors import ConfigError
from semkv.evaluation import Grid, Variant
from semkv.evaluation.runner import cell_of
from semkv.evaluation.tasks import TASKS, build_tasks, task_names
from semkv.evaluation.tasks.registry import GROUPS, SOURCES

FULL = Variant(method="full")


def test_groups_have_the_published_tasks():
    assert GROUPS["ruler"] == (
        "niah_single_1",
        "niah_single_2",
        "niah_single_3",
        "niah_multikey_1",
        "niah_multikey_2",
        "niah_multikey_3",
        "niah_multivalue",
        "niah_multiquery",
        "vt",
        "cwe",
        "fwe",
        "qa_1",
        "qa_2",
    )
    assert len(GROUPS["longbench"]) == 21
    assert len(GROUPS["longbench_en"]) == 16
    assert len(GROUPS["infinitebench"]) == 3
    assert GROUPS["bundled"] == ("single", "multi", "confusable", "dense")
    assert set(TASKS).isdisjoint(GROUPS)


def test_names_and_groups_become_names_once():
    assert task_names(["bundled", "dense", "niah"]) == ("single", "multi", "confusable", "dense", "niah")


def test_every_source_that_a_task_takes_is_known():
    assert {key for entry in TASKS.values() for key in entry.sources} == set(SOURCES)
    assert TASKS["qa_2"].sources == ("hotpotqa",)
    assert TASKS["niah_single_1"].sources == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": ["rulr"]}, "unknown task 'rulr'; there are the groups bundled, ruler, .* that `semkv tasks` lists"),
        ({"names": ["niah"], "sources": {"hay": "x"}}, "--source hay: unknown; there are: haystack, text,"),
        (
            {"names": ["niah"], "options": {"vt": {"hops": 3}}},
            "--set vt: the task vt is not among those asked for: niah",
        ),
        (
            {"names": ["niah"], "options": {"niah": {"dept": 3}}},
            "--set niah.dept: no such option; there are: depths, needles",
        ),
        ({"names": ["single"], "options": {"single": {"x": 3}}}, "--set single.x: no such option; it has none"),
        (
            {"names": ["niah"], "options": {"niah": {"depths": "few"}}},
            "--set niah.depths=few: Input should be a valid integer.*the default is 10",
        ),
        (
            {"names": ["niah"], "options": {"niah": {"depths": "0"}}},
            "task 'niah': depths 0, needles 1: expected at least 1",
        ),
        (
            {"names": ["niah"], "options": {"niah": {"within": "hay"}}},
            "--set niah.within=hay: Input should be 'text' or",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_tasks(**arguments)


def test_options_and_data_are_part_of_a_cell(tmp_path):
    (tmp_path / "a.txt").write_text("one two")
    (tmp_path / "b.txt").write_text("three four")
    grid = Grid(variants=(FULL,), families=("niah",), lengths=(512,))

    def key(**changes):
        task = build_tasks(["niah"], **changes)["niah"]
        return cell_of(grid, "x", FULL, "niah", 512, "unseen", task).key

    keys = {
        key(),
        key(chat=True),
        key(options={"niah": {"depths": "5"}}),
        key(sources={"haystack": str(tmp_path / "a.txt")}),
        key(sources={"haystack": str(tmp_path / "b.txt")}),
    }
    assert len(keys) == 5
    noise = {"options": {"niah": {"within": "noise"}}}
    assert key(**noise) == key(**noise, sources={"haystack": str(tmp_path / "a.txt")})


def test_a_bundled_family_has_one_key_as_a_task_and_as_a_family():
    grid = Grid(variants=(FULL,), families=("dense",), lengths=(4096,), seed=0)
    plain = cell_of(grid, "subject", FULL, "dense", 4096, "unseen")
    task = build_tasks(["dense"])["dense"]
    assert cell_of(grid, "subject", FULL, "dense", 4096, "unseen", task).key == plain.key
