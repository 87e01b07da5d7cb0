"""Headers and body → the client's namespace, or none."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from hashlib import sha256
from typing import Any

import pytest
from msgspec import Raw

from proxy.policies import Policies
from proxy.policies.tenants import described, identified, identify
from proxy.policy import Identity, Policy
from proxy.upstream.headers import Headers

ACCOUNT = "7b1d2c0e-6f5a-4a57-9b3a-0d6a6c1f2e11"
DEVICE = "0f" * 32
HEADER, SUB = Identity(header="ChatGPT-Account-Id"), Identity(jwt="sub")
Given = list[tuple[bytes, bytes]]


def token(**claims: Any) -> bytes:
    return b"Bearer e30." + urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=") + b".c2ln"


def namespace(
    by: Identity,
    headers: Given,
    body: Any = None,
    *,
    listed: bool = False,
    target: bytes = b"/v1/messages?beta=true",
) -> str | None:
    policy = Policy(tenant="acme", identity=by)
    keys = {sha256(b"gateway").digest(): policy} if listed else {}
    tenant = identify(
        headers, Policies(default=None if listed else policy, named=(), by_digest=keys)
    )
    members = {name: Raw(json.dumps(value).encode()) for name, value in (body or {}).items()}
    found = identified(tenant, Headers(headers), members, target)
    return None if found is None else str(found.namespace)


def key(value: bytes = b"Bearer sk-1", *more: tuple[bytes, bytes]) -> Given:
    return [(b"authorization", value), *more]


SAID: list[tuple[Identity, Given, Any]] = [
    (HEADER, key(b"Bearer a", (b"chatgpt-account-id", ACCOUNT.encode())), None),
    (HEADER, key(b"Bearer a", (b"CHATGPT-Account-ID", b" %b " % ACCOUNT.encode())), None),
    (SUB, key(token(sub="u1")), None),
    (SUB, key(token(sub="u1", exp=9)), None),
    (SUB, key(token(sub=7)), None),
    (Identity(jwt="https://api.openai.com/auth.chatgpt_account_id"),
     key(token(**{"https://api.openai.com/auth": {"chatgpt_account_id": "a"}})), None),
    (Identity(body="safety_identifier"), key(), {"safety_identifier": DEVICE}),
    (Identity(body="metadata.user_id"), key(), {"metadata": {"user_id": DEVICE}}),
    (Identity(body="metadata.user_id.device_id"), key(),
     {"metadata": {"user_id": json.dumps({"device_id": DEVICE, "session_id": "s"})}}),
]  # fmt: skip


@pytest.mark.parametrize(("by", "headers", "body"), SAID)
def test_a_client_is_known_whatever_its_key(by: Identity, headers: Given, body: Any) -> None:
    found = namespace(by, headers, body)
    assert found is not None and found.startswith("acme-")
    if not by.jwt:
        assert namespace(by, [(b"x-api-key", b"another"), *headers[1:]], body) == found


@pytest.mark.parametrize(
    ("by", "headers", "body"),
    [
        (Identity(), key(), {"safety_identifier": DEVICE}),
        (HEADER, key(), None),
        # nothing that upstream could accept
        (HEADER, [(b"chatgpt-account-id", ACCOUNT.encode())], None),
        (HEADER, key(b"Bearer a", (b"chatgpt-account-id", b"short")), None),
        (SUB, key(b"Bearer sk-1"), None),
        (SUB, key(b"Bearer e30.!!!.x"), None),
        (SUB, key(b"Bearer e30." + urlsafe_b64encode(b"\xff\xfe[") + b".x"), None),
        (SUB, key(b"Bearer e30." + urlsafe_b64encode(b"[" * 9000) + b".x"), None),
        (SUB, key(b"Basic " + token(sub="u1")[7:]), None),
        (SUB, key(token(sub=True)), None),
        (SUB, key(token(sub="")), None),
        (SUB, key(token(sub={"a": "u1"})), None),
        # Upstream may accept another credential than the token whose claim it is.
        (SUB, key(token(sub="u1"), (b"x-api-key", b"sk-2")), None),
        (SUB, key(token(sub="u1"), (b"cookie", b"session=1")), None),
        (SUB, key(token(sub="u1"), (b"x-litellm-api-key", b"sk-2")), None),
        (SUB, key(token(sub="u1"), (b"authorization", b"Bearer sk-2")), None),
        (Identity(body="safety_identifier"), key(), {"safety_identifier": "alice"}),
        (Identity(body="safety_identifier"), key(), {"safety_identifier": None}),
        (Identity(body="metadata.user_id"), key(), {"metadata": [DEVICE]}),
        (Identity(body="metadata.user_id.device_id"), key(), {"metadata": {"user_id": DEVICE}}),
        (
            Identity(body="metadata.user_id"),
            key(),
            {"metadata": {"user_id": DEVICE, "pad": "x" * 20_000}},
        ),
    ],
)
def test_what_does_not_say_it_leaves_the_key(by: Identity, headers: Given, body: Any) -> None:
    assert namespace(by, headers, body) is None


@pytest.mark.parametrize(
    "query",
    [b"subscription-key=mine", b"beta=true&%6bey=mine", b"api-version=1&beta=x&access_token=mine"],
)
def test_a_claim_counts_for_nothing_beside_what_may_be_a_credential(query: bytes) -> None:
    """Upstream may accept that one, and never look at the token."""
    assert namespace(SUB, key(token(sub="u1")), target=b"/v1/messages?" + query) is None
    assert namespace(
        HEADER, key(b"Bearer a", (b"chatgpt-account-id", ACCOUNT.encode())), target=b"/v1?" + query
    )


def test_a_listed_key_vouches_for_short_names() -> None:
    alice, bob = (
        namespace(Identity(header="x-user"), key(b"Bearer gateway", (b"x-user", name)), listed=True)
        for name in (b"alice", b"bob")
    )
    assert alice is not None and bob is not None and alice != bob


def test_a_second_header_makes_nobody_another_client_or_the_key_itself() -> None:
    by, names = Identity(header="x-user"), (b"alice", b"bob")
    said = [namespace(by, key(b"Bearer gateway", *[(b"x-user", one) for one in ones]), listed=True)
            for ones in (names[:1], names[1:], names, names[::-1])]  # fmt: skip
    assert None not in said and len({*said}) == 4
    assert namespace(by, key(b"Bearer gateway", (b"x-user", b"alice, bob")), listed=True) == said[2]


def test_identities_of_different_kinds_are_different_clients() -> None:
    given = key(b"Bearer a", (b"a", DEVICE.encode()), (b"b", DEVICE.encode()))
    spaces = [namespace(Identity(header=name), given) for name in ("a", "b")]
    spaces.append(namespace(Identity(body="a"), given, {"a": DEVICE}))
    assert (
        len(
            {
                *spaces,
                identify(key(DEVICE.encode()), Policies(Policy(tenant="acme"), (), {})).namespace,
            }
        )
        == 4
    )


@pytest.mark.parametrize(
    ("by", "listed", "text"),
    [
        (Identity(), False, "a client is its key; with another key, it is another client"),
        (HEADER, True, "a client is its header chatgpt-account-id; without it, its key"),
        (SUB, False, "a client is the claim sub of its token; without it, its key. Upstream has to accept it first, "
         "and it never opens /grep, /read_file or the dashboard"),
        (Identity(body="a.b"), False, "a client is a.b in the body of at least 32 characters; without it, its key. "
         "Upstream has to accept it first, and it never opens /grep, /read_file or the dashboard"),
    ],
)  # fmt: skip
def test_check_says_who_a_client_is(by: Identity, listed: bool, text: str) -> None:
    assert described(by, listed=listed) == text
