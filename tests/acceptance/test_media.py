"""Images and documents of moved results and of cut history: they leave as references, and
`read_file` gives them back.

The real SDKs, streamed and plain, through the real proxy in front of strict upstreams.
"""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.shared import up
from tests.clients.apis import Asked, api
from tests.clients.worker import SUMMARY, is_summary
from tests.fake_upstream import Message, StrictUpstream, calls, text
from tests.sdks import anthropic, openai
from tests.serving import Proxy, served, tight, wait_until
from tests.steps import STEP, tool

__all__ = ["up"]

Json = dict[str, Any]

GROUP = re.compile(r"stored in: (/context_store/compressed_group_\w+\.txt)")
MOVED = re.compile(
    r"\[(image|document|file), [^\]]*\](?:\.\.\. \(detailed result is stored| is) in (/context_store/[\w.-]+)"
)


def data(number: int, kind: bytes) -> str:
    """The base64 of some 3 kB that no other number has."""
    return base64.b64encode(kind + random.Random(number).randbytes(3_000)).decode()


PNG = [data(number, b"\x89PNG\r\n\x1a\n") for number in range(6)]
PDF = data(6, b"%PDF-1.7\n")


def media(name: str, number: int) -> Json:
    """What the client's tool shows: pictures, and once a document."""
    if name == "messages":
        kind = (
            ("document", "application/pdf", PDF)
            if number == 1
            else ("image", "image/png", PNG[number])
        )
        titled = {"title": "plan.pdf"} if number == 1 else {}
        return {
            "type": kind[0],
            "source": {"type": "base64", "media_type": kind[1], "data": kind[2]},
            **titled,
        }
    if name == "responses":
        if number == 1:
            return {
                "type": "input_file",
                "filename": "plan.pdf",
                "file_data": f"data:application/pdf;base64,{PDF}",
            }
        return {
            "type": "input_image",
            "image_url": f"data:image/png;base64,{PNG[number]}",
            "detail": "auto",
        }
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG[number]}"}}


def history(name: str, question: str) -> list[Json]:
    """Six steps with a picture each, and a question. Where results are only text, the user sends
    the pictures."""
    said: list[Json] = [{"role": "user", "content": "Look at the pages."}]
    for number in range(6):
        words, shown = f"page {number}: " + "nothing to see here. " * 40, media(name, number)
        parts = [{"type": "input_text" if name == "responses" else "text", "text": words}, shown]
        said += STEP[name](
            f"call_{number:04}_{name}", words if name == "chat" else parts, "look", page=number
        )
        if name == "chat":
            said.append({"role": "user", "content": [{"type": "text", "text": "There:"}, shown]})
            said.append({"role": "assistant", "content": "I see."})
    return [
        *said,
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": question},
    ]


