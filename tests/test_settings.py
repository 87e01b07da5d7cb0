"""Flags over environment over defaults, each mistake named by where it was made."""

import os
import pickle
import re
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from proxy.errors import UserMistake
from proxy.settings import Settings, read, refuse_loop, strange_variables

EVERY = {
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("9000", 9000),
    "policies": ("/etc/policies", Path("/etc/policies")),
    "store": ("redis://r/0", "redis://r/0"),
    "upstream": ("http://127.0.0.1:8080/v1", "http://127.0.0.1:8080/v1"),
    "workers": ("3", 3),
    "body_limit": ("1MiB", 1 << 20),
    "buffered_limit": ("1GiB", 1 << 30),
    "head_timeout": ("3", 3.0),
    "body_timeout": ("2.5", 2.5),
    "first_byte_timeout": ("1.5", 1.5),
    "drain_timeout": ("7", 7.0),
    "log_format": ("full", "full"),
    "max_connections": ("9", 9),
    "capture": ("2GiB", 2 << 30),
    "dashboard": ("/var/dashboard.db", Path("/var/dashboard.db")),
    "dashboard_limit": ("2GiB", 2 << 30),
    "dashboard_content": ("true", True),
    "replica_url": ("http://10.0.0.7:8787", "http://10.0.0.7:8787"),
    "monitor_networks": ("10.1.2.3/8, ::1", ("10.0.0.0/8", "::1/128")),
    "allowed_hosts": (
        "Host.Docker.Internal., [FD00::1]",
        frozenset({"host.docker.internal", "fd00::1"}),
    ),
}


def without_environment(settings: Settings) -> Settings:
    return msgspec.structs.replace(settings, environment={})


def test_every_setting_has_a_flag_and_a_variable() -> None:
    flags = {name: text for name, (text, _) in EVERY.items()}
    variables = {f"OFFLOAD_{name.upper()}": text for name, text in flags.items()}
    given = {name: value for name, (_, value) in EVERY.items()}
    expected = Settings(**given, dashboard_named=True)
    assert without_environment(read(flags, {})) == expected
    assert without_environment(read({}, variables)) == expected
    assert {field.name for field in msgspec.structs.fields(Settings)} == {
        *EVERY, "admin_token", "environment", "profile", "state", "built_in", "dashboard_named", "below",
    }  # fmt: skip


def test_the_profile_is_that_of_the_built_in_policy() -> None:
    for given in (read({"profile": "frugal"}, {}), read({}, {"OFFLOAD_PROFILE": "frugal"})):
        assert given.built_in["default"].startswith('{"offload":{"profile":"frugal"}')
    with pytest.raises(UserMistake, match="--profile is for the built-in policy"):
        read({"profile": "frugal", "policies": "p"}, {})
    assert read({"profile": False}, {}).profile is None, "a flag of replay, which compares them all"


def test_each_api_has_its_upstream_unless_one_is_given() -> None:
    assert "https://api.anthropic.com" in read({}, {}).built_in["default"]
    assert "anthropic" not in read({"upstream": "http://a/v1"}, {}).built_in["default"]


def test_flags_take_precedence_over_variables() -> None:
    environment = {"OFFLOAD_PORT": "1", "OFFLOAD_WORKERS": "2", "OFFLOAD_HOST": ""}
    settings = read({"port": "3", "workers": None}, environment)
    assert (settings.port, settings.workers, settings.host) == (3, 2, "127.0.0.1")


def test_the_upstream_can_come_from_openais_variable() -> None:
    openai = {"OPENAI_BASE_URL": "http://a/v1"}
    assert read({}, openai).upstream == "http://a/v1"
    assert read({}, openai | {"OFFLOAD_UPSTREAM": "http://b/v1"}).upstream == "http://b/v1"
    assert (
        read({"upstream": "http://c/v1"}, openai | {"OFFLOAD_UPSTREAM": "http://b/v1"}).upstream
        == "http://c/v1"
    )
    assert read({}, {"OPENAI_BASE_URL": ""}).upstream is None


