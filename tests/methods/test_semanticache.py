"""SemantiCache: chunks at delimiters, greedy seeds, merged means with log size; against loops."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import semkv
from semkv.errors import BudgetError, ConfigError
from semkv.ir.site import AttentionSite
from semkv.methods import SemantiCache, delimiter_ids, find_method
from semkv.methods.semantic_clusters import SemanticClusters, cluster, sentence_delimiters, shared_out
from semkv.methods.sentences import sentence_ends, token_class
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.store.quantization import dequantize
from semkv.runtime.store.segments import Cut, Folding
from semkv.runtime.store.spans import FoldedSpans

SITE = AttentionSite(index=0, name="layer", store=0, q_heads=4, kv_heads=2, key_dim=6, value_dim=4, scale=0.4)


def keys(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, n, 6, generator=torch.Generator().manual_seed(seed))


def by_loops(k: torch.Tensor, lengths: list[int], counts: list[int]) -> list[list[int]]:
    """Seeds: the first token, then always the one least like any seed. Each token joins the seed that it is most like."""
    out = []
    for head in k:
        x = [row / row.norm() for row in head.double()]
        labels, start, base = [], 0, 0
        for length, count in zip(lengths, counts):
            tokens = range(start, start + length)
            seeds = [start]
            while len(seeds) < count:
                free = [t for t in tokens if t not in seeds]
                seeds.append(min(free, key=lambda t: max(float(x[t] @ x[s]) for s in seeds)))
            seeds.sort()
            for t in tokens:
                near = seeds.index(t) if t in seeds else max(range(count), key=lambda i: float(x[t] @ x[seeds[i]]))
                labels.append(base + near)
            start, base = start + length, base + count
        out.append(labels)
    return out


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([9, 1, 17, 4], [3, 1, 5, 4]),
        ([30], [1]),
        ([5, 5, 5], [5, 1, 2]),
        ([63], [20]),
    ],
)
def test_clusters_are_those_of_greedy_seeds(lengths, counts):
    k = keys(sum(lengths), seed=len(lengths))
    got = cluster(k, torch.tensor(lengths), torch.tensor(counts))
    assert got.tolist() == by_loops(k, lengths, counts)


def test_equal_keys_leave_no_cluster_empty():
    k = torch.ones(2, 12, 6)
    got = cluster(k, torch.tensor([7, 5]), torch.tensor([4, 5]))
    for row in got:
        assert sorted(set(row.tolist())) == list(range(9))


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), extra=st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_clusters_are_shared_out_by_length(lengths, extra):
    total = len(lengths) + extra
    counts = shared_out(torch.tensor(lengths), total)
    assert int(counts.sum()) == min(total, sum(lengths))
    assert all(1 <= count <= length for count, length in zip(counts.tolist(), lengths))


def test_chunks_end_behind_delimiters_and_at_their_longest():
    ids = torch.tensor([5, 6, 1, 7, 8, 9, 9, 9, 1, 1, 4, 4])
    assert SemanticClusters((1,), longest=4).chunks(ids).tolist() == [3, 4, 2, 1, 2]
    assert SemanticClusters((), longest=5).chunks(ids).tolist() == [5, 5, 2]
    assert SemanticClusters((1,)).chunks(ids[:0]).tolist() == []


@pytest.mark.parametrize("room", [40.0, 66.5, 200.0])
def test_a_prompt_is_divided_within_its_room(room):
    record = RowRecord(ids=torch.arange(300) % 11)
    record.keys[0] = keys(300)
    cost = 0.6
    parts = SemanticClusters((3, 7), longest=16).segment(record, SITE, room, cost, 8)
    units = int(parts.units.max()) + 1
    window = 300 - parts.recent
    assert units * cost + window + 8 <= room
    assert units * (cost + 8 / 24) > room - window - 8 - 16 - 4
    assert parts.folded.tolist() == list(range(4, parts.recent))
    for row in parts.units:
        assert sorted(set(row.tolist())) == list(range(units))


def test_a_room_without_clusters_is_refused():
    record = RowRecord(ids=torch.arange(300) % 11)
    record.keys[0] = keys(300)
    with pytest.raises(
        BudgetError, match="20 tokens per KV head leave no room for clusters beside a window of 8 and 8 first"
    ):
        SemanticClusters().segment(record, SITE, 20.0, 0.6, 8)


def test_merging_neighbours_is_the_mean_by_size_in_every_head():
    components = SemantiCache(bits=8).components(None, None)
    spans = FoldedSpans(SITE, components, torch.float32)
    k, v = keys(12), torch.randn(2, 12, 4, generator=torch.Generator().manual_seed(9))
    units = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3], [0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3]])
    ones = torch.ones(12, dtype=torch.int64)
    spans.fold(Folding(k, v, Cut(torch.arange(12), torch.zeros(12), ones, units)))
    assert spans.host_nbytes == 0
    assert spans.merge(1, 100) == 1
    assert spans.count == 3
    joined = units.clone()
    joined[units > 0] -= 1  # units 0 and 1 are the shortest pair: at most 5 tokens in a head
    for head in range(2):
        assert spans.lengths[head].tolist() == [int((joined[head] == unit).sum()) for unit in range(3)]
        for unit in range(3):
            mine = joined[head] == unit
            got = dequantize(spans.mean_k)[head, unit]
            torch.testing.assert_close(got, k[head, mine].mean(0), rtol=0, atol=0.05)
            got = dequantize(spans.mean_v)[head, unit]
            torch.testing.assert_close(got, v[head, mine].mean(0), rtol=0, atol=0.05)


def test_delimiters_of_the_bundled_tokenizer():
    _, tokenizer = semkv.bundled.load()
    found = {tokenizer.decode([token]).strip() for token in delimiter_ids(tokenizer)}
    assert {".", "?"} <= found
    assert not any(text[-1:].isalnum() for text in found)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"delimiters": "3"},
            r"option 'delimiters' of method 'semanticache' is '3'; expected token ids such as \[5, 17\]",
        ),
        ({"delimiters": [3, -1]}, r"option 'delimiters' of method 'semanticache' is \(3, -1\)"),
        ({"chunk": 0}, "option 'chunk' of method 'semanticache' is 0; expected at least 1 token"),
        ({"bits": 5}, "option 'bits' of method 'semanticache' is 5; expected 4, 8 or 16"),
    ],
)
def test_options_are_checked(options, said):
    with pytest.raises(ConfigError, match=said):
        find_method("semanticache", options)


def test_delimiters_may_come_from_json():
    assert find_method("semanticache", {"delimiters": [3, 5]}).delimiters == (3, 5)


TEXTS = ["word", " Dr", ".", ";", ":", " yes!", '?"', "\n\n", "。", " 3.", " a", "…", "-", " J."]
CLASSES = torch.tensor([begins + 16 * ends for begins, ends in map(token_class, TEXTS)], dtype=torch.uint8)


def with_classes(classes: torch.Tensor | None):
    sentences = None if classes is None else object()
    return SimpleNamespace(info=SimpleNamespace(sentences=sentences), tensors={"sentences.classes": classes})


def chunks_by_loops(ids: list[int], ends: set[str], longest: int) -> list[int]:
    lengths, run = [], 0
    for token in ids:
        run += 1
        if (token < len(TEXTS) and TEXTS[token] in ends) or run == longest:
            lengths.append(run)
            run = 0
    return lengths + [run] * (run > 0)


def test_chunks_end_where_sentences_may_by_the_profile():
    """Semicolons, colons and abbreviations end none; ids that the profile's table does not have do not either."""
    ends = {".", " yes!", '?"', "\n\n", "。", " 3.", "…"}
    assert {TEXTS[token] for token in sentence_delimiters(CLASSES)} == ends
    segmenter = find_method("semanticache", {"chunk": 9}).components(None, with_classes(CLASSES)).segmenter
    ids = torch.randint(0, len(TEXTS) + 5, (400,), generator=torch.Generator().manual_seed(2))
    assert segmenter.chunks(ids).tolist() == chunks_by_loops(ids.tolist(), ends, 9)


