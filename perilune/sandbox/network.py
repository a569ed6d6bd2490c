"""A network for one guest: a namespace of its own with a tap, rules, a name server and, for domains, a filtering proxy.

Every guest has the same address in its own namespace, so a fork needs no new one. What leaves the namespace is
decided by nftables: allowed ranges first, then denied ones, then every private range, then the internet if the
sandbox has it. Domains are decided by the name a connection wants (TLS server name, HTTP host); the host resolves it,
never into a private range.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import ipaddress
import json
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from perilune.sandbox.catalogue import Network
from perilune.sandbox.egress import NameServer, Splicer
from perilune.sandbox.errors import InvalidRequest, OutOfCapacity, SandboxError, SetupMissing
from perilune.sandbox.firewall import GATEWAY, GUEST, HOST_RULES, HTTP, TLS, UPLINK, public, rules, split

T = TypeVar("T")
PLAN = f"{GUEST}/30 {GATEWAY} {GATEWAY}"
_libc = ctypes.CDLL(None, use_errno=True)
_most = UPLINK.num_addresses // 4
_slots = threading.Lock()


def check(network: Network) -> None:
    """InvalidRequest when a list is malformed; domains may only be allowed."""
    split(network.allow)
    domains = split(network.deny)[1]
    if domains:
        raise InvalidRequest(f"domains cannot be denied, only ranges: {domains[0]!r}")


def wanted(network: Network) -> bool:
    """Whether a sandbox needs a network at all."""
    return network.internet or bool(network.allow)


def _do(*command: str, text: str = "") -> None:
    _run(*command, text=text)


def _run(*command: str, text: str = "") -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True)
    except FileNotFoundError:
        raise SetupMissing(f"{command[0]} is not installed: apt-get install iproute2 nftables") from None
    if done.returncode:
        raise SandboxError(f"{' '.join(command[:4])} failed: {done.stderr.strip()}")
    return done.stdout


def _read(*command: str) -> Any:
    return json.loads(_run(*command))


def within(namespace: str, work: Callable[[], T]) -> T:
    """Run `work` on a thread that lives in another network namespace; what it opens stays there."""
    found: list[T] = []
    failed: list[BaseException] = []

    def body() -> None:
        try:
            fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
            try:
                if _libc.setns(fd, 0x40000000):
                    raise OSError(ctypes.get_errno(), "setns")
            finally:
                os.close(fd)
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _tap() -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(fd, 0x400454CA, struct.pack("16sH22x", b"tap0", 0x0002 | 0x1000))  # TUNSETIFF: a tap, bare frames
    return fd


def _forwarding() -> None:
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


@dataclass
class Slot:
    """One namespace. `home` distinguishes the namespaces of several runtimes on a host."""

    index: int
    home: str
    network: Network
    _helpers: list[Splicer | NameServer] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        """Its name."""
        return f"{prefix(self.home)}{self.index}"

    def open(self) -> int:
        """Build it; returns the tap's descriptor."""
        base = int(UPLINK.network_address) + 4 * self.index
        host, inner = ipaddress.ip_address(base + 1), ipaddress.ip_address(base + 2)
        name, link = self.namespace, f"pl{self.index}"
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        _do("nft", "-f", "-", text=HOST_RULES)
        _do("ip", "-batch", "-", text=f"""link add {link} type veth peer name wan0 netns {name}
addr add {host}/30 dev {link}
link set {link} up
""")  # fmt: skip
        tap = within(name, _tap)
        within(name, _forwarding)
        _do("ip", "-n", name, "-batch", "-", text=f"""addr add {inner}/30 dev wan0
link set wan0 up
link set lo up
addr add {GATEWAY}/30 dev tap0
link set tap0 up
route add default via {host}
""")  # fmt: skip
        self.serve()
        return tap

    def serve(self) -> None:
        """Rules, name server and proxy."""
        self.apply(self.network)
        self._helpers.append(NameServer(within(self.namespace, lambda: _listen(socket.SOCK_DGRAM, 53))))
        for port, secure in ((HTTP, False), (TLS, True)):
            listener = within(self.namespace, partial(_listen, socket.SOCK_STREAM, port))
            self._helpers.append(Splicer(listener, secure, self.permits))

    def apply(self, network: Network) -> None:
        """Replace the rules at once. The host itself is reached only at an address that is allowed by itself, never
        through a range."""
        self.network = network
        _do("ip", "netns", "exec", self.namespace, "nft", "-f", "-", text=rules(network))
        self._reach([r.removesuffix("/32") for r in split(network.allow)[0] if r.endswith("/32")])

    def _reach(self, addresses: list[str]) -> None:
        """Which of the host's addresses this namespace's link may reach."""
        link = f"pl{self.index}"
        with _slots:
            listed = _read("nft", "-j", "list", "set", "ip", "perilune_host", "reach")
            held = [pair["concat"] for pair in listed["nftables"][-1]["set"].get("elem", ())]
            lines = [f"delete element ip perilune_host reach {{ {a} . {b} }}" for a, b in held if a == link]
            lines += [f"add element ip perilune_host reach {{ {link} . {address} }}" for address in addresses]
            _do("nft", "-f", "-", text="\n".join(lines) + "\n")

    def permits(self, name: str, address: str) -> str | None:
        """Where a connection that wants `name` (and went to `address`) may go: a name to resolve, an address, None."""
        for domain in split(self.network.allow)[1]:
            if name == domain or (domain.startswith("*.") and name.endswith(domain[1:])):
                return name
        denied = any(ipaddress.ip_address(address) in ipaddress.ip_network(r) for r in split(self.network.deny)[0])
        return address if self.network.internet and not denied and public(address) else None

    def close(self) -> None:
        """Remove everything."""
        with contextlib.suppress(SandboxError):
            self._reach([])
        for helper in self._helpers:
            helper.close()
        remove(self.namespace)


def _listen(kind: socket.SocketKind, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((GATEWAY if kind == socket.SOCK_DGRAM else "0.0.0.0", port))
    if kind == socket.SOCK_STREAM:
        listener.listen(64)
    return listener


def prefix(home: str) -> str:
    """Of this home's namespaces."""
    return f"pl-{hashlib.sha256(home.encode()).hexdigest()[:6]}-"


def acquire(home: str, network: Network) -> Slot:
    """A free slot; its namespace exists but is empty. OutOfCapacity when there are too many."""
    with _slots:
        used = {name.rsplit("-", 1)[-1] for name in namespaces("pl-")}
        for index in range(1, _most):
            if str(index) not in used:
                slot = Slot(index, home, network)
                _do("ip", "netns", "add", slot.namespace)
                return slot
    raise OutOfCapacity(f"all {_most} network namespaces are in use")


def namespaces(start: str) -> list[str]:
    """Existing ones by prefix."""
    with contextlib.suppress(OSError):
        return [path.name for path in Path("/run/netns").iterdir() if path.name.startswith(start)]
    return []


def remove(namespace: str) -> None:
    """With its links (the host's end of the pair goes with it)."""
    with contextlib.suppress(SandboxError):
        _do("ip", "link", "del", f"pl{namespace.rsplit('-', 1)[-1]}")
    with contextlib.suppress(SandboxError):
        _do("ip", "netns", "del", namespace)
