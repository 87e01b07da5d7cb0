"""/grep in both shapes and /read_file: exact formats, borders, and which caller's files they
see."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from itertools import permutations, product
from typing import Any

import httpx
import pytest

from tests.acceptance.test_openai_client import TOOL, history
from tests.apps.operations.served import (
    ALL,
    STORE,
    Caller,
    Summaries,
    World,
    assistant,
    page,
    step,
    user,
)
from tests.fake_upstream import StrictUpstream, text
from tests.serving import PLAIN, Proxy, tight

Json = dict[str, Any]

TOOLS = {
    "alpha": "tool one\nnothing here\ntool two, tool too\n",
    "beta": "no match at all\n",
    "gamma": "a tool\r\nand more\r\nthe last tool",
}


def put(caller: Caller, texts: dict[str, str], store_dir: str = STORE) -> dict[str, str]:
    """Store these through the front door: call id → path. Short ones too: a last line makes them
    worth moving."""
    padded = {name: value + "\n" + "~ " * 150 for name, value in texts.items()}
    messages = [
        user(),
        *(message for name, value in padded.items() for message in step(name, value)),
        assistant(),
    ]
    reply = caller.compact(messages, store_dir=store_dir, preview_char_length=1)
    by_text = {value: path for path, value in reply.files.items()}
    return {name: by_text[value] for name, value in padded.items()}


# -- grep below a directory ------------------------------------------------------------------------


def test_grep_answers_with_this_exact_text(caller: Caller) -> None:
    paths = put(caller, TOOLS, "./cache_file/")
    reply = caller.grep("tool", path="./cache_file/", glob="*.txt")
    names = {name: path.removeprefix("./cache_file/") for name, path in paths.items()}
    blocks = {
        names["alpha"]: "L1: tool one\nL3: tool two, tool too",
        names["gamma"]: "L1: a tool\nL3: the last tool",
    }
    body = "".join(f"---\nFile: {name}\n{lines}\n" for name, lines in sorted(blocks.items()))
    assert (
        reply.answer
        == f'Found 4 matches for pattern "tool" in path "./cache_file/" (filter: "*.txt"):\n{body}---'
    )
    assert reply.messages == []


def test_matches_are_also_in_the_metadata(caller: Caller) -> None:
    paths = put(caller, TOOLS)
    found = {
        (one["path"], one["line"]): one
        for one in caller.grep("too", path=STORE).metadata["matches"]
    }
    assert set(found) == {
        (paths["alpha"], 1),
        (paths["alpha"], 3),
        (paths["gamma"], 1),
        (paths["gamma"], 3),
    }
    assert all(set(one) >= {"path", "line", "column", "text"} for one in found.values())
    assert found[paths["alpha"], 3]["text"] == "tool two, tool too"
    assert found[paths["gamma"], 3]["text"][found[paths["gamma"], 3]["column"] :].startswith("tool")


def test_no_match_is_a_success(caller: Caller) -> None:
    put(caller, TOOLS)
    reply = caller.grep("heliotrope", path=STORE)
    assert (reply.status, reply.metadata["matches"]) == (200, [])
    assert "heliotrope" in reply.answer and "File:" not in reply.answer


def test_the_limit_of_grep_bounds_its_matches(caller: Caller) -> None:
    put(caller, TOOLS)
    for limit in (1, 3, 4, 100, 2**53):
        reply = caller.grep("tool", path=STORE, limit=limit)
        assert len(reply.metadata["matches"]) == min(limit, 4)
        assert len(re.findall(r"^L\d+: ", reply.answer, re.MULTILINE)) == min(limit, 4)


def test_grep_has_no_limit_by_default(caller: Caller) -> None:
    put(caller, {"many": "tool\n" * 3_000})
    assert len(caller.grep("^tool$", path=STORE).metadata["matches"]) == 3_000
    assert len(caller.grep("^tool$", path=STORE, limit=None).metadata["matches"]) == 3_000


def test_without_a_path_all_of_the_callers_files_are_searched(caller: Caller) -> None:
    put(caller, TOOLS, "one/place")
    put(caller, TOOLS, "/another")
    assert len(caller.grep("tool").metadata["matches"]) == 8


# -- grep in one file ------------------------------------------------------------------------------


def test_grep_in_one_file_answers_with_this_exact_text(caller: Caller) -> None:
    path = put(caller, TOOLS)["alpha"]
    reply = caller.post("/grep", {"pattern": "TOOL", "file_path": path})
    assert reply.answer == f"{path}:1:tool one\n{path}:3:tool two, tool too"
    assert [(one["path"], one["line"], one["text"]) for one in reply.metadata["matches"]] == [
        (path, 1, "tool one"),
        (path, 3, "tool two, tool too"),
    ]


def test_grep_in_one_file_takes_literal_text(caller: Caller) -> None:
    path = put(caller, {"x": "a.c\nabc\n(a+)+$\n[x\n"})["x"]
    lines = {p: [m["line"] for m in caller.post("/grep", {"pattern": p, "file_path": path}).metadata["matches"]]
             for p in ("a.c", "(a+)+$", "[x", "B")}  # fmt: skip
    assert lines == {"a.c": [1], "(a+)+$": [3], "[x": [4], "B": [2]}


def test_grep_in_one_file_has_a_limit_of_50_by_default(caller: Caller) -> None:
    path = put(caller, {"x": "hit\n" * 200})["x"]
    counts = [
        len(
            caller.post("/grep", {"pattern": "hit", "file_path": path, **given}).answer.splitlines()
        )
        for given in ({}, {"limit": 7}, {"limit": 150}, {"limit": 10_000})
    ]
    assert counts == [50, 7, 150, 200]


def test_a_file_path_of_null_is_none(caller: Caller) -> None:
    path = put(caller, TOOLS)["alpha"]
    reply = caller.post(
        "/grep", {"pattern": "tool one", "path": None, "file_path": None, "limit": None}
    )
    assert reply.status == 200
    assert path.endswith(reply.metadata["matches"][0]["path"].removeprefix("."))


# -- read_file -------------------------------------------------------------------------------------

LINES = "".join(f"line {number}\u2028 Ärger ☃\r\n" for number in range(250)) + "the end, unended"


def test_read_file_takes_offset_and_limit(caller: Caller) -> None:
    [path] = caller.compact([user(), *step("c", LINES), user()]).files
    whole = re.findall(r".*\n|.+", LINES)
    for offset, limit in product(
        [None, 0, 3, 249, 250, 251, 10**6], [None, 0, 1, 2, 100, 10**6, 2**53]
    ):
        stop = None if limit is None else (offset or 0) + limit
        assert caller.read(path, offset=offset, limit=limit).answer == "".join(
            whole[offset or 0 : stop]
        )
    assert caller.read(path).answer == LINES


def test_read_file_returns_metadata(caller: Caller) -> None:
    wide = "Ärger ☃ 🌍\n" * 300
    [path] = caller.compact([user(), *step("c", wide), user()]).files
    reply = caller.read(path, offset=5, limit=2)
    assert reply.answer == "Ärger ☃ 🌍\n" * 2
    assert reply.messages == []
    assert {name: reply.metadata[name] for name in ("path", "size_bytes", "lines")} == {
        "path": path,
        "size_bytes": len(wide.encode()),
        "lines": 300,
    }


@pytest.mark.parametrize(
    "path", ["/context_store/none.txt", "none", "/", ".", STORE, "/etc/passwd"]
)
def test_reading_a_missing_file_is_404(caller: Caller, path: str) -> None:
    caller.compact([user(), *step("c", LINES), user()])
    reply = caller.read(path)
    assert reply.status == 404
    assert path in reply.answer
    assert LINES not in reply.answer


@pytest.mark.parametrize("name", ["absolute_path", "file_path"])
def test_every_match_of_a_search_opens_its_file(caller: Caller, name: str) -> None:
    paths = put(caller, TOOLS)
    matches = caller.grep("tool", path=STORE).metadata["matches"]
    opened = [caller.post("/read_file", {name: match}) for match in matches]
    assert [one.metadata["path"] for one in opened] == [match["path"] for match in matches]
    assert {one.metadata["path"] for one in opened} == {paths["alpha"], paths["gamma"]}
    assert opened[0].answer.startswith(TOOLS["alpha"])


def test_names_in_an_answer_can_be_taken_out_of_it_with_a_simple_pattern(caller: Caller) -> None:
    paths = put(
        caller, {"web-search: a/b?c=d": "one tool\n", "été 2-x": "two tools\n"}, "./cache_file/"
    )
    names = re.findall(r"File: ([\w.]+)", caller.grep("tool", path="./cache_file/").answer)
    assert {f"./cache_file/{name}" for name in names} == set(paths.values())
    assert all(re.fullmatch(r"[A-Za-z0-9_.]+", name) for name in names)
    assert all(caller.read(f"./cache_file/{name}").status == 200 for name in names)


def test_a_path_that_markdown_escaped_is_the_same_path(caller: Caller) -> None:
    path = put(caller, {"call_1": "one tool"})["call_1"]
    escaped = path.replace("_", "\\_")
    assert caller.text(escaped) == caller.text(path)
    assert caller.read("context\\_store/none\\_at\\_all.txt").status == 404


# -- whose files -----------------------------------------------------------------------------------


def test_callers_never_see_each_others_files(
    up: StrictUpstream, serve: Callable[..., Proxy]
) -> None:
    """Nor do two callers of the default tenant, with the same directory, chat and call id; two keys
    of one tenant do where its policy says so."""
    up.respond(Summaries())
    shared = {**tenant(up, "acme", "a1", "a2"), "share_namespace": True}
    proxy = serve(
        {
            "acme": shared,
            "beta": tenant(up, "beta", "b"),
            "default": {"upstream": {"base_url": up.url}},
        }
    )
    with Caller(proxy, "a1") as acme, Caller(proxy, "a2") as same, Caller(proxy, "b") as beta:
        with Caller(proxy) as one, Caller(proxy) as other:
            never_meet(acme, beta, one, other)
        assert same.grep("heliotrope").metadata == acme.grep("heliotrope").metadata


def tenant(up: StrictUpstream, name: str, *keys: str) -> Json:
    """Return the policy of a tenant with these keys."""
    known = [{"sha256": hashlib.sha256(key.encode()).hexdigest()} for key in keys]
    return {"tenant": name, "api_keys": known, "upstream": {"base_url": up.url}}


def never_meet(*callers: Caller) -> None:
    """Check that each caller finds and opens its own files and no others."""
    secrets = dict(
        zip(callers, ("heliotrope", "chartreuse", "periwinkle", "vermilion"), strict=True)
    )
    for one, secret in secrets.items():
        one.compact([user(), *step("same", page(secret, 300)), user()])
        one.compress([user(page(secret, 300)), assistant()], chat_id="same", keep_recent_count=0)
    for (one, own), (other, others) in permutations(secrets.items(), 2):
        assert not one.grep(others).metadata["matches"]
        paths = {match["path"] for match in one.grep(own).metadata["matches"]}
        assert len(paths) == 2
        assert all(own in one.text(path) and others not in one.text(path) for path in paths)
        [path] = {match["path"] for match in one.grep(own, glob="*.txt").metadata["matches"]}
        assert (
            other.read(path).status
            == other.post("/grep", {"pattern": own, "file_path": path}).status
            == 404
        )


@pytest.mark.parametrize("path", ALL)
def test_file_operations_without_a_key_are_401(world: World, path: str) -> None:
    body = {"messages": [user()], "store_dir": STORE, "pattern": "x", "absolute_path": "x"}
    response = world.proxy.post(path, body, "")
    assert response.status_code == 401
    envelope = response.json()
    assert set(envelope) == {"success", "answer", "messages", "metadata"}
    assert envelope["success"] is False and "key" in envelope["answer"]
    preflight = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
    asked = httpx.options(world.proxy.root + path, headers=preflight, trust_env=False, verify=PLAIN)
    assert asked.status_code == 401, "no page may ask for a file"
    assert envelope["messages"] == [], "the body was not read"


def test_a_key_is_asked_for_before_the_name_of_the_host(caller: Caller) -> None:
    """Documents of such operations call `0.0.0.0` and send no key: another name of the host would
    not help them."""
    body = {"pattern": "x"}
    nobody = httpx.post(
        f"{caller.proxy.root}/grep", json=body, headers={"host": "0.0.0.0:8002"}, trust_env=False
    )
    assert nobody.status_code == 401 and "Authorization: Bearer KEY" in nobody.json()["answer"]
    assert caller.http.post("/grep", json=body, headers={"host": "0.0.0.0:8002"}).status_code == 200
    page = {"host": "evil.example", "origin": "https://evil.example"}
    refused = httpx.post(
        f"{caller.proxy.root}/v1/chat/completions", json=body, headers=page, trust_env=False
    )
    assert refused.status_code == 403, "chats of a page are refused as before"


def test_an_unknown_key_is_refused_without_an_open_policy(
    up: StrictUpstream, serve: Callable[..., Proxy]
) -> None:
    with Caller(serve({"acme": tenant(up, "acme", "another")})) as stranger:
        refused = stranger.offload([user()])
        assert (refused.status, refused.messages) == (401, [])
        assert stranger.grep("x").status == stranger.read("x").status == 401


def test_the_proxys_originals_open_by_their_paths_and_are_not_listed(
    up: StrictUpstream, serve: Callable[..., Proxy]
) -> None:
    proxy = serve({"default": tight(up.url)})
    up.script(text("Yes."))
    with Caller(proxy) as caller, Caller(proxy) as other:
        body = {"model": "m", "messages": history(), "tools": [TOOL]}
        assert caller.http.post("/v1/chat/completions", json=body).status_code == 200
        sent = json.dumps(up.chats[0].messages)
        paths = re.findall(r"detailed result is stored in (/context_store/[^;]+);", sent)
        assert paths
        whole = {message.get("content") for message in history()}
        assert all(opened(caller, path) in whole for path in paths)
        assert all(other.read(path).status == 404 for path in paths)
        mine = put(caller, {"mine": "code is mine"})["mine"]
        assert {
            opened(caller, match["path"]) for match in caller.grep(".").metadata["matches"]
        } == {opened(caller, mine)}
        assert {match["path"] for match in caller.grep(".", path=STORE).metadata["matches"]} == {
            mine
        }
        assert opened(caller, paths[0].removeprefix("/context_store/")) in whole, (
            "its name is enough"
        )
        assert all(
            caller.post("/grep", {"pattern": "a", "file_path": path}).status == 200
            for path in paths
        )
        assert all(
            other.post("/grep", {"pattern": "a", "file_path": path}).status == 404 for path in paths
        )


def opened(caller: Caller, path: str) -> str:
    """Return the file. It is there at once, though the proxy writes it while the request is under
    way."""
    reply = caller.read(path)
    assert reply.status == 200, reply.answer
    return reply.answer
