"""The HTTP service around a gallery: keys, limits, audit log, counters; needs the extra ``app``."""

from mettle.service.app import create_app
from mettle.service.audit_log import AuditLog, entries_about, verify_audit_log
from mettle.service.auth import Key, Keys, create_key, list_keys, revoke_key
from mettle.service.rate_limits import Limits, Rate
from mettle.service.server import serve

__all__ = [
    "AuditLog",
    "Key",
    "Keys",
    "Limits",
    "Rate",
    "create_app",
    "create_key",
    "entries_about",
    "list_keys",
    "revoke_key",
    "serve",
    "verify_audit_log",
]
