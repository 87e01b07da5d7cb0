"""The systems that users could pick instead of the proxy, and how to start each in a comparable
setup.

Each runs with one worker in front of the benchmark's upstream on loopback, at its maker's defaults;
its launcher's docstring names the exceptions. `make bench-competitors` installs them at pinned
versions, each in its own environment.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.systems import ROOT, Launch, Site

PINS = Path(__file__).parent / "competitors"
VOCABULARIES = "https://openaipublic.blob.core.windows.net/encodings"
"""The addresses by which tiktoken identifies its tables (tiktoken_ext/openai_public.py). Nothing is
fetched there."""
PORTKEY = PINS / "portkey/node_modules/@portkey-ai/gateway/build/start-server.js"


@dataclass(frozen=True)
class Competitor:
    """A system by somebody else. `program` exists once it is installed."""

    name: str
    program: Path
    launch: Callable[[Path, Site], Launch]

    def at(self, site: Site) -> Launch:
        return self.launch(self.program, site)

    @property
    def installed(self) -> bool:
        return self.program.exists()


def _program(environment: str, name: str) -> Path:
    return ROOT / ".competitors" / environment / "bin" / name


def _headroom(program: Path, site: Site) -> Launch:
    """Optimizing, as by default, with a local copy of the vocabulary that it would otherwise fetch.

    Left out: images, and the compressor that needs weights from a hub (`kompress`). Off: its cache
    of replies, its limit of 60 requests a minute, and its statistics. It speaks HTTP/1.1, as the
    upstream does.
    """
    flags = [
        "--no-cache",
        "--no-rate-limit",
        "--no-telemetry",
        "--no-subscription-tracking",
        "--no-http2",
    ]
    compressors = "--compressor=smart_crusher,code_aware,search,log,tabular,config,html"
    where = [
        "--host=127.0.0.1",
        f"--port={site.port}",
        "--workers=1",
        f"--openai-api-url={site.url}",
    ]
    return Launch(
        [str(program), "proxy", *where, *flags, compressors],
        {"TIKTOKEN_CACHE_DIR": _vocabulary(site.folder)},
    )


def _vocabulary(folder: Path) -> str:
    """Unpack tiktoken's table into `folder`, where it finds it by the SHA-1 of its address
    (tiktoken/load.py)."""
    key = hashlib.sha1(f"{VOCABULARIES}/o200k_base.tiktoken".encode()).hexdigest()
    packed = ROOT / "proxy/vocabulary/o200k_base.tiktoken.gz"
    (folder / key).write_bytes(gzip.decompress(packed.read_bytes()))
    return str(folder)


def _awecompress(program: Path, site: Site) -> Launch:
    """At its defaults. Above 60,000 tokens it has the upstream summarise old turns, once."""
    where = ["--host", "127.0.0.1", "--port", str(site.port), "--upstream", site.url]
    return Launch([str(program), "serve", *where], {"AWECOMPRESS_CONFIG_DIR": str(site.folder)})


def _distil(program: Path, site: Site) -> Launch:
    """Its asynchronous proxy, for concurrent requests. Sampling for its statistics is off, as it
    sends requests too."""
    where = ["--host", "127.0.0.1", "--port", str(site.port), "--upstream", site.url]
    return Launch([str(program), "proxy", "--async", *where, "--shadow", "0", "--retention", "0"])


def _litellm(program: Path, site: Site) -> Launch:
    """One model; no database, virtual keys or cache."""
    routed = {"model": "openai/gpt-4.1", "api_base": f"{site.url}/v1", "api_key": "sk-bench"}
    configuration = {
        "model_list": [{"model_name": "gpt-4.1", "litellm_params": routed}],
        "litellm_settings": {"telemetry": False},
    }
    path = site.write("litellm.yaml", configuration)
    where = [
        "--host",
        "127.0.0.1",
        "--port",
        str(site.port),
        "--num_workers",
        "1",
        "--telemetry",
        "False",
    ]
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    return Launch([str(program), "--config", str(path), *where], offline)


def _portkey(program: Path, site: Site) -> Launch:
    """Its clients name provider and address in every request.

    @hono/node-server is pinned at 1.13.8: with newer versions that its own range allows it answers
    every stream with a 500 (`TypeError: immutable`), and there would be nothing to compare.
    """
    headers = {"x-portkey-provider": "openai", "x-portkey-custom-host": f"{site.url}/v1"}
    return Launch(
        ["node", str(program), f"--port={site.port}", "--headless"],
        {"NODE_ENV": "production"},
        headers,
    )


COMPETITORS = (
    Competitor("headroom-ai 0.42.0", _program("headroom", "headroom"), _headroom),
    Competitor("awecompress 0.2.0", _program("awecompress", "awecompress"), _awecompress),
    Competitor("distil-llm 1.58.0", _program("distil", "distil"), _distil),
    Competitor("LiteLLM proxy 1.80.0", _program("litellm", "litellm"), _litellm),
    Competitor("Portkey gateway 1.15.2", PORTKEY, _portkey),
)
