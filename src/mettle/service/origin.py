"""Where a request comes from and whom it believes to talk to."""

import ipaddress
from typing import TYPE_CHECKING

from mettle.service.keys import TOKEN
from mettle.service.refusal import Refusal

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.types import Scope

_SECRET_NAMES = ("key", "api_key", "apikey", "api-key", "token", "access_token", "authorization", "bearer")


def check_host(scope: "Scope", headers: "Headers", hosts: frozenset[str]) -> None:
    """Refuse names that this service does not go by: one that leads here all the same may be a rebound one.

    The very address that was connected to is no name, so nobody can have rebound it.
    """
    given = headers.getlist("host")
    address = (scope.get("server") or ("",))[0] or ""
    own = {f"[{address}]" if ":" in address else address} - {""}
    if len(given) != 1 or host_name(given[0]) not in hosts | own:
        raise Refusal(421, "host", "this service does not go by that name")


def host_name(host: str) -> str:
    """A Host header without its port, in small letters."""
    host = host.strip().lower()
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


def check_query(query: bytes) -> None:
    """Addresses end up in histories and logs: a key in one is refused, and should be revoked."""
    text = query.decode("latin-1").lower()
    names = {part.partition("=")[0] for part in text.split("&")}
    if names & set(_SECRET_NAMES) or TOKEN.search(query.decode("latin-1")):
        raise Refusal(401, "key-in-url", "keys belong in the Authorization header; revoke one that was in an address")


def check_origin(headers: "Headers") -> None:
    """Refuse what a browser sends from a page of another site."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None:
        scheme, _, place = origin.lower().partition("://")
        if scheme not in ("http", "https") or place != headers.get("host", "").lower():
            raise Refusal(403, "cross-site", "requests from other sites are refused")
    if site is not None and site not in ("same-origin", "none"):
        raise Refusal(403, "cross-site", "requests from other sites are refused")


def is_local(scope: "Scope", headers: "Headers") -> bool:
    """Whether the client is on this machine, not behind a proxy that is."""
    if any(name in headers for name in ("forwarded", "x-forwarded-for", "x-real-ip", "via")):
        return False
    return is_loopback((scope.get("client") or ("", 0))[0])


def is_loopback(host: str) -> bool:
    """Whether an address or name means this machine."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
