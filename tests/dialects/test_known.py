"""Nothing that we do not understand is ever cut: every entry that the newest SDKs' types know, in
every mode."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import pytest

from proxy import regex
from proxy.dialects import Dialect, chat
from proxy.dialects.chat import CHAT
from proxy.dialects.entries import MARKS
from proxy.dialects.messages import MESSAGES
from proxy.dialects.messages import request as messages
from proxy.dialects.render import Files, moved_files
from proxy.dialects.responses import RESPONSES
from proxy.dialects.responses import request as responses
from proxy.plan.plan import Message, Reading
from proxy.plan.preview import Shape
from proxy.policy import Compress, Mode
from proxy.tools.answer import Material, answer
from proxy.tools.definitions import Arguments
from tests import written
from tests.dialects import sdk_types
from tests.dialects.rendering import history, rendered, snapshot
from tests.steps import STEP

Json = dict[str, Any]

MODES = (Mode.COMPACT, Mode.COMPRESS)
SECRET = {
    "signature",
    "encrypted_content",
    "encrypted_index",
    "data",
    "encrypted_stdout",
    "logprobs",
}
"""Members of the model's reasoning and of citations. They mean something to upstream alone."""
INLINE = {"data", "file_data"}
"""Members with the bytes of audio and files, which results of chat cannot hold."""
FRAMES = {
    "id",
    "call_id",
    "tool_use_id",
    "tool_call_id",
    "container_id",
    "name",
    "namespace",
    "toolset_name",
}
"""What pairs entries and names tools; it is not said."""


def _type(place: str) -> Any:
    module, _, name = place.rpartition(".")
    return getattr(import_module(module), name)


