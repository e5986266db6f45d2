"""Every block of code is of a known kind, and the blocks that do not run are few, each with its reason."""

from __future__ import annotations

import json

import pytest
import torch

from semkv.artifact.graph_json import graph_from_json

KINDS = {
    "python": "runs with the page",
    "sh": "commands",
    "json": "a graph of an artifact",
    "text": "nothing that could run",
}
STARTS = ("$", "import ", "from ", "semkv ", "semkv-profile ", "make ", "python ", "pip ", "bash ", ">>>")
"""How lines begin that would run."""

NOT_RUN = {
    ("README.md", "make demo"): "each makes an environment of its own, and takes minutes",
    ("CONTRIBUTING.md", "make test"): "these are the tests themselves, and what makes their environment",
    ("profiles/bundled/README.md", "python -m semkv.profiles.bundled.train"): "hours on two cores",
    ("docs/calibration.md", "semkv-profile -o bundled.profile"): "needs a model from the Hub",
    ("docs/cli.md", "semkv eval --model MODEL"): "the tasks need a model of your own and the benchmarks' data",
    ("docs/cli.md", "semkv bench --model MODEL"): "needs a GPU",
    ("docs/cli.md", 'pip install ".[lm-eval]"'): "needs a model from the Hub",
    ("docs/cli.md", "semkv-profile MODEL"): "takes as long as the model is large",
    ("docs/serving.md", "semkv serve bundled"): "starts a server",
    ("docs/calibration.md", "torchrun --nproc-per-node 8"): "needs a model from the Hub, and GPUs",
    ("docs/serving.md", "semkv serve model.semkv"): "starts a server",
    ("docs/serving.md", 'pip install "ray[serve]'): "starts servers",
    ("docs/serving.md", "semkv plan --model meta-llama"): "needs a configuration from the Hub",
    ("docs/parallel.md", "torchrun --nproc-per-node 2"): "starts several processes",
    ("docs/quickstart.md", "semkv-profile Qwen/Qwen3-0.6B"): "needs a model from the Hub",
}
"""Blocks that no test runs, by page and beginning, with the reason that the page gives."""


def wrong_kinds(page):
    """Blocks whose kind no test knows, and those whose kind hides code."""
    found = [f"{block}: a block of kind {block.kind!r}" for block in page.blocks if block.kind not in KINDS]
    for block in page.blocks:
        hidden = [line for line in block.text.splitlines() if line.lstrip().startswith(STARTS)]
        if block.kind == "text" and hidden:
            found.append(f"{block}: code in a block of kind 'text': {hidden[0]}")
        if block.kind in ("text", "json", "python") and block.mark == "not run":
            found.append(f"{block}: only commands may stay without a run")
        if block.shown is not None and block.kind not in ("python", "sh"):
            found.append(f"{block}: an output of what does not run")
        if block.shown is not None and block.mark == "not run":
            found.append(f"{block}: an output that no test compares")
    return found


def test_kinds_are_known(page):
    assert wrong_kinds(page) == [], f"known are {KINDS}, and `output` right behind what prints it"


def test_what_does_not_run_is_listed(all_pages):
    left_out = [block for page in all_pages for block in page.blocks if block.mark == "not run"]
    unlisted = [
        f"{block}, {block.reason}"
        for block in left_out
        if not any(
            block.page == page and block.text.startswith(start) and block.reason == reason
            for (page, start), reason in NOT_RUN.items()
        )
    ]
    assert (unlisted, len(left_out)) == ([], len(NOT_RUN))


def test_graphs_are_graphs(page):
    """A JSON block is a graph as artifacts hold it: it loads, and runs on weights of its names."""
    for block in page.blocks:
        if block.kind == "json":
            value = json.loads(block.text)
            weights = {name: torch.ones(5, 3) for name in value["tensors"].values()}
            inputs = [torch.ones(2, 3) for node in value["nodes"] if node["op"] == "placeholder"]
            assert graph_from_json(value, weights)(*inputs).shape == (2, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```\nls\n```\n", "a block of kind ''"),
        ("```bash\nls\n```\n", "a block of kind 'bash'"),
        ("```py\nimport semkv\n```\n", "a block of kind 'py'"),
        ("A formula:\n\n    a >= b\n", "a block of kind 'indented'"),
        ("Text.\n\n```output\n3\n```\n", "a block of kind 'output'"),
        ("```text\na\n```\n```output\n3\n```\n", "an output of what does not run"),
        ("```text\na diagram\n  import semkv\n```\n", "code in a block of kind 'text'"),
        ("```text\n$ semkv demo\n```\n", "code in a block of kind 'text'"),
        ("<!-- not run: no time -->\n```python\nimport semkv\n```\n", "only commands may stay without a run"),
        ("<!-- not run: no time -->\n```sh\nmake\n```\n```output\n3\n```\n", "an output that no test compares"),
    ],
)
def test_what_is_not_known_is_refused(read, text, message):
    (found,) = wrong_kinds(read(text))
    assert message in found


@pytest.mark.parametrize("between", ["\n\nText.\n\n", "\n\n<!-- a comment -->\n\n"])
def test_a_mark_belongs_to_the_next_block_alone(read, between):
    page = read(f"<!-- slow: a minute -->{between}```sh\nmake demo\n```\n")
    assert [block.mark for block in page.blocks] == [""]
    page = read("<!-- slow: a\nminute -->\n```sh\nmake demo\n```\n\n```sh\nmake test\n```\n")
    assert [(block.mark, block.reason) for block in page.blocks] == [("slow", "a minute"), ("", "")]
