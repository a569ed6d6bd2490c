"""Prometheus text: requests, sandboxes by state, memory and CPU of each machine, room left on the host."""

import os
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from perilune import __version__
from perilune.sandbox import guard
from perilune.sandbox.runtime import Runtime

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """Counters of one server. Thread-safe."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._lock = runtime, threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._seconds: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * (len(_BUCKETS) + 2))

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """One answered request."""
        with self._lock:
            self._requests[method, route, status] += 1
            series = self._seconds[method, route]
            for i, bound in enumerate(_BUCKETS):
                series[i] += seconds <= bound
            series[-2] += 1
            series[-1] += seconds

    def render(self) -> str:
        """The exposition."""
        lines = ["# TYPE perilune_sandbox_http_requests_total counter"]
        with self._lock:
            for (method, route, status), count in sorted(self._requests.items()):
                labels = f'method="{method}",route="{route}",status="{status}"'
                lines.append(f"perilune_sandbox_http_requests_total{{{labels}}} {count}")
            lines += self._histogram()
        lines.append("# TYPE perilune_sandboxes gauge")
        for phase, count in sorted(Counter(str(r.phase) for r in self._runtime.records()).items()):
            lines.append(f'perilune_sandboxes{{phase="{phase}"}} {count}')
        lines += self._machines()
        lines.append("# TYPE perilune_sandbox_host_available_bytes gauge")
        lines.append(f'perilune_sandbox_host_available_bytes{{of="memory"}} {guard.available_mb() << 20}')
        lines.append(f'perilune_sandbox_host_available_bytes{{of="disk"}} {guard.free_mb(self._runtime.home) << 20}')
        return "\n".join(lines) + "\n"

    def _histogram(self) -> list[str]:
        name = "perilune_sandbox_http_request_seconds"
        lines = [f"# TYPE {name} histogram"]
        for (method, route), series in sorted(self._seconds.items()):
            labels = f'method="{method}",route="{route}"'
            lines += [f'{name}_bucket{{{labels},le="{b:g}"}} {series[i]:.0f}' for i, b in enumerate(_BUCKETS)]
            lines.append(f'{name}_bucket{{{labels},le="+Inf"}} {series[-2]:.0f}')
            lines += [f"{name}_count{{{labels}}} {series[-2]:.0f}", f"{name}_sum{{{labels}}} {series[-1]:.6f}"]
        return lines

    def _machines(self) -> list[str]:
        lines = ["# TYPE perilune_sandbox_memory_bytes gauge", "# TYPE perilune_sandbox_cpu_seconds_total counter"]
        for identity, live in list(self._runtime.lives.items()):
            used = usage(live.machine.pid)
            lines.append(f'perilune_sandbox_memory_bytes{{sandbox="{identity}"}} {used["memory"]}')
            lines.append(f'perilune_sandbox_cpu_seconds_total{{sandbox="{identity}"}} {used["cpu"]:.2f}')
        return lines

    def node(self) -> dict[str, Any]:
        """This host, as one node of AgentENV's list."""
        phases = Counter(str(r.phase) for r in self._runtime.records())
        return {
            "nodeID": os.uname().nodename, "status": "ready", "version": __version__, "sandboxCount": phases["running"],
            "pausedCount": phases["paused"], "cpuCount": os.cpu_count(), "memoryAvailableMB": guard.available_mb(),
            "diskAvailableMB": guard.free_mb(self._runtime.home), "accelerator": self._runtime.platform.accelerator,
        }  # fmt: skip


def usage(pid: int) -> dict[str, float]:
    """Of one VMM process: proportional memory (PSS, shared pages divided among sharers) in bytes, CPU in seconds."""
    memory, cpu = 0, 0.0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                memory = int(line.split()[1]) << 10
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        pass  # it ended meanwhile
    return {"memory": memory, "cpu": cpu}
