"""What upstream's refusal of a request is about: something that we added to it, or something else."""

from __future__ import annotations

from enum import Enum, StrEnum, auto


class Addition(StrEnum):
    """What we add to a client's request. Metrics and the log show these values."""

    TOOLS = "tools"
    USAGE = "usage"
    """The wish to have the usage of a stream reported."""
    PLACE = "place"
    """The place of the snapshot: a system message of ours, or text at the end of the client's."""
    THINKING = "thinking"
    """The client's signed thinking, which upstream takes only behind what it took before. We have changed that."""
    SUMMARY = "summary"
    """The task of a summary call that continues the conversation."""
    ANY = "any"
    """No addition in particular: upstream takes the conversation as the client sent it and not as we changed it."""


class Verdict(Enum):
    """A refusal that is about none of our additions."""

    OVERFLOW = auto()
    """The request has too many tokens."""
    GENERATION = auto()
    """The model wrote something that upstream could not use. The same request may succeed."""
    FINAL = auto()
    """Whatever we left out would not help: safety, credentials, quota, an unknown model, a fault of upstream's own."""


Complaint = Addition | Verdict
