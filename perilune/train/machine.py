"""The machine a run is on: device, precision and name."""

import platform
from pathlib import Path

import torch


def describe(device: torch.device) -> str:
    """One line: processor or GPU, cores, Python and torch."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{_cpu_name()}, {torch.get_num_threads()} threads"
    return f"{name}; Python {platform.python_version()}, torch {torch.__version__}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f'train.device must be "auto", "cpu" or "cuda", not {name!r}.') from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"train.device is {name!r}, but this machine has no CUDA device.")
    return device


def pick_precision(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "fp32"
    return torch.bfloat16 if name == "bf16" else torch.float32
