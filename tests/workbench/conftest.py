"""The workbench is mounted by a service: its tests use the same ones."""

from tests.http_service import drawn, key, keyfile, people, service, told, trained

__all__ = ["drawn", "key", "keyfile", "people", "service", "told", "trained"]
