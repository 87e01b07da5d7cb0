"""Headers → tenant, namespace and credential; paths → allowed or not."""

import hashlib
import hmac

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import Unauthorized
from proxy.policies import Policies
from proxy.policies.tenants import Header, allowed, identify, namespace, retention
from proxy.policy import Policy, Upstream
from proxy.stores import CHECKS

ACME = Policy(tenant="acme", upstream=Upstream(api_key="sk-upstream"), retention=60)
SHARED = Policy(tenant="shared", share_namespace=True, retention=None)
DEFAULT = Policy(tenant="default", retention=90)


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


KNOWN = Policies(
    default=None, named=(ACME, SHARED), by_digest={digest(b"sk-a"): ACME, digest(b"sk-s"): SHARED}
)
OPEN = Policies(default=DEFAULT, named=KNOWN.named, by_digest=KNOWN.by_digest)


def caller(key: bytes) -> str:
    return hmac.new(key, b"offload-namespace-v1", "sha256").hexdigest()[:16]


@pytest.mark.parametrize(
    ("headers", "name", "key_header"),
    [
        ([(b"authorization", b"Bearer sk-a")], "acme", b"authorization"),
        ([(b"Authorization", b"bearer  sk-a ")], "acme", b"authorization"),
        ([(b"api-key", b"sk-a")], "acme", b"api-key"),
        ([(b"X-API-Key", b" sk-a")], "acme", b"x-api-key"),
        ([(b"authorization", b"Bearer sk-s")], "shared", b"authorization"),
        ([(b"authorization", b"Bearer other")], "default", b"authorization"),
        ([(b"authorization", b"sk-a")], "acme", b"authorization"),
        # of several, the one that names a tenant
        ([(b"authorization", b"Bearer gateway"), (b"x-api-key", b"sk-a")], "acme", b"x-api-key"),
        (
            [(b"authorization", b"Bearer gateway"), (b"authorization", b"Bearer sk-a")],
            "acme",
            b"authorization",
        ),
        ([(b"x-api-key", b"one"), (b"api-key", b"two")], "default", b"api-key"),
        ([(b"x-api-key", b"sk-s"), (b"authorization", b"Bearer sk-a")], "acme", b"authorization"),
        # what is no key
        ([], "default", b"authorization"),
        ([(b"authorization", b"Bearer "), (b"api-key", b"")], "default", b"authorization"),
        ([(b"cookie", b"sk-a"), (b"x-key", b"sk-a")], "default", b"authorization"),
    ],
)
def test_who_is_asking(headers: list[Header], name: str, key_header: bytes) -> None:
    tenant = identify(headers, OPEN)
    assert (tenant.name, tenant.key_header) == (name, key_header)


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ([], "Send yours as `Authorization: Bearer KEY`"),
        ([(b"authorization", b"Bearer ")], "Send yours as `Authorization: Bearer KEY`"),
        ([(b"authorization", b"Bearer sk-other")], "add the key's SHA-256 to `api_keys`"),
    ],
)
def test_strangers_without_a_default_are_told_what_to_do(headers: list[Header], text: str) -> None:
    with pytest.raises(Unauthorized) as caught:
        identify(headers, KNOWN)
    assert caught.value.status == 401
    assert text in caught.value.message
    assert "sk-other" not in caught.value.message


def test_namespaces() -> None:
    spaces = [
        identify([(b"api-key", key)], OPEN).namespace for key in (b"sk-a", b"sk-s", b"one", b"two")
    ]
    assert spaces == [
        f"acme-{caller(b'sk-a')}",
        "shared",
        f"default-{caller(b'one')}",
        f"default-{caller(b'two')}",
    ]


def test_callers_without_a_key_have_a_namespace_of_their_own() -> None:
    tenant = identify([], OPEN)
    assert (tenant.namespace, tenant.anonymous) == ("default-anonymous", True)
    assert not identify([(b"api-key", b"x")], OPEN).anonymous


