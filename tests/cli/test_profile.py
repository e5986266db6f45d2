"""`semkv-profile`: a whole run on a tiny local model, and the errors that come before any work."""

import json
import re
import sys
from typing import get_args, get_type_hints

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import semkv
from semkv.cli import profile as command
from semkv.profiles.bundled.tokenizer import build_tokenizer
from semkv.profiles.calibration.measure_settings import MeasureSettings
from semkv.profiles.calibration.settings import CalibrationSettings
from semkv.profiles.schema import Profile

TINY = [
    "--length",
    "192",
    "--queries",
    "8",
    "--max-steps",
    "4",
    "--sequences",
    "2",
    "--samples",
    "2",
    "--needle-lengths",
    "1",
    "--needle-depths",
    "1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A local folder with a tiny Llama and the bundled tokenizer."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
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


@pytest.mark.slow
def test_a_local_folder_is_calibrated(folder, text, tmp_path):
    output, report = tmp_path / "tiny.profile", tmp_path / "report"
    result = run(folder, "--data", text, "-o", output, "--report", report, "--device-memory", "8GB", *TINY)
    assert result.exit_code == 0, result.output
    trained = re.search(r"on held-out text, after ([34]) steps at most: caught", result.output)  # may stop one early
    assert trained, result.output
    columns = "site recall prec. zoomed caught coarse oracle k rank v rank tau mined"
    assert columns in " ".join(result.output.split())
    assert "wrote" in result.output
    assert re.search(r"together [\d.]+ (s|min|h), \d\.\d GiB of memory", result.output)
    profile = Profile.load(output)
    assert profile.info.provenance.data == "plain text: text.txt"
    assert profile.info.sekv.routing_dims == (8, 8)
    assert not (tmp_path / "tiny.profile.resume").exists()
    written = json.loads((report / "report.json").read_text())
    assert [row["step"] for row in written["history"]] == list(range(int(trained[1]) + 1))
    assert written["layer_errors"]["keep"] == 32
    for name in ("losses", "heads", "clusters", "layer_errors", "sketch", "memory"):
        assert (report / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    tables = ("head roles per KV store", "output error with 32 tokens kept", "token sketch per site")
    for words in (*tables, "device of 7.5 GiB, 1 row(s), 2048 selected tokens"):
        assert words in result.output
    said = refused(folder, "--data", text, "-o", output, *TINY)
    assert "exists already: pass --steps to make some of its sections again, --restart" in said

    # One section again, the others stay; what cannot be measured is said where it was asked for.
    again = run(folder, "--data", text, "-o", output, "--steps", "taxonomy", "--tau-similar", "1", *TINY)
    assert again.exit_code == 0, again.output
    made = Profile.load(output)
    assert made.info.head_taxonomy.tau_similar == 1
    assert made.info.sekv == profile.info.sekv
    assert made.info.sketch == profile.info.sketch
    if profile.info.retrieval_heads is None:
        assert "retrieval-heads was left out: none of 3 needle tests passed" in " ".join(result.output.split())
        said = refused(folder, "--data", text, "-o", output, "--steps", "retrieval-heads", *TINY)
        assert said.startswith("--steps retrieval-heads has no result: none of 3 needle tests passed")


def test_an_interrupted_command_goes_on(folder, text, tmp_path, monkeypatch):
    from semkv.profiles.calibration import layer_errors

    output = tmp_path / "tiny.profile"
    arguments = (folder, "--data", text, "-o", output, "--steps", "taxonomy,layer-errors", *TINY)
    with monkeypatch.context() as patch:
        patch.setattr(layer_errors.CompressionErrors, "measure", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(*arguments).exit_code != 0
    assert not output.exists()
    assert (tmp_path / "tiny.profile.resume" / "run.json").is_file()
    with monkeypatch.context() as patch:
        patch.setattr("semkv.profiles.calibration.taxonomy.Taxonomy.measure", None)
        result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert Profile.load(output).info.head_taxonomy is not None
    assert [path.name for path in tmp_path.iterdir() if "profile" in path.name] == ["tiny.profile"]


def refused(*arguments):
    """Why the command ends: the last line on stderr, and with it the only one where no work was done."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    *before, last = result.stderr.splitlines()
    assert last.startswith("error: ")
    assert not any(line.startswith(("error", " ", "Traceback")) for line in before)
    return last.removeprefix("error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "out", "--data", "none.txt"], r"calibration file none\.txt does not exist"),
        (["some/model", "-o", "out"], r"--data is needed to calibrate 'some/model': pass running text"),
        (["-o", "out", "--steps", "roles"], r"--steps 'roles' is unknown: it can be taxonomy, retrieval-heads"),
        (["-o", "out", "--length", "3"], r"setting length = 3"),
        (["-o", "out", "--device-memory", "much"], r"--device-memory: 'much' is no size: expected a number of bytes"),
        (
            ["some/model", "-o", "out", "--with-tasks", "--data", __file__],
            r"--with-tasks makes the bundled model",
        ),
        (["no/such/folder", "-o", "out", "--data", __file__], r"model no/such/folder: no such folder; give a folder"),
    ],
)
def test_misuse_is_refused_before_any_work(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert re.search(message, refused(*arguments))
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_what_it_will_take_and_ends(folder, text, tmp_path):
    output = tmp_path / "tiny.profile"
    result = run(folder, "--data", text, "-o", output, "--dry-run", "--steps", "taxonomy,sekv,choice", *TINY)
    assert result.exit_code == 0, result.output
    assert re.search(r"taxonomy +\d+ s\n +sekv +\d+ s\n +choice +[\d.]+ (s|min)\n", result.output), result.output
    assert "together" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_contexts_are_no_longer_than_the_model_holds(folder, tmp_path):
    """The default of 8192 tokens for a model of 512: 448 less the 100 decode steps, in whole 64s."""
    path = tmp_path / "long.txt"
    path.write_text("the sailors moored the wet boats near oslo . " * 400)
    result = run(folder, "--data", path, "-o", tmp_path / "p", "--steps", "memory", "--samples", "1", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "1 contexts of 320 tokens" in result.output
    said = refused(folder, "--data", path, "-o", tmp_path / "p", "--steps", "memory", "--length", "500")
    assert "length 500 with 100 decode steps needs 600 positions, the model has 512" in said


def test_short_text_is_refused(folder, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("the boats . ")
    assert "the calibration text has 3 tokens" in refused(folder, "--data", path, "-o", tmp_path / "out", *TINY)


def test_latents_of_a_model_without_them_are_refused(folder, text, tmp_path):
    arguments = [str(folder), "--data", str(text), "-o", str(tmp_path / "p"), "--steps", "taxonomy", "--latents", *TINY]
    result = CliRunner().invoke(command.app, arguments)
    assert result.exit_code == 2
    assert "no attention of this model is found to" in " ".join(result.output.split())
    assert not (tmp_path / "p").exists()


def test_errors_are_one_line_however_long(tmp_path, monkeypatch, capsys):
    name = tmp_path / ("a-long-name-" * 12) / "none.txt"
    monkeypatch.setattr(sys, "argv", ["semkv-profile", "-o", str(tmp_path / "out"), "--data", str(name)])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: calibration file {name} does not exist: pass a text file")


def test_the_steps_are_those_of_the_calibration():
    from semkv.profiles.calibration import STEPS

    assert command.STEPS == STEPS
    assert all(step in command.HELP for step in STEPS)


def test_a_report_of_every_section_is_drawn(tmp_path):
    """Pictures of a profile with retrieval heads, which a random model has not, and with a window layer."""
    from semkv.cli.profile_pictures import write_report
    from semkv.cli.profile_tables import TABLES, print_step
    from semkv.profiles.schema import (
        HeadTaxonomy,
        LayerErrors,
        ModelFacts,
        ProfileInfo,
        RetrievalHeads,
        SiteFacts,
        SketchSection,
    )

    def site(index, treatment):
        return SiteFacts(
            index=index, name="a", store=index, q_heads=4, kv_heads=2, key_dim=8, value_dim=8, treatment=treatment
        )

    rows = ((0.5, 0.1, 0.0, 0.0), (0.0, 0.0, 0.2, 0.0))
    info = ProfileInfo(
        fingerprint="f" * 64,
        model=ModelFacts(name="m", dtype="float32", vocab_size=9, sites=(site(0, "window"), site(1, "method"))),
        head_taxonomy=HeadTaxonomy(
            roles=(("anchor", "anchor"), ("pivot", "satellite")),
            clusters=((0, 1), (0, 0)),
            stability=((1, 1), (0.5, 0.2)),
            similarity=((0, 0), (0.7, 0.7)),
            tau_stable=0.5,
            tau_similar=0.5,
            transfer={"text": 1.0},
        ),
        retrieval_heads=RetrievalHeads(semantic=rows, classic=rows, classic_top_k=rows, tests=2, passed=1),
        layer_errors=LayerErrors(errors=(0, 1), relative=(0, 0.4), sets={"text": (0, 1)}),
        sketch=SketchSection(stages=2, caught=((), (0.8, 0.3))),
    )
    tensors = {
        name: torch.full(shape, 0.125) if "books" not in name else torch.zeros(shape, dtype=torch.uint8)
        for name, shape in info.tensor_shapes().items()
    }
    made = Profile(info, tensors)
    files = write_report(tmp_path / "report", made, [])
    assert files == [
        "report.json",
        "heads.png",
        "clusters.png",
        "retrieval_heads.png",
        "layer_errors.png",
        "sketch.png",
    ]
    console = Console(record=True, width=160)
    for step in TABLES:
        print_step(console, step, made, "a note")
    text = console.export_text()
    for shown in (
        "2 anchor, 0 volatile, 1 pivot, 1 satellite of 4 KV heads",
        "best semantic heads (site.head): 0.0 0.50",
        "0.12",
    ):
        assert shown in text


@pytest.mark.parametrize("count", [1, 20])
def test_what_was_compared_is_drawn(tmp_path, count):
    """Every method is named once, each name apart from the others; what auto takes stands under its budget."""
    from matplotlib import pyplot
    from matplotlib.text import Text

    from semkv.cli.profile_choice import choice_picture
    from semkv.cli.profile_pictures import write_report
    from semkv.profiles.schema import Choice, ModelFacts, ProfileInfo, SiteFacts

    site = SiteFacts(index=0, name="a", store=0, q_heads=2, kv_heads=2, key_dim=8, value_dim=8, treatment="method")
    choices = tuple(
        Choice(
            method=f"method_{i}", budget=budget, length=length, score=max(0.0, 1 - i * (0.3 - budget)), samples=4 + i
        )
        for i in range(count)
        for budget in (0.03, 0.05, 0.2)
        for length in (512, 2048)
        if i != 1 or budget > 0.04  # cannot run at the smallest
    )
    facts = ModelFacts(name="m", dtype="float32", vocab_size=9, sites=(site,))
    made = Profile(ProfileInfo(fingerprint="f" * 64, model=facts, choices=choices), {})
    assert write_report(tmp_path / "report", made, []) == ["report.json", "choice.png"]
    assert (tmp_path / "report" / "choice.png").read_bytes()[:4] == b"\x89PNG"

    figure = choice_picture(pyplot, choices, made)
    figure.canvas.draw()
    (axis,) = figure.axes
    assert [label.get_text() for label in axis.get_xticklabels()] == [f"{b} %\nmethod_0" for b in (3, 5, 20)]
    assert sorted(text.get_text() for text in axis.texts) == sorted(f"method_{i}" for i in range(count))
    # of the words alone, without the lines that lead to them
    boxes = sorted((Text.get_window_extent(text) for text in axis.texts), key=lambda box: box.y0)
    legend = figure.legends[0].get_window_extent()
    assert boxes[-1].y1 < figure.bbox.y1
    assert all(box.x1 < figure.bbox.x1 for box in boxes)
    assert all(below.y1 <= above.y0 + 1 for below, above in zip([legend, *boxes], boxes))
    stars = next(line for line in axis.lines if line.get_marker() == "*")
    assert stars.get_ydata().tolist() == [100.0] * 3
    pyplot.close(figure)


def test_the_router_is_a_name_of_the_step_that_trains_it(folder, text, tmp_path):
    output = tmp_path / "tiny.profile"
    result = run(folder, "--data", text, "-o", output, "--steps", "router", *TINY)
    assert result.exit_code == 0, result.output
    info = Profile.load(output).info
    assert info.sekv is not None
    assert info.head_taxonomy is None
    every = "taxonomy,retrieval-heads,layer-errors,sketch,router,retrieval-head,memory,choice"
    assert set(command._named([every])) == set(command.ALL_STEPS) - {"sentences"}
    said = refused("-o", tmp_path / "out", "--steps", "routers")
    assert re.match(r"--steps 'routers' is unknown: .*, sekv, choice; or router \(sekv\)", said)


def test_the_version_is_told():
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"semkv {semkv.__version__}\n"


def test_help_teaches():
    result = run("--help")
    assert result.exit_code == 0
    for word in (
        "semkv.compile(model, profile, budget=...)",
        "--with-tasks",
        "--restart",
        "bundled",
        "layer-errors",
        "OUT.resume",
    ):
        assert word in " ".join(result.output.split())


def test_help_tells_the_defaults():
    """Those of the settings, and the bundled model's where they differ."""
    hints = get_type_hints(command.profile, include_extras=True)
    both = [(MeasureSettings(), command.BUNDLED_MEASURES), (CalibrationSettings(), command.BUNDLED_SETTINGS)]
    for name in ("length", "samples", "needle_lengths", "needle_depths", "queries", "max_steps", "sequences"):
        settings, bundled = next(pair for pair in both if name in type(pair[0]).model_fields)
        said = next(x.help for x in get_args(hints[name]) if hasattr(x, "help"))
        own = f", bundled {bundled[name]}" if name in bundled else ""
        assert said.endswith(f"; default {getattr(settings, name)}{own}.")
