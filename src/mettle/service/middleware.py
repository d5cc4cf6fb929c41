"""The door: what every request passes before any of it is parsed, and every answer on its way out.

    host -> place -> cross-site -> key and scope -> rate -> room -> body, counted and timed -> the route

Each step is cheaper than the next, and a stranger is turned away before a byte of the body is read. The door
also has the last word: an error that nobody expected becomes a plain refusal, never an acceptance.
"""

import asyncio
import json
import logging
import math
import time
from contextlib import suppress
from dataclasses import replace
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mettle.errors import MettleError
from mettle.service import html_pages as pages
from mettle.service.app import ServiceContext
from mettle.service.auth import ANYBODY, COOKIE, TOKEN, Key
from mettle.service.errors import ApiError, internal_error, to_api_error, unknown_path_error
from mettle.service.routes import ANY, PUBLIC, SIGN_IN, RoutePolicy, RouteTable
from mettle.service.server import is_loopback

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.types import Scope


LINGER = 1.0  # seconds in which a refused client may stop sending, so that it reads why
SAFE = ("GET", "HEAD")
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}

log = logging.getLogger("mettle.service")


class GateMiddleware:
    """ASGI middleware around the routes."""

    def __init__(self, app: ASGIApp, context: ServiceContext, routes: RouteTable):
        self._app, self._context, self._routes = app, context, routes
        self._active = 0
        self._unwritten = 0  # refusals since the last one that the audit log took

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _RequestContext(self, scope, receive, send).serve()
        else:  # nothing here speaks WebSocket
            await send({"type": "websocket.close", "code": 1008})


