"""What stands in the context instead of a tool result."""

from __future__ import annotations

import hashlib
import json
import random
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.plan import preview
from proxy.plan.history import Naming
from proxy.plan.plan import Message, Piece, Role
from proxy.plan.preview import CHUNK, GLIMPSE_CHARS, Label, Shape
from proxy.stores import is_part
from proxy.tools import pages
from tests.doubling import assert_linear
from tests.sampling import sample

SHAPE = Shape("/context_store", 10)


def test_a_preview_has_the_documented_form() -> None:
    text = "0123456789 and more\nsecond line"
    assert preview.replacement(text, "a.log.12345678.txt", "result of cat", 9, SHAPE) == (
        "0123456789... (detailed result is stored in /context_store/a.log.12345678.txt;"
        " complete, 2 lines, 9 tokens; result of cat)"
    )


def test_the_first_preview_shows_a_screen_or_more_by_policy() -> None:
    assert SHAPE.first_preview().preview_chars == GLIMPSE_CHARS
    assert Shape("/s", 5000).first_preview().preview_chars == 5000


@pytest.mark.parametrize(
    ("text", "lines"),
    [("", 0), ("\n", 1), ("a", 1), ("a\n", 1), ("a\nb", 2), ("a\r\u2028b\n\n", 2)],
)
def test_a_preview_counts_lines(text: str, lines: int) -> None:
    assert preview.line_count(text) == lines


@given(st.text(min_size=11))
def test_the_head_of_a_preview_is_copied_exactly(text: str) -> None:
    assert preview.replacement(text, "f", "o", 1, SHAPE).startswith(
        text[:10] + "... (detailed result is stored in "
    )


# -- names of files --------------------------------------------------------------------------------


def label(tool: str, **arguments: Any) -> Label:
    return preview.of_call(tool, json.dumps(arguments), len)


@pytest.mark.parametrize(
    ("tool", "arguments", "stem"),
    [
        ("read_log", {"path": "/var/log/billing.log"}, "billing.log"),
        ("read", {"file_path": "C:\\app\\mailer\\settings.py"}, "settings.py"),
        ("open", {"files": [{"file_path": "a/b.py", "start": 3}]}, "b.py"),
        (
            "edit",
            {"command": "view", "path": "/testbed/core/base.py", "view_range": [1, 2]},
            "base.py",
        ),
        ("write", {"file_text": "import other.module\nx = 1", "path": "new.py"}, "new.py"),
        ("fetch", {"url": "https://me:pw@example.org/docs/page?token=abc#top"}, "page"),
        ("fetch", {"url": "https://me:pw@example.org/"}, "example.org"),
        ("ls", {"path": "/srv/www/"}, "www"),
        ("bash", {"command": "cd /testbed && python reproduce.py 2>/dev/null"}, "reproduce.py"),
        ("bash", {"command": "cat > conf.yaml <<EOF\nsee other.txt\nEOF"}, "conf.yaml"),
        ("bash", {"command": "grep -rn 'def loc' pandas/core"}, "core"),
        ("bash", {"command": "goto 672"}, "goto_672"),
        ("search", {"query": "how to brew coffee at home"}, "how_to_brew"),
        ("search", {"query": "咖啡"}, "search"),
        ("get_user", {"user_id": "aarav_garcia_1177"}, "aarav_garcia_1177"),
        ("login", {"token": "sk-4fA81kd93jKd02mmXz71Qq"}, "login"),
        ("get", {"id": "1f975693-876d-457b-a649-393859e79bf3"}, "get"),
        ("read", {"path": "../.."}, "read"),
        ("now", {}, "now"),
        ("../../x", {}, "x"),
        ("", {"n": 1}, "tool"),
        ("read", {"path": "y" * 100 + ".log"}, "y" * 40),
        ("read", {"path": "notes/2026-01-31 plan-b.md"}, "plan_b.md"),
        ("web-search", {}, "web_search"),
        ("-x-", {}, "x"),
        ("-", {}, "tool"),
    ],
)
def test_a_file_is_named_after_what_identifies_the_call(
    tool: str, arguments: dict[str, Any], stem: str
) -> None:
    assert label(tool, **arguments).stem == stem


def test_a_label_says_what_the_text_is() -> None:
    made = label("read_log", path="/var/log/billing.log", lines=200)
    assert made.origin == "result of read_log"
    assert made.about == "result of read_log /var/log/billing.log"
    assert made.call_strings == ("/var/log/billing.log", "read_log")
    assert made.tokens == len("billing.log") + len("result of read_log")
    assert label("web-search", query="x").origin == "result of web-search", (
        "the model knows it by this name"
    )
    assert label("search", query="咖啡").about == "result of search 咖啡"
    assert label("bash", command="cat a.log\n | wc").about == "result of bash cat a.log | wc"
    assert label("bash", command="cat " + "x" * 500).about == "result of bash cat " + "x" * 76 + "…"