@pytest.mark.parametrize(
    ("delimiters", "classes", "expected"),
    [
        (None, None, ()),
        ((), CLASSES, ()),
        ([3, 4], CLASSES, (3, 4)),
        (None, CLASSES, sentence_delimiters(CLASSES)),
    ],
)
def test_delimiters_that_are_given_are_those(delimiters, classes, expected):
    method = find_method("semanticache", {"delimiters": delimiters})
    assert method.components(None, with_classes(classes)).segmenter.delimiters == expected
    assert method.with_options({"chunk": 8}).delimiters == method.delimiters
    again = json.loads(json.dumps(asdict(method)))
    assert find_method("semanticache", again) == method


def test_a_prompts_chunks_end_at_its_sentences():
    """Every sentence of the bundled tasks ends a chunk, and chunks that are shorter than the longest end nowhere else."""
    from semkv.profiles.bundled.tasks import make_text

    _, tokenizer = semkv.bundled.load()
    profile = semkv.bundled.profile()
    segmenter = SemantiCache().components(None, profile).segmenter
    assert {tokenizer.decode([token]) for token in segmenter.delimiters} >= {".", "?"}
    ids = tokenizer(make_text(640, 0), return_tensors="pt")["input_ids"][0, :600]
    ends = sentence_ends(ids, profile.tensors["sentences.classes"])
    lengths = segmenter.chunks(ids)
    edges = lengths.cumsum(0) - 1
    assert set(torch.nonzero(ends)[:, 0].tolist()) <= set(edges.tolist())
    assert int(ends.sum()) > 20
    assert all(bool(ends[edge]) or length == 32 for edge, length in zip(edges.tolist(), lengths.tolist()))
