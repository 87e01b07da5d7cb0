"""What `serve` says at its start, on a terminal and elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proxy.cli import check, main
from proxy.settings import Settings
from tests.fake_upstream import StrictUpstream
from tests.ports import free_port
from tests.sdks import redis as redis_client
from tests.stores.engines import redis_server


def said(
    settings: Settings, capsys: pytest.CaptureFixture[str], *, terminal: bool = True
) -> list[str]:
    check.say(settings, terminal=terminal)
    return capsys.readouterr().err.splitlines()


def test_four_lines_on_a_terminal(
    up: StrictUpstream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(upstream=up.url, store=str(tmp_path / "s"), dashboard=tmp_path / "d.db")
    upstream, policy, store, dashboard = said(settings, capsys)
    assert upstream.startswith(f"upstream   {up.url} reachable, ")
    expected = "policy     built in: auto, balanced; `offload-proxy check` explains it in full"
    assert policy == expected
    assert store == f"store      {tmp_path}/s, works"
    assert dashboard == f"dashboard  {tmp_path}/d.db; --dashboard off ends it"


def test_elsewhere_nothing_is_said_if_all_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And upstream is not asked."""
    settings = Settings(upstream=f"http://127.0.0.1:{free_port()}/v1", store=str(tmp_path / "s"))
    assert said(settings, capsys, terminal=False) == []


def test_what_does_not_work_is_said_with_its_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    settings = Settings(
        upstream=f"http://127.0.0.1:{free_port()}/v1",
        store=str(tmp_path / "file"),
        environment={"OFFLOAD_UPSTREEM": "x"},
    )
    variable, fault, upstream, _, store, dashboard = said(settings, capsys)
    assert (
        variable
        == "warning: OFFLOAD_UPSTREEM is no setting of the proxy; did you mean OFFLOAD_UPSTREAM?"
    )
    assert "not a directory" in fault and "give --store a folder that you can write to" in fault
    assert "DOES NOT ANSWER, connection refused at 127.0.0.1:" in upstream
    assert upstream.endswith("start it, or give --upstream")
    assert store.endswith("DOES NOT WORK") and dashboard.startswith(
        "dashboard  off; --dashboard FILE"
    )
    assert said(settings, capsys, terminal=False) == [variable, fault]


def test_what_the_check_of_a_store_leaves_behind_expires(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with redis_server(tmp_path) as process:
        url = f"redis://127.0.0.1:{process.port}/0"
        with redis_client.Redis(port=process.port) as client:
            client.execute_command("ACL SETUSER default -unlink")
            said(Settings(store=url, upstream="http://127.0.0.1:1"), capsys, terminal=False)
            [left] = client.scan_iter()
            assert 0 < client.ttl(left) <= 3_600


def test_a_variable_that_a_policy_names_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = {"upstream": {"base_url": "http://127.0.0.1:1", "api_key": "${OFFLOAD_UPSTREAM_KEY}"}}
    for name in ("default", "other"):
        keys = {"open": True} if name == "default" else {"api_keys": [{"sha256": "0" * 64}]}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(policy | keys))
    settings = Settings(
        policies=tmp_path, store=str(tmp_path / "s"), environment={"OFFLOAD_UPSTREAM_KEY": "sk"}
    )
    lines = said(settings, capsys)
    assert [line.split()[0] for line in lines] == ["upstream", "policy", "store", "dashboard"]
    assert lines[1] == f"policy     2 of {tmp_path}; `offload-proxy check --full` explains each"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["serve", "--upstrem", "http://h/v1"], "(did you mean --upstream?)"),
        (["serve", "--body_limit=5"], "(did you mean --body-limit?)"),
        (["replay", "--polcy", "a.yaml"], "(did you mean --policy?)"),
        (["store", "ls", "--polices=p"], "(did you mean --policies?)"),
        (["replay", "--dialect", "chat"], "unrecognized arguments: --dialect\n"),
        (["serve", "--zzz"], "unrecognized arguments: --zzz\n"),
        (
            ["serve", "--admin-token", "secret", "--key=secret"],
            "unrecognized arguments: --admin-token --key\n",
        ),
    ],
)
def test_a_flag_with_a_typo_is_told_the_right_one(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and meant in capsys.readouterr().err
