"""A tensor that the package makes says its dtype and its device: the defaults of both are somebody else's globals."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

ROOT = Path(__file__).parents[2]
FOLDERS = ("semkv_compile", "passes", "kernels", "profiles")

FACTORIES = frozenset(
    (
        "arange",
        "as_tensor",
        "asarray",
        "bartlett_window",
        "blackman_window",
        "empty",
        "empty_permuted",
        "empty_quantized",
        "empty_strided",
        "eye",
        "fft.fftfreq",
        "fft.rfftfreq",
        "full",
        "hamming_window",
        "hann_window",
        "kaiser_window",
        "linspace",
        "logspace",
        "nested.nested_tensor",
        "nn.utils.skip_init",
        "normal",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "range",
        "scalar_tensor",
        "sparse_bsc_tensor",
        "sparse_bsr_tensor",
        "sparse_compressed_tensor",
        "sparse_coo_tensor",
        "sparse_csc_tensor",
        "sparse_csr_tensor",
        "tensor",
        "tril_indices",
        "triu_indices",
        "zeros",
    )
)
"""Functions of torch that take dtype and device from globals where they are not given."""

LEGACY = frozenset(
    f"{kind}Tensor" for kind in ("", "Float", "Double", "Half", "BFloat16", "Long", "Int", "Bool", "Byte")
)
"""Constructors that have no place to say either."""

SETTERS = frozenset(
    (
        "manual_seed",
        "random.manual_seed",
        "seed",
        "set_default_device",
        "set_default_dtype",
        "set_default_tensor_type",
        "set_grad_enabled",
        "set_num_threads",
        "use_deterministic_algorithms",
    )
)
"""What changes a global of the process for everybody."""

EXCEPTIONS = {
    "semkv_compile/evaluation/workers.py: set_num_threads": "a worker is a process of its own",
    "profiles/bundled/train.py: set_num_threads": "each rank is a process of its own",
}

MODULES = frozenset(
    f"nn.{name}"
    for name, kind in vars(torch.nn).items()
    if inspect.isclass(kind) and {"dtype", "device"} <= set(inspect.signature(kind.__init__).parameters)
)
"""Modules of torch that make parameters."""


def _names(tree: ast.AST) -> dict[str, str]:
    """What the names of a file stand for, where that is torch (the empty string) or something in it, as `nn.Linear`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name == "torch" or (name.name.startswith("torch.") and name.asname is None):
                    found[name.asname or "torch"] = ""
                elif name.name.startswith("torch."):
                    found[name.asname] = name.name.removeprefix("torch.")
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            inside = node.module.removeprefix("torch").removeprefix(".")
            for name in node.names:
                found[name.asname or name.name] = f"{inside}.{name.name}".removeprefix(".")
    return found


