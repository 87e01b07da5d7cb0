"""Sections of a policy as a file has them: what is left out has the plan's and the profile's default."""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.plan.profiles import presets
from proxy.policy import Offload


def offload(**keys: Any) -> Offload:
    """Return the `offload` section of a policy that sets these keys."""
    return msgspec.convert({**presets(keys).get("offload", {}), **keys}, Offload)
