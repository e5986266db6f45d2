"""The Python of a page runs as printed, from its first block to its last, in one namespace, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch


@pytest.fixture
def run(workplace, same):
    """`run(page, blocks)`: run them in order in a folder of their own."""

    def run_blocks(page, blocks):
        workplace("".join(block.text for block in blocks))
        torch.manual_seed(0)
        namespace = {"__name__": "page"}
        for block in blocks:
            # Empty lines before the code let a traceback name the page's own line.
            code = compile("\n" * (block.line - 1) + block.text, page.name, "exec")
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(code, namespace)
            if block.shown is not None:
                same(block.shown, printed.getvalue(), block)
        return namespace

    return run_blocks


def python_blocks(page, *, slow):
    return [block for block in page.blocks if block.kind == "python" and (slow or block.mark != "slow")]


def test_python_runs_as_printed(python_page, run):
    run(python_page, python_blocks(python_page, slow=False))


@pytest.mark.slow
def test_python_runs_as_printed_with_what_is_slow(slow_page, run):
    run(slow_page, python_blocks(slow_page, slow=True))


def test_a_name_that_no_block_made_fails(read, run):
    page = read("Text.\n\n```python\ncompiled.generate(ids)\n```\n")
    with pytest.raises(NameError, match="'compiled' is not defined") as caught:
        run(page, python_blocks(page, slow=False))
    place = caught.traceback[-1]
    assert (place.frame.code.raw.co_filename, place.lineno + 1) == ("page.md", 4)


def test_names_live_on_until_the_page_ends(read, run):
    page = read("```python\na = 1\n```\n\nMore.\n\n```python\nprint(a + 1)\n```\n```output\n2\n```\n")
    assert run(page, python_blocks(page, slow=False))["a"] == 1


@pytest.mark.parametrize(
    ("shown", "printed"), [("2", "3"), ("2", ""), ("", "2"), ("0.10 of ...", "0.11 of 7"), ("a\nb", "a\nb\nc")]
)
def test_another_output_fails(read, run, shown, printed):
    page = read(f"```python\nprint({printed!r})\n```\n```output\n{shown}\n```\n")
    with pytest.raises(pytest.fail.Exception, match=r"page\.md:2: the page shows"):
        run(page, python_blocks(page, slow=False))


def test_dots_in_an_output_stand_for_anything(read, run):
    page = read("```python\nprint('12.5 ms,', 3, 'steps')\n```\n```output\n... ms, 3 steps\n```\n")
    run(page, python_blocks(page, slow=False))


def test_a_slow_block_is_left_to_the_slow_tests(read):
    page = read("```python\na = 1\n```\n\n<!-- slow: a minute -->\n```python\na = 2\n```\n")
    assert [block.text for block in python_blocks(page, slow=False)] == ["a = 1\n"]
    assert [block.text for block in python_blocks(page, slow=True)] == ["a = 1\n", "a = 2\n"]
    assert page.blocks[1].reason == "a minute"
