"""The site builds without a warning, and the pages that follow from others say what those say."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"From \[[^]]*\]\(([^)]+)\)")


def build(*arguments):
    pytest.importorskip("mkdocs", reason="semkv[docs] is not installed")
    pytest.importorskip("mkdocstrings", reason="semkv[docs] is not installed")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_the_site_builds_and_has_the_reference(tmp_path):
    made = build("--site-dir", tmp_path / "site")
    assert made.returncode == 0, made.stderr[-2000:]
    assert "WARNING" not in made.stderr
    pages = {path.parent.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("index.html")}
    assert {"quickstart", "which_method", "troubleshooting", "results/real", "tree/examples", "api"} <= pages
    reference = re.sub(r"<[^>]+>", "", (tmp_path / "site" / "api" / "index.html").read_text())
    for text in (
        "A hard cap on what is",
        "A prompt to be read in pieces",
        "The most bytes that a request",
        "RequestBytes",
    ):
        assert text in reference


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [("[a](nowhere.md)", "nowhere.md"), ("[a](#nowhere)", "#nowhere"), ("::: semkv.nothing", "nothing")],
)
def test_what_leads_nowhere_fails(tmp_path, text, message):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n{text}\n")
    config = (ROOT / "mkdocs.yml").read_text().split("nav:\n")[0]
    config = config.replace("docs_dir: docs", f"docs_dir: {tmp_path / 'docs'}").replace(
        "hooks: [docs/site/hooks.py]\n", ""
    )
    config = re.sub(r"docs/site/docstrings.py", str(ROOT / "docs/site/docstrings.py"), config)
    (tmp_path / "mkdocs.yml").write_text(re.sub(r"\.site_tree", str(ROOT / ".site_tree"), config))
    made = build("--config-file", tmp_path / "mkdocs.yml", "--site-dir", tmp_path / "site")
    assert made.returncode != 0
    assert message in made.stderr


def module(name):
    pytest.importorskip("mkdocs", reason="semkv[docs] is not installed")
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_links_out_of_the_pages_have_a_place():
    hooks = module("hooks")
    assert hooks.target_of("quickstart.md", "../examples/quickstart.py") == "examples/quickstart.py"
    assert hooks.target_of("results/real.md", "../evaluation.md") is None
    assert hooks.place_of("examples/quickstart.py") == "tree/examples/quickstart.py.md"
    assert hooks.place_of("profiles/bundled/README.md") == "tree/profiles/bundled/README.md"
    assert hooks.within("profiles/bundled/README.md", "../../docs/cli.md") == "../../../cli.md"


def test_docstrings_have_lists():
    text = module("docstrings").as_markdown(
        "What it does.\n\nParameters\n----------\na, b: one\n    and more\nc: two\n\nReturns\n-------\nA thing."
    )
    assert (
        text
        == "What it does.\n\n**Parameters**\n\n- **a, b**: one\n  and more\n- **c**: two\n\n**Returns**\n\nA thing."
    )


def rows_of(text):
    """Lines of tables, without the space that aligns them."""
    return [re.sub(r"\s*\|\s*", "|", line.strip()) for line in text.splitlines() if line.startswith("|")]


def test_which_method_says_what_was_measured():
    """Each row of a table that names its source stands there."""
    page = (ROOT / "docs" / "which_method.md").read_text()
    sections = [section for section in page.split("\n## ") if LINK.search(section)]
    assert len(sections) == 2
    for section in sections:
        source = (ROOT / "docs" / LINK.search(section)[1]).read_text()
        rows = [row for row in rows_of(section) if "---" not in row]
        assert len(rows) > 5
        assert [row for row in rows if row not in rows_of(source)] == []


def test_messages_of_troubleshooting_are_ours():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    folders = ("semkv_compile", "passes", "profiles")
    sources = "\n".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    assert len(quoted) > 25
    assert [text for text in quoted if text not in sources] == []
