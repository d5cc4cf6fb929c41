"""The HTTP service around a gallery: keys, limits, audit trail, counters; needs the extra ``app``."""

from mettle.service.app import create_app
from mettle.service.audit_log import Trail, uses, verify_trail
from mettle.service.auth import Key, Keys, create_key, list_keys, revoke_key
from mettle.service.rate_limits import Limits, Rate
from mettle.service.server import serve

__all__ = [
    "Key",
    "Keys",
    "Limits",
    "Rate",
    "Trail",
    "create_app",
    "create_key",
    "list_keys",
    "revoke_key",
    "serve",
    "uses",
    "verify_trail",
]
