"""The rule that says which operators a stored graph may call."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from semkv.artifact import operators
from semkv.artifact.operators import refusal, resolve, target_name
from semkv.errors import ArtifactError
from semkv.ir.spec import MEMORY_FUNCTIONS, PLAIN_FUNCTIONS


def test_names_round_trip():
    aten = torch.ops.aten
    used = [aten.add.Tensor, aten.linear.default, aten.__and__.Tensor, aten.sym_size.int, aten._to_copy.default]
    used += [torch.ops.semkv.attention.default, torch.ops.semkv.mixed_attention.default]
    used += list(operators.FUNCTIONS.values())
    for target in used:
        assert resolve(target_name(target)) is target


def test_everything_that_specs_allow_can_be_saved():
    assert set(operators.FUNCTIONS.values()) >= PLAIN_FUNCTIONS | MEMORY_FUNCTIONS


def test_core_aten_without_out_variants_is_allowed():
    """All of core ATen that computes on tensors, so that decompositions can be saved too."""
    refused = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace != "aten" or base.startswith("_"):
            continue
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        if overload != "out" and torch.Tag.core in op.tags and (reason := refusal(op)) is not None:
            refused[name] = reason
    assert set(refused) <= {"aten::rand", "aten::randn", "aten::randperm", "aten::resize_"}, refused


@pytest.mark.parametrize(
    "name",
    [
        "aten::from_file.default",
        "aten::set_.source_Storage",
        "aten::resize_.default",
        "aten::record_stream.default",
        "aten::add.out",
        "aten::_cudnn_rnn.default",
        "aten::_sparse_coo_tensor_unsafe.default",
        "aten::_efficient_attention_forward.default",
    ],
)
def test_operators_that_reach_further_are_refused(name):
    with pytest.raises(ArtifactError, match="may not be in an artifact"):
        resolve(name)


@pytest.mark.parametrize(
    "name", ["eval", "builtins.eval", "operator.attrgetter", "operator.methodcaller", "torch.load", ""]
)
def test_python_outside_the_list_is_refused(name):
    with pytest.raises(ArtifactError, match=r"expected namespace::operator\.overload"):
        resolve(name)


def test_an_operator_of_another_library_is_named_with_what_to_do():
    with torch.library._scoped_library("elsewhere", "DEF") as library:
        library.define("packed_product(Tensor x) -> Tensor")
        with pytest.raises(
            ArtifactError,
            match=r"elsewhere::packed_product\..*an operator of the library 'elsewhere'.*quantise with torchao",
        ):
            target_name(torch.ops.elsewhere.packed_product.default)


def test_operators_registered_elsewhere_resolve_in_a_fresh_process():
    """Graphs of mixtures of experts call an operator that transformers registers outside its modelling code."""
    code = (
        "import sys; sys.modules['transformers.models'] = None\n"
        "from semkv.artifact.operators import resolve\n"
        "print(resolve('transformers::grouped_mm_fallback.default'), resolve('prims::convert_element_type.default'))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["transformers.grouped_mm_fallback.default", "prims.convert_element_type.default"]
