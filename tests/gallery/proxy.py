"""A line to a PostgreSQL server that can freeze, or break at the worst moment."""

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path


class Proxy:
    """Listens on a socket of its own and passes everything on, unless told otherwise by `fault`."""

    def __init__(self, folder: Path, target: Path):
        self.folder, self._target = folder, str(target / ".s.PGSQL.5432")
        self.fault = ""  # "freeze", "cut before commit", "cut after commit"; the cuts happen once
        self.after = ""  # the fault that follows a cut, before anybody can notice the cut
        self.happened = 0
        self._closing = False
        self._lines: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / ".s.PGSQL.5432"))
        self._listener.listen(64)
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def close(self) -> None:
        self._closing, self.fault = True, ""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for line in self._lines:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for line in [self._listener, *self._lines]:
            line.close()

    def _serve(self) -> None:
        while not self._closing:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            self._lines.append(client)
            server = socket.socket(socket.AF_UNIX)
            self._lines.append(server)
            try:
                server.connect(self._target)
            except OSError:
                client.shutdown(socket.SHUT_RDWR)
                continue
            for source, sink, forth in ((client, server, True), (server, client, False)):
                self._threads.append(threading.Thread(target=self._pass, args=(source, sink, forth)))
                self._threads[-1].start()

    def _pass(self, source: socket.socket, sink: socket.socket, forth: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(65536):
                while self.fault == "freeze" and not self._closing:
                    time.sleep(0.02)
                if forth and b"COMMIT" in piece and self.fault.startswith("cut"):
                    fault, self.fault = self.fault, self.after
                    self.happened += 1
                    if fault == "cut after commit":
                        with suppress(OSError):
                            source.shutdown(socket.SHUT_RDWR)  # the answer will find nobody
                        sink.sendall(piece)
                        time.sleep(0.3)
                    break
                sink.sendall(piece)
        for line in (source, sink):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
