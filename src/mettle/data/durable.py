"""Moved to `mettle.durable`."""

from mettle.durable import sha256, sweep, sync_folder, write_bytes, write_folder, write_text

__all__ = ["sha256", "sweep", "sync_folder", "write_bytes", "write_folder", "write_text"]