class Api(NamedTuple):
    """How one API writes a history of steps."""

    dialect: Dialect
    types: tuple[str, str]
    """Where the SDK has its entries, and whole bodies."""
    field: str

    @property
    def entry(self) -> Any:
        return _type(self.types[0])

    def step(self, number: int, text: str) -> list[Json]:
        return STEP[self.dialect.name](f"call_{number:08d}", text, "look")

    def around(self, entry: Json) -> tuple[list[Json], list[Json]]:
        """What pairs with this entry, before it and behind it."""
        if self.dialect is CHAT:
            calls = [{**call, "type": "function"} for call in entry.get("tool_calls") or []]
            if entry["role"] == "tool":
                call = {
                    "id": entry["tool_call_id"],
                    "type": "function",
                    "function": {"name": "f", "arguments": "{}"},
                }
                return [{"role": "assistant", "content": None, "tool_calls": [call]}], []
            return [], [
                {"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls
            ]
        if self.dialect is RESPONSES:
            kind = entry.get("type", "message")
            if kind.endswith("_output") and "call_id" in entry:
                return [{**_call(kind.removesuffix("_output")), "call_id": entry["call_id"]}], []
            if kind.endswith("_call") and "call_id" in entry:
                return [], [
                    {"type": f"{kind}_output", "call_id": entry["call_id"], "output": "done"}
                ]
            return [], []
        blocks = entry["content"] if isinstance(entry["content"], list) else []
        of = {
            kind: [block for block in blocks if block["type"] == kind]
            for kind in ("tool_use", "tool_result")
        }
        calls = [
            {"type": "tool_use", "id": one["tool_use_id"], "name": "f", "input": {}}
            for one in of["tool_result"]
        ]
        results = [
            {"type": "tool_result", "tool_use_id": one["id"], "content": "done"}
            for one in of["tool_use"]
        ]
        return (
            [{"role": "assistant", "content": calls}] if calls else [],
            [{"role": "user", "content": results}] if results else [],
        )

    def within(self, entries: list[Json]) -> list[Json]:
        """A conversation that is long enough for every event, with these entries in its old
        part."""
        steps = [
            each for number in range(12) for each in self.step(number, f"result {number} " * 60)
        ]
        task = {"role": "user", "content": "The task."}
        asked = {"role": "user", "content": "Go on."}
        return [
            task,
            *steps[:8],
            *entries,
            asked,
            *steps[8:],
            {"role": "assistant", "content": "."},
            asked,
        ]


def _call(kind: str) -> Json:
    named = {"name": "f"} if kind in ("function_call", "custom_tool_call") else {}
    given: dict[str, Json] = {
        "function_call": {"arguments": "{}"},
        "custom_tool_call": {"input": ""},
    }
    given["apply_patch_call"] = {"operation": {}}
    return {"type": kind, **named, **given.get(kind, {"action": {}})}


APIS = {
    "chat": Api(
        CHAT,
        (
            "openai.types.chat.ChatCompletionMessageParam",
            "openai.types.chat.completion_create_params.CompletionCreateParamsNonStreaming",
        ),
        "messages",
    ),
    "responses": Api(
        RESPONSES,
        (
            "openai.types.responses.response_input_param.ResponseInputItemParam",
            "openai.types.responses.response_create_params.ResponseCreateParamsNonStreaming",
        ),
        "input",
    ),
    "messages": Api(
        MESSAGES,
        (
            "anthropic.types.beta.BetaMessageParam",
            "anthropic.types.beta.message_create_params.MessageCreateParamsNonStreaming",
        ),
        "messages",
    ),
}


class Sent(NamedTuple):
    body: str
    files: Files
    acted: bool

    @property
    def readable(self) -> str:
        """All that `read_file` answers in this request."""
        return "".join(read_back(self.files, path) for path in self.files)


def sent(api: Api, entries: list[Json], mode: Mode, **policy: Any) -> Sent:
    """What is sent of a history with these entries in its old part, and whether that is moved or
    cut as `mode` says."""
    offload = written.offload(
        mode=mode,
        keep_views=1,
        max_total_tokens=3_000,
        max_tool_message_tokens=100,
        unseen_limit=50_000,
        pin_user_tokens=100,
        compact_ratio_threshold=0.2,
        cached_read=1,
        cache_write=1,
        store_dir="/store",
        compress=Compress(snapshot_tokens=20),
        **policy,
    )
    dialect = api.dialect
    request = dialect.parse(json.dumps({"model": "m", api.field: api.within(entries)}).encode())
    past = history(dialect, request.entries, offload)
    plan, transcript = past.plan(), past.transcript(request.entries)
    shown = snapshot(past, plan)
    made = rendered(dialect, transcript, plan, offload, shown)
    files = moved_files(
        dialect, transcript, plan, "/store", shown.boundary if shown else None, past.links
    )
    body = dialect.turn(request, made, [], 8).request().decode()
    acted = plan.boundaries if mode is Mode.COMPRESS else plan.moves
    return Sent(body, files, bool(acted))


def read_back(files: Files, path: str) -> str:
    """What `read_file` answers: the text, and the image or the file behind it."""
    material = Material(files, files.index, 10**9, len, regex.compile, media=files.media)
    found = answer(Arguments("read_file", path=path), material)
    return f"{found.text}\n{found.part}\n"


def said(value: Any) -> Iterator[str]:
    """The words in a value, without what only upstream can read."""
    if isinstance(value, dict):
        yield from (
            word for key, one in value.items() if key not in SECRET | FRAMES for word in said(one)
        )
    elif isinstance(value, list):
        yield from (word for one in value for word in said(one))
    else:
        yield from sdk_types.words(value)


SEALED_MEMBERS = {
    "chat": {"audio", "function_call"},  # what only upstream has; an older form of calls
    "responses": {"async"},  # its result comes in a later step
    "messages": {"clear_at", "output_config"},
}


def probes(api: Api) -> list[Json]:
    found = [*sdk_types.values(api.entry), *LISTS.get(api.dialect.name, ())]
    sealing = SEALED_MEMBERS[api.dialect.name]
    return [*found, *(_without(probe, sealing) for probe in found if sealing & probe.keys())]


def _without(probe: Json, keys: Collection[str]) -> Json:
    """A value whose other members would stay with these in any case."""
    return {key: one for key, one in probe.items() if key not in keys}


LISTS: dict[str, list[Json]] = {
    "chat": [
        {"role": "assistant", "content": "So.", "reasoning_details": [
            {"type": "reasoning.summary", "summary": sdk_types.word()},
            {"type": "reasoning.text", "text": sdk_types.word(), "signature": "s"},
        ]},
        {"role": "assistant", "thinking_blocks": [{"type": "thinking", "thinking": sdk_types.word()}]},
    ],
}  # fmt: skip
"""Reasoning as gateways write it, which is in no SDK."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", APIS)
def test_everything_is_sent_or_readable_and_with_an_unknown_member_sent_as_it_is(
    name: str, mode: Mode
) -> None:
    """The types of the SDKs are not known before it runs, so it is one test for all of them."""
    for probe in probes(APIS[name]):
        assert_nothing_is_lost(APIS[name], probe, mode)


def assert_nothing_is_lost(api: Api, probe: Json, mode: Mode) -> None:
    before, behind = api.around(probe)
    made = sent(api, [*before, probe, *behind], mode)
    assert made.acted, probe
    readable = made.readable
    lost = [word for word in said(probe) if word not in made.body + readable]
    if api.dialect is CHAT and lost:
        assert "cannot be shown again, because this API's results are only text" in readable
        assert lost == [word for word in said(inline(probe)) if word in lost]
    else:
        assert lost == [], probe
    for changed in ({**probe, "a_new_member": sdk_types.word()}, *with_new_members(probe)):
        body = sent(api, [*before, changed, *behind], mode).body
        assert [word for word in sdk_types.words(changed) if word not in body] == [], changed


def with_new_members(probe: Json) -> Iterator[Json]:
    """The entry with an unknown member in one of the objects that its lists have, and in what is
    called there."""
    for key in ("content", "output", "outputs", "tool_calls"):
        parts = probe.get(key)
        for place, part in enumerate(parts if isinstance(parts, list) else []):
            for inner in ("", "function", "custom"):
                whole = part.get(inner) if inner else part
                if isinstance(whole, dict):
                    new = {**whole, "a_new_member": sdk_types.word()}
                    new = {**part, inner: new} if inner else new
                    yield {**probe, key: [*parts[:place], new, *parts[place + 1 :]]}


def inline(value: Any) -> list[Any]:
    """The bytes of images, audio and files in a value."""
    if isinstance(value, dict):
        return [
            one
            for key, inner in value.items()
            for one in ([inner] if key in INLINE else inline(inner))
        ]
    return [one for inner in value for one in inline(inner)] if isinstance(value, list) else []


def test_who_said_it_is_readable_after_a_cut() -> None:
    said = [
        {"role": "assistant", "name": name, "content": f"I am {name}."}
        for name in ("coder", "critic")
    ]
    readable = sent(APIS["chat"], said, Mode.COMPRESS).readable
    assert (
        " assistant coder\nI am coder." in readable
        and " assistant critic\nI am critic." in readable
    )


FAILED: list[tuple[str, Json, str]] = [
    ("messages", {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "No such file.", "is_error": True}]}, ""),
    ("responses", {"type": "apply_patch_call_output", "call_id": "c1", "output": "Hunk 2.", "status": "failed"}, ""),
    ("responses", {"type": "shell_call_output", "call_id": "c1", "output": [
        {"stdout": "", "stderr": "core dumped", "outcome": {"type": "exit", "exit_code": 134}}]}, "134"),
    ("responses", {"type": "shell_call_output", "call_id": "c1", "output": [
        {"stdout": "so far", "stderr": "", "outcome": {"type": "timeout"}}]}, "timeout"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "result", "how"), FAILED)
def test_that_a_call_failed_is_readable_after_a_cut(name: str, result: Json, how: str) -> None:
    api = APIS[name]
    before, _ = api.around(result)
    readable = sent(api, [*before, result], Mode.COMPRESS).readable
    title, *_ = (
        line
        for line in readable.splitlines()
        if line.startswith("### ") and line.endswith(" failed")
    )
    assert " tool " in title and how in readable


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("role", ["user", "assistant", "tool", ""])
@pytest.mark.parametrize("name", APIS)
def test_what_has_an_unknown_type_is_sent_as_it_is(name: str, role: str, mode: Mode) -> None:
    api = APIS[name]
    probe: Json = {"type": "a_new_type", "a_new_member": sdk_types.word()}
    if name != "responses":
        probe = {
            "role": role or "narrator",
            "content": [{"type": "text", "text": sdk_types.word()}, probe],
        }
    elif role:
        probe["role"] = role
    if name == "messages" and role == "tool":
        result = {
            "type": "tool_result",
            "tool_use_id": "toolu_0000001",
            "content": sdk_types.word(),
        }
        probe = {"role": "user", "content": [result, *probe["content"]]}
    if name == "chat" and role == "tool":
        probe["tool_call_id"] = "call_0000001a"
    before, behind = api.around(probe)
    made = sent(api, [*before, probe, *behind], mode)
    assert made.acted
    assert [word for word in sdk_types.words(probe) if word not in made.body] == []


# -- our tables and the SDKs' types ----------------------------------------------------------------

SEALED = {
    "chat": {"function"},
    "responses": {
        *(
            "tool_search_call",
            "tool_search_output",
            "additional_tools",
            "configuration_update",
            "compaction",
        ),
        *("mcp_list_tools", "compaction_trigger", "item_reference", "program", "program_output"),
    },
    "messages": {
        *(
            "tool_reference",
            "browser_state",
            "advisor_tool_result",
            "tool_search_tool_result",
            "container_upload",
        ),
        *("compaction", "tool_addition", "tool_removal", "mcp_tool_listing", "fallback"),
    },
}
"""The types that we know and that stay with their steps: they define tools, point to what only
upstream has, or were made by programs of upstream's."""

UNPLANNED = {
    "chat": set[str](),
    # a program of upstream's reads the history
    "responses": {"access_programs", "background_options", "image"},
    "messages": set[str](),
}
"""The top-level members with which a request passes unplanned, besides those that are `barred`."""

TOP = {"chat": chat.KNOWN, "responses": responses.KNOWN, "messages": messages.KNOWN}


@pytest.mark.parametrize("name", TOP)
def test_every_top_level_member_of_the_sdks_is_known_or_listed_here(name: str) -> None:
    body = _type(APIS[name].types[1])
    assert sdk_types.members(body).keys() - TOP[name] == UNPLANNED[name]


@pytest.mark.parametrize("name", TOP)
def test_unknown_top_level_members_keep_us_from_the_history(name: str) -> None:
    api = APIS[name]
    body = {
        "model": "m",
        api.field: api.step(1, "x"),
        "a_new_one": 1,
        "another": {},
        "no_one": None,
    }
    request = api.dialect.parse(json.dumps(body).encode())
    assert request.unknown == ("a_new_one", "another")
    assert request.obstacle_beside(()) == "a_new_one"
    assert request.obstacle_beside(("a_new_one",)) == "another"
    assert request.obstacle_beside(("a_new_one", "another")) == ""
    request = api.dialect.parse(json.dumps({**body, "a\r\nx-header: 1" + "x" * 90: 1}).encode())
    assert request.obstacle_beside(()) == "a??x-header??1" + "x" * 26


def test_members_of_servers_are_known() -> None:
    """Of llama.cpp, vLLM and SGLang. A client that wants to see its prompt gets the one that it
    sent."""
    asked = dict.fromkeys(
        (
            "repeat_penalty",
            "dry_base",
            "thinking_token_budget",
            "ebnf",
            "echo",
            "return_prompt_text",
        ),
        1,
    )
    request = CHAT.parse(json.dumps({"model": "m", "messages": [], **asked}).encode())
    assert request.unknown == ("echo", "return_prompt_text")


def unknown(
    kinds: Iterable[Any], table: Mapping[str, Collection[str]], key: str = "type"
) -> tuple[set[str], set[str]]:
    """The types that are not in the table, and the members of the others that are not."""
    types, members = set[str](), set[str]()
    for kind in kinds:
        name = sdk_types.named(kind, key)
        if name not in table:
            types.add(name)
        else:
            members |= sdk_types.members(kind).keys() - {"type", "caller", *MARKS, *table[name]}
    return types, members


def test_every_message_of_chat_is_known_or_listed_here() -> None:
    kinds = sdk_types.typed_dicts(APIS["chat"].entry)
    assert unknown(kinds, chat.MESSAGES, "role") == (SEALED["chat"], SEALED_MEMBERS["chat"])
    for field, table in (("content", chat.PARTS), ("tool_calls", chat.CALLS)):
        parts = [
            part
            for kind in kinds
            for part in sdk_types.typed_dicts(sdk_types.members(kind).get(field))
        ]
        assert unknown(parts, table) == (set(), set())


def test_every_item_of_responses_is_known_or_listed_here() -> None:
    kinds = sdk_types.typed_dicts(APIS["responses"].entry)
    assert unknown(kinds, responses.ITEMS) == (SEALED["responses"], SEALED_MEMBERS["responses"])
    fields = ("content", "output", "summary")
    parts = [
        part
        for kind in kinds
        for key in fields
        for part in sdk_types.typed_dicts(sdk_types.members(kind).get(key))
    ]
    assert unknown(parts, responses.PARTS) == (set(), set())


def test_every_block_of_messages_is_known_or_listed_here() -> None:
    kinds = sdk_types.typed_dicts(APIS["messages"].entry)
    assert {
        key for kind in kinds for key in sdk_types.members(kind)
    } - messages.FRAME == SEALED_MEMBERS["messages"]
    blocks = [
        part for kind in kinds for part in sdk_types.typed_dicts(sdk_types.members(kind)["content"])
    ]
    results = [one for one in blocks if sdk_types.named(one) == "tool_result"]
    inner = [
        part for one in results for part in sdk_types.typed_dicts(sdk_types.members(one)["content"])
    ]
    assert unknown([*blocks, *inner], messages.BLOCKS) == (SEALED["messages"], set())


# -- what is not known, and what a policy says of it -----------------------------------------------

USED = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "found"}
STRANGE: list[tuple[Dialect, Json, str]] = [
    # ServiceStack/llms#17, odysseus#167, chatbox#2081
    (
        CHAT,
        {"role": "tool", "tool_call_id": "c", "content": "x", "timestamp": 1},
        "messages[].timestamp",
    ),
    (CHAT, {"role": "user", "content": "x", "metadata": {}}, "messages[].metadata"),
    (CHAT, {"role": "assistant", "content": "x", "id": "m1"}, "messages[].id"),
    (
        CHAT,
        {"role": "user", "content": [{"type": "text", "text": "x", "odd": 1}]},
        "messages[].content[].odd",
    ),
    (
        CHAT,
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "look"}, "odd": 1}]},
        "messages[].tool_calls[].odd",
    ),
    (MESSAGES, {"role": "assistant", "content": "x", "id": "m1"}, "messages[].id"),
    (MESSAGES, {"role": "user", "content": "x", "timestamp": 1}, "messages[].timestamp"),
    (MESSAGES, {"role": "assistant", "content": [USED | {"odd": 1}]}, "messages[].content[].odd"),
    (RESPONSES, {"role": "user", "content": "x", "timestamp": 1}, "input[].timestamp"),
    (
        RESPONSES,
        {"type": "function_call_output", "call_id": "c", "output": "x", "odd": 1},
        "input[].odd",
    ),
    (
        RESPONSES,
        {"role": "user", "content": [{"type": "input_text", "text": "x", "odd": 1}]},
        "input[].content[].odd",
    ),
]
FOREVER: list[tuple[Dialect, Json, str]] = [
    (CHAT, {"role": "user", "content": [{"type": "odd"}]}, "messages[].content[].type"),
    (MESSAGES, {"role": "assistant", "content": [{"type": "odd"}]}, "messages[].content[].type"),
    (MESSAGES, {"role": "system", "content": [{"type": "odd"}]}, "messages[].content[].type"),
    (CHAT, {"role": "wizard", "content": "x"}, "form, which nobody here knows"),
]