def test_other_schemes_tell_strangers_apart_too() -> None:
    one, two = (
        identify([(b"authorization", value)], OPEN) for value in (b"Basic YTpi", b"Basic YTpj")
    )
    assert one.namespace != two.namespace
    assert not one.anonymous


KEYS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1).map(str.encode)


@given(KEYS, KEYS)
def test_two_keys_never_share_a_namespace(one: bytes, two: bytes) -> None:
    assert (namespace(DEFAULT, one) == namespace(DEFAULT, two)) == (one == two)


def test_a_namespace_is_the_same_however_the_key_was_sent() -> None:
    ways = [(b"authorization", b"Bearer k"), (b"api-key", b"k"), (b"x-api-key", b"k")]
    assert len({identify([way], OPEN).namespace for way in ways}) == 1


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ((b"authorization", b"Bearer sk-a"), (b"authorization", b"Bearer sk-upstream")),
        ((b"Api-Key", b"sk-a"), (b"api-key", b"sk-upstream")),
        ((b"x-api-key", b"sk-a"), (b"x-api-key", b"sk-upstream")),
    ],
)
def test_the_tenants_key_goes_where_the_clients_stood(header: Header, expected: Header) -> None:
    tenant = identify([header], KNOWN)
    assert tenant.credential(ACME.upstream) == expected
    assert tenant.credential(Upstream()) is None
    assert tenant.credential(ACME.upstream, anthropic=True) == (b"x-api-key", b"sk-upstream")


def test_a_tenant_has_an_upstream_for_an_api() -> None:
    own = msgspec.structs.replace(SHARED, upstream=Upstream(base_url="http://a", api_key="sk-a"))
    tenant = identify(
        [], Policies(msgspec.structs.replace(SHARED, by_api={"messages": own}), (), {})
    )
    assert tenant.lends_key
    assert tenant.for_api("messages").policy is own
    assert tenant.for_api("messages").namespace == tenant.namespace
    assert tenant.for_api("chat") is tenant


def test_an_open_relay_lends_its_key_to_callers_without_one() -> None:
    policies = Policies(default=ACME, named=(), by_digest={})
    assert identify([], policies).credential(ACME.upstream) == (
        b"authorization",
        b"Bearer sk-upstream",
    )


def test_a_tenant_shows_no_key() -> None:
    assert "sk-" not in repr(identify([(b"api-key", b"sk-a")], KNOWN))


@pytest.mark.parametrize(
    ("space", "seconds"),
    [
        ("acme-0123456789abcdef", 60),
        ("acme", 60),
        ("shared", None),
        ("default-anonymous", 90),
        ("acme-0123456789ABCDEF", None),
        ("acme-x-0123456789abcdef", None),
        ("unknown-0123456789abcdef", None),
        (CHECKS, 3_600),
    ],
)
def test_retention_is_that_of_the_namespaces_tenant(space: str, seconds: float | None) -> None:
    assert retention(space, OPEN) == seconds


