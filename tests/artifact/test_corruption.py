"""Over 1600 corruptions of artifacts, states and profiles: refused by name; none runs code, hangs or fills memory.

Corruptions of the first kind leave the hashes as they were, as an accident does: all must be refused. Those of the
second kind are edits whose author computed the hashes again: they are refused, or load as what they now describe.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import resource
import shutil
import struct
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import semkv
from semkv.artifact.load import load_program
from semkv.artifact.save import save_program
from semkv.artifact.state_file import load_tensors, save_tensors
from semkv.errors import ArtifactError, ProfileError, SemkvError
from semkv.profiles.schema import Profile

ACCIDENTS, EDITS, CONTAINERS, COMPILED, STATES, PROFILES = 300, 500, 200, 150, 300, 200
SECONDS = 10.0  # of CPU; a load of the tiny artifact takes about 0.02. A sleep is left to the timeout of tests.
SPARE_ADDRESSES = 16 << 30  # threads of a large machine reserve gigabytes of addresses that they never touch
SPARE_BYTES = 1 << 30

_watching: list[list[str]] = []


def _audit(event: str, arguments: tuple) -> None:
    if _watching and (
        event.split(".")[0] in ("subprocess", "socket", "pickle", "marshal", "ctypes", "shutil", "ftplib", "urllib")
        or event in ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.remove", "os.rename", "os.mkdir")
    ):
        _watching[-1].append(f"{event} {arguments!r:.200}")


sys.addaudithook(_audit)  # hooks cannot be removed; this one is idle unless `guarded` runs


@contextmanager
def guarded(canary: Path):
    """Fail on processes, sockets, unpickling, removed files, a written canary, too long a time or too much memory."""
    events: list[str] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + SPARE_ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    _watching.append(events)
    try:
        yield
    finally:
        _watching.pop()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert not events
    assert not canary.exists()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) * 1024 < SPARE_BYTES
    assert time.process_time() - started < SECONDS


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory limit is read from /proc")


def values(canary: Path) -> list[object]:
    """What edits put in place of a JSON value."""
    code = f"__import__('pathlib').Path({str(canary)!r}).touch()"
    deep: object = 1
    for _ in range(400):
        deep = [deep]
    return [
        None,
        True,
        0,
        1,
        -1,
        7,
        2**31,
        2**62,
        2**63,
        10**400,
        1e308,
        0.5,
        "",
        "a" * 5000,
        "x\x00y",
        "\ud800",
        [],
        {},
        deep,
        [0] * 1000,
        code,
        f"x=({code})",
        f"x\n    {code}\n",
        f"a'); {code}; ('",
        "../../../etc/passwd",
        "/dev/zero",
        "os.system",
        "builtins.eval",
        "torch.load",
        "aten::from_file.default",
        "aten::resize_.default",
        "semkv::none.default",
        "aten::add.Tensor",
        "operator.pow",
        "semkv.memory.record",
        "forward",
        "__class__",
        "input_ids",
        "embed.weight",
        {"node": "input_ids"},
        {"node": "memory"},
        {"node": code},
        {"dtype": "float64"},
        {"device": "cuda:7"},
        {"slice": [0, 1]},
        {"float": "nan"},
        {"tuple": [[], []]},
        {"mapping": {code: 1}},
        {"mapping": {}, "node": "x"},
        {"__reduce__": [code]},
    ]


def places(value: object, path: tuple = ()) -> list[tuple]:
    """The paths of all values inside a JSON document, but its root."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


def mutate(value: object, rng: random.Random, pool: list[object]) -> object:
    """One edit at a random place: replace, remove, double, rename, or move a value."""
    value = copy.deepcopy(value)
    every = places(value)
    *parents, key = rng.choice(every)
    parent = value
    for part in parents:
        parent = parent[part]
    match rng.randrange(6):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, list):
            parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(parent[key]))
        case 2 if isinstance(parent, dict):
            parent[str(rng.choice(pool))[:300]] = parent.pop(key)
        case 3:
            *others, other = rng.choice(every)
            source = value
            for part in others:
                source = source.get(part) if isinstance(source, dict) else source[part]
            parent[key] = copy.deepcopy(source[other])
        case _:
            parent[key] = copy.deepcopy(rng.choice(pool))
    return value


