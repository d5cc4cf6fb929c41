"""The HTTP service around a gallery: keys, limits, audit trail, counters; needs the extra ``app``."""

from mettle.service.app import create_app
from mettle.service.keys import Key, Keys, create_key, list_keys, revoke_key
from mettle.service.limits import Limits, Rate
from mettle.service.server import serve
from mettle.service.trail import Trail, uses, verify_trail

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
