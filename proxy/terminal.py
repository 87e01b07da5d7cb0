"""How commands write text, sizes, counts and tables for people."""

from __future__ import annotations

from collections.abc import Iterable
from math import floor, log10


def harmless(text: str) -> str:
    """Return text that cannot control a terminal, because strangers wrote it."""
    return "".join(char if char.isprintable() or char in "\t\n" else "\ufffd" for char in text)


def several(count: int, noun: str, plural: str = "") -> str:
    """`1 record`, `2,000 records`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def in_short(count: float) -> str:
    """`1.8 M`, `640 k`, `812`."""
    if count >= 999_500:
        return f"{count / 1e6:.1f} M"
    return f"{count / 1e3:.0f} k" if count >= 1_000 else f"{count:.0f}"


def in_money(amount: float) -> str:
    """`$101.47`, and of less than a dollar two digits that say something: `$0.0034`."""
    digits = 2 if amount >= 1 or not amount else min(max(2, 1 - floor(log10(amount))), 6)
    return f"${amount:,.{digits}f}"


def percent(share: float) -> str:
    """`76 %`, `3.2 %`."""
    return f"{100 * share:.{1 if 0 < share < 0.0995 else 0}f} %"


def change(before: float, after: float) -> str:
    """`76 % less`, `12 % more`, or `the same`."""
    if not before or round(1000 * abs(before - after) / before) == 0:
        return "the same"
    return f"{percent(abs(before - after) / before)} {'less' if after < before else 'more'}"


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