def accident(folder: Path, other: Path, rng: random.Random) -> str:
    """Damage one file without touching its hash; returns what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    kind = rng.choice(("cut", "flip", "remove", "swap", "append", "other", "blank", "folder"))
    match kind:
        case "cut":
            path.write_bytes(data[: rng.randrange(len(data))])
        case "flip":
            for _ in range(rng.choice((1, 1, 3, 30))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        case "remove":
            path.unlink()
        case "swap":
            second = rng.choice([item for item in files if item.read_bytes() != bytes(data)])
            path.write_bytes(second.read_bytes())
            second.write_bytes(data)
        case "append":
            path.write_bytes(data + rng.randbytes(rng.choice((1, 8, 1000))))
        case "other":
            if (other / path.relative_to(folder)).read_bytes() == bytes(data):
                path = folder / "weights.safetensors"
            shutil.copy(other / path.relative_to(folder), path)
        case "blank":
            path.write_bytes(bytes(len(data)))
        case "folder":
            path.unlink()
            path.mkdir()
    return f"{kind} of {path.name}"


def seal(folder: Path, manifest: dict | None = None) -> None:
    """Compute every size and hash again."""
    path = folder / "manifest.json"
    if manifest is None:
        manifest = json.loads(path.read_text())
        for name, entry in manifest["files"].items():
            data = (folder / name).read_bytes()
            entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    data = json.dumps(manifest).encode("utf-8", "surrogatepass")
    path.write_bytes(data)
    (folder / "manifest.sha256").write_text(f"{hashlib.sha256(data).hexdigest()}  manifest.json\n")


def rewrite_header(path: Path, rng: random.Random, pool: list[object]) -> None:
    """Mutate the header of a safetensors file, or declare another length of it."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    if rng.randrange(6) == 0:
        path.write_bytes(struct.pack("<Q", rng.choice((0, 1, length - 1, length + 8, 10**8, 2**40, 2**63))) + data[8:])
        return
    header = json.loads(data[8 : 8 + length])
    for _ in range(rng.choice((1, 1, 2))):
        header = mutate(header, rng, pool) or {"x": 1}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def edit(folder: Path, rng: random.Random, pool: list[object]) -> str:
    """Change one file as its author could, hashes included; returns what was done."""
    name = rng.choice(("manifest", "manifest", "body", "head", "prefill", "extend", "decode", "weights"))
    if name == "weights":
        rewrite_header(folder / "weights.safetensors", rng, pool)
        seal(folder)
    elif name == "manifest":
        value = json.loads((folder / "manifest.json").read_text())
        seal(folder, mutate(value, rng, pool))
    else:
        path = folder / "programs" / f"{name}.json"
        value = json.loads(path.read_text())
        for _ in range(rng.choice((1, 1, 2, 4))):
            value = mutate(value, rng, pool)
        path.write_bytes(json.dumps(value).encode("utf-8", "surrogatepass"))
        seal(folder)
    return f"edit of {name}"


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory, other_program):
    """Two artifacts of equal shape and different weights."""
    folder = tmp_path_factory.mktemp("artifacts")
    first = other_program.evolve(max_positions=32)
    twice = {name: parameter.detach() * 2 for name, parameter in first.body.named_parameters()}
    save_program(first, folder / "a", method="full", model_config={"model_type": "x"}, generation_config={"top_k": 3})
    body = copy.deepcopy(first.body)
    for name, parameter in body.named_parameters():
        parameter.data = twice[name]
    save_program(first.evolve(body=body), folder / "b", method="sekv", budget=0.3, model_config={"model_type": "y"})
    return folder / "a", folder / "b"


def refusal(folder: Path) -> str | None:
    """Why an artifact is not loaded, or None where it is, as graphs that fx finds well-formed."""
    try:
        program, _ = load_program(folder)
    except ArtifactError as error:
        return str(error)
    for module in (program.body, program.head, program.prefill, program.extend, program.decode):
        if module is not None:
            module.graph.lint()
    return None


