"""Counts a text's tokens as the model does: with OpenAI's encodings, and with each digit alone for the families that
have it so. No other module uses tiktoken or its tables.

Nothing is ever downloaded: tiktoken is built from the tables in `proxy/vocabulary`.
"""

from __future__ import annotations

import ctypes
import gzip
import hashlib
import re
from binascii import a2b_base64
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.resources import files
from threading import Lock

import msgspec

from proxy.errors import ProxyError
from proxy.threads import breathe

Counter = Callable[[str], int]

PIECE = 20_000
"""Characters. tiktoken takes `n log n` time for a run that it cannot split into words, and panics on about 1,000,000
white-space characters. In pieces of this size, the worst run takes four times as long as prose."""

SEAM = re.compile(r"\n(?=[^\s/]|[ \t]{1,100}\S)|(?<=[A-Za-z])(?= [A-Za-z])")
"""Where a cut changes no count, as neither encoding has a token across it: after a line, or before a word's space."""

_OLDER = re.compile(r"(^|[/:])(gpt-4(?![\w.])|gpt-3\.?5|text-embedding)")
"""The model families of cl100k_base (tiktoken/model.py), also with a prefix such as `openai/` or `ft:`, and in Azure's
spelling."""


_DIGIT_BY_DIGIT = re.compile(r"qwen|qwq|qvq|gemma|gemini|mixtral|pixtral|(mi|mini|magi|code|dev|vox)stral")
"""Model families whose vocabularies have no number of more than one digit, where OpenAI's have them up to three.
Nothing else makes such a difference: without it Qwen's count of logs is 1.5 times ours, and of numbers twice
(docs/benchmarks.md)."""

_DIGITS = bytes(ord("0") if chr(byte) in "0123456789" else ord(" ") for byte in range(256))


class Encoding(msgspec.Struct, frozen=True):
    """Facts from tiktoken_ext/openai_public.py. Special tokens are left out: in a message they are ordinary text."""

    name: str
    sha256: str
    """The hash of the unpacked table."""
    pattern: str


CL100K = Encoding(
    "cl100k_base",
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
)
O200K = Encoding(
    "o200k_base",
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


class Tokens:
    """Counts tokens; threads may share it.

    Counting releases the interpreter's lock, and one piece takes 15 ms at worst (white space), so in a thread it delays
    nobody. Loading an encoding holds the lock for up to 0.2 s and takes about 45 MB (o200k_base) or 25 MB
    (cl100k_base), so call `load_all` before requests arrive.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._counters: dict[str, Counter] = {}

    def count(self, text: str, model: str = "") -> int:
        """Count the tokens of `text` for `model`; unknown models use o200k_base.

        For OpenAI's models the count is exact, except for stretches of more than `PIECE` characters without a line or
        word at which to cut, such as one repeated character or base64. These are cut anywhere, which adds about one
        token for each cut. Lone surrogates count as U+FFFD. In a pool's thread, others have their turn between two
        stretches.
        """
        count, found = self.load(model), 0
        for piece in pieces(text):
            found += count(piece)
            breathe()
        return found

    def load(self, model: str = "") -> Counter:
        """Return the counter of `model`'s encoding, for texts of bounded length. The first call loads it."""
        encoding = encoding_of(model)
        if encoding.name not in self._counters:
            with self._lock:
                if encoding.name not in self._counters:
                    self._counters[encoding.name] = counter(encoding)
        count = self._counters[encoding.name]
        return (lambda text: count(text) + extra_digits(text)) if _DIGIT_BY_DIGIT.search(model.lower()) else count

    def load_all(self) -> None:
        """Load both encodings, so that no request has to wait while one is loaded."""
        for encoding in (O200K, CL100K):
            self._counters[encoding.name] = counter(encoding)

    def loaded(self, model: str = "") -> bool:
        """Whether `count` for `model` can begin at once, because its encoding is loaded."""
        return encoding_of(model).name in self._counters


def encoding_of(model: str) -> Encoding:
    """The encoding of `model`: cl100k_base for the GPT-4 and 3.5 families, else o200k_base."""
    return CL100K if _OLDER.search(model.lower()) else O200K


def extra_digits(text: str) -> int:
    """Return how many tokens more the numbers of `text` take if each digit is one, and not up to three of them.

    The choice by the model's name is a function of the request alone, so that every process plans alike. It takes a
    fiftieth of the time that counting takes.
    """
    marked = text.encode("utf-8", "replace").translate(_DIGITS)
    digits = marked.count(b"0")
    groups = marked.replace(b"000", b"1").replace(b"00", b"1") if digits else b""
    return digits - len(groups) + groups.count(b" ")


@cache
def counter(encoding: Encoding) -> Counter:
    """Build tiktoken's counter from our table."""
    import tiktoken  # 10 ms and 2 MB that commands other than `serve` never need

    ranks = table(encoding)
    built = tiktoken.Encoding(encoding.name, pat_str=encoding.pattern, mergeable_ranks=ranks, special_tokens={})
    ranks.clear()  # copied into the encoder, which would otherwise keep these 30 MB for nothing but pickling
    _give_back()
    return lambda text: len(built.encode_ordinary(text))


def table(encoding: Encoding) -> dict[bytes, int]:
    """Read the packaged vocabulary: token → rank. Raises ProxyError if it is damaged."""
    packed = (files("proxy") / "vocabulary" / f"{encoding.name}.tiktoken.gz").read_bytes()
    lines = gzip.decompress(packed)
    if hashlib.sha256(lines).hexdigest() != encoding.sha256:
        raise ProxyError(f"the packaged vocabulary {encoding.name} is damaged; install offload-proxy again")
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


def _give_back() -> None:
    """Return the memory that loading took and freed, about 10 MB, to the system. Only glibc keeps it, and only glibc
    has this call."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
