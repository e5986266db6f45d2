"""`semkv-profile`: a whole run on a tiny local model, and the errors that come before any work."""

import json
import sys

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from semkv.cli import profile as command
from semkv.errors import ConfigError
from semkv.profiles.bundled.tokenizer import build_tokenizer
from semkv.profiles.schema import Profile

TINY = ["--length", "192", "--queries", "8", "--max-steps", "4", "--sequences", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A local folder with a tiny Llama and the bundled tokenizer."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the sailors moored the wet boats near oslo . " * 100)
    return path


def run(*arguments):
    return CliRunner().invoke(command.app, [str(argument) for argument in arguments])


def test_a_local_folder_is_calibrated(folder, text, tmp_path):
    output, report = tmp_path / "tiny.profile", tmp_path / "report"
    result = run(folder, "--data", text, "-o", output, "--report", report, *TINY)
    assert result.exit_code == 0, result.output
    assert "held-out losses after 4 steps: distill" in result.output
    columns = "site recall prec. zoomed caught oracle k rank v rank tau mined"
    assert columns in " ".join(result.output.split())
    assert "wrote" in result.output
    profile = Profile.load(output)
    assert profile.info.provenance.data == "plain text: text.txt"
    assert profile.info.sekv.routing_dims == (16, 16)
    assert not (tmp_path / "tiny.profile.resume.safetensors").exists()
    history = json.loads((report / "report.json").read_text())["history"]
    assert [row["step"] for row in history] == [0, 1, 2, 3, 4]
    assert (report / "losses.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ConfigError, match=r"exists already: pass --restart to replace it"):
        run_raising(folder, "--data", text, "-o", output, *TINY)


def run_raising(*arguments):
    result = run(*arguments)
    assert result.exit_code != 0
    raise result.exception


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "out", "--data", "none.txt"], r"calibration file none\.txt does not exist"),
        (["some/model", "-o", "out"], r"--data is needed to calibrate 'some/model': pass running text"),
        (["-o", "out", "--steps", "roles"], r"--steps 'roles' is unknown: it can be sekv"),
        (["-o", "out", "--length", "3"], r"setting length = 3"),
        (
            ["some/model", "-o", "out", "--with-tasks", "--data", __file__],
            r"--with-tasks makes the bundled model",
        ),
        (["no/such/folder", "-o", "out", "--data", __file__], r"model 'no/such/folder' cannot be loaded"),
    ],
)
def test_misuse_is_refused_before_any_work(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=message):
        run_raising(*arguments)
    assert not list(tmp_path.iterdir())


def test_short_text_is_refused(folder, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("the boats . ")
    with pytest.raises(ConfigError, match=r"the calibration text has 3 tokens"):
        run_raising(folder, "--data", path, "-o", tmp_path / "out", *TINY)


def test_errors_reach_people_without_a_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["semkv-profile", "-o", str(tmp_path / "out"), "--data", "none.txt"])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 2
    assert "calibration file none.txt does not exist" in " ".join(capsys.readouterr().err.split())


def test_help_teaches():
    result = run("--help")
    assert result.exit_code == 0
    for word in ("semkv.compile(model, profile, budget=...)", "--with-tasks", "--restart", "bundled"):
        assert word in " ".join(result.output.split())
