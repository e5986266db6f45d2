"""What the site needs besides the pages: files of the tree that pages link to, as files of the site.

Pages are written for the tree, where `../examples/quickstart.py` leads somewhere. Here each such target is given a place under `tree/`: a
page as it is, a page that shows the file, and for a folder a list of its files.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]*)")
LANGUAGES = {".py": "python", ".json": "json", ".sh": "sh"}
LARGEST = 100_000
"""Bytes of a file that its page shows."""


def place_of(target: str) -> str:
    """Of a path in the tree: its page's path in the site."""
    return f"tree/{target}" if target.endswith(".md") else f"tree/{target.rstrip('/')}.md"


def target_of(page: str, link: str) -> str | None:
    """The path in the tree that `link` of the page `page`, a path in docs/, leads to; None where it stays within docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") or path == "docs" else path


def shown(target: Path, page: str) -> str:
    """A page for what stands at `target` in the tree."""
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        files = sorted(
            path.name + ("/" if path.is_dir() else "")
            for path in target.iterdir()
            if not path.name.startswith((".", "_"))
        )
        return "\n".join([f"# {name}/", "", *(f"- `{file}`" for file in files), ""])
    text = target.read_text(encoding="utf-8")
    if target.suffix == ".md":
        return LINK.sub(lambda match: f"{match[1]}{within(name, match[2])}", text)
    if len(text) > LARGEST:
        return f"# {name}\n\n{len(text):,} characters; it is in the tree.\n"
    return f"# {name}\n\n````{LANGUAGES.get(target.suffix, '')}\n{text.rstrip()}\n````\n"


def within(name: str, link: str) -> str:
    """`link` of the page `name` outside of docs/, as a link of its place in the site."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
    there = path.removeprefix("docs/") if path.startswith("docs/") else place_of(path)
    return posixpath.relpath(there, posixpath.dirname(place_of(name)))


def on_startup(**ignored: Any) -> None:
    """The package in the shape that it has once installed, made of links, for what reads docstrings out of its sources."""
    tree = ROOT / ".site_tree" / "semkv"
    tree.mkdir(parents=True, exist_ok=True)
    folders = [ROOT / name for name in ("passes", "kernels", "profiles")]
    wanted = {path.name: path for path in (*(ROOT / "semkv_compile").iterdir(), *folders)}
    for link in tree.iterdir():
        if link.name not in wanted:
            link.unlink()
    for name, path in wanted.items():
        if not (tree / name).exists():
            (tree / name).symlink_to(path)


def on_config(config: Any) -> Any:
    """The section Results has every page of docs/results."""
    found = sorted(path.name for path in (ROOT / "docs" / "results").glob("*.md"))
    (section,) = (entry for entry in config.nav if isinstance(entry, dict) and "Results" in entry)
    section["Results"] = [f"results/{name}" for name in found]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to outside of docs/."""
    targets = set()
    for file in files.documentation_pages():
        for match in LINK.finditer(file.content_string):
            target = target_of(file.src_uri, match[2])
            if target is not None and (ROOT / target).exists():
                targets.add(target)
    for target in sorted(targets):
        files.append(File.generated(config, place_of(target), content=shown(ROOT / target, target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links out of docs/ lead to the places of `on_files`."""
    own = page.file.src_uri
    if own.startswith("tree/"):
        return markdown

    def moved(match: re.Match[str]) -> str:
        target = target_of(own, match[2])
        return match[0] if target is None else match[1] + posixpath.relpath(place_of(target), posixpath.dirname(own))

    return LINK.sub(moved, markdown)
