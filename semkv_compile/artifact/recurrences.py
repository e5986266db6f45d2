"""Bodies of recurrent sites in artifacts: each of their graphs is a file of its own, which programs name by number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field
from torch.fx import GraphModule

from semkv.artifact.arguments import DTYPE_NAME, DTYPES
from semkv.artifact.schema import DtypeName, Strict
from semkv.errors import ArtifactError
from semkv.ir.graph import placeholders
from semkv.ir.program import Program
from semkv.ir.recurrence import CHOICE_GRAPHS, Choice, Form, Live, Pieces, RecurrentSite, distinct_pieces

NAME = r"recurrence_(\d{1,4})_(\d{1,5}|first|keys|choose)"
"""Of a graph: the number of the body, and the tokens that it is for, or what it computes."""

Size = Annotated[int, Field(ge=0, lt=2**31)]


class FormFacts(Strict):
    """A `semkv.ir.recurrence.Form`."""

    shape: list[Size] = Field(max_length=16)
    dtype: DtypeName


class BodyFacts(Strict):
    """What of a `semkv.ir.recurrence.Pieces` is no graph."""

    states: list[FormFacts] = Field(max_length=64)
    outputs: list[FormFacts] = Field(min_length=1, max_length=64)
    most: Size = 0
    """Tokens that a `Choice` chooses; 0: it is none."""
    mask: DtypeName | None = None


class SiteFacts(Strict):
    """A `semkv.ir.recurrence.RecurrentSite`, whose number is its place."""

    name: str = Field(max_length=1000)
    states: list[FormFacts] = Field(max_length=64)
    reason: str = Field(max_length=1000)
    chooses: Size = 0


def bodies_of(program: Program) -> list[Pieces]:
    """The bodies of a program's recurrent sites, each once; their place is their number."""
    return distinct_pieces((program.body, program.prefill, program.extend))


def body_graphs(bodies: Sequence[Pieces]) -> dict[str, GraphModule]:
    """The graphs of bodies, by name."""
    return {
        f"recurrence_{number}_{name}": graph
        for number, body in enumerate(bodies)
        for name, graph in body.modules_by_name().items()
    }


def body_values(bodies: Sequence[Pieces]) -> list[dict[str, Any]]:
    """`BodyFacts` as JSON values.

    Raises
    ------
    ArtifactError: a body is the model's own code.
    """
    for body in bodies:
        if isinstance(body, Live):
            raise ArtifactError(
                f"module {body.name} runs as the model's own code, which no file of data holds: {body.reason}. The compiled model works in "
                "this process; to save it, write that module with tensor operations in place of branches on values"
            )
    return [{"states": _values(body.states), "outputs": _values(body.outputs), **_choice(body)} for body in bodies]


def _choice(body: Pieces) -> dict[str, Any]:
    return {"most": body.most, "mask": DTYPE_NAME[body.mask]} if isinstance(body, Choice) else {}


def site_facts(sites: Sequence[RecurrentSite]) -> list[dict[str, Any]]:
    """`SiteFacts` as JSON values."""
    return [
        {"name": site.name, "states": _values(site.states), "reason": site.reason, "chooses": site.chooses}
        for site in sites
    ]


def sites_from(facts: Sequence[SiteFacts]) -> tuple[RecurrentSite, ...]:
    """The sites that `site_facts` described."""
    return tuple(RecurrentSite(i, one.name, _forms(one.states), one.reason, one.chooses) for i, one in enumerate(facts))


def is_body_graph(name: str) -> bool:
    """Whether a graph of this name is of a body."""
    return re.fullmatch(NAME, name) is not None


def bodies_from(facts: Sequence[BodyFacts], graphs: Mapping[str, GraphModule], source: str) -> list[Pieces]:
    """The bodies of stored facts, of those `graphs` that are theirs.

    Raises
    ------
    ArtifactError: a graph is missing, belongs to none, or has other inputs than the facts say.
    """
    found: list[dict[str, GraphModule]] = [{} for _ in facts]
    for name, graph in graphs.items():
        if (match := re.fullmatch(NAME, name)) is None:
            continue
        number, tokens = int(match[1]), match[2]
        if number >= len(found) or tokens in found[number]:
            raise ArtifactError(f"{source}: graph {name!r} belongs to none of {len(found)} bodies; save it again")
        found[number][tokens] = graph
    bodies: list[Pieces] = []
    for number, (one, own) in enumerate(zip(facts, found)):
        if one.most:
            bodies.append(_choice_from(one, own, f"{source}: recurrence {number}"))
            continue
        first = own.pop("first", None)
        if any(not tokens.isdigit() for tokens in own):
            raise ArtifactError(
                f"{source}: recurrence {number} has graphs {sorted(own)}; expected those of tokens; save it again"
            )
        by_tokens = {int(tokens): graph for tokens, graph in own.items()}
        inputs = {len(placeholders(graph.graph)) for graph in (*by_tokens.values(), *([first] if first else []))}
        if 1 not in by_tokens or len(inputs) != 1 or 0 in by_tokens:
            raise ArtifactError(
                f"{source}: recurrence {number} has graphs for {sorted(by_tokens)} tokens with {sorted(inputs)} inputs; expected one token "
                "among them, and one number of inputs; save it again"
            )
        bodies.append(Pieces(by_tokens, first, _forms(one.states), _forms(one.outputs)))
    return bodies


def _choice_from(facts: BodyFacts, own: Mapping[str, GraphModule], name: str) -> Choice:
    inputs = [len(placeholders(own[graph].graph)) for graph in CHOICE_GRAPHS if graph in own]
    if set(own) != set(CHOICE_GRAPHS) or facts.mask is None or len(facts.states) != 1 or inputs[1] != inputs[0] + 2:
        raise ArtifactError(
            f"{name} chooses tokens and has graphs {sorted(own)} with {inputs} inputs, a mask {facts.mask} and {len(facts.states)} states; "
            f"expected {' and '.join(CHOICE_GRAPHS)}, with two inputs more, a mask and one; save it again"
        )
    (form,), (out,) = _forms(facts.states), _forms(facts.outputs)
    keys, choose = (own[graph] for graph in CHOICE_GRAPHS)
    return Choice(keys, choose, form, facts.most, DTYPES[facts.mask], out.dtype)


def _values(forms: Sequence[Form]) -> list[dict[str, Any]]:
    return [{"shape": list(form.shape), "dtype": DTYPE_NAME[form.dtype]} for form in forms]


def _forms(facts: Sequence[FormFacts]) -> tuple[Form, ...]:
    return tuple(Form(tuple(one.shape), DTYPES[one.dtype]) for one in facts)


__all__ = [
    "NAME",
    "BodyFacts",
    "SiteFacts",
    "bodies_from",
    "bodies_of",
    "body_graphs",
    "body_values",
    "is_body_graph",
    "site_facts",
    "sites_from",
]
