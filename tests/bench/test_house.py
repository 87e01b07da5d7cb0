"""What `bench.house` counts, on small texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import bodies, house
from bench.bodies import MESSAGES, Talk

TEXT = '''"""About it."""

def made():
    """Return it."""
    one, two = 1, 2  # packed
    return "a text"
'''


def test_tokens_lines_and_pairs_are_counted_without_comments_and_docstrings() -> None:
    # def made ( ) :   one , two = 1 , 2   return "a text"
    assert house.size([TEXT]) == house.Size(tokens=5 + 7 + 2, lines=3, tuples=1)
    assert house.size([TEXT, TEXT]).tokens == 28
    assert house.formatted("a = 'x'\n") == 'a = "x"\n'


def test_only_our_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "ROOT", tmp_path)
    for folder in ("tests", "tests/clients/node_modules/gyp"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "one.py").write_text(f"# {folder}")
    assert house.sources("tests") == ["# tests"]


def test_the_words_of_the_table_are_counted() -> None:
    assert 60 <= house.words() <= 80


def test_a_greeting_runs_functions_of_ours() -> None:
    replied, recorded = house.greeting()
    assert 100 < replied <= recorded < 500


def test_turns_differ_and_the_beginning_of_a_talk_stays() -> None:
    """What a system knows of a conversation is the beginning of its next request."""
    talk = Talk(1)
    short = talk.body(3)
    messages = short[: short.rindex(b'],"tools":')]
    assert talk.body(4).startswith(messages) and not Talk(2).body(4).startswith(messages[:9_000])
    assert {b"\\\\", b'\\"', b"\\n", "→".encode()} <= {
        one for one in (b"\\\\", b'\\"', b"\\n", "→".encode()) if one in talk.body(4)
    }
    assert abs(len(talk.body(talk.turns(1_000_000))) - 1_000_000) < 60_000


def test_marks_move_with_the_newest_messages() -> None:
    plain = Talk(1, MESSAGES).body(4)
    marked = [Talk(1, MESSAGES, marks=True).body(turns) for turns in (3, 4)]
    mark = b'"cache_control":{"type":"ephemeral"}'
    assert plain.count(mark) == 0 and [body.count(mark) for body in marked] == [3, 3]
    assert bodies.request(plain, MESSAGES).startswith(b"POST /v1/messages HTTP/1.1\r\n")