class _RequestContext:
    """One request and its answer."""

    def __init__(self, gate: GateMiddleware, scope: Scope, receive: Receive, send: Send):
        self.gate, self.context, self.scope = gate, gate._context, scope
        self._receive, self._send = receive, send
        self.headers = Headers(scope=scope)
        self.method, self.started = scope["method"], time.perf_counter()
        self.policy: RoutePolicy | None = None
        self.key: Key | None = None
        self.status, self.body_left = 0, bool(self.headers.get("content-length", "0") != "0")
        self.body_left = self.body_left or "transfer-encoding" in self.headers
        scope.setdefault("state", {})

    @property
    def route(self) -> str:
        return self.policy.route if self.policy else "other"

    async def serve(self) -> None:
        try:
            await self._admit()
        except ApiError as refusal:
            await self._send_error(refusal)
        except MettleError as error:
            await self._send_error(to_api_error(error))
        except Exception as error:
            self._log_unexpected(error)
            await self._send_error(internal_error())
        finally:
            self._count_request()

    async def _admit(self) -> None:
        check_host(self.scope, self.headers, self.context.hosts)
        check_query(self.scope.get("query_string", b""))
        self.policy = policy = self.gate._routes.find_policy(self.scope["path"])
        if policy is None:
            raise unknown_path_error()
        if policy.route == "/v1/identities/{identity}":
            self.scope["path"] = policy.route  # the framework's patterns stop at line breaks; the route reads raw_path
        if self.method not in policy.scopes:
            raise ApiError(405, "method", f"this resource takes {', '.join(policy.scopes)}")
        if self.method not in SAFE:
            check_origin(self.headers)
        self.key = self.scope["state"]["key"] = self._authenticate(policy)
        if self.key is not None and (policy.route.startswith("/v1/") or self.method not in SAFE):
            wait = self.context.per_key.acquire(self.key.id)
            if wait:
                raise ApiError(429, "rate", "this key asks too often", retry_after=wait)
        if self.gate._active >= self.context.limits.active:
            raise ApiError(503, "busy", "too many requests at once; try again", retry_after=1)
        self.gate._active += 1
        try:
            body = await self._read_body()
            await self.gate._app(self.scope, _replay_body(body, self._receive), self._send_message)
        finally:
            self.gate._active -= 1

    def _authenticate(self, policy: RoutePolicy) -> Key | None:
        scope = policy.scopes[self.method]
        if scope == PUBLIC:
            return None
        near = is_local(self.scope, self.headers)
        if self.context.keys is None:
            if not near:
                raise ApiError(403, "forbidden", "this service has no keys, so it serves its own machine only")
            return ANYBODY
        given = self.headers.getlist("authorization")
        if scope == "metrics" and near and not given:
            return replace(ANYBODY, scopes=("metrics",))
        key = self._key_from_cookie() if policy.cookie and not given else self._key_from_header(given)
        person = policy.route == SIGN_IN  # what is refused there is read by whoever sits at the page, not by a program
        if key is None:
            why = pages.UNKNOWN_KEY if person else "a valid key is needed: Authorization: Bearer mettle_..."
            raise ApiError(401, "unauthorized", why)
        self.key = key
        if policy.whole and key.tenant is not None:
            raise ApiError(
                403, "forbidden", "a key of a tenant cannot use the workbench, which shows the whole gallery"
            )
        for wanted in ("workbench", scope) if policy.whole else (scope,):
            if wanted != ANY and not key.allows(wanted):
                why = pages.OTHER_KEY if person else f"this key does not have the scope {wanted}"
                raise ApiError(403, "forbidden", why)
        return key

    def _key_from_header(self, given: list[str]) -> Key | None:
        assert self.context.keys is not None
        kind, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        return self.context.keys.find(token.strip() if kind.lower() == "bearer" else "")

    def _key_from_cookie(self) -> Key | None:
        """The key of a browser session; what is not a plain reading must come from our own page."""
        assert self.context.keys is not None
        if self.method not in SAFE and "origin" not in self.headers:
            return None
        with suppress(CookieError):
            morsel = SimpleCookie(self.headers.get("cookie", "")).get(COOKIE)
            id = self.context.sessions.find(morsel.value) if morsel else None
            return self.context.keys.named(id) if id else None
        return None

    async def _read_body(self) -> bytes:
        """The whole body, no longer and no slower than allowed."""
        limits = self.context.limits
        has_pictures = self.headers.get("content-type", "").strip().lower().startswith("multipart/")
        most = 1 << 16 if self.method != "POST" else limits.body if has_pictures else min(limits.json, limits.body)
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "encoding", "send the body as it is, not compressed")
        length = self.headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit():
            raise ApiError(400, "length", "the length of the body is not a number")
        fewer = "send a smaller picture, or fewer at a time" if has_pictures else "send fewer embeddings at a time"
        why = f"a body {'with pictures' if has_pictures else 'of JSON'} has at most {most} bytes: {fewer}"
        too_large = ApiError(413, "too-large", why)
        if len(length) > 18 or int(length) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.context.limits.body_seconds):
                more = True
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "gone", "the connection ended before the body did")
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_large
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, "slow", "the body took too long to arrive") from None
        self.body_left = False
        return bytes(body)

    async def _send_message(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await self._send(message)

    async def _send_error(self, refusal: ApiError) -> None:
        if self.status:  # an answer has begun: it can only be broken off
            raise RuntimeError("an answer was broken off") from None
        self.context.metrics.refusals.labels(self.route, refusal.code).inc()
        await self._record_refusal(refusal)
        content, kind = _error_body(refusal), b"application/json"
        if refusal.status == 401 and self.route.startswith("/workbench/") and _wants_page(self.method, self.headers):
            content, kind = pages.sign_in_page().encode(), b"text/html; charset=utf-8"
        headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
        if refusal.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if refusal.status == 405 and self.policy:
            headers.append((b"allow", ", ".join(self.policy.scopes).encode()))
        if refusal.retry_after is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(refusal.retry_after))).encode()))
        if self.body_left:
            headers.append((b"connection", b"close"))
        await self._send_message({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await self._send_message({"type": "http.response.body", "body": content, "more_body": self.body_left})
        if self.body_left:
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER):
                    while (await self._receive()).get("more_body", False):
                        pass
            await self._send_message({"type": "http.response.body", "body": b""})

    async def _record_refusal(self, refusal: ApiError) -> None:
        """Into the audit log, at a rate that no stranger can fill a disk with."""
        scoped = self.policy is not None and self.policy.scopes.get(self.method) != PUBLIC
        if self.context.audit_log is None or not scoped:
            return
        if self.context.refusals.acquire(""):
            self.gate._unwritten += 1
            return
        missed, self.gate._unwritten = self.gate._unwritten, 0
        more: dict[str, Any] = {"unwritten": missed} if missed else {}
        who, subject = self.key.name if self.key else "-", self.scope["state"].get("subject")
        try:
            await asyncio.to_thread(
                self.context.audit_log.append, who, self.route, f"refused: {refusal.code}", subject=subject, **more
            )
        except MettleError:
            log.error("a refusal could not be written to the audit log")

    def _log_unexpected(self, error: Exception) -> None:
        """Say where an unexpected error happened, but not its text, which may hold anything that was sent."""
        trace, places = error.__traceback__, []
        while trace is not None:
            places.append(f"{trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}")
            trace = trace.tb_next
        log.error("unexpected %s at %s", type(error).__name__, " > ".join(places[-4:]))

    def _count_request(self) -> None:
        seconds = time.perf_counter() - self.started
        self.context.metrics.requests.labels(self.route, str(self.status or 499)).inc()
        self.context.metrics.seconds.labels(self.route).observe(seconds)
        who = self.key.name if self.key else "-"
        known = self.method if self.method in (*SAFE, "POST", "DELETE") else "OTHER"
        log.info("%s %s %d %.1f ms by %s", known, self.route, self.status or 499, 1000 * seconds, who)


def _replay_body(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _error_body(refusal: ApiError) -> bytes:
    return json.dumps({"error": {"code": refusal.code, "message": refusal.message}, "match": None}).encode()


def _wants_page(method: str, headers: Headers) -> bool:
    return method == "GET" and "text/html" in headers.get("accept", "")


_SECRET_NAMES = ("key", "api_key", "apikey", "api-key", "token", "access_token", "authorization", "bearer")


def check_host(scope: "Scope", headers: "Headers", hosts: frozenset[str]) -> None:
    """Refuse names that this service does not go by: one that leads here all the same may be a rebound one.

    The very address that was connected to is no name, so nobody can have rebound it.
    """
    given = headers.getlist("host")
    address = (scope.get("server") or ("",))[0] or ""
    own = {f"[{address}]" if ":" in address else address} - {""}
    if len(given) != 1 or host_name(given[0]) not in hosts | own:
        raise ApiError(421, "host", "this service does not go by that name")


def host_name(host: str) -> str:
    """A Host header without its port, in small letters."""
    host = host.strip().lower()
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


def check_query(query: bytes) -> None:
    """Addresses end up in histories and logs: a key in one is refused, and should be revoked."""
    text = query.decode("latin-1").lower()
    names = {part.partition("=")[0] for part in text.split("&")}
    if names & set(_SECRET_NAMES) or TOKEN.search(query.decode("latin-1")):
        raise ApiError(401, "key-in-url", "keys belong in the Authorization header; revoke one that was in an address")


def check_origin(headers: "Headers") -> None:
    """Refuse what a browser sends from a page of another site."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None:
        scheme, _, policy = origin.lower().partition("://")
        if scheme not in ("http", "https") or policy != headers.get("host", "").lower():
            raise ApiError(403, "cross-site", "requests from other sites are refused")
    if site is not None and site not in ("same-origin", "none"):
        raise ApiError(403, "cross-site", "requests from other sites are refused")


def is_local(scope: "Scope", headers: "Headers") -> bool:
    """Whether the client is on this machine, not behind a proxy that is."""
    if any(name in headers for name in ("forwarded", "x-forwarded-for", "x-real-ip", "via")):
        return False
    return is_loopback((scope.get("client") or ("", 0))[0])
