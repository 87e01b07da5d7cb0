"""Counts a text's tokens with OpenAI's encoding since GPT-4o, and with each digit alone for
families that have it so.

No other module uses tiktoken or its table.

Nothing is ever downloaded: tiktoken is built from the table in `proxy/vocabulary`.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from binascii import a2b_base64
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files

from proxy.errors import ProxyError
from proxy.threads import breathe

Counter = Callable[[str], int]

PIECE = 20_000
"""Characters. tiktoken takes `n log n` time for a run that it cannot split into words, and panics
on about 1,000,000 white-space characters. In pieces of this size, the worst run takes four times as
long as prose."""

SEAM = re.compile(r"\n(?=[^\s/]|[ \t]{1,100}\S)|(?<=[A-Za-z])(?= [A-Za-z])")
"""Where a cut changes no count, as no token is across it: after a line, or before a word's
space."""

_DIGIT_BY_DIGIT = re.compile(
    r"qwen|qwq|qvq|gemma|gemini|mixtral|pixtral|(mi|mini|magi|code|dev|vox)stral"
)
"""Model families whose vocabularies have no number of more than one digit, where OpenAI's have them
up to three. Nothing else makes such a difference: without it Qwen's count of logs is 1.5 times
ours, and of numbers twice (docs/benchmarks.md)."""

_NUMBER = re.compile("[0-9]+")

NAME = "o200k_base"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
"""The encoding, and the hash of its unpacked table (tiktoken_ext/openai_public.py)."""

WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
)
SPACES = r"\s+(?!\S)|\s+"
"""How it splits text: `WORDS`, or else `SPACES`. Special tokens are left out: in a message they are
ordinary text."""

PATTERN = f"(?:{WORDS})|{SPACES}"
"""The group is ours: nothing in it looks ahead, so tiktoken tries it as one expression and not as
five, which takes a third less time."""


class Tokens:
    """Counts tokens; threads may share it.

    Counting releases the interpreter's lock, and one piece takes 15 ms at worst (white space), so
    in a thread it delays nobody. The first count loads the encoding, which holds the lock for up to
    0.2 s and takes about 45 MB, so call `counter` before requests arrive.
    """

    def count(self, text: str, model: str = "") -> int:
        """Count the tokens of `text` for `model`.

        For OpenAI's models the count is exact, except for stretches of more than `PIECE` characters
        without a line or word at which to cut, such as one repeated character or base64. These are
        cut anywhere, which adds about one token for each cut. Lone surrogates count as U+FFFD.
        """
        count = counter()
        alone = _DIGIT_BY_DIGIT.search(model.lower())
        found = 0
        for piece in pieces(text):
            found += count(piece) + (extra_digits(piece) if alone else 0)
            breathe()
        return found


def extra_digits(text: str) -> int:
    """Return how many tokens more the numbers of `text` take if each digit is one, and not up to
    three of them.

    The choice by the model's name is a function of the request alone, so that every process plans
    alike. It takes a third at most of the time that counting takes.
    """
    return sum([len(number) - (len(number) + 2) // 3 for number in _NUMBER.findall(text)])


@cache
def counter() -> Counter:
    """Return tiktoken's counter, built from our table. It is for texts of bounded length."""
    import tiktoken  # 10 ms and 2 MB that commands other than `serve` never need

    built = tiktoken.Encoding(NAME, pat_str=PATTERN, mergeable_ranks=table(), special_tokens={})
    return lambda text: len(built.encode_ordinary(text))


def table() -> dict[bytes, int]:
    """Read the packaged vocabulary: token → rank. Raises ProxyError if it is damaged."""
    packed = (files("proxy") / "vocabulary" / f"{NAME}.tiktoken.gz").read_bytes()
    lines = gzip.decompress(packed)
    if hashlib.sha256(lines).hexdigest() != SHA256:
        raise ProxyError(f"the packaged vocabulary {NAME} is damaged; install offload-proxy again")
    words = lines.split()
    return dict(zip(map(a2b_base64, words[::2]), map(int, words[1::2]), strict=True))


def pieces(text: str) -> Iterator[str]:
    """Cut `text` into parts of at most twice `PIECE` characters, at a seam if there is one."""
    start = 0
    while len(text) - start > 2 * PIECE:
        found = SEAM.search(text, start + PIECE, start + 2 * PIECE)
        end = found.end() if found else start + PIECE
        yield text[start:end]
        start = end
    yield text[start:]
