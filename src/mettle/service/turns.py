"""Whose turn it is to ask: tries at one identity, and identifications of one key, through the API or on the page."""

import unicodedata

from starlette.requests import Request

from mettle.service.keys import Key
from mettle.service.refusal import Refusal
from mettle.service.state import State


def try_at(request: Request, state: State, key: Key, what: str, identity: str) -> None:
    """Name the subject for the trail, and let nobody be tried too often, whoever tries."""
    full = unicodedata.normalize("NFC", key.full(identity))  # another spelling is no other person
    request.state.subject = full
    if wait := state.per_target.take((what, full)):
        raise Refusal(429, "target-rate", "too many tries at one identity", retry_after=wait)


def one_identification(state: State, key: Key) -> None:
    """Count it, unless the key has had all of its day."""
    if wait := state.identify_daily.take(key.id):
        raise Refusal(429, "quota", "this key has used up its identifications", retry_after=wait)
