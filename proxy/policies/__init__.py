"""Loads all of policies/*.yaml or none of it, and reloads when files change. The only package that uses yaml."""

from proxy.policies.format import duration, reference, schema
from proxy.policies.loader import Policies, PolicyLoader, builtin, defaults, load, load_alone

__all__ = ["Policies", "PolicyLoader", "builtin", "defaults", "duration", "load", "load_alone", "reference", "schema"]
