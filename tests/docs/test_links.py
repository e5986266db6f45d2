"""Links and pictures of the pages lead somewhere: the file is there, and so is the heading. Links to the web are not followed."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def broken(all_pages):
    """`broken(page)`: the relative links of a page that lead nowhere."""
    headings = {page.name: page.headings for page in all_pages}

    def find(page):
        found = []
        for link in page.links:
            if "://" in link or link.startswith("mailto:"):
                continue
            place, _, anchor = link.partition("#")
            target = (ROOT / page.name).parent / place
            if not target.exists():
                found.append(f"{link}: no such file")
            elif anchor:
                name = target.resolve().relative_to(ROOT.resolve()).as_posix()
                if anchor not in (headings.get(name, ()) if place else page.headings):
                    found.append(f"{link}: no such heading")
        return found

    return find


def test_links_lead_somewhere(page, broken):
    assert broken(page) == []


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("docs/nothing.md", "no such file"),
        ("docs", None),
        ("LICENSE", None),
        ("docs/architecture.md#the-budget", None),
        ("docs/architecture.md#the-purse", "no such heading"),
        ("LICENSE#the-budget", "no such heading"),
        ("#one-heading-in-code", None),
        ("#one-heading-in-code-1", None),
        ("#one-heading-in-code-2", "no such heading"),
        ("https://example.org/nothing.md#nothing", None),
    ],
)
@pytest.mark.parametrize("form", ["[text]({})", "![text]({})", "| a |\n|---|\n| [text]({}) |"])
def test_which_links_are_broken(read, broken, link, why, form):
    page = read("# One heading, in `code`\n\n# One heading, in `code`\n\n" + form.format(link) + "\n")
    found = broken(page)
    assert len(page.links) == 1
    assert [why in line for line in found] == ([] if why is None else [True])