OWN_KEY = Policy()
TENANTS_KEY = ACME
WIDER = Policy(upstream=ACME.upstream, relay=("/files/*", "/v1/batches", "/audio/[st]*"))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", b"/v1/chat/completions"),
        ("POST", b"/chat/completions"),
        ("POST", b"/v1/completions"),
        ("POST", b"/v1/chat/completions/"),
        ("POST", b"/v1/embeddings"),
        ("POST", b"/v1/responses"),
        ("GET", b"/v1/models"),
        ("HEAD", b"/models"),
        ("POST", b"/openai/deployments/my-gpt/chat/completions"),
        ("POST", b"/openai/v1/responses"),
        ("POST", b"/openai/responses"),
        ("POST", b"/v1/projects/p/locations/l/publishers/anthropic/models/m@1:streamRawPredict"),
        ("POST", b"/projects/p/locations/l/publishers/anthropic/models/count-tokens:rawPredict"),
        ("POST", b"/v1/messages"),
        ("POST", b"/v1/v1/messages/count_tokens"),
    ],
)
def test_paths_that_anybodys_key_opens(method: str, path: bytes) -> None:
    assert allowed(path, TENANTS_KEY, method)
    assert allowed(path, OWN_KEY, method)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", b"/v1/chat/completions"),  # lists the replies stored for everybody behind the key
        ("GET", b"/v1/responses/resp_1"),
        ("POST", b"/v1/messages/batches"),
        ("DELETE", b"/v1/models"),
        ("DELETE", b"/v1/models/ft:gpt:acme"),
        ("GET", b"/v1/files"),
        ("POST", b"/v1/batches"),
        ("POST", b"/v1/fine_tuning/jobs"),
        ("GET", b"/v1/organization/admin_api_keys"),
        ("POST", b"/"),
        ("POST", b""),
        ("POST", b"/v1"),
        ("POST", b"//v1/chat/completions"),
        ("POST", b"/v1/chat/completions//"),
        ("POST", b"/v1/Chat/completions"),
        ("POST", b"/v1/files#/v1/chat/completions"),
        ("POST", b"/elsewhere/chat/completions"),
        ("POST", b"/openai/deployments/a/b/embeddings"),
        ("POST", b"/v1/chat%2fcompletions"),
        ("POST", b"/v1/projects/p/locations/l/publishers/google/models/m:rawPredict"),
        ("POST", b"/v1/projects/p/locations/l/publishers/anthropic/models/m:delete"),
        ("POST", b"/v1/chat/completions\n"),
    ],
)
def test_paths_that_only_the_clients_own_key_opens(method: str, path: bytes) -> None:
    assert not allowed(path, TENANTS_KEY, method)
    assert allowed(path, OWN_KEY, method)


@pytest.mark.parametrize(
    ("path", "open_"),
    [
        (b"/v1/files/file-1/content", True),
        (b"/files/file-1", True),
        (b"/v1/files", False),
        (b"/v1/batches", True),
        (b"/batches", False),
        (b"/v1/audio/speech", True),
        (b"/v1/audio/other", False),
        (b"/v1/Files/x", False),
        (b"/v1/files/\xff", True),
        (b"/v1/files/../fine_tuning/jobs", False),
        (b"/v1/files/%2e%2e/fine_tuning/jobs", False),
    ],
)
def test_relay_globs_open_more_with_and_without_v1(path: bytes, open_: bool) -> None:
    assert allowed(path, WIDER, "GET") is open_


@pytest.mark.parametrize(
    "path",
    [
        b"/v1/..",
        b"/..",
        b"/v1/./models",
        b"/v1/../admin",
        b"/v1/%2e%2E/admin",
        b"/v1/.%2e/admin",
        b"/v1/%252e%252e/admin",
        b"/v1/x%2f..%2f..%2fadmin",
        b"/v1/x\\..\\admin",
        b"/v1/%5c..%5cadmin",
        b"/v1/..;a=b/admin",
        b"/v1/%25252525252e%252e/admin",
    ],
)
def test_dot_segments_are_refused_to_everybody(path: bytes) -> None:
    assert not allowed(path, OWN_KEY, "GET")
    assert not allowed(path, Policy(upstream=ACME.upstream, relay=("*",)), "GET")


@pytest.mark.parametrize(
    "path", [b"/v1/files/a.b", b"/v1/...", b"/v1/..a", b"/v1/.well-known", b"/v1/100%", b"/%zz/%41"]
)
def test_dots_elsewhere_are_none_of_our_business(path: bytes) -> None:
    assert allowed(path, OWN_KEY, "GET")


def test_a_path_of_nothing_but_encodings_is_refused_quickly() -> None:
    assert not allowed(b"/%" + b"25" * 30_000 + b"2e", OWN_KEY, "GET")
