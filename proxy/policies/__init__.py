"""Loads policies/*.yaml as a whole or not at all, and follows changes. The only package that uses yaml."""

from proxy.policies.format import duration, schema
from proxy.policies.loader import Policies, PolicyLoader, builtin, load
from proxy.policies.reference import reference

__all__ = ["Policies", "PolicyLoader", "builtin", "duration", "load", "reference", "schema"]
