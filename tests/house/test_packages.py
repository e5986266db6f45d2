"""What is installed is what is in the tree: a wheel is built and looked into."""

from __future__ import annotations

import configparser
import importlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"semkv": "semkv_compile", "semkv.passes": "passes", "semkv.kernels": "kernels", "semkv.profiles": "profiles"}
DATA = (
    "semkv/py.typed",
    "semkv/kernels/vectors.h",
    "semkv/kernels/threads.h",
    "semkv/kernels/products.h",
    "semkv/kernels/code_products/template.cpp",
    "semkv/kernels/gather/template.cpp",
    "semkv/kernels/mixed_attention/template.cpp",
    "semkv/kernels/segments/template.cpp",
    "semkv/kernels/selection/template.cpp",
    "semkv/profiles/bundled/model/config.json",
    "semkv/profiles/bundled/model/model.safetensors",
    "semkv/profiles/bundled/model/tokenizer.json",
    "semkv/profiles/bundled/profile/profile.json",
    "semkv/profiles/bundled/profile/tensors.safetensors",
)


def _settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _packages_in_tree() -> set[str]:
    found = set()
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([package, *path.parent.relative_to(ROOT / folder).parts]))
    return found


def _modules_in_tree() -> set[str]:
    """Paths inside the wheel of every module in the tree."""
    found = set()
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            found.add("/".join([*package.split("."), *path.relative_to(ROOT / folder).parts]))
    return found


def test_packages_list_equals_the_folders() -> None:
    listed = _lines(_settings()["options"]["packages"])
    assert len(listed) == len(set(listed))
    assert set(listed) == _packages_in_tree(), "setup.cfg's packages and the folders with an __init__.py differ"


def test_every_folder_with_modules_is_a_package() -> None:
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), (
                f"{path.parent} of {package} lacks __init__.py: it would not be installed"
            )


def test_folders_are_mapped_as_the_tests_assume() -> None:
    mapped = dict(line.split(" = ") for line in _lines(_settings()["options"]["package_dir"]))
    assert mapped == FOLDERS


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tree, so that the build leaves nothing beside the sources."""
    for needed in ("setuptools", "wheel"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: `make env` installs it")
    copy = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("the tree is not a git checkout: which files belong to it is not known")
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, copy / name
        if source.is_file() and name.split("/")[0] not in ("tests", "docs", "benchmarks", "examples"):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            str(out),
            str(copy),
        ],
        capture_output=True,
        text=True,
        cwd=copy,
    )
    assert built.returncode == 0, built.stderr
    (path,) = out.glob("semkv-*.whl")
    return path


@pytest.fixture(scope="module")
def contents(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_every_module(contents: set[str]) -> None:
    assert {name for name in contents if name.endswith(".py")} == _modules_in_tree()


def test_wheel_holds_the_data_files(contents: set[str]) -> None:
    assert [name for name in DATA if name not in contents] == []


def test_only_semkv_is_importable_from_the_wheel(contents: set[str]) -> None:
    tops = {name.split("/")[0] for name in contents if not name.split("/")[0].endswith(".dist-info")}
    assert tops == {"semkv"}, "a top-level `kernels`, `passes` or `profiles` would shadow other people's packages"


def test_wheel_has_the_entry_points_and_its_licence(wheel: Path, contents: set[str]) -> None:
    (points,) = (name for name in contents if name.endswith("entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(zipfile.ZipFile(wheel).read(points).decode())
    assert dict(parser["console_scripts"]) == {"semkv": "semkv.cli.main:app", "semkv-profile": "semkv.cli.profile:main"}
    assert dict(parser["torch_dynamo_backends"]) == {"semkv": "semkv.backend:semkv"}
    assert any(name.endswith("licenses/LICENSE") for name in contents)


@pytest.mark.parametrize("group", ["console_scripts", "torch_dynamo_backends", "vllm.general_plugins"])
def test_entry_points_lead_to_something(group: str) -> None:
    for line in _lines(_settings()["options.entry_points"][group]):
        module, name = line.split(" = ")[1].split(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_the_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    """Unpacked elsewhere and run from there, semkv and its parts come from the wheel, and no folder of the tree is seen."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = f"""
import sys, importlib.util
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
sys.path.insert(0, {str(tmp_path / "site")!r})
import semkv, semkv.passes, semkv.kernels, semkv.profiles
from semkv import bundled
for module in (semkv, semkv.passes, semkv.kernels, semkv.profiles):
    assert module.__file__.startswith({str(tmp_path / "site")!r}), module.__file__
for name in ("passes", "profiles", "semkv_compile"):
    assert importlib.util.find_spec(name) is None, name
model, tokenizer = bundled.load()
assert bundled.profile().fingerprint
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
