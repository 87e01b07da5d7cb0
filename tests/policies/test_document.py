"""YAML with lines: values, places, variables, and what is refused."""

from itertools import pairwise

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import PolicyError
from proxy.policies.format import Document

SCALARS = (
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text("abc xyz:#-é\n", max_size=12)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
    ),
)


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=5), VALUES, min_size=1))
def test_values_are_those_of_the_safe_loader(value: dict[str, object]) -> None:
    text = yaml.safe_dump(value, allow_unicode=True)
    assert Document(text, "x.yaml", {}).value == yaml.safe_load(text)


LAUGHS = "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in pairwise("abcdefgh")
)
"""Each line stands for ten times as many values as the one before it."""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ((), 2),
        (("tenant",), 2),
        (("offload",), 3),
        (("offload", "compress", "model"), 5),
        (("rules", 1), 8),
        (("rules", 1, "model"), 8),
        (("rules", 0, "offload", "mode"), 7),
        (("nowhere", "at", "all"), 2),
    ],
)
def test_lines_are_those_of_keys_and_items_or_of_what_they_would_stand_in(
    path: tuple[str | int, ...], line: int
) -> None:
    text = """# a comment
tenant: acme
offload:
  compress:
    model: x
rules:
  - offload: {mode: auto}
  - model: y
"""
    assert Document(text, "x.yaml", {}).place(path) == f"x.yaml:{line}"


def test_variables_are_filled_in_anywhere_in_a_text() -> None:
    text = "a: ${ONE}\nb: ['pre-${ONE}-${_two2}-post']\nc: '${ONE}'\nd: $ONE $$"
    document = Document(text, "x.yaml", {"ONE": "1", "_two2": "zwei"})
    assert document.value == {"a": "1", "b": ["pre-1-zwei-post"], "c": "1", "d": "$ONE $$"}
    structure = "{x: [1]}\nb: 2 # ${ONE}"
    assert Document("a: ${X}", "x.yaml", {"X": structure}).value == {"a": structure}, (
        "what it holds is text"
    )


def test_aliases_work() -> None:
    assert Document("a: &x {k: [1]}\nb: *x", "x.yaml", {}).value == {
        "a": {"k": [1]},
        "b": {"k": [1]},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.yaml:1: the file is empty"),
        ("a: 1\nb: [1, 2\nc: 3", "x.yaml:3: not valid YAML: "),
        ("a: 1\n\tb: 2", "x.yaml:2: not valid YAML: "),
        ("a: 1\n---\nb: 2", "x.yaml:2: not valid YAML: "),
        ("a: \x07", "x.yaml:1: not valid YAML: "),
        ("a: 1\nb:\n  c: 2\n  d: 3\n  c: 4", "x.yaml:5: b.c: given twice, first on line 3"),
        ("offload:\noffload: {}", "x.yaml:2: offload: given twice, first on line 1"),
        ("? [a, b]\n: 1", "x.yaml:1: a key must be plain text"),
        ("a: &x [*x]", "x.yaml:1: nested too deeply, or an alias contains itself"),
        ("a: 2024-13-45", "x.yaml:1: a: cannot be read as YAML; put it in quotes"),
        (
            "a: !!python/object:os.system {}\nb: !!python/name:os.system ''",
            "x.yaml:2: b: cannot be read as YAML",
        ),
        ("a: !!int ''", "x.yaml:1: a: cannot be read as YAML; put it in quotes"),
        ("a: 1\nb: !!bool maybe", "x.yaml:2: b: cannot be read as YAML; put it in quotes"),
        ("a:\n  - ${UNSET}", "x.yaml:2: a[0]: the environment variable UNSET is not set"),
        ("a: ${X:-default}", "x.yaml:1: a: expected ${NAME}"),
        (
            "a: {k: ${X}}",
            "x.yaml:1: not valid YAML: expected ',' or '}', but got '{'; write ${NAME} in quotes here",
        ),
        ("a: ${X", "x.yaml:1: a: expected ${NAME}"),
        ("[" * 600, "x.yaml:1: nested too deeply"),
        ("a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + LAUGHS, "x.yaml:1: more than 200,000 values"),
    ],
)
def test_bad_texts_are_named_with_file_line_and_key(text: str, message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Document(text, "x.yaml", {"X": "secret"})
    assert str(caught.value).startswith(message)
    assert "secret" not in str(caught.value)
