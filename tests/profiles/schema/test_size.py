"""How large a whole profile is."""

import math

from semkv.profiles.calibration import CalibrationSettings, MeasureSettings
from semkv.profiles.calibration.parameters import routing_rows
from semkv.profiles.schema import ModelFacts, SekvSection, SiteFacts, SketchSection
from semkv.profiles.schema.retrieval_head import RetrievalHeadSection, Yarn

HALF, WHOLE, SINGLE = 2, 1, 4
"""Bytes of an entry of half precision, of a whole number, of single precision."""


def test_a_profile_of_a_small_model_has_less_than_ten_megabytes():
    """SmolLM2-135M: 30 layers of 9 query and 3 KV heads of 64, all that the default settings put into a profile."""
    sites = tuple(
        SiteFacts(index=i, name="a", store=i, q_heads=9, kv_heads=3, key_dim=64, value_dim=64, treatment="method")
        for i in range(30)
    )
    model = ModelFacts(name="m", dtype="float32", vocab_size=49152, max_positions=8192, sites=sites)
    training, measures = CalibrationSettings(), MeasureSettings()
    rows = routing_rows(sites[0], training)
    sekv = SekvSection(
        routing_dims=(rows,) * 30, max_rank=training.max_rank, gate_hidden=training.gate_hidden, gate_summary_dim=rows
    )
    stages, rank = measures.key_bytes(64), measures.directions(64)
    sketch = SketchSection(stages=stages, rank=rank, form=2, balanced=True, caught=((0.5,) * 3,) * 30)
    hidden, features = 576, 3 * 576
    head = RetrievalHeadSection(
        hidden=hidden,
        feature_sites=(2, 15, 27),
        features=features,
        q_heads=9,
        kv_heads=3,
        head_dim=64,
        yarn=Yarn(positions=8192),
        parameters=12 * 64 * (hidden + features),
        whole=30_000_000,
        share=0.05,
        steps=240,
    )
    size = model.vocab_size * WHOLE  # classes of sentences
    for name, shape in (sekv.tensor_shapes(model) | sketch.tensor_shapes(model) | head.tensor_shapes()).items():
        small = (
            "sekv.gates.",
            "sekv.offset.",
            "sekv.threshold.",
            "sketch.mean.",
            "sketch.balance.",
            "sketch.value_mean.",
            "sketch.caught.",
        )
        each = WHOLE if "books" in name else SINGLE if name.startswith(small) else HALF
        size += each * math.prod(shape)
    assert size < 10e6
    assert size > 9e6, "nothing of it was forgotten"
