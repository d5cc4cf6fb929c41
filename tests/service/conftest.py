"""The fixtures of every test of the service."""

from tests.http_service import drawn, key, keyfile, people, service, told, trained

__all__ = ["drawn", "key", "keyfile", "people", "service", "told", "trained"]