def read_with(dialect: Dialect, entry: Json, *harmless: str) -> Message:
    reading = Reading(Shape("/s", 100), 20_000, harmless=harmless)
    return dialect.read(json.dumps(entry).encode(), reading, len)


@pytest.mark.parametrize(("dialect", "entry", "path"), STRANGE, ids=[row[2] for row in STRANGE])
def test_what_is_not_known_has_a_path_that_a_policy_can_name(
    dialect: Dialect, entry: Json, path: str
) -> None:
    assert read_with(dialect, entry).sealed == path
    assert read_with(dialect, entry, "messages[].other").sealed == path
    named = read_with(dialect, entry, path)
    assert named.sealed == ""
    assert named.meaning == read_with(dialect, entry).meaning


@pytest.mark.parametrize(("dialect", "entry", "path"), FOREVER, ids=[row[2] for row in FOREVER])
def test_what_no_policy_makes_known(dialect: Dialect, entry: Json, path: str) -> None:
    assert read_with(dialect, entry).sealed == read_with(dialect, entry, path).sealed == path


def test_results_that_a_message_with_other_members_holds_stay_together() -> None:
    held = {"role": "user", "content": [RESULT], "odd": 1}
    assert read_with(MESSAGES, held).sealed == "messages[].odd"
    assert read_with(MESSAGES, held, "messages[].odd").sealed.startswith("results")


