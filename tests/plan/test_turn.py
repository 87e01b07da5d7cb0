"""What is said of a request that has no plan."""

from __future__ import annotations

from proxy.plan.turn import Reason


def test_every_reason_is_a_sentence() -> None:
    said = {reason: reason.words() for reason in Reason if reason}
    assert len(set(said.values())) == len(said)
    assert all(words.startswith("sent as it came: ") for words in said.values())
    assert (
        Reason.FIELD.words("n", ["other"])
        == "sent as it came: the proxy's tools do not go with `n`"
    )
    assert Reason.FIELD.words("tools").endswith(
        "the client's tools have the names of the proxy's; rename one"
    )
    assert Reason.FIELD.words("new", ["new"]) == (
        "sent as it came: the proxy does not know what `new` means; where it is harmless, name it in the policy's "
        "`upstream.members`"
    )
