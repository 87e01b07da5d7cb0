"""policies/*.yaml → `Policies`: loaded whole or not at all, followed while we run. The only home of yaml."""

from proxy.policies.format import duration, schema
from proxy.policies.loader import Policies, PolicyLoader, builtin, load
from proxy.policies.reference import reference

__all__ = ["Policies", "PolicyLoader", "builtin", "duration", "load", "reference", "schema"]