@needs_proc
def test_accidents_are_all_refused(artifacts, tmp_path):
    first, second = artifacts
    rng = random.Random(2024)
    load_program(first)
    for number in range(ACCIDENTS):
        folder = tmp_path / str(number)
        shutil.copytree(first, folder)
        what = accident(folder, second, rng)
        with guarded(tmp_path / "canary"):
            message = refusal(folder)
            assert message is not None, f"accident {number} ({what}) was not noticed"
            assert str(folder) in message, what
        shutil.rmtree(folder)


@needs_proc
def test_sealed_edits_are_refused_or_load_as_data(artifacts, tmp_path):
    rng = random.Random(7)
    canary = tmp_path / "canary"
    pool = values(canary)
    outcomes = {"refused": 0, "loaded": 0}
    for number in range(EDITS):
        folder = tmp_path / str(number)
        shutil.copytree(artifacts[0], folder)
        what = edit(folder, rng, pool)
        with guarded(canary):
            message = refusal(folder)
        assert message is None or 20 < len(message) < 4000, what
        outcomes["loaded" if message is None else "refused"] += 1
        shutil.rmtree(folder)
    # Both happen: edits that keep the schema load, or the test would only try what any parser refuses.
    assert outcomes["refused"] > EDITS // 2
    assert outcomes["loaded"] > EDITS // 50


@needs_proc
def test_state_files_of_accidents_and_edits(tmp_path):
    canary = tmp_path / "canary"
    rng = random.Random(11)
    pool = values(canary)
    path = tmp_path / "state"
    tensors = {"keys": torch.randn(2, 3, 8), "places": torch.arange(9)}
    save_tensors(path, "state", {"rows": [1, 2]}, tensors, fingerprint="abc")
    data = path.read_bytes()
    for number in range(CONTAINERS):
        path.write_bytes(data)
        if number % 2:
            rewrite_header(path, rng, pool)
        else:
            changed = bytearray(data)
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(changed[: rng.choice((len(data), rng.randrange(len(data))))])
        if path.read_bytes() == data:
            continue
        with guarded(canary), pytest.raises(ArtifactError, match=str(path)):
            load_tensors(path, "state", "abc")


def seal_state(path: Path) -> None:
    """Compute a state's hash again, where its header still has a place for one."""
    data = path.read_bytes()
    place = data.find(b'"sha256":"') + len(b'"sha256":"')
    blank = data[:place] + b"0" * 64 + data[place + 64 :]
    path.write_bytes(data[:place] + hashlib.sha256(blank).hexdigest().encode() + data[place + 64 :])


