"""Small rules that keep the tree readable and free of what belongs to one machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST = 600
TEXT = {".py", ".md", ".cfg", ".toml", ".yaml", ".yml", ".sh", ".json", ""}
ANCHORLESS = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK")) + r")\b")
MACHINE = re.compile(r"(?<![\w.])/(?:home|Users|root|work|mnt|opt|tmp)/[\w.-]+")


def _tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("the tree is not a git checkout: which files belong to it is not known")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def _texts() -> list[tuple[str, str]]:
    own = Path(__file__).relative_to(ROOT).as_posix()
    return [
        (name, (ROOT / name).read_text(encoding="utf-8"))
        for name in _tracked()
        if Path(name).suffix in TEXT and name != own and not name.startswith("profiles/bundled/model/")
    ]


def test_no_reminders_are_left() -> None:
    found = [f"{name}: {match[0]}" for name, text in _texts() for match in ANCHORLESS.finditer(text)]
    assert found == [], "do it, or open an issue"


def test_no_path_of_one_machine() -> None:
    found = [f"{name}: {match[0]}" for name, text in _texts() for match in MACHINE.finditer(text)]
    assert found == []


def test_files_have_one_job() -> None:
    code = [(name, text.count("\n")) for name, text in _texts() if name.endswith(".py")]
    assert [f"{name}: {lines} lines" for name, lines in code if lines > LONGEST] == []


def test_modules_say_what_they_are() -> None:
    """The first statement of every module of the package is a docstring."""
    bare = []
    for name, text in _texts():
        if name.endswith(".py") and name.split("/")[0] in (
            "semkv_compile",
            "passes",
            "kernels",
            "profiles",
            "benchmarks",
            "examples",
        ):
            code = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
            if code and not code[0].startswith(('"""', 'r"""', 'f"""')):
                bare.append(name)
    assert bare == []


def test_tests_are_collected_without_packages() -> None:
    assert [name for name in _tracked() if name.startswith("tests/") and name.endswith("__init__.py")] == []
    named = [name for name in _tracked() if name.startswith("tests/") and name.endswith(".py")]
    helpers = {"conftest.py"}
    lost = [
        name
        for name in named
        if Path(name).name not in helpers
        and not Path(name).name.startswith("test_")
        and "def test_" in (ROOT / name).read_text()
    ]
    assert lost == [], "a test in a file without the prefix test_ never runs"


def test_bundled_weights_are_small() -> None:
    names = [name for name in _tracked() if name.endswith(".safetensors")]
    # tests/profiles/test_smollm2.py holds the profile of a real model to its size
    weights = [ROOT / name for name in names if "smollm2_135m" not in name]
    assert weights
    assert sum(path.stat().st_size for path in weights) <= 16e6
    assert (ROOT / "profiles/bundled/model/model.safetensors").stat().st_size <= 12e6


def test_links_in_the_documents_lead_somewhere() -> None:
    broken = []
    for name, text in _texts():
        if not name.endswith(".md"):
            continue
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if "://" not in target and not ((ROOT / name).parent / target).exists():
                broken.append(f"{name}: {target}")
    assert broken == []


def test_generated_results_say_where_they_come_from() -> None:
    pages = [(name, text) for name, text in _texts() if name.startswith("docs/results/") and name.endswith(".md")]
    assert [name for name, text in pages if "benchmarks/" not in text] == [], "name the script that writes the page"
