"""How commands write text, sizes, counts and tables for people."""

from __future__ import annotations

from collections.abc import Iterable


def harmless(text: str) -> str:
    """Return text that cannot control a terminal, because strangers wrote it."""
    return "".join(char if char.isprintable() or char in "\t\n" else "\ufffd" for char in text)


def several(count: int, noun: str, plural: str = "") -> str:
    """`1 record`, `2,000 records`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def in_units(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def duration(seconds: float, *, exact: bool = False) -> str:
    """Return a time in its largest unit, or in the largest that is exact."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size and not (exact and seconds % size):
            return f"{seconds // size:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


def table(rows: Iterable[Iterable[str]], *, right: bool = False) -> str:
    """Return lines whose columns are aligned: the first to the left, and the others to the right if
    wanted."""
    lines = [list(row) for row in rows]
    first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(
        [f"{{:<{first}}}", *(f"{{:{'>' if right else '<'}{width}}}" for width in others)]
    )
    return "".join(form.format(*cells).rstrip() + "\n" for cells in lines)