def test_the_paths_in_a_command_are_words_for_its_result() -> None:
    assert label("bash", command="cd /app && tail -n 5 logs/billing.log").call_strings == (
        "cd /app && tail -n 5 logs/billing.log",
        "/app",
        "logs/billing.log",
        "bash",
    )


@pytest.mark.parametrize(
    "arguments", ["not json at all", "cat /var/log/a.log", '["a.log", ["b.log"]]', '"a.log"', ""]
)
def test_arguments_need_not_be_an_object(arguments: str) -> None:
    assert preview.of_call("t", arguments, len).stem in ("not_json_at", "a.log", "t")


@given(
    st.text(max_size=50),
    st.recursive(
        st.text() | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ),
)
def test_any_call_gives_a_safe_name(tool: str, arguments: Any) -> None:
    made = preview.of_call(tool, json.dumps(arguments), len)
    name = preview.file_name(made, "0" * 32, 32)
    assert re.fullmatch(r"[A-Za-z0-9_.]+", name), "readers take names out of texts with this"
    assert is_part(name) and len(name) <= preview.STEM_CHARS + 40
    assert len(made.call_strings) <= preview.SAID + 1 and all(
        len(word) <= preview.SAID_CHARS for word in made.call_strings
    )
    assert len(made.about) < 200 and "\n" not in made.about


@pytest.mark.parametrize(
    "text", sample(["a/", "a", "a.1", "/", ".", "~", "a~", "a.b ", "-", "@"], 4)
)
def test_looking_for_paths_is_linear(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(preview, "_TEXT_CHARS", 10_000_000)
    assert_linear(preview.paths, text * (30_000 // len(text)), text * (60_000 // len(text)))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cat /a/b.txt c.txt", ["/a/b.txt", "c.txt"]),
        ("see ~/notes/x.md.", ["~/notes/x.md"]),
        ("cat .env.local ../x/y", [".env.local", "../x/y"]),
        ("a//b.txt x=conf/z.ini", ["/b.txt", "conf/z.ini"]),
        ("no path at all, e.g. this one", []),
        ("ls > /dev/null", []),
    ],
)
def test_the_paths_in_a_text(text: str, found: list[str]) -> None:
    assert [path for path in preview.paths(text) if path != "e.g"] == found


def test_huge_arguments_are_looked_at_in_bounded_time() -> None:
    calls = 0

    def count(text: str) -> int:
        nonlocal calls
        calls += len(text)
        return 1

    made = preview.of_call(
        "t",
        json.dumps({"path": "a.log", "data": "/x" * 1_000_000, "more": [["y"]] * 10_000}),
        count,
    )
    assert len(made.call_strings) <= preview.SAID + 1 and calls < 200


# -- the names of a history ------------------------------------------------------------------------


def message(
    role: Role, *, calls: dict[str, Label] | None = None, answers: str = "", digest: str = ""
) -> Message:
    pieces = (
        (Piece(None, digest, 1000, 50, 1000, preview.of_kind("tool result", len)),)
        if digest
        else ()
    )
    made = calls or {}
    ids = tuple((id, "t") for id in made)
    return Message(b"d", role, b"m", 1000, pieces, ids, answers, labels=tuple(made.values()))


def asking(**calls: Label) -> Message:
    return message(Role.ASSISTANT, calls=calls)


def answered(call: str, digest: str) -> Message:
    return message(Role.TOOL, answers=call, digest=digest)


def names(messages: list[Message], naming: Naming | None = None) -> list[str]:
    return [piece.name for each in (naming or Naming()).named(messages)[0] for piece in each.pieces]


A = label("read_log", path="/var/log/a.log")
FIRST, TWIN, OTHER = "123456789abcdef0" + "a" * 16, "123456789abcdef0" + "b" * 16, "0" * 32


def test_a_name_is_made_of_the_call_and_the_text() -> None:
    assert names([asking(x=A), answered("x", FIRST)]) == ["a.log.123456789abcdef0.txt"]
    assert names([answered("x", FIRST)]) == ["tool_result.123456789abcdef0.txt"], (
        "its call is not known"
    )
    assert names([asking(x=A), message(Role.USER, digest=FIRST)]) == [
        "tool_result.123456789abcdef0.txt"
    ]


def test_two_texts_never_share_a_name_and_equal_texts_share_a_file() -> None:
    history = [
        asking(x=A, y=A, z=A),
        answered("x", FIRST),
        answered("y", TWIN),
        answered("z", FIRST),
    ]
    assert names(history) == [
        "a.log.123456789abcdef0.txt",
        f"a.log.{TWIN}.txt",
        "a.log.123456789abcdef0.txt",
    ]


@pytest.mark.parametrize("cut", range(5))
def test_names_do_not_depend_on_where_a_history_is_continued(cut: int) -> None:
    """A name depends on what came before it, however many requests it took."""
    history = [
        asking(x=A, y=A),
        answered("x", FIRST),
        answered("y", TWIN),
        asking(x=A),
        answered("x", OTHER),
    ]
    begun, naming = Naming().named(history[:cut])
    rest, _ = naming.named(history[cut:])
    assert [*begun, *rest] == Naming().named(history)[0]


def test_a_name_adds_to_the_tokens_of_the_reference() -> None:
    [_, named], _ = Naming().named([asking(x=A), answered("x", FIRST)])
    [piece] = named.pieces
    assert piece.preview == 50 + A.tokens == named.preview
    assert piece.first_preview == 1000 == named.first_preview
    long = msgspec.structs.replace(answered("x", FIRST).pieces[0], preview=990)
    assert long.named("n", A).preview == 1000, "the reference would be longer than the text"


def test_what_replaces_a_message_is_kept_for_its_name_alone() -> None:
    unnamed = answered("x", FIRST)
    unnamed.replaced[False] = b"nameless"
    [_, one], _ = Naming().named([asking(x=A), unnamed])
    one.replaced[False] = b"a.log"
    [_, other], _ = Naming().named([asking(x=label("read_log", path="b.log")), unnamed])
    assert (one.replaced, other.replaced) == ({False: b"a.log"}, {})


DIGEST = "0123456789abcdef"
NAME = f"a.log.{DIGEST}.txt"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (f"(detailed result is stored in /context_store/{NAME}; complete)", {NAME}),
        (f"context_store: \\/context_store\\/{NAME}", {NAME}),
        (f"context_store:\\n{NAME}", {NAME}),
        (f"context_store:\\u0020{NAME}", {NAME}),
        (
            "/context_store/compressed_group_0123456789abcdef.txt",
            {"compressed_group_0123456789abcdef.txt"},
        ),
        (f"{NAME} without its folder", set()),
        (
            "context_store a.log.0123456789abcde.txt, .0123456789abcdef.txt, a.0123456789abcdef.txt2",
            set(),
        ),
        # Markdown escapes an underscore; within JSON its backslash is two, and within JSON of JSON
        # four
        *(
            (
                f"context{escape}_store/compressed{escape}_group{escape}_{DIGEST}.txt",
                {f"compressed_group_{DIGEST}.txt"},
            )
            for escape in ("\\\\", "\\\\\\\\")
        ),
        ("context_store:\\n" + "x\\\\_" * 20 + f"x.{DIGEST}.txt", {"x_" * 20 + f"x.{DIGEST}.txt"}),
        ("context_store " + "x" * (256 << 10) + f" {NAME}", {NAME}),
        ("context_store " + "x" * ((256 << 10) - 22) + f" {NAME}", {NAME}),
    ],
)
def test_names_that_a_body_quotes(body: str, found: set[str]) -> None:
    there = preview.has_place(body.encode(), "/context_store")
    assert (preview.names_in(body.encode()) if there else set()) == found


