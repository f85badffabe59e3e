"""What stands between a client and an HTTP server: sees each request, and cuts or holds back its answer."""

import socket
import threading
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit

_LONG = 60.0  # seconds


class Proxy:
    """
    Args:
        server: its URL.
        cuts: after how many bytes of each answer the connection ends; of those after the last one none does.

    Attributes:
        requests: the start of each, up to its body.
        answers_pass: as long as it is cleared, no answer does.
    """

    def __init__(self, server: str, cuts: tuple[int, ...] = ()) -> None:
        parts = urlsplit(server)
        self._server = (parts.hostname, parts.port)
        self._cuts = list(cuts)
        self.requests: list[str] = []
        self.answers_pass = threading.Event()
        self.answers_pass.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._to_server: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.answers_pass.set()
        for connection in (self._listener, *self._to_server):
            with suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_LONG)
        self._listener.close()

    def count(self, start: str) -> int:
        """How many requests began like this."""
        return sum(request.startswith(start) for request in self.requests)

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._pass_on, args=(client,)))
                self._threads[-1].start()

    def _pass_on(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(self._server, _LONG) as server:
            self._to_server.append(server)
            head = b""
            while b"\r\n\r\n" not in head:
                if not (read := client.recv(1 << 16)):
                    return
                head += read
            left = self._cuts.pop(0) if self._cuts else None
            self.requests.append(head.partition(b"\r\n\r\n")[0].decode())
            server.sendall(head)
            while answer := server.recv(1 << 16 if left is None else min(left, 1 << 16)):
                assert self.answers_pass.wait(_LONG)
                client.sendall(answer)
                left = None if left is None else left - len(answer)
                if left == 0:
                    return