class Model:
    """Opens what the summary replaced, then the first image or document `kind` that it finds a
    reference to."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seen: list[Asked] = []

    def __call__(self, asked: Asked) -> Message:
        if is_summary(asked):
            return text(SUMMARY)
        self.seen.append(asked)
        if "read_file" not in asked.tools or "Recall" not in asked.shown or len(self.seen) > 4:
            return text("Done.")
        opened = [path for kind, path in MOVED.findall(asked.shown) if kind == self.kind]
        if opened:
            return (
                text("I see it.")
                if self.answered(asked)
                else calls(("read_file", {"path": opened[0]}))
            )
        return calls(("read_file", {"path": GROUP.findall(asked.shown)[-1]}))

    def answered(self, asked: Asked) -> bool:
        return re.search(rf"\A(?:\[this is [^\n]*\]\n)?\[{self.kind},", asked.texts[-1]) is not None


def sdk(proxy: Proxy, name: str, entries: list[Json], streamed: bool) -> str:
    """Ask with the real SDK, and return the text of the reply."""
    options: Any = {"model": "m", "tools": [tool(name, "look")]}
    if name == "messages":
        options |= {"max_tokens": 500, "messages": entries}
        with closing(
            anthropic.Anthropic(base_url=proxy.root, api_key="alice", max_retries=0)
        ) as client:
            if not streamed:
                return "".join(
                    getattr(block, "text", "")
                    for block in client.messages.create(**options).content
                )
            with client.messages.stream(**options) as events:
                return events.get_final_text()
    with closing(openai.OpenAI(base_url=proxy.url, api_key="alice", max_retries=0)) as asking:
        if name == "responses":
            options |= {"input": entries, "store": False}
            if not streamed:
                return str(asking.responses.create(**options).output_text)
            with asking.responses.stream(**options) as items:
                return str(items.get_final_response().output_text)
        options["messages"] = entries
        if not streamed:
            return str(asking.chat.completions.create(**options).choices[0].message.content)
        with asking.chat.completions.stream(**options) as chunks:
            return str(chunks.get_final_completion().choices[0].message.content)


@pytest.fixture(scope="module")
def serve(
    up: StrictUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Proxy]]:
    """A proxy for each mode, with a store for each test."""
    with ExitStack() as held:

        def serving(mode: str, **tools: Any) -> Proxy:
            compress = {"wait": "always", "snapshot_tokens": 100}
            offload = {
                "mode": mode,
                "max_total_tokens": 4_500,
                "compact_ratio_threshold": 0.1,
                "pin_user_tokens": 100,
                "compress": compress,
            }
            policy = tight(up.url, offload=offload, tools={"inject": "agents", **tools})
            return held.enter_context(
                served({"default": policy}, store=tmp_path_factory.mktemp("store"))
            )

        yield serving


each_way = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])


def talk(
    up: StrictUpstream,
    proxy: Proxy,
    name: str,
    model: Model,
    streamed: bool,
    question: str = "Recall.",
) -> str:
    up.begin_anew()
    up.respond(answering := api(name, model))
    said = sdk(proxy, name, history(name, question), streamed)
    assert answering.refused == []
    return said


@pytest.mark.parametrize(
    ("name", "kind", "streamed", "mode"),
    [
        ("responses", "image", True, "compact"),
        ("responses", "document", False, "compact"),
        ("responses", "image", False, "compress"),
        ("responses", "document", True, "auto"),
        ("messages", "document", True, "compact"),
        ("messages", "image", False, "compact"),
        ("messages", "document", False, "compress"),
        ("messages", "image", True, "auto"),
    ],
)
def test_what_was_shown_is_shown_again(
    name: str, kind: str, streamed: bool, mode: str, up: StrictUpstream, serve: Callable[..., Proxy]
) -> None:
    model = Model("file" if (name, kind) == ("responses", "document") else kind)
    assert talk(up, serve(mode), name, model, streamed) == "I see it."
    shown = media(name, 1 if kind == "document" else 0)
    bytes_of = PNG[0] if kind == "image" else PDF
    assert bytes_of not in json.dumps(model.seen[0].history)
    given = model.seen[-1].history[-1]
    parts = given["output"] if name == "responses" else given["content"][-1]["content"]
    assert parts[-1] == shown and json.dumps(model.seen[-1].history).count(bytes_of) == 1
    assert not re.search(r"[A-Za-z0-9+/]{200}", "\n".join(model.seen[-1].texts))


@pytest.mark.parametrize(("streamed", "mode"), [(True, "compress"), (False, "auto")])
def test_chat_says_why_a_cut_picture_cannot_be_shown(
    streamed: bool, mode: str, up: StrictUpstream, serve: Callable[..., Proxy]
) -> None:
    model = Model("image")
    talk(up, serve(mode), "chat", model, streamed)
    assert "[image, image/png, 3 kB] cannot be shown again, because" in model.seen[-1].texts[-1]
    assert PNG[0] not in json.dumps(model.seen[-1].history)


@each_way
def test_in_chat_pictures_stay_when_results_move(
    streamed: bool, up: StrictUpstream, serve: Callable[..., Proxy]
) -> None:
    model = Model("image")
    up.begin_anew()
    up.respond(api("chat", model))
    sdk(serve("compact"), "chat", history("chat", "And?"), streamed)
    sent = json.dumps(model.seen[-1].history)
    assert "detailed result is stored" in sent and all(picture in sent for picture in PNG)


def test_a_picture_counts_towards_what_a_turn_may_read(
    up: StrictUpstream, serve: Callable[..., Proxy]
) -> None:
    model = Model("image")
    talk(up, serve("compact", max_retrieved_tokens=700), "responses", model, False)
    answers = "\n".join(text for asked in model.seen for text in asked.texts)
    assert re.search(
        r"\[image, image/png, 3 kB\] takes 765 tokens, and only \d+ are left for it", answers
    )
    assert PNG[0] not in json.dumps([asked.history for asked in model.seen])


@pytest.mark.parametrize("name", ["responses", "messages"])
def test_the_next_request_has_what_was_shown(
    name: str, up: StrictUpstream, serve: Callable[..., Proxy]
) -> None:
    proxy, models = serve("compact"), [Model("image"), Model("image")]
    up.begin_anew()
    up.respond(answering := api(name, lambda asked: models[0](asked)))
    said = sdk(proxy, name, history(name, "Recall."), False)
    before = models.pop(0).seen[-1].history
    entries = [
        *history(name, "Recall."),
        {"role": "assistant", "content": said},
        {"role": "user", "content": "Well?"},
    ]
    sdk(proxy, name, entries, False)
    assert answering.refused == []
    assert models[0].seen[0].history[: len(before)] == before and PNG[0] in json.dumps(before)


@pytest.mark.parametrize("name", ["responses", "messages"])
def test_a_later_conversation_that_quotes_a_picture_sees_it(
    name: str, up: StrictUpstream, tmp_path: Path
) -> None:
    model = Model("image")
    policy = tight(up.url, tools={"inject": "agents"})
    with served({"default": policy}, store=tmp_path) as proxy:
        talk(up, proxy, name, model, False)
        path = next(path for kind, path in MOVED.findall(model.seen[0].shown) if kind == "image")
        wait_until(lambda: any(path.rpartition("/")[2] in stored.name for stored in proxy.stored()))
        later = Model("image")
        up.respond(api(name, later))
        quoted = f"Recall [image, image/png, 3 kB] is in {path}"
        assert sdk(proxy, name, [{"role": "user", "content": quoted}], False) == "I see it."
    assert PNG[0] in json.dumps(later.seen[-1].history)