def test_settings_show_no_secret() -> None:
    settings = read(
        {"store": "redis://:hunter2@r/0"}, {"OFFLOAD_ADMIN_TOKEN": "hunter2", "KEY": "hunter2"}
    )
    assert "hunter2" not in f"{settings!r} {settings}"


def test_settings_reach_worker_processes_with_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OFFLOAD_ADMIN_TOKEN", "token")
    settings = read({"policies": "p"})
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert settings.admin_token == settings.environment["OFFLOAD_ADMIN_TOKEN"] == "token"


@pytest.mark.parametrize(
    ("environment", "store"),
    [
        ({"HOME": "/home/me"}, "/home/me/.local/state/offload-proxy/store"),
        ({"HOME": "/home/me", "XDG_STATE_HOME": "/state"}, "/state/offload-proxy/store"),
        (
            {"HOME": "/home/me", "XDG_STATE_HOME": "state"},
            "/home/me/.local/state/offload-proxy/store",
        ),
        ({}, "offload-store"),
        ({"HOME": "/home/me", "OFFLOAD_STORE": "/data"}, "/data"),
    ],
)
def test_the_store_defaults_to_the_users_state_directory(
    environment: dict[str, str], store: str
) -> None:
    assert read({}, environment).store == store


@pytest.mark.parametrize(
    ("flags", "environment", "on"),
    [
        ({}, {"HOME": "/home/me"}, True),
        ({"host": "::1"}, {"HOME": "/home/me"}, True),
        ({"host": "0.0.0.0"}, {"HOME": "/home/me"}, False),
        ({"dashboard": "off"}, {"HOME": "/home/me"}, False),
        ({}, {"HOME": "/home/me", "OFFLOAD_DASHBOARD": "OFF"}, False),
        ({}, {}, False),
    ],
)
def test_on_loopback_there_is_a_dashboard_unless_it_is_off(
    flags: dict[str, str], environment: dict[str, str], on: bool
) -> None:
    found = read(flags, environment).dashboard
    assert (found is not None) == on
    if found:
        assert re.fullmatch(
            r"/home/me/.local/state/offload-proxy/dashboard-[0-9a-f]{8}\.db", str(found)
        )


def test_proxies_in_front_of_different_upstreams_have_different_dashboards() -> None:
    home = {"HOME": "/home/me"}
    said: list[dict[str, str]] = [{}, {"upstream": "http://h/v1"}, {"policies": "p"}]
    found = [read(one, home).dashboard for one in said]
    assert len({*found}) == 3
    assert found == [read(one | {"port": "9000"}, home).dashboard for one in said]


def test_a_folder_of_policies_need_not_be_utf_8() -> None:
    found = read({"policies": os.fsdecode(b"caf\xe9")}, {"HOME": "/home/me"})
    assert found.dashboard is not None


def test_paths_from_variables_know_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    settings = read({"store": "~/s"}, {"OFFLOAD_POLICIES": "~/p", "OFFLOAD_ADMIN_TOKEN": "~/t"})
    assert (settings.policies, settings.store, settings.admin_token) == (
        Path("/home/me/p"),
        "/home/me/s",
        "~/t",
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2048", 2048),
        ("64MiB", 64 << 20),
        ("64M", 64 << 20),
        ("64 mb", 64 << 20),
        ("10KiB", 10_240),
    ],
)
def test_sizes_with_units_are_parsed(text: str, size: int) -> None:
    assert read({"body_limit": text}, {}).body_limit == size


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("port", "http", "a port from 1 to 65535, or 0"),
        ("port", "65536", "a port from 1 to 65535, or 0"),
        ("workers", "0", "a number of processes from 1 to 256"),
        ("body_limit", "5", "a size of at least 1KiB, such as 64MiB"),
        ("body_limit", "64TiB", "a size of at least 1KiB"),
        ("body_limit", "", "a size of at least 1KiB"),
        ("buffered_limit", "9", "a size of at least 2KiB, such as 512MiB"),
        ("drain_timeout", "nan", "seconds above 0"),
        ("allowed_hosts", "http://a.example", "host names without ports"),
        ("allowed_hosts", "a.example:80", "host names without ports"),
        ("drain_timeout", "1m", "seconds above 0"),
        ("log_format", "xml", "json, full or short"),
        ("max_connections", "0", "a number above 0"),
        ("host", " ", "a host name or an address, such as 127.0.0.1"),
        ("host", "[]", "a host name or an address, such as 127.0.0.1"),
        ("store", "", "a URL or a directory"),
        ("dashboard", "", "a file"),
        ("upstream", "localhost:8080", "an address such as https://api.openai.com/v1"),
        ("upstream", "http://x:99999/v1", "an address such as https://api.openai.com/v1"),
        (
            "upstream",
            "http://user:pw@x/v1",
            "an address such as https://api.openai.com/v1 without user and password",
        ),
    ],
)
def test_a_mistake_names_its_flag_or_variable(name: str, text: str, expected: str) -> None:
    with pytest.raises(UserMistake) as flag:
        read({name: text}, {})
    assert str(flag.value).startswith(
        f"--{name.replace('_', '-')}: "
    ) and f"expected {expected}" in str(flag.value)
    if text.strip():
        with pytest.raises(UserMistake) as variable:
            read({}, {f"OFFLOAD_{name.upper()}": text})
        assert f"expected {expected}" in str(variable.value) and str(variable.value).startswith(
            f"OFFLOAD_{name.upper()}: "
        )


