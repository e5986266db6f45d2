"""The JSON form of a graph: pydantic models that check every field before anything is built from it.

`graph_json` converts between these and `torch.fx`. The form is documented in docs/artifact.md.
"""

from __future__ import annotations

import keyword
import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    StrictBool,
    StrictInt,
    StringConstraints,
    Tag,
    field_validator,
)
from typing_extensions import TypeAliasType

GRAPH_SCHEMA = 1
"""Version of the graph form; a reader refuses any other."""

MAX_NODES = 200_000
MAX_ARGUMENTS = 64
MAX_LIST = 4096
MAX_ARGUMENT_DEPTH = 6
MAX_NAME = 300

DTYPE_NAMES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
)
DtypeName = Literal[DTYPE_NAMES]  # type: ignore[valid-type]


def identifier(name: str) -> str:
    """`name` when generated code can use it as a variable; ValueError else."""
    if len(name) > MAX_NAME or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError("expected a Python identifier")
    return name


def attribute_path(name: str) -> str:
    """`name` when it is a dotted module path such as `model.layers.0.mlp.weight`; ValueError else."""
    parts = name.split(".")
    if len(name) > MAX_NAME or len(parts) > 32 or not all(re.fullmatch(r"[A-Za-z0-9_]+", part) for part in parts):
        raise ValueError("expected a dotted path of letters, digits and underscores")
    if any(part.startswith("__") for part in parts):
        raise ValueError("expected a path without names of Python's own")
    return name


class Strict(BaseModel):
    """Base: no unknown fields, no conversions between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class NodeRef(Strict):
    """The value of an earlier node."""

    node: str = Field(max_length=MAX_NAME)


class DtypeRef(Strict):
    dtype: DtypeName


class DeviceRef(Strict):
    """`model`: the device the graph is loaded on. `cpu`: the CPU, wherever the graph runs."""

    device: Literal["model", "cpu"]


class LayoutRef(Strict):
    layout: Literal["strided"]


class MemoryFormatRef(Strict):
    memory_format: Literal["contiguous_format", "preserve_format", "channels_last"]


class NonFinite(Strict):
    """A float that JSON cannot hold."""

    float: Literal["inf", "-inf", "nan"]


class TupleRef(Strict):
    tuple: list[Argument] = Field(max_length=MAX_LIST)


class SliceRef(Strict):
    """start, stop, step."""

    slice: Annotated[list[Argument], Field(min_length=3, max_length=3)]


class DictRef(Strict):
    mapping: dict[Annotated[str, StringConstraints(max_length=MAX_NAME)], Argument] = Field(max_length=MAX_LIST)


def _tag(value: Any) -> str | None:
    """Which member of `Argument` a value claims to be: its type's name, or the key of a one-key object."""
    if isinstance(value, dict) and len(value) == 1:
        return str(next(iter(value)))
    if isinstance(value, Strict):
        return next(iter(type(value).model_fields))
    return {type(None): "null", bool: "bool", int: "int", float: "number", str: "str", list: "list"}.get(type(value))


_Argument = Annotated[
    Annotated[None, Tag("null")]
    | Annotated[StrictBool, Tag("bool")]
    | Annotated[StrictInt, Field(ge=-(2**63), lt=2**63), Tag("int")]
    | Annotated[FiniteFloat, Tag("number")]
    | Annotated[str, StringConstraints(max_length=1000), Tag("str")]
    | Annotated[list["Argument"], Field(max_length=MAX_LIST), Tag("list")]
    | Annotated[NodeRef, Tag("node")]
    | Annotated[DtypeRef, Tag("dtype")]
    | Annotated[DeviceRef, Tag("device")]
    | Annotated[LayoutRef, Tag("layout")]
    | Annotated[MemoryFormatRef, Tag("memory_format")]
    | Annotated[NonFinite, Tag("float")]
    | Annotated[TupleRef, Tag("tuple")]
    | Annotated[SliceRef, Tag("slice")]
    | Annotated[DictRef, Tag("mapping")],
    Discriminator(_tag),
]
Argument = TypeAliasType("Argument", _Argument)
"""An argument of a call: a JSON value for None, bool, int, finite float, str, list; a one-key object for the rest."""

for _model in (TupleRef, SliceRef, DictRef):
    _model.model_rebuild()


class NodeJson(Strict):
    """One node, in execution order.

    `target`: for a placeholder its argument name, for get_attr the tensor's path, for a call the operator's or
    function's name, absent for the output. `shape` and `dtype` tell a reader what was seen at capture (a symbolic size
    is a string); loading does not use them.
    """

    name: str
    op: Literal["placeholder", "get_attr", "call", "output"]
    target: str | None = Field(default=None, max_length=MAX_NAME)
    args: list[Argument] = Field(default_factory=list, max_length=MAX_ARGUMENTS)
    kwargs: dict[str, Argument] = Field(default_factory=dict, max_length=MAX_ARGUMENTS)
    shape: list[StrictInt | Annotated[str, StringConstraints(max_length=MAX_NAME)]] | None = Field(
        default=None, max_length=64
    )
    dtype: DtypeName | None = None

    @field_validator("name")
    @classmethod
    def _named(cls, value: str) -> str:
        return identifier(value)


class GraphJson(Strict):
    """A graph: its nodes, and for each get_attr path the key of the tensor, or the number of the recurrent body, it stands for."""

    schema_version: Literal[GRAPH_SCHEMA] = Field(alias="schema")  # type: ignore[valid-type]
    nodes: list[NodeJson] = Field(min_length=1, max_length=MAX_NODES)
    tensors: dict[str, str] = Field(default_factory=dict, max_length=MAX_NODES)
    recurrences: dict[str, StrictInt] = Field(default_factory=dict, max_length=10_000)

    @field_validator("tensors")
    @classmethod
    def _paths(cls, value: dict[str, str]) -> dict[str, str]:
        for path in value:
            attribute_path(path)
        return value

    @field_validator("recurrences")
    @classmethod
    def _names(cls, value: dict[str, int]) -> dict[str, int]:
        for name in value:
            identifier(name)
        return value


def graph_json_schema() -> dict[str, Any]:
    """The graph form as JSON Schema, the content of docs/graph.schema.json."""
    schema = GraphJson.model_json_schema()
    # JSON Schema counts 3 as an integer and as a number, so an argument may match two kinds there.
    argument = schema["$defs"]["Argument"]
    argument["anyOf"] = argument.pop("oneOf")
    return schema
