"""A server on a thread of its own, for as long as a test module needs it."""

import asyncio
import contextlib
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from perilune.sandbox.http.app import Server


@contextlib.contextmanager
def served(server: Server, wanted: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """The port it listens on."""
    loop, started, found = asyncio.new_event_loop(), threading.Event(), []
    stop = asyncio.Event()

    async def run() -> None:
        async with server.listening("127.0.0.1", wanted, tls) as port:
            found.append(port)
            started.set()
            await stop.wait()

    def serve() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(run())
        loop.run_until_complete(asyncio.sleep(0.05))  # connections say goodbye
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert started.wait(10)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(20)


def certificate(folder: Path, domain: str) -> Path:
    """Of a domain and all names below it, with its key in the same file; it is its own authority."""
    pem, config = folder / "tls.pem", folder / "tls.conf"
    config.write_text(
        "[req]\ndistinguished_name=name\nx509_extensions=more\n[name]\n"
        f"[more]\nbasicConstraints=CA:TRUE\nsubjectAltName=DNS:{domain},DNS:*.{domain}\n"
    )
    command = ["openssl", "req", "-x509", "-config", str(config), "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", f"/CN={domain}", "-keyout", str(pem)]
    made = subprocess.run(command, check=True, capture_output=True)
    pem.write_bytes(pem.read_bytes() + made.stdout)
    return pem
