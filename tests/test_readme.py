"""What the README shows works: its policy loads, its flags exist, its files are there."""

from __future__ import annotations

import re
from pathlib import Path

from proxy import policies

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_policy_loads(tmp_path: Path) -> None:
    [example] = re.findall(r"```yaml\n(tenant: .*?)```", README, re.DOTALL)
    (tmp_path / "acme.yaml").write_text(example, encoding="utf-8")
    environment = {"ACME_CLIENT_KEY": "client-key", "ACME_OPENAI_KEY": "upstream-key"}
    [policy] = policies.load(tmp_path, environment).all()
    assert policy.tenant == "acme"
    assert policy.for_model("gpt-4.1-mini").offload.max_total_tokens == 100_000


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_its_flags_and_headers_exist() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "proxy").rglob("*.py"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in {*re.findall(r"x-offload-[a-z-]*[a-z]", README), *re.findall(r"offload_\w+_total", README)}:
        assert name.removeprefix("offload_").removesuffix("_total") in sources
    for flag in re.findall(r"(?<=`--)[a-z-]+", README):
        assert flag in sources or flag.replace("-", "_") in sources, flag
    for target in re.findall(r"`?make ([a-z-]+)", README):
        assert f"{target}:" in makefile


def test_its_commands_are_modules() -> None:
    for module in re.findall(r"`python -m (tests\.bench\.\w+)", README):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
