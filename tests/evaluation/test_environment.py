"""What results say of where they come from."""

from __future__ import annotations

import sys

from semkv.evaluation import environment


def test_a_command_names_no_folder_of_one_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(
        sys, "argv", [str(tmp_path / "grid.py"), "--methods", "full,sekv", "--out", str(tmp_path / "a b.json")]
    )
    assert environment.command() == "grid.py --methods full,sekv --out 'a b.json'"
    given = [f"text={tmp_path / 'judged'}", f"--json={tmp_path / 'out.json'}", "text=some/place", "niah.depths=20"]
    monkeypatch.setattr(sys, "argv", ["semkv", "eval", *given])
    assert environment.command() == "semkv eval text=judged --json=out.json text=some/place niah.depths=20"
    assert (
        environment.command("semkv-eval")
        == "semkv-eval eval text=judged --json=out.json text=some/place niah.depths=20"
    )


def test_a_copy_outside_of_a_checkout_is_told_its_commit(monkeypatch):
    monkeypatch.setattr(environment, "_of_checkout", lambda: "unknown")
    assert environment.commit() == "unknown"
    monkeypatch.setenv(environment.COMMIT, "1234abc")
    assert environment.commit() == "1234abc"
    monkeypatch.setattr(environment, "_of_checkout", lambda: "5678def+changes")
    assert environment.commit() == "5678def+changes"