def edit_state(path: Path, rng: random.Random, pool: list[object]) -> str:
    """Change the description, a declared tensor, or numbers of a state as its author could."""
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    kind = rng.choice(("description", "numbers", "header"))
    if kind == "numbers":
        name = rng.choice([name for name in header if name != "__metadata__"])
        begin, end = header[name]["data_offsets"]
        if end - begin >= 8:
            place = begin + 8 * rng.randrange((end - begin) // 8)
            size = rng.choice((1, 8))
            value = rng.choice((0, -1, 2**31 - 1, 2**62, -(2**40), rng.randrange(2**63)))
            data[8 + length + place : 8 + length + place + size] = struct.pack("<q", value)[:size]
    else:
        if kind == "description":
            description = json.loads(header["__metadata__"]["semkv"])
            header["__metadata__"]["semkv"] = json.dumps(mutate(description, rng, pool))
        else:
            name = rng.choice([name for name in header if name != "__metadata__"])
            other = rng.choice([name for name in header if name != "__metadata__"])
            header[name], header[other] = header[other], header[name]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        data = bytearray(struct.pack("<Q", len(text)) + text + data[8 + length :])
    path.write_bytes(data)
    seal_state(path)
    return kind


@needs_proc
def test_compiled_models_with_sealed_edits_of_their_settings(saved, tmp_path):
    """What `semkv.load` reads beyond the program: method, options, configurations, profile."""
    rng = random.Random(3)
    canary = tmp_path / "canary"
    pool = values(canary)
    outcomes = {"refused": 0, "loaded": 0}
    semkv.load(saved / "sekv.semkv")
    for number in range(COMPILED):
        folder = tmp_path / str(number)
        shutil.copytree(saved / "sekv.semkv", folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        part = rng.choice(("compile", "model"))
        for _ in range(rng.choice((1, 1, 3))):
            manifest[part] = mutate(manifest[part], rng, pool)
        seal(folder, manifest)
        with guarded(canary):
            try:
                semkv.load(folder)
                outcomes["loaded"] += 1
            except SemkvError:
                outcomes["refused"] += 1
        shutil.rmtree(folder)
    assert outcomes["refused"] > COMPILED // 5
    assert outcomes["loaded"] > COMPILED // 20


@needs_proc
@pytest.mark.parametrize("method", ["full", "sekv"])
def test_states_of_compiled_models(compiled, saved, tmp_path, method):
    """Accidents are refused; sealed edits are refused or make a state that the model can go on from."""
    rng = random.Random(5)
    canary = tmp_path / "canary"
    pool = values(canary)
    data = (saved / f"{method}.state").read_bytes()
    path = tmp_path / "talk.state"
    ids = torch.tensor([[5, 6, 7]] * 2)
    outcomes = {"refused": 0, "loaded": 0}
    path.write_bytes(data)
    compiled[method].extend(compiled[method].load_state(path), ids)  # kernels are looked up once in a process
    for number in range(STATES // 2):
        path.write_bytes(data)
        if number % 2:
            what = edit_state(path, rng, pool)
        else:
            changed = bytearray(data)
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(changed[: rng.choice((len(data), rng.randrange(len(data))))])
            what = "accident"
        with guarded(canary):
            try:
                state = compiled[method].load_state(path)
            except ArtifactError as error:
                outcomes["refused"] += 1
                assert str(path) in str(error)  # noqa: PT017
            else:
                assert what != "accident"
                outcomes["loaded"] += 1
                if number % 8 == 1:
                    assert compiled[method].extend(state, ids).shape[0] == len(ids)
    assert outcomes["refused"] > STATES // 4
    assert outcomes["loaded"] > STATES // 50


@needs_proc
def test_profiles_of_accidents_and_edits(saved, tmp_path):
    rng = random.Random(13)
    canary = tmp_path / "canary"
    pool = values(canary)
    source = saved / "sekv.semkv" / "profile"
    Profile.load(source)
    for number in range(PROFILES):
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        path = folder / rng.choice(("profile.json", "tensors.safetensors"))
        data = bytearray(path.read_bytes())
        accident_only = number % 2 == 0
        if accident_only:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])
        else:
            if path.suffix == ".safetensors":
                rewrite_header(path, rng, pool)
            seal_profile(folder, rng, pool, change=path.suffix == ".json")
        if path.suffix == ".json" and accident_only and _equal_json(path, source / path.name):
            continue  # white space
        with guarded(canary):
            try:
                Profile.load(folder)
            except ProfileError as error:
                assert str(folder) in str(error)  # noqa: PT017
            else:
                assert not accident_only
        shutil.rmtree(folder)


def _equal_json(first: Path, second: Path) -> bool:
    try:
        return json.loads(first.read_text()) == json.loads(second.read_text())
    except ValueError:
        return False


def seal_profile(folder: Path, rng: random.Random, pool: list[object], *, change: bool) -> None:
    """Compute both digests of a profile again, after an edit of its JSON where `change`."""
    path = folder / "profile.json"
    content = json.loads(path.read_text())
    del content["digest"]
    content["tensors_digest"] = hashlib.sha256((folder / "tensors.safetensors").read_bytes()).hexdigest()
    if change:
        content = mutate(content, rng, pool)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    if isinstance(content, dict):
        content["digest"] = hashlib.sha256(canonical.encode()).hexdigest()
    path.write_bytes(json.dumps(content).encode())
