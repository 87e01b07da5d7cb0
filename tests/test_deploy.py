"""What the deployment recipes say of the proxy is what the proxy knows: flags, variables, times, files."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from proxy.cli import parser
from proxy.dashboard import writer
from proxy.requests import captures
from proxy.server.app import LEAST_GRACE
from proxy.server.runner import GRACE
from proxy.settings import Settings, read
from proxy.stores import guarded, local
from proxy.upstream import client

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "docs" / "deploy"
VARIABLES = {f"OFFLOAD_{field.name.upper()}" for field in msgspec.structs.fields(Settings)} - {"OFFLOAD_ENVIRONMENT"}


def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def manifests() -> Mapping[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def pod() -> Any:
    return manifests()["Deployment"]["spec"]["template"]["spec"]


def proxies() -> Iterator[Mapping[str, Any]]:
    return (one for name, one in compose()["services"].items() if name.startswith("proxy-"))


def dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def variables() -> Iterator[tuple[str, str | None]]:
    for service in proxies():
        yield from service["environment"].items()
    for one in pod()["containers"][0]["env"]:
        yield one["name"], one.get("value")
    for line in re.findall(r"^ENV (.*)$", dockerfile(), re.MULTILINE):
        yield from (word.split("=", 1) for word in shlex.split(line) if word.startswith("OFFLOAD_"))


def test_variables_in_manifests_exist_and_their_values_are_valid() -> None:
    found = dict(variables())
    assert set(found) <= VARIABLES | {"OPENAI_BASE_URL"}
    plain = {name: value for name, value in found.items() if value and not value.startswith("${")}
    assert {"OFFLOAD_STORE", "OFFLOAD_HOST", "OFFLOAD_DRAIN_TIMEOUT"} <= set(plain)
    assert read({}, plain).drain_timeout == 30


def test_flags_in_manifests_exist() -> None:
    chosen = parser().parse_args(pod()["containers"][0]["args"])
    assert (chosen.policies, chosen.drain_timeout) == ("/policies", "30")


def test_manifests_leave_time_to_drain() -> None:
    container = pod()["containers"][0]
    waited = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drained = float(parser().parse_args(container["args"]).drain_timeout)
    assert pod()["terminationGracePeriodSeconds"] >= waited + drained + GRACE
    for service in proxies():
        assert int(service["stop_grace_period"].removesuffix("s")) >= 30 + GRACE


def test_probes_do_not_depend_on_the_store() -> None:
    container = pod()["containers"][0]
    [port] = container["ports"]
    assert port["containerPort"] == Settings().port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}


def test_kubernetes_selectors_match_labels() -> None:
    found = manifests()
    label = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == label
    assert found["Service"]["spec"]["selector"] == label
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == label
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == label
    assert 0 < found["PodDisruptionBudget"]["spec"]["minAvailable"] < found["Deployment"]["spec"]["replicas"]


def test_containers_do_not_run_as_root_or_write_to_their_disk() -> None:
    assert re.search(r"^USER 65534", dockerfile(), re.MULTILINE)
    assert pod()["securityContext"]["runAsNonRoot"]
    assert pod()["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
    assert all(service["read_only"] for service in compose()["services"].values())


def test_containers_have_no_extra_privileges() -> None:
    assert pod()["automountServiceAccountToken"] is False
    assert pod()["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    may = pod()["containers"][0]["securityContext"]
    assert (may["allowPrivilegeEscalation"], may["capabilities"]) == (False, {"drop": ["ALL"]})
    for service in compose()["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_containers_have_resource_limits() -> None:
    """Memory, and the disk: /tmp has the metrics of several workers, and records where there is no other store."""
    resources = pod()["containers"][0]["resources"]
    assert {"cpu", "memory", "ephemeral-storage"} <= set(resources["requests"])
    assert {"memory", "ephemeral-storage"} <= set(resources["limits"])
    assert [volume["emptyDir"] for volume in pod()["volumes"] if "emptyDir" in volume] == [{"sizeLimit": "64Mi"}]
    for service in proxies():
        assert service["tmpfs"] == ["/tmp:size=64m"]
        assert service["mem_limit"] and service["pids_limit"]


def test_foreign_images_are_pinned_by_digest() -> None:
    assert re.fullmatch(r"[a-z-]+@sha256:REPLACE_WITH_DIGEST", pod()["containers"][0]["image"])
    for service in compose()["services"].values():
        assert "build" in service or re.match(r"\$\{\w+:\?", service["image"]), "compose stops where it is not given"
    froms = re.findall(r"^FROM (\S+)", dockerfile(), re.MULTILINE)
    arguments = re.findall(r"^ARG (\w+)=", dockerfile(), re.MULTILINE)
    assert froms == [f"${{{name}}}" for name in arguments], "each can be given by its digest"


def test_the_network_policy_allows_required_traffic() -> None:
    policy = manifests()["NetworkPolicy"]["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    [came] = policy["ingress"]
    [port] = pod()["containers"][0]["ports"]
    assert [one["port"] for one in came["ports"]] == [port["name"]]
    assert all(one["podSelector"]["matchLabels"] for one in came["from"])
    assert all(rule["to"] and rule["ports"] for rule in policy["egress"]), "an empty list admits everything"
    assert {one["port"] for rule in policy["egress"] for one in rule["ports"]} == {53, 443, 6379}


def test_files_copied_into_the_image_exist_and_are_in_the_context() -> None:
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert sent[0] == "*"
    for line in re.findall(r"^COPY (?!--from)(.*)$", dockerfile(), re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists()
            assert f"!{source}" in sent


@pytest.mark.parametrize("extras", [(), ("redis", "objects")])
def test_the_image_has_every_package_that_the_proxy_needs(extras: tuple[str, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    pinned = set(re.findall(r"^([a-z0-9-]+)==", (DEPLOY / "requirements.txt").read_text(), re.MULTILINE))
    assert {re.split(r"[\[<>=;~ ]", one)[0].lower() for one in needed} <= pinned


def test_the_bounds_of_closing_fit_into_the_grace() -> None:
    """One stage after the other, each with something that hangs: the last one still logs what hangs."""
    captured = 2 * captures.CLOSING  # for what waits, and for what is being written
    closing = LEAST_GRACE + captured + client.CLOSING + guarded.CLOSING + writer.CLOSING
    assert closing < GRACE
    assert local.CLOSE_SECONDS < guarded.CLOSING