def test_a_long_body_is_looked_at_in_linear_time() -> None:
    begin = b"context_store "
    for word in (b"some-words_in.a-text ", b"\\\\_", b"a" * 150 + b"\\_" + NAME.encode()):
        words = word * (400_000 // len(word))
        assert_linear(preview.names_in, begin + words, begin + 2 * words)


# -- long texts: one call into C holds the interpreter's lock until it ends ------------------------

LONG = "".join(random.Random(1).choices('a\n"\\é語😀\x00', k=3 * CHUNK + 17))


class Watched(str):
    """A text that notes how many characters each call reads."""

    read: list[int]

    def __getitem__(self, key: Any) -> str:
        part = Watched(super().__getitem__(key))
        part.read = self.read
        return part

    def encode(self, *options: Any, **more: Any) -> bytes:
        self.read.append(len(self))
        return super().encode(*options, **more)

    def count(self, sub: str, start: Any = 0, stop: Any = None) -> int:  # type: ignore[override]
        self.read.append((len(self) if stop is None else stop) - start)
        return super().count(sub, start, stop)


def watched() -> Watched:
    text = Watched(LONG)
    text.read = []
    return text


def test_a_digest_is_made_in_steps() -> None:
    text = watched()
    assert preview.digest(text) == hashlib.sha256(LONG.encode()).hexdigest()[:32]
    assert max(text.read) <= CHUNK and sum(text.read) == len(LONG)
    assert preview.digest("") == hashlib.sha256(b"").hexdigest()[:32]
    assert re.fullmatch("[0-9a-f]{32}", preview.digest("\ud83d"))


def test_lines_are_counted_in_steps() -> None:
    text = watched()
    assert preview.line_count(text) == LONG.count("\n") + (LONG[-1] != "\n")
    assert pages.line_start(text, 100_000) == len("\n".join(LONG.split("\n", 100_000)[:-1])) + 1
    assert max(text.read) <= CHUNK
    assert preview.line_feeds("a\nb\nc\n", 2, 5) == 1
