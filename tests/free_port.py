"""Ports for servers in processes of their own, which must be told where to listen."""

import os
import socket
from contextlib import suppress
from itertools import count

TURNS = count()


def free_port() -> int:
    """A port that stays free until the server is there.

    It lies below those that a system gives out by itself, and every process of this machine begins to look elsewhere.
    """
    while True:
        port = 20_000 + (97 * os.getpid() + next(TURNS)) % 12_000
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