DEFAULTED: list[tuple[str, Json, bool]] = [
    ("responses", {"async": False}, True),
    ("responses", {"async": True}, False),
    ("responses", {"caller": {"type": "direct"}}, True),
    ("responses", {"caller": {"type": "program", "caller_id": "p"}}, False),
    ("messages", {"caller": {"type": "direct"}}, True),
    ("chat", {"prefix": False, "partial": False}, True),
    ("chat", {"prefix": True}, False),
]


@pytest.mark.parametrize(("name", "members", "said_nothing"), DEFAULTED)
def test_a_member_with_its_apis_default_says_nothing(
    name: str, members: Json, said_nothing: bool
) -> None:
    api = APIS[name]
    called, result = api.step(1, "x" * 400)
    place = called["content"][0] if name == "messages" else called
    place |= members
    body = json.dumps({"model": "m", api.field: [called, result]}).encode()
    found = history(api.dialect, api.dialect.parse(body).entries, written.SMALL)
    assert bool(found.irregular) is not said_nothing


def test_a_number_that_python_does_not_read_is_no_default() -> None:
    entry = b'{"role": "user", "content": "x", "prefix": %b}' % (b"1" * 5_000)
    reading = Reading(Shape("/s", 100), 20_000)
    assert CHAT.read(entry, reading, len).sealed == "messages[].prefix"
