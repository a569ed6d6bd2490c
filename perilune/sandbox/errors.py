# ruff: noqa: N818 - named for what happened
"""Every way a sandbox can fail, as a type. `status` is the HTTP status and `code` the Connect code that carry it."""


class SandboxError(Exception):
    """Something about a sandbox failed; the message is one sentence for the user."""

    status, code = 500, "internal"


class InvalidRequest(SandboxError):
    """The caller asked for something that makes no sense."""

    status, code = 400, "invalid_argument"


class Unauthorized(SandboxError):
    """A key or token is missing or wrong."""

    status, code = 401, "unauthenticated"


class NotFound(SandboxError):
    """No such sandbox, snapshot, template, process or path."""

    status, code = 404, "not_found"


class AlreadyExists(SandboxError):
    """The path or name is taken."""

    status, code = 409, "already_exists"


class Conflict(SandboxError):
    """The sandbox is not in a state that allows this."""

    status, code = 409, "failed_precondition"


class OutOfCapacity(SandboxError):
    """The host has no room for more; nothing that runs was harmed."""

    status, code = 429, "resource_exhausted"


class DiskFull(SandboxError):
    """The host's or the guest's disk is full."""

    status, code = 507, "resource_exhausted"


class SetupMissing(SandboxError):
    """QEMU, a guest kernel or a tool is absent; the message says how to get it."""

    status, code = 500, "failed_precondition"


class TimedOut(SandboxError):
    """An answer did not come in time."""

    status, code = 504, "deadline_exceeded"


class GuestError(SandboxError):
    """The guest refused: an errno with the path or command it concerns."""

    status, code = 400, "unknown"

    def __init__(self, errno: int, message: str) -> None:
        super().__init__(message)
        self.errno = errno


class MachineLost(SandboxError):
    """The virtual machine is gone. Terminal: resume from the last checkpoint, or create another."""

    status, code = 502, "unavailable"


class VmmDied(MachineLost):
    """The VMM process was killed or crashed."""


class GuestPanicked(MachineLost):
    """The guest kernel panicked."""


class GuestStopped(MachineLost):
    """The guest rebooted or powered itself off."""


class VmmRefused(SandboxError):
    """The VMM rejected a command; the machine still stands."""


class SnapshotCorrupt(SandboxError):
    """A file of a snapshot is missing, short or altered."""

    status, code = 500, "data_loss"


class SnapshotIncompatible(SandboxError):
    """A snapshot was taken with another kernel, QEMU, machine type, CPU model or accelerator."""

    status, code = 409, "failed_precondition"
