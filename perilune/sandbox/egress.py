"""What serves a guest's namespace from the host: names by UDP, and connections let through by the name they ask for."""

import contextlib
import ipaddress
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_MOST_CONNECTIONS, _MOST_QUESTIONS = 512, 64  # of one guest at once
_HEAD_S = 10.0  # within which a connection says what it wants
Permits = Callable[[str, str], str | None]
_ORIGINAL_DESTINATION = 80  # SO_ORIGINAL_DST


def resolver() -> str:
    """The host's first name server."""
    with contextlib.suppress(OSError):
        for line in Path("/etc/resolv.conf").read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[0] == "nameserver" and ":" not in words[1]:
                return words[1]
    return "1.1.1.1"


@contextlib.contextmanager
def _given_back(room: threading.Semaphore) -> Iterator[None]:
    try:
        yield
    finally:
        room.release()


class NameServer:
    """Forwards questions from a socket inside the namespace to the host's name server."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._room = listener, threading.Semaphore(_MOST_QUESTIONS)
        threading.Thread(target=self._serve, daemon=True, name="names").start()

    def _serve(self) -> None:
        while True:
            try:
                question, asker = self._listener.recvfrom(4096)
            except OSError:
                return
            if self._room.acquire(blocking=False):  # else it is lost, as datagrams may be
                threading.Thread(target=self._answer, args=(question, asker), daemon=True).start()

    def _answer(self, question: bytes, asker: tuple[str, int]) -> None:
        with (
            _given_back(self._room),
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as upstream,
        ):
            upstream.settimeout(5)
            upstream.sendto(question, (resolver(), 53))
            self._listener.sendto(upstream.recv(4096), asker)

    def close(self) -> None:
        """Stop."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class Splicer:
    """Accepts redirected connections, reads the name they ask for, and connects them on if they may."""

    def __init__(self, listener: socket.socket, secure: bool, permits: Permits) -> None:
        self._listener, self._secure, self._permits = listener, secure, permits
        self._room = threading.Semaphore(_MOST_CONNECTIONS)
        threading.Thread(target=self._serve, daemon=True, name="egress").start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if not self._room.acquire(blocking=False):
                client.close()
                continue
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with _given_back(self._room), contextlib.suppress(OSError, ValueError), client:
            raw = client.getsockopt(socket.SOL_IP, _ORIGINAL_DESTINATION, 16)
            port, packed = struct.unpack_from("!2xH4s", raw)
            head = _head(client, tls_complete if self._secure else http_complete)
            name = (server_name(head) if self._secure else host(head)) or ""
            where = self._permits(name, socket.inet_ntoa(packed))
            address = resolve(where) if where else None
            if address is None:
                return
            with socket.create_connection((address, port), 10) as server:
                server.sendall(head)
                _splice(client, server)

    def close(self) -> None:
        """Stop accepting."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def resolve(name: str) -> str | None:
    """A public IPv4 address of `name`, or None: a name that points into a private range is refused."""
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM):
            if ipaddress.ip_address(address[0]).is_global:
                return str(address[0])
    return None


def _head(client: socket.socket, complete: Callable[[bytes], bool]) -> bytes:
    head, until = b"", time.monotonic() + _HEAD_S
    while not complete(head) and len(head) < 16384:
        client.settimeout(max(0.001, until - time.monotonic()))
        part = client.recv(4096)
        if not part:
            break
        head += part
    return head


def _splice(left: socket.socket, right: socket.socket) -> None:
    for one in (left, right):
        one.settimeout(3600)
    back = threading.Thread(target=_copy, args=(right, left), daemon=True)
    back.start()
    _copy(left, right)
    back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def http_complete(head: bytes) -> bool:
    """Whether the request's header has ended."""
    return b"\r\n\r\n" in head


def host(head: bytes) -> str | None:
    """The Host header, without a port; None when there is none or more than one."""
    found = re.findall(rb"(?im)^host:[ \t]*([^\r\n]*)", head.split(b"\r\n\r\n")[0])
    if len(found) != 1:
        return None
    return found[0].decode("ascii", "replace").strip().rsplit(":", 1)[0].lower()


def tls_complete(head: bytes) -> bool:
    """Whether the first TLS record is whole."""
    return len(head) >= 5 and len(head) >= 5 + int.from_bytes(head[3:5], "big")


def server_name(hello: bytes) -> str | None:
    """The server name of a TLS ClientHello; None when it is absent or the bytes are something else."""
    try:
        if hello[0] != 22 or hello[5] != 1:
            return None
        at = 5 + 4 + 2 + 32
        at += 1 + hello[at]  # session id
        at += 2 + int.from_bytes(hello[at : at + 2], "big")  # cipher suites
        at += 1 + hello[at]  # compression
        end = at + 2 + int.from_bytes(hello[at : at + 2], "big")
        at += 2
        while at + 4 <= min(end, len(hello)):
            kind, length = struct.unpack_from("!HH", hello, at)
            if kind == 0:
                size = int.from_bytes(hello[at + 7 : at + 9], "big")
                name = hello[at + 9 : at + 9 + size]
                return name.decode("ascii").lower() if len(name) == size else None
            at += 4 + length
    except (IndexError, struct.error, UnicodeDecodeError):
        pass
    return None
