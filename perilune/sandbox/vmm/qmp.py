"""QMP, QEMU's control protocol: one JSON object a line, one command at a time."""

import array
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

from perilune.sandbox.errors import TimedOut, VmmDied, VmmRefused


class Qmp:
    """A connection to one QEMU. Thread-safe; events are skipped, the process's exit tells what matters."""

    def __init__(self, path: Path, deadline_s: float = 10.0, pid: int | None = None) -> None:
        self._lock = threading.Lock()
        self._buffer = b""
        self._socket = connect(path, deadline_s, pid)
        self._socket.settimeout(60.0)
        self._line()  # greeting
        self("qmp_capabilities")

    def _line(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            try:
                part = self._socket.recv(65536)
            except TimeoutError:
                raise TimedOut("QEMU did not answer on its control socket within 60 s") from None
            except OSError:
                part = b""
            if not part:
                raise VmmDied("QEMU closed its control socket")
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def __call__(self, command: str, **arguments: Any) -> Any:
        """Run a command and return what it returns."""
        return self.send(command, arguments)

    def send(self, command: str, arguments: dict[str, Any], descriptor: int | None = None) -> Any:
        """The same; a descriptor may travel along (`getfd`)."""
        message = json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n"
        with self._lock:
            try:
                if descriptor is None:
                    self._socket.sendall(message)
                else:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
                    self._socket.sendmsg([message], [rights])
            except OSError:
                raise VmmDied("QEMU closed its control socket") from None
            while True:
                reply = self._line()
                if "return" in reply:
                    return reply["return"]
                if "error" in reply:
                    raise VmmRefused(f"QEMU refused {command}: {reply['error']['desc']}")

    def close(self) -> None:
        """Close the socket; QEMU stays."""
        self._socket.close()


def connect(path: Path, deadline_s: float, pid: int | None = None) -> socket.socket:
    """A connected UNIX stream socket, retried until the deadline or the death of process `pid`."""
    until = time.monotonic() + deadline_s
    while True:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            client.connect(str(path))
            return client
        except (FileNotFoundError, ConnectionRefusedError):
            client.close()
        if pid is not None and _dead(pid):
            raise VmmDied(f"QEMU ended before it opened {path.name}")
        if time.monotonic() > until:
            raise TimedOut(f"nothing listens on {path} after {deadline_s:.0f} s")
        time.sleep(0.0005)


def _dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
