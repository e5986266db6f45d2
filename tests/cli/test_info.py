"""`semkv info` on profiles and artifacts."""

import pytest

from semkv.profiles.schema import Choice, Measured, ModelFacts, Profile, ProfileInfo, Provenance, SiteFacts


@pytest.fixture
def profile_folder(tmp_path):
    site = SiteFacts(index=0, name="layers.0", store=0, q_heads=4, kv_heads=2, key_dim=8, value_dim=8)
    info = ProfileInfo(
        fingerprint="0123456789abcdef",
        model=ModelFacts(name="tiny", dtype="float32", vocab_size=602, max_positions=512, sites=(site,)),
        choices=(Choice(method="sekv", budget=0.1, length=4096, score=0.875, samples=200),),
        measured={
            "taxonomy": Measured(
                created="2026-01-03T03:04:05+00:00",
                command="semkv-profile",
                data="plain text: book.txt",
                data_digest="a" * 64,
                units=50,
                wall_minutes=2.0,
                versions={"torch": "2.13.0"},
                note="a note",
            )
        },
        provenance=Provenance(
            created="2026-01-02T03:04:05+00:00",
            command="semkv-profile tiny -o tiny.profile",
            data="plain text: book.txt",
            data_digest="a" * 64,
            tokens=12345,
            seed=7,
            steps=300,
            wall_minutes=1.25,
            versions={"torch": "2.13.0"},
            losses={"total": 0.125},
        ),
    )
    return Profile(info).save(tmp_path / "tiny.profile")


def test_info_of_a_profile(run, profile_folder):
    result = run("info", profile_folder)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for part in (
        "model tiny, 1 attention sites, float32",
        "fingerprint 0123456789abcdef",
        "measured at 10 % sekv: 87.5 % at 4096 tokens, 200 questions",
        "taxonomy 2026-01-03T03:04:05+00:00, 50 samples in 2.0 minutes; a note",
        "300 steps in 1.2 minutes, seed 7",
        "data plain text: book.txt; 12345 tokens",
        "loss total 0.125",
    ):
        assert part in text


def test_info_of_a_damaged_profile_is_one_line(run, profile_folder):
    file = profile_folder / "profile.json"
    file.write_text(file.read_text().replace("tiny", "tony", 1))
    result = run("info", profile_folder)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "profile.json" in result.stderr


def test_info_of_an_artifact(run, tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    import semkv

    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    semkv.compile(model, method="streaming_llm", budget=0.25).save(tmp_path / "tiny.semkv")
    result = run("info", tmp_path / "tiny.semkv")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for part in ("artifact", "method streaming_llm", "budget 0.25", "2 attention sites, float32", "profile none"):
        assert part in text
