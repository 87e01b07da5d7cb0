"""Which files a model means: calls as models make them, wrong ones included, and what they have to
find."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.plan import preview
from proxy.plan.preview import Label
from proxy.tools.find import Index, fitting
from tests.doubling import assert_linear

STORE = "/context_store"
CALLS = {
    "log": ("read_log", {"path": "/var/log/billing.log", "lines": 400}),
    "py": ("read_file", {"file_path": "mailer/settings.py"}),
    "py2": ("read_file", {"file_path": "billing/settings.py"}),
    "json": ("bash", {"command": "cd /srv/app && cat deploy/cluster_state.json | head -500"}),
    "win": ("view", {"path": "C:\\Users\\ann\\Report Final.csv"}),
    "url": ("web_fetch", {"url": "https://docs.example.org/guide/setup.html?lang=en#start"}),
    "query": ("web_search", {"query": "how to rotate TLS keys"}),
    "user": ("get_user_details", {"user_id": "aarav_garcia_1177"}),
    "edit": ("edit", {"files": [{"path": "src/core/Engine.ts"}], "mode": "replace"}),
}
"""What the client's own tools were called with."""

DIGESTS = {name: f"{number}a5c0ffee{number}" + "0" * 22 for number, name in enumerate(CALLS)}
LABELS = {
    name: preview.of_call(tool, json.dumps(arguments), len)
    for name, (tool, arguments) in CALLS.items()
}
PATHS = {name: f"{STORE}/{preview.file_name(LABELS[name], DIGESTS[name])}" for name in CALLS}
FILES = {
    path: msgspec.structs.replace(
        LABELS[name], call_strings=(*LABELS[name].call_strings, f"call_{name}")
    )
    for name, path in PATHS.items()
}
INDEX = Index(FILES, FILES, STORE)

MEANT: list[tuple[str, str]] = [
    # the path that the client's own call had
    ("/var/log/billing.log", "log"),
    ("mailer/settings.py", "py"),
    ("C:\\Users\\ann\\Report Final.csv", "win"),
    ("https://docs.example.org/guide/setup.html?lang=en#start", "url"),
    ("how to rotate TLS keys", "query"),
    ("aarav_garcia_1177", "user"),
    ("cd /srv/app && cat deploy/cluster_state.json | head -500", "json"),
    # the same below our folder
    ("context_store/var/log/billing.log", "log"),
    ("/context_store//var/log/billing.log", "log"),
    ("/context_store/C:\\Users\\ann\\Report Final.csv", "win"),
    # its last component, in front of it our folder or another
    ("billing.log", "log"),
    ("/context_store/billing.log", "log"),
    ("/srv/app/deploy/cluster_state.json", "json"),
    ("/workspace/mailer/settings.py", "py"),
    ("setup.html?lang=en#start", "url"),
    ("Report Final.csv", "win"),
    ("core/Engine.ts", "edit"),
    # spelled otherwise
    ("./mailer/settings.py", "py"),
    ("mailer\\settings.py", "py"),
    (" 'mailer/settings.py' ", "py"),
    ("`/var/log/billing.log`", "log"),
    ('"/var/log/billing.log"', "log"),
    ("<mailer/settings.py>", "py"),
    ("file:///var/log/billing.log", "log"),
    ("file://mailer/settings.py", "py"),
    ("file:///C:/Users/ann/Report%20Final.csv", "win"),
    ("/VAR/LOG/Billing.LOG", "log"),
    ("mailer/../mailer/settings.py", "py"),
    ("/var/log/billing.log/", "log"),
    ("/var/log/billing.log.", "log"),
    # with the number of a line
    ("/var/log/billing.log:120", "log"),
    ("mailer/settings.py:12:5", "py"),
    ("mailer/settings.py:12-40", "py"),
    ("mailer/settings.py#L12", "py"),
    ("mailer/settings.py (lines 3-9)", "py"),
    ("mailer/settings.py lines 3-9", "py"),
    # our own names, half right
    (PATHS["log"], "log"),
    (PATHS["log"].removeprefix(f"{STORE}/"), "log"),
    (PATHS["log"].removesuffix(".txt"), "log"),
    (f"{STORE}/billing.log.txt", "log"),
    (f"{STORE}/billing.txt", "log"),
    (f"{STORE}/billing.log.deadbeef.txt", "log"),
    (PATHS["user"].replace("_", "\\_"), "user"),
    (f"wrong-{DIGESTS['user'][:16]}.txt", "user"),
    (f"{STORE}/wrong.{DIGESTS['user'][:16]}.txt", "user"),
    (f"/other/{PATHS['query'].rpartition('/')[2]}", "query"),
    (f"{PATHS['url']}:3", "url"),
    (PATHS["edit"].upper(), "edit"),
    # the call's id
    ("call_json", "json"),
    # its tool, its directory, a pattern
    ("read_log", "log"),
    ("/var/log", "log"),
    ("/context_store/var/log/", "log"),
    ("mailer/", "py"),
    ("*.log", "log"),
    ("**/billing.log", "log"),
    ("/context_store/*.csv", "win"),
    # in what we say ourselves: a reference, a title, a list, a first line
    (f"(detailed result is stored in {PATHS['log']}; complete, result of read_log)", "log"),
    (f"{PATHS['py']}: result of read_file mailer/settings.py", "py"),
    (f"File: {PATHS['url'].removeprefix(f'{STORE}/')} (result of web_fetch)", "url"),
    ("result of read_log /var/log/billing.log", "log"),
    ("result of bash cd /srv/app && cat deploy/cluster_state.json | head -500", "json"),
    ("the result of web_search: how to rotate TLS keys", "query"),
    # as a call, a command, a phrase
    ('read_log(path="/var/log/billing.log")', "log"),
    ('read_log({"path": "/var/log/billing.log"})', "log"),
    ("user_id=aarav_garcia_1177", "user"),
    ("get_user_details_aarav_garcia_1177.txt", "user"),
    ("tail -n 50 /var/log/billing.log | sort", "log"),
    ("web_search how to rotate TLS keys", "query"),
    ("how_to_rotate_tls_keys.txt", "query"),
    ("rotate TLS keys", "query"),
    ("[setup](https://docs.example.org/guide/setup.html)", "url"),
    ("docs.example.org/guide/setup.html", "url"),
    ("@deploy/cluster_state.json", "json"),
    ("deploy/cluster_state.json, deploy/other.json", "json"),
    ("deploy/cluster_state.json\ndeploy/other.json", "json"),
]


