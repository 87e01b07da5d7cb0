"""A result of megabytes that one process moved is there for another one with the same store."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.fake_upstream import Message, Recorded, StrictUpstream, calls, text
from tests.serving import served, tight
from tests.steps import CHAT_TOOL, chat


def test_large_result_is_read_back_through_another_process(tmp_path: Path) -> None:
    result = "".join(f"line {number}: {number * 7919 % 104729}\n" for number in range(60_000))
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "Fetch."},
        *chat("call_0", result),
        {"role": "assistant", "content": "I have it."},
        {"role": "user", "content": "And now?"},
    ]

    def model(request: Recorded) -> Message:
        if request.messages[-1]["role"] == "tool" or len(request.messages) > len(history):
            return text("It says 41.")
        grep = next(name for name in request.tool_names if name.endswith("grep"))
        return calls((grep, {"pattern": "^line 59998:"}))

    with StrictUpstream() as up, ExitStack() as held:
        up.respond(model)
        one, two = (held.enter_context(served({"default": tight(up.url)}, store=tmp_path)) for _ in range(2))
        body = {"model": "m", "tools": [CHAT_TOOL], "messages": history}
        said = one.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        first = up.requests[-1].raw_messages
        body["messages"] = [*history, {"role": "assistant", "content": said["content"]}, history[0]]
        two.post("/v1/chat/completions", body).raise_for_status()
        again = up.requests[-1].raw_messages
        assert "line 59998: " in json.loads(first[-1])["content"] and len(b"".join(again)) < 20_000
        assert again[: len(first) - 1] == first[:-1], "the other process puts the round back"
        limits = {"max_total_tokens": 0, "max_tool_message_tokens": 0, "keep_recent_count": 0}
        asked = {"messages": history, "store_dir": "/s", **limits}
        [path] = one.post("/context_compact", asked).json()["metadata"]["write_file_dict"]
        whole = two.post("/read_file", {"absolute_path": path}).json()
        found = two.post("/grep", {"pattern": "^line 59998:", "path": "/s"}).json()
        assert whole["answer"] == result and "Found 1 match" in found["answer"]
