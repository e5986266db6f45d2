"""The pages as the tests read them: blocks of code with their marks, commands, links and headings; and the files they name."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "profiles/bundled/README.md")
MARK = re.compile(r"<!-- (not run|slow): (.+?) -->\s*", re.DOTALL)
READER = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """A block of code. line: of its first line of code, from 1. mark: `not run` or `slow`, with the reason, or nothing.

    shown: the text of the `output` block right behind it, or None.
    """

    page: str
    line: int
    kind: str
    text: str
    mark: str
    reason: str
    shown: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command line of a `sh` block, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


@dataclass(frozen=True)
class Page:
    """A page; inline: its spans of code, links: targets of links and pictures as written, headings: their anchors."""

    name: str
    blocks: tuple[Block, ...]
    inline: tuple[str, ...]
    links: tuple[str, ...]
    headings: frozenset[str]

    def __str__(self) -> str:
        return self.name


def read_page(name: str, text: str) -> Page:
    """A page by what stands in it."""
    tokens = READER.parse(text)
    leaves = [leaf for token in tokens if token.type == "inline" for leaf in token.children or ()]
    links = [str(leaf.attrGet("href") or leaf.attrGet("src")) for leaf in leaves if leaf.type in ("link_open", "image")]
    inline = [leaf.content for leaf in leaves if leaf.type == "code_inline"]
    return Page(name, tuple(_blocks(name, tokens)), tuple(inline), tuple(links), frozenset(_anchors(tokens)))


def _blocks(name: str, tokens: list[Token]) -> Iterator[Block]:
    """Blocks with the mark before them and the output behind them; an `output` block behind nothing stays one of its own."""
    before: Block | None = None
    mark = ("", "")
    for token in tokens:
        if token.type in ("fence", "code_block"):
            kind = "indented" if token.type == "code_block" else token.info.strip()
            if kind == "output" and before is not None:
                before = replace(before, shown=token.content)
                continue
            if before is not None:
                yield before
            assert token.map is not None
            before, mark = Block(name, token.map[0] + 2, kind, token.content, *mark), ("", "")
            continue
        if before is not None:
            yield before
            before = None
        found = MARK.fullmatch(token.content) if token.type == "html_block" else None
        mark = (found[1], " ".join(found[2].split())) if found else ("", "")
    if before is not None:
        yield before


def _anchors(tokens: list[Token]) -> Iterator[str]:
    """The anchors that GitHub gives to headings: lower case, without marks, hyphens for spaces, counted where they repeat."""
    seen: dict[str, int] = {}
    for opening, token in pairwise(tokens):
        if opening.type != "heading_open":
            continue
        text = "".join(leaf.content for leaf in token.children or ())
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = seen[anchor] = seen.get(anchor, -1) + 1
        yield f"{anchor}-{count}" if count else anchor


def pages() -> list[Page]:
    """Every page that a reader is sent to."""
    docs = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    return [read_page(name, (ROOT / name).read_text(encoding="utf-8")) for name in (*NAMES, *docs)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`page`: a test for each page; `python_page`, `slow_page`: for those with such Python; `shell_block`, `slow_block`."""
    wanted: dict[str, Callable[[], list[Page] | list[Block]]] = {
        "page": pages,
        "python_page": lambda: [page for page in pages() if any(block.kind == "python" for block in page.blocks)],
        "slow_page": lambda: [
            page for page in pages() if any(block.kind == "python" and block.mark == "slow" for block in page.blocks)
        ],
        "shell_block": lambda: [block for page in pages() for block in page.blocks if block.kind == "sh"],
        "slow_block": lambda: [
            block for page in pages() for block in page.blocks if block.kind == "sh" and block.mark == "slow"
        ],
    }
    for name, values in wanted.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values(), ids=str)


@pytest.fixture(scope="session")
def all_pages() -> list[Page]:
    """Every page."""
    return pages()


@pytest.fixture
def read() -> Callable[[str], Page]:
    """`read(text)`: a page of that text."""
    return lambda text: read_page("page.md", text)


LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
DEEPSEEK_LITE = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 163840,
    "dtype": "bfloat16",
}


def _prose() -> str:
    """20,000 words of the bundled model's language."""
    from semkv.profiles.bundled.tasks import make_haystack

    return make_haystack("single", 20_000, seed=0).context


def _bundled(part: str) -> Callable[[Path], None]:
    from semkv import bundled

    return lambda path: path.symlink_to(bundled.folder() / part)


def _texts(make: Callable[[], str]) -> Callable[[Path], None]:
    return lambda path: path.write_text(make(), encoding="utf-8") and None


NAMED = {
    "MODEL": _bundled("model"),
    "model.profile": _bundled("profile"),
    "bundled.profile": _bundled("profile"),
    "qwen.profile": _bundled("profile"),
    "text.txt": _texts(_prose),
    "book.txt": _texts(_prose),
    "books.txt": _texts(_prose),
    "essays.txt": _texts(_prose),
    "code.jsonl": _texts(lambda: json.dumps({"text": _prose()})),
    "config.json": _texts(lambda: json.dumps(LLAMA_8B)),
    "deepseek.json": _texts(lambda: json.dumps(DEEPSEEK_LITE)),
    "squad.json": _texts(lambda: "[]"),
    "hotpot.json": _texts(lambda: "[]"),
}
"""What a reader is expected to have, under the names that pages give it, and what makes it."""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """`workplace(text)`: an empty folder to be in, with the files that `text` names, but for those that it says to write (`-o`)."""

    def enter(text: str) -> Path:
        monkeypatch.chdir(tmp_path)
        for name, make in NAMED.items():
            word = rf"(?<![\w./-]){re.escape(name)}(?![\w/-])"
            if re.search(word, text) and not re.search(rf"-o {word}", text):
                make(tmp_path / name)
        return tmp_path

    return enter


def _same(shown: str, printed: str, block: Block) -> None:
    import doctest

    if not doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS):
        pytest.fail(f"{block}: the page shows\n{shown}\nand this was printed\n{printed}", pytrace=False)


@pytest.fixture
def same() -> Callable[[str, str, Block], None]:
    """`same(shown, printed, block)`: fails where the output of a block is not what the page shows; `...` stands for anything."""
    return _same