def _meant(node: ast.AST, names: dict[str, str]) -> str | None:
    """The dotted name inside torch that an expression is; None: it is none."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _meant(node.value, names)
        return None if owner is None else f"{owner}.{node.attr}".removeprefix(".")
    return None


def _is_number(node: ast.AST) -> bool:
    """Whether an expression is a number of Python: a literal, `float(...)`, or a constant by its name."""
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("float", "int", "bool")
    if isinstance(node, (ast.Name, ast.Attribute)):
        name = node.id if isinstance(node, ast.Name) else node.attr
        return name.isupper() or name in ("inf", "nan", "pi")
    return isinstance(node, ast.Constant)


def globals_asked(source: str) -> Iterator[str]:
    """`line: what` for each place in a file that leaves a dtype or a device to the globals of the process, or changes those."""
    tree = ast.parse(source)
    names = _names(tree)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Name, ast.Attribute)):
            continue
        meant, call = _meant(node, names), called.get(id(node))
        given = set() if call is None else {keyword.arg for keyword in call.keywords}
        place = f"{node.lineno}: torch.{meant}"
        if meant in FACTORIES and call is None:
            yield f"{place} is handed on, so that its dtype and device are not seen; call it"
        elif meant in FACTORIES | MODULES and call is not None:
            if missing := {"dtype", "device"} - given:
                yield f"{place} without {' and '.join(f'{name}=' for name in sorted(missing))}"
        elif meant == "Generator" and call is not None and not call.args and "device" not in given:
            yield f"{place} without device="
        elif meant in LEGACY and call is not None:
            yield f"{place} says neither dtype nor device; use torch.tensor or torch.empty"
        elif meant in SETTERS:
            yield f"{place} changes what all threads of the process see"
        elif meant == "where" and call is not None and len(call.args) == 3 and all(map(_is_number, call.args[1:])):
            yield f"{place} of two numbers has the default dtype"


FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_tensor_depends_on_the_defaults_of_the_process() -> None:
    assert len(FILES) > 200
    found, excepted = [], set()
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        for place in globals_asked(path.read_text(encoding="utf-8")):
            known = f"{name}: {place.split('torch.')[1].split()[0]}"
            if known in EXCEPTIONS:
                excepted.add(known)
            else:
                found.append(f"{name}:{place}")
    assert found == []
    assert excepted == set(EXCEPTIONS), "take the exceptions that are not needed out"


def test_every_function_that_reads_the_default_device_is_known() -> None:
    """By torch's own list of them, made anew: in the one that it keeps, other libraries' functions may stand for its own."""
    listed = {function.__name__.removeprefix("fft_") for function in _device_constructors.__wrapped__()}
    known = {name.split(".")[-1] for name in FACTORIES}
    assert len(listed) > 20
    assert listed - known == set()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torch.zeros(3)", "1: torch.zeros without device= and dtype="),
        ("torch.zeros(3, dtype=d)", "1: torch.zeros without device="),
        ("torch.arange(3, device=d)", "1: torch.arange without dtype="),
        ("torch.tensor([1], **where)", "1: torch.tensor without device= and dtype="),
        ("torch.as_tensor(x)", "1: torch.as_tensor without device= and dtype="),
        ("import torch as t; t.full((2,), 1.0)", "1: torch.full without device= and dtype="),
        ("from torch import zeros; zeros(1)", "1: torch.zeros without device= and dtype="),
        ("from torch import zeros as nought; nought(1)", "1: torch.zeros without device= and dtype="),
        ("from torch import nn; nn.Linear(2, 2)", "1: torch.nn.Linear without device= and dtype="),
        ("import torch.nn as layers; layers.Embedding(2, 2)", "1: torch.nn.Embedding without device= and dtype="),
        ("from torch.nn import LayerNorm; LayerNorm(2)", "1: torch.nn.LayerNorm without device= and dtype="),
        ("torch.nn.utils.skip_init(torch.nn.Linear, 2, 2)", "1: torch.nn.utils.skip_init without device= and dtype="),
        ("torch.fft.rfftfreq(4)", "1: torch.fft.rfftfreq without device= and dtype="),
        ("list(map(torch.tensor, x))", "1: torch.tensor is handed on"),
        ("make = torch.empty", "1: torch.empty is handed on"),
        ("torch.Generator()", "1: torch.Generator without device="),
        ("torch.FloatTensor(3)", "1: torch.FloatTensor says neither"),
        ("torch.where(x, 0.0, -math.inf)", "1: torch.where of two numbers"),
        ("torch.where(x, 0.0, NEG_INF)", "1: torch.where of two numbers"),
        ("torch.set_default_dtype(torch.float32)", "1: torch.set_default_dtype changes"),
        ("torch.manual_seed(0)", "1: torch.manual_seed changes"),
    ],
)
def test_a_call_that_reads_a_global_is_seen(line: str, said: str) -> None:
    (found,) = globals_asked(line if line.startswith(("import", "from")) else f"import torch; {line}")
    assert found.startswith(said)


@pytest.mark.parametrize(
    "line",
    [
        "torch.zeros(3, dtype=d, device=x.device)",
        "x.new_zeros(3)",
        "torch.zeros_like(x)",
        "torch.Generator(x.device)",
        "torch.where(x, y, 0.0)",
        "nn.Linear(2, 2, dtype=d, device=e)",
        "nn.utils.skip_init(nn.Linear, 2, 2, dtype=d, device=e)",
        "isinstance(x, nn.Linear)",
        "def f(g: torch.Generator, x: torch.Tensor): pass",
        "other.zeros(3)",
    ],
)
def test_a_call_that_reads_none_is_left_alone(line: str) -> None:
    assert (
        list(
            globals_asked(
                f"import torch; from torch import nn; {line}" if "def" not in line else f"import torch\n{line}"
            )
        )
        == []
    )
