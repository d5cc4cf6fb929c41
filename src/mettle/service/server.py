"""Serving over HTTP: on this machine only, unless told otherwise, and to strangers only with keys."""

import asyncio
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from mettle.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from fastapi import FastAPI
    from uvicorn import Server

HEAD_SECONDS = 10.0  # in which the head of a request must arrive
CONNECTIONS = 512
STOP_SECONDS = 3.0  # in which pictures that are being decoded may end once the service is told to stop


def serve(
    app: "FastAPI", host: str = "127.0.0.1", port: int = 8000, *, listening: Callable[[str], None] | None = None
) -> None:
    """Serve until interrupted or told to stop; requests in hand are finished first.

    ``listening`` is called with the address once clients can connect to it; port 0 is then the one that was free.
    """
    check_address(host, port, keys=app.state.mettle.keys is not None)
    server = make_server(app, host, port)
    with _open_listener(host, port) as listener, _stop_on_signal(server, signal.SIGTERM):
        if listening is not None:
            listening(format_address(host, listener.getsockname()[1]))
        server.run(sockets=[listener])


def format_address(host: str, port: int) -> str:
    """How a client writes it."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def check_address(host: str, port: int, *, keys: bool) -> None:
    """Refuse an address that cannot be, or that lets strangers in where there are no keys."""
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
        raise InputError(f"port must be a whole number from 0 (any that is free) to 65535, got {port!r}")
    if not keys and not is_loopback(host):
        raise InputError(
            f"host {host!r} lets other machines in, and there are no keys: make one with `mettle keys create keys.json "
            "NAME --scope identify --scope verify --scope workbench` and serve with `--keys keys.json`, or listen on "
            "127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether an address or name means this machine."""
    if host.lower() == "localhost":
        return True
    try:
        format_address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(format_address, "ipv4_mapped", None)
    return (mapped or format_address).is_loopback


def make_server(app: "FastAPI", host: str = "127.0.0.1", port: int = 8000) -> "Server":
    """A uvicorn server with our limits: no access log (paths name people), nobody is slow for ever."""
    try:
        import uvicorn
        from uvicorn.protocols.http.h11_impl import H11Protocol
    except ImportError:
        raise MissingExtra("the service needs uvicorn: pip install 'mettle-ml[app]'") from None

    class HeadTimeoutProtocol(H11Protocol):
        """Closes a connection whose next request has begun but whose head does not end; sends answers at once."""

        waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # asyncio does so only for sockets that name their protocol. Without it the body of an answer waits until
            # the client has acknowledged the head: some 40 ms for each but the first on a connection.
            with suppress(OSError):  # gone already
                transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._update_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._update_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.waiting is not None:
                self.waiting.cancel()
            super().connection_lost(exc)

        def _update_timer(self) -> None:
            """Start the clock when there is no request in hand, once; a request in hand stops it."""
            idle = self.cycle is None or self.cycle.response_complete
            if idle and self.waiting is None:
                self.waiting = self.loop.call_later(HEAD_SECONDS, self._close_if_idle)
            elif not idle and self.waiting is not None:
                self.waiting.cancel()
                self.waiting = None

        def _close_if_idle(self) -> None:
            self.waiting = None
            if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
                self.transport.close()

    class ReaderClosingServer(uvicorn.Server):
        """Does not wait for pictures that take long to decode once it is to stop."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            readers = app.state.mettle.readers
            asyncio.get_running_loop().call_later(STOP_SECONDS, readers.close)
            await super().shutdown(sockets)

    return ReaderClosingServer(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            http=HeadTimeoutProtocol,
            ws="none",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=30,
            limit_concurrency=CONNECTIONS,
            log_level="warning",
        )
    )


@contextmanager
def _stop_on_signal(server: "Server", stop: signal.Signals) -> Iterator[None]:
    """Obey a signal to stop that comes before uvicorn listens for it, and come back after one that it obeyed.

    uvicorn raises such a signal anew when it has stopped, and the caller has a gallery to close.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(stop, lambda *_: setattr(server, "should_exit", True))
    try:
        yield
    finally:
        signal.signal(stop, before)


def _open_listener(host: str, port: int) -> socket.socket:
    """A listening socket; an address that cannot be had is one clear line, not a log of uvicorn's."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=256)
    except (OSError, UnicodeError) as error:  # the latter: no name of a host at all
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot listen on {host} port {port}: {reason}; choose another --port or --host") from None
