"""Where data comes from, and what is said where it does not."""

import gzip
import json
import sys
import zipfile

import pytest

from semkv.errors import ConfigError
from semkv.evaluation.tasks.sources import Source

ROWS = [{"a": "x\u2028y", "text": "one"}, {"a": 2, "text": "two"}]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "folder", "zip"])
def test_rows_come_from_every_format(kind, tmp_path):
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        path.write_text(LINES, encoding="utf-8")
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(LINES.encode()))
    elif kind == "folder":
        (path / "deep").mkdir(parents=True)
        (path / "deep" / "part.jsonl").write_text(LINES, encoding="utf-8")
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data/part.jsonl", LINES)
            archive.writestr("data/other.jsonl", '{"b": 1}')
    source = Source("key", str(path))
    assert source.rows("part") == ROWS
    assert len(source.digest) == 16


def test_text_comes_from_files_folders_and_rows(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.md").write_text("second")
    assert Source("haystack", str(tmp_path / "a.txt")).text == "first"
    assert Source("haystack", str(tmp_path)).text == "first\n\nsecond"
    assert Source("haystack", str(tmp_path)).texts == ("first", "second")
    (tmp_path / "c.txt").write_text(" \n")
    assert Source("haystack", str(tmp_path)).texts == ("first", "second"), "a file without text is none"
    (tmp_path / "rows.jsonl").write_text(LINES, encoding="utf-8")
    assert Source("haystack", str(tmp_path / "rows.jsonl")).text == "one\n\ntwo"
    (tmp_path / "none.json").write_text('[{"b": 1}]')
    with pytest.raises(ConfigError, match=r"holds no text \(.txt, .md, or rows with a field text"):
        _ = Source("haystack", str(tmp_path / "none.json")).text
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no text"):
        _ = Source("haystack", str(tmp_path / "empty")).text


def test_content_decides_the_digest(tmp_path):
    (tmp_path / "a.txt").write_text("same")
    (tmp_path / "b.txt").write_text("same")
    (tmp_path / "c.txt").write_text("other")
    digests = [Source("k", str(tmp_path / f"{name}.txt")).digest for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("place", ["./missing.json", "missing", "/none/at/all.json", "a//b"])
def test_a_place_that_is_none_is_refused(place):
    with pytest.raises(ConfigError, match=r"--source squad=.*: no such file or folder; give a file \(.jsonl, .json"):
        _ = Source("squad", place).path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": ', "a.jsonl is damaged"),
        ("a.jsonl", "3", "a.jsonl holds no rows with named fields"),
        ("a.bin", "x", "a.bin has no known format"),
        ("a.json", "[]", "a.json holds no rows"),
    ],
)
def test_damage_is_named(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        Source("k", str(tmp_path / name)).rows()


def test_missing_members_and_fields_are_named(tmp_path):
    (tmp_path / "other.jsonl").write_text(LINES, encoding="utf-8")
    source = Source("longbench", str(tmp_path))
    with pytest.raises(ConfigError, match=r"expected qasper.jsonl in it"):
        source.rows("qasper")
    with pytest.raises(ConfigError, match="row 4: no field 'input'; expected rows with input, a, found a, text"):
        source.fields(ROWS[0], ("input", "a"), 4)


def test_hub_names_take_the_default_or_the_named_file(tmp_path, monkeypatch):
    import huggingface_hub

    (tmp_path / "file.jsonl").write_text(LINES, encoding="utf-8")
    asked = []

    def download(repository, name, repo_type):
        asked.append((repository, name, repo_type))
        if name == "gone.jsonl":
            raise OSError("404 not found\nmore")
        return str(tmp_path / "file.jsonl")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert Source("k", "owner/name", ("main/test.jsonl",)).rows() == ROWS
    assert Source("k", "owner/name/deep/file.jsonl").rows() == ROWS
    assert asked == [("owner/name", "main/test.jsonl", "dataset"), ("owner/name", "deep/file.jsonl", "dataset")]
    with pytest.raises(ConfigError, match="--source k=owner/name: name the file in it, owner/name/FILE"):
        Source("k", "owner/name").rows()
    with pytest.raises(ConfigError, match=r"gone.jsonl of the data set owner/name cannot be had \(404 not found\)"):
        Source("k", "owner/name/gone.jsonl").rows()


def test_parquet_without_its_package_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match="`pip install pyarrow`, or give the data as JSON lines"):
        Source("k", str(tmp_path / "a.parquet")).rows()