def found(path: str, index: Index = INDEX) -> list[str]:
    return index.find(path)


@pytest.mark.parametrize(("path", "name"), MEANT)
def test_a_call_that_means_one_result_finds_it(path: str, name: str) -> None:
    assert found(path) == [PATHS[name]]


SEVERAL = {
    "settings.py": ["py", "py2"],
    "/context_store/settings.py": ["py", "py2"],
    "src/settings.py": ["py", "py2"],
    "read_file": ["py", "py2"],
    "/context_store/billing": ["log", "py2"],
    "*.py": ["py", "py2"],
    "billing.log\nmailer/settings.py": ["log", "py"],
    "mailer/settings.py, /var/log/billing.log": ["log", "py"],
    "result of read_file": ["py", "py2"],
    "": list(CALLS),
    "/": list(CALLS),
    "/context_store": list(CALLS),
    "context_store/": list(CALLS),
}


@pytest.mark.parametrize("path", SEVERAL)
def test_a_word_for_several_means_all_of_them(path: str) -> None:
    assert found(path) == [PATHS[name] for name in SEVERAL[path]]


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/etc/passwd", "../../etc/passwd", "mailer/other.py", "nothing", "\x00", "..", "/context_store/../etc",
            "*.go",
        ),
        *("cat mailer/other.py", "result of read_file mailer/other.py", "read_log(path='/var/log/mail.log')", "x of y"),
        *("python -m json", "= = =", "other.py, another.py", "a\nb"),
    ],
)  # fmt: skip
def test_what_was_not_moved_is_not_found(path: str) -> None:
    assert found(path) in ([], list(FILES)) if path == ".." else found(path) == []


@given(st.text(), st.dictionaries(st.text(min_size=1), st.lists(st.text(), max_size=3), max_size=5))
def test_any_path_leads_only_to_files_of_the_request(path: str, said: dict[str, list[str]]) -> None:
    files: Mapping[str, Label] = {
        f"{STORE}/{name}": Label("s", "o", "a", tuple(words)) for name, words in said.items()
    }
    index = Index(files, files, STORE)
    for asked in (
        path,
        f"{STORE}/{path}",
        *said,
        *(word for words in said.values() for word in words),
    ):
        assert set(index.find(asked)) <= set(files)
        assert set(index.fitting(asked, list(files))) <= set(files)


def test_globs_also_fit_what_the_calls_named() -> None:
    assert INDEX.fitting("settings.py.1*", INDEX.paths) == [PATHS["py"]]
    assert INDEX.fitting("*.log", INDEX.paths) == [PATHS["log"]]
    assert INDEX.fitting("**/*.TS", INDEX.paths) == [PATHS["edit"]]
    assert INDEX.fitting("mailer/*", INDEX.paths) == [PATHS["py"]]
    assert INDEX.fitting("*.go", INDEX.paths) == []


def test_globs_that_never_come_again_are_not_all_kept() -> None:
    tracemalloc.start()
    try:
        kept = []
        for first in (0, 600):
            for number in range(first, first + 600):
                assert fitting(f"*.{number}", ["/records/billing.7"], "/records") == (
                    ["/records/billing.7"] if number == 7 else []
                )
            kept.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert kept[1] - kept[0] < 100_000


def test_looking_up_is_linear_in_the_words() -> None:
    def work(files: int) -> None:
        known = {
            f"{STORE}/f.{number:08x}.txt": preview.of_call(
                "t", json.dumps({"path": "a/" * 90 + "b", "n": number}), len
            )
            for number in range(files)
        }
        index = Index(known, known, STORE)
        for path in (
            "a/" * 80,
            "b",
            "a",
            "/".join("ab" * 40),
            "x.12345678.txt",
            "*b",
            "a b " * 250,
            "a/b " * 250,
        ):
            index.find(path)

    assert_linear(work, 100, 200)
