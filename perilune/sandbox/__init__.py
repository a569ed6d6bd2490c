"""MicroVMs that pause, resume, fork and snapshot; no torch (K3 report, section 5.3.2)."""

from perilune.sandbox.catalogue import Network, Record
from perilune.sandbox.commands import Process, Result
from perilune.sandbox.errors import SandboxError
from perilune.sandbox.guard import Guard
from perilune.sandbox.runtime import Runtime
from perilune.sandbox.sandbox import Sandbox
from perilune.sandbox.snapshot import Snapshot
from perilune.sandbox.vmm.driver import Rates, Shape

__all__ = [
    "Guard",
    "Network",
    "Process",
    "Rates",
    "Record",
    "Result",
    "Runtime",
    "Sandbox",
    "SandboxError",
    "Shape",
    "Snapshot",
]
