"""What users would pick in the proxy's place: how each is started, as near to it as the peer can honestly be.

All stand in front of the benchmark's upstream on loopback, with one worker, at the defaults of their makers but for
what is said at each. `make bench-peers` installs them at pinned versions, each into an environment of its own.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.bench.contestants import ROOT, Launch, Site

PINS = Path(__file__).parent / "peers"
VOCABULARIES = "https://openaipublic.blob.core.windows.net/encodings"
"""The addresses that tiktoken knows its tables by (tiktoken_ext/openai_public.py); nothing is fetched from there."""
PORTKEY = PINS / "portkey/node_modules/@portkey-ai/gateway/build/start-server.js"


@dataclass(frozen=True)
class Peer:
    """`program` is there once it is installed."""

    name: str
    program: Path
    launch: Callable[[Path, Site], Launch]

    def at(self, site: Site) -> Launch:
        return self.launch(self.program, site)

    @property
    def installed(self) -> bool:
        return self.program.exists()


def _program(environment: str, name: str) -> Path:
    return ROOT / ".peers" / environment / "bin" / name


def _headroom(program: Path, site: Site) -> Launch:
    """Optimizing, as is its default, with the vocabulary at hand that it would otherwise fetch.

    Left out are what needs weights from a hub (`kompress`) and images; off are its cache of replies, its limit of 60
    requests a minute and its statistics. HTTP/1.1, which is what the upstream speaks.
    """
    flags = ["--no-cache", "--no-rate-limit", "--no-telemetry", "--no-subscription-tracking", "--no-http2"]
    compressors = "--compressor=smart_crusher,code_aware,search,log,tabular,config,html"
    where = ["--host=127.0.0.1", f"--port={site.port}", "--workers=1", f"--openai-api-url={site.url}"]
    return Launch(
        [str(program), "proxy", *where, *flags, compressors], {"TIKTOKEN_CACHE_DIR": _vocabulary(site.folder)}
    )


def _vocabulary(folder: Path) -> str:
    """A folder in which tiktoken finds its tables: under the SHA-1 of their addresses (tiktoken/load.py)."""
    for name in ("o200k_base", "cl100k_base"):
        key = hashlib.sha1(f"{VOCABULARIES}/{name}.tiktoken".encode()).hexdigest()
        packed = ROOT / "proxy/vocabulary" / f"{name}.tiktoken.gz"
        (folder / key).write_bytes(gzip.decompress(packed.read_bytes()))
    return str(folder)


def _context_guardian(program: Path, site: Site) -> Launch:
    """Told the window of the requests' model, and not to ask the package index for a newer version."""
    return Launch(
        [str(program)],
        {
            "GUARDIAN_HOST": "127.0.0.1",
            "GUARDIAN_PORT": str(site.port),
            "GUARDIAN_UPSTREAM_URL": f"{site.url}/v1",
            "GUARDIAN_NUM_CTX": "1047576",
            "GUARDIAN_VERSION_CHECK": "0",
        },
    )


def _awecompress(program: Path, site: Site) -> Launch:
    """As it comes. Above 60,000 tokens it has old turns summarised by the upstream, once."""
    where = ["--host", "127.0.0.1", "--port", str(site.port), "--upstream", site.url]
    return Launch([str(program), "serve", *where], {"AWECOMPRESS_CONFIG_DIR": str(site.folder)})


def _distil(program: Path, site: Site) -> Launch:
    """Its asynchronous proxy, which is for many requests at once; without the samples for its own statistics, some of
    which would be requests of their own."""
    where = ["--host", "127.0.0.1", "--port", str(site.port), "--upstream", site.url]
    return Launch([str(program), "proxy", "--async", *where, "--shadow", "0", "--retention", "0"])


def _litellm(program: Path, site: Site) -> Launch:
    """One model, no database, no keys of its own, no cache."""
    routed = {"model": "openai/gpt-4.1", "api_base": f"{site.url}/v1", "api_key": "sk-bench"}
    configuration = {
        "model_list": [{"model_name": "gpt-4.1", "litellm_params": routed}],
        "litellm_settings": {"telemetry": False},
    }
    path = site.write("litellm.yaml", configuration)
    where = ["--host", "127.0.0.1", "--port", str(site.port), "--num_workers", "1", "--telemetry", "False"]
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    return Launch([str(program), "--config", str(path), *where], offline)


def _portkey(program: Path, site: Site) -> Launch:
    """Its clients name provider and address with every request.

    It is pinned together with @hono/node-server 1.13.8: newer ones that its own range allows make it answer every
    stream with a 500 (`TypeError: immutable`), which would say nothing about it.
    """
    headers = {"x-portkey-provider": "openai", "x-portkey-custom-host": f"{site.url}/v1"}
    return Launch(["node", str(program), f"--port={site.port}", "--headless"], {"NODE_ENV": "production"}, headers)


PEERS = (
    Peer("headroom-ai 0.42.0", _program("headroom", "headroom"), _headroom),
    Peer("context-guardian 0.12.0", _program("context_guardian", "context-guardian"), _context_guardian),
    Peer("awecompress 0.2.0", _program("awecompress", "awecompress"), _awecompress),
    Peer("distil-llm 1.58.0", _program("distil", "distil"), _distil),
    Peer("LiteLLM proxy 1.80.0", _program("litellm", "litellm"), _litellm),
    Peer("Portkey gateway 1.15.2", PORTKEY, _portkey),
)