def test_secrets_from_files_end_with_a_line_feed() -> None:
    settings = read(
        {},
        {
            "OFFLOAD_ADMIN_TOKEN": "token\n",
            "OFFLOAD_STORE": "redis://r/0\n",
            "OFFLOAD_PORT": "9\r\n",
        },
    )
    assert (settings.admin_token, settings.store, settings.port) == ("token", "redis://r/0", 9)


@pytest.mark.parametrize("token", ["tökén", "to\nken", "\udcff"])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(UserMistake, match="OFFLOAD_ADMIN_TOKEN: expected printable ASCII"):
        read({}, {"OFFLOAD_ADMIN_TOKEN": token})


def test_half_of_the_buffers_must_hold_one_body() -> None:
    with pytest.raises(
        UserMistake, match=r"half of --buffered-limit.*raise the first to 134217728, or lower"
    ):
        read({"buffered_limit": "100MiB"}, {})
    assert read({"buffered_limit": "100MiB", "body_limit": "50MiB"}, {}).body_limit == 50 << 20


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("OFFLOAD_UPSTREEM", "OFFLOAD_UPSTREAM"),
        ("OFFLOAD_BODYLIMIT", "OFFLOAD_BODY_LIMIT"),
        ("OFFLOAD_PROXY_STORE", "OFFLOAD_STORE"),
        ("OFFLOAD_WHATEVER", ""),
    ],
)
def test_variables_that_are_no_settings_are_found(name: str, meant: str) -> None:
    kubernetes = (
        "PROXY_PORT",
        "PROXY_SERVICE_PORT_HTTP",
        "PROXY_PORT_80_TCP_ADDR",
        "SERVICE_HOST",
        "PORT_8787_TCP",
    )
    others = [f"OFFLOAD_{one}" for one in ("PORT", "ADMIN_TOKEN", "API_KEY", *kubernetes)]
    environment = dict.fromkeys((name, "HOME", *others), "1")
    assert list(strange_variables(environment)) == [(name, meant)]


@pytest.mark.parametrize(
    ("upstream", "flags", "said"),
    [
        ("http://127.0.0.1:8787/v1", {}, "this proxy itself"),
        ("http://localhost:8787/v1", {}, "this proxy itself"),
        ("http://[::1]:8787", {}, "this proxy itself"),
        ("http://gateway:80/v1", {"host": "gateway", "port": "80"}, "this proxy itself"),
        ("http://[::1::2]/v1", {}, r"http://\[::1::2\]/v1"),
        ("http://127.0.0.1:8788/v1", {}, ""),
        ("http://elsewhere:8787/v1", {}, ""),
    ],
)
def test_a_proxy_in_front_of_itself_is_refused(
    upstream: str, flags: dict[str, str], said: str
) -> None:
    """OPENAI_BASE_URL is what people set to point their agent at us."""
    with pytest.raises(UserMistake, match=said) if said else nullcontext():
        refuse_loop(read(flags, {"OPENAI_BASE_URL": upstream}))
