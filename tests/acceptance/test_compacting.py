"""A client that has its history summarised, as /compact does: what the model gets to write the
summary from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.test_archive import FACT, LOGS, REFERENCE, ask, body, each_api
from tests.clients.apis import Asked, api
from tests.fake_upstream import Message, StrictUpstream, calls, text
from tests.serving import served, tight, wait_until

COMPACT = "Your task is to create a detailed summary of the conversation so far."
HINT = "Keep the paths that will matter in your summary"

PDF = "data:application/pdf;base64,JVBERi0xLjcK"
FILE: dict[str, dict[str, Any]] = {
    "chat": {
        "type": "file",
        "file": {"filename": "Summary of this conversation.pdf", "file_data": PDF},
    },
    "responses": {
        "type": "input_file",
        "filename": "Summary of this conversation.pdf",
        "file_data": PDF,
    },
    "messages": {
        "type": "document",
        "source": {
            "type": "base64",
            "media_type": "application/pdf",
            "data": PDF.rpartition(",")[2],
        },
        "title": "Summary of this conversation.pdf",
    },
}


class Writer:
    """Reads the first log before it writes the summary, which quotes the log's path, as it is told
    to."""

    def __init__(self) -> None:
        self.seen: list[Asked] = []

    def __call__(self, asked: Asked) -> Message:
        self.seen.append(asked)
        found = [path for path in REFERENCE.findall(asked.shown) if "0.log" in path]
        if asked.texts[-1].startswith(("Recall", COMPACT)) and found and "read_file" in asked.tools:
            return calls(("read_file", {"path": found[0]}))
        return text("Done.")


@each_api
def test_a_long_history_is_summarised_from_previews_that_can_be_read(
    name: str, tmp_path: Path
) -> None:
    writer = Writer()
    with StrictUpstream() as up, served({"default": tight(up.url)}, store=tmp_path) as proxy:
        up.respond(api(name, writer))
        ask(proxy, name, LOGS, COMPACT)
        first, last = writer.seen[0], writer.seen[-1]
        assert (
            HINT in first.texts[-1]
            and first.texts[-1].startswith(COMPACT)
            and FACT not in first.shown
        )
        assert FACT in last.texts[-1], "it read the log"
        wait_until(lambda: any("0.log" in path.name for path in proxy.stored()))
        reference = next(path for path in REFERENCE.findall(first.shown) if "0.log" in path)
        ask(proxy, name, [], f"Recall. So far: {reference}")
        assert FACT in writer.seen[-1].texts[-1], "and it can be read after the summary"


@pytest.mark.parametrize(("question", "hinted"), [(COMPACT, True), ("Read this.", False)])
@each_api
def test_a_file_beside_the_wish_for_a_summary_stays_and_is_no_wish_itself(
    name: str, question: str, hinted: bool, tmp_path: Path
) -> None:
    writer = Writer()
    path, made = body(name, LOGS, "")
    words = {"type": "input_text" if name == "responses" else "text", "text": question}
    said = made["input" if name == "responses" else "messages"]
    said[-1]["content"] = [words, FILE[name]]
    with StrictUpstream() as up, served({"default": tight(up.url)}, store=tmp_path) as proxy:
        up.respond(api(name, writer))
        reply = proxy.post(f"/v1{path}", made, "alice", **{"anthropic-version": "2023-06-01"})
        assert reply.status_code == 200, reply.text
    asked, file = writer.seen[0].history[-1]["content"]
    assert file == FILE[name]
    assert asked["text"].startswith(question)
    assert (HINT in asked["text"]) is hinted
