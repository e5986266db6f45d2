"""Bad input ends with one clear line and exit code 2, before any work starts."""

import subprocess
import sys
import time

import pytest

import semkv

NOTHING = ("--samples", "1", "--lengths", "64")


def refused(result, message):
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "full,magic"), "unknown method 'magic'; there are: full, streaming_llm, snapkv, sekv"),
        (("--model", "./not/there", "--methods", "auto"), "method 'auto' needs a profile whose methods were measured"),
        (("--methods", ","), "--methods ',': expected a list such as a,b,c"),
        (("--budgets", "0"), "budget 0: a whole number is tokens per KV head and layer, at least 1"),
        (("--budgets", "0.0"), "budget 0.0: a fraction of the full KV must lie in (0, 1]"),
        (("--budgets", "0.1,2.0"), "budget 2.0: a fraction of the full KV must lie in (0, 1]"),
        (("--budgets", "nan"), "budget nan: a fraction of the full KV must lie in (0, 1]"),
        (("--budgets", "-0.1"), "budget -0.1: a fraction of the full KV must lie in (0, 1]"),
        (("--budgets", "ten"), "--budgets 'ten': expected fractions of the full KV such as 0.1, or tokens"),
        (("--lengths", "0"), "--lengths '0': expected whole numbers of tokens, at least 1"),
        (("--lengths", "4.5K"), "--lengths '4.5K': expected whole numbers of tokens"),
        (("--families", "single,double"), "unknown family 'double'; there are: single, multi, confusable, dense"),
        (("--question", "later"), "--question 'later': expected one of unseen, seen, both"),
        (("--samples", "0"), "--samples 0: expected at least 1"),
        (("--questions-per-context", "0"), "--questions-per-context 0: expected at least 1"),
        (("--seed", "-1"), "--seed -1: expected a number from 0 on"),
        (("--kv-dtype", "int3"), "setting kv_dtype = 'int3': expected one of float32, float16, bfloat16, float64"),
        (
            ("--model", "./not/there"),
            "model ./not/there: no such folder; give a folder, a GGUF file, a Hugging Face name, or `bundled`",
        ),
        (
            ("--profile", "missing.profile"),
            "profile missing.profile: no such folder; make one with `semkv-profile MODEL",
        ),
    ],
)
def test_eval_refuses(run, arguments, message):
    refused(run("eval", *NOTHING, *arguments), message)


@pytest.mark.parametrize("device", ["cuda:77", "abacus"])
@pytest.mark.parametrize(
    "command",
    [
        ("eval", *NOTHING),
        ("bench", "--methods", "quest", "--context", "64"),
    ],
)
def test_devices_that_there_are_not(run, command, device):
    refused(run(*command, "--device", device), f"device '{device}' cannot be used here")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, (), "text.txt: no such file"),
        (b"\xff\xfe", (), "text.txt: not readable as UTF-8"),
        (b"the old book . " * 6000, (), "with --tokens 256 behind them they are more than the model's 16384 positions"),
        (b"the old book", ("--tokens", "17000"), "with --tokens 17000 behind them they are more than"),
        (b"the old book", ("--method", "full", "--budget", "0.5"), "'full' keeps everything: pass no budget"),
    ],
)
def test_export_refuses_before_it_exports(run, tmp_path, content, options, message):
    pytest.importorskip("onnxscript")
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    refused(run("export", "bundled", tmp_path / "out", "--method", "quest", "--text", text, *options), message)
    assert not (tmp_path / "out").exists()


def test_eval_refuses_outputs_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    refused(run("eval", "--json", tmp_path), f"--json {tmp_path}: expected a file, but there is a folder")
    refused(run("eval", "--plot", tmp_path / "file"), "expected a folder, but there is a file")
    refused(run("eval", "--json", tmp_path / "file" / "out.json"), "is not a folder")


def test_eval_refuses_lengths_beyond_the_models_context(run, tiny_model):
    refused(
        run("eval", "--model", tiny_model, "--lengths", "512", "--methods", "full"),
        "length 512: the model's context is 512 tokens and a question with its answer needs up to 64 of them",
    )


def test_eval_refuses_a_folder_without_a_model(run, tmp_path):
    refused(
        run("eval", "--model", tmp_path, "--methods", "full", "--lengths", "64"),
        f"model {tmp_path}: cannot be loaded (",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "0"), "budget 0: a whole number is tokens"),
        (("--budget", "0.1,0.2"), "the demo takes one --budget and one --length"),
        (("--length", "x"), "--length 'x': expected whole numbers of tokens"),
        (("--samples", "0"), "--samples must be at least 1"),
    ],
)
def test_demo_refuses(run, arguments, message):
    refused(run("demo", *arguments), message)


def test_explain_refuses(run):
    refused(run("explain", "bundled", "--method", "magic"), "unknown method 'magic'; there are: full,")
    refused(run("explain", "bundled", "--budget", "3.0"), "budget 3.0: a fraction")
    refused(run("explain", "bundled", "--budget", "0.1,0.2"), "--budget '0.1,0.2': expected one budget")


def test_info_refuses_what_is_neither_profile_nor_artifact(run, tmp_path):
    refused(run("info", tmp_path / "gone"), "no such folder; give the folder of a profile or of a compiled artifact")
    refused(run("info", tmp_path), "holds neither profile.json nor a semkv manifest.json")
    (tmp_path / "profile.json").write_text("{")
    refused(run("info", tmp_path), str(tmp_path))


def test_help_is_instant_and_shows_examples(run):
    started = time.monotonic()
    code = (
        "import sys; from semkv.cli.main import app; "
        "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    assert time.monotonic() - started < 5.0
    for command in ("eval", "explain", "info", "demo"):
        text = run(command, "--help").output
        assert "Examples" in text
        assert f"$ semkv {command}" in text


def test_the_version_is_told(run):
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"semkv {semkv.__version__}\n"


def test_help_keeps_the_names_of_extras(run):
    assert "semkv[lm-eval]" in run("lm-eval", "--help").output
