"""What this machine can do at most, measured in the same run: bytes and FLOP a second, and the link to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.kernels.timing import Stopwatch


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes a second of a device copy (read and written both count), FLOP a second of a product, the pinned link."""

    copy_bytes_per_s: float
    matmul_flop_per_s: float
    host_to_device_bytes_per_s: float
    device_to_host_bytes_per_s: float


def measure_ceilings(stopwatch: Stopwatch, *, num_bytes: int = 1 << 30, width: int = 8192) -> Ceilings:
    """Return the ceilings of the stopwatch's device: copies of ``num_bytes``, a bf16 product of ``width`` cubed."""
    link = num_bytes // 4
    copy_s, up_s, down_s = _copies(stopwatch, num_bytes, link)
    product_s = _product(stopwatch, width)
    return Ceilings(2 * num_bytes / copy_s, 2 * width**3 / product_s, link / up_s, link / down_s)


def _copies(stopwatch: Stopwatch, num_bytes: int, link: int) -> tuple[float, float, float]:
    device = stopwatch.device
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.zeros(link, dtype=torch.uint8, pin_memory=device.type == "cuda")
    part = source[:link]
    copy = stopwatch.time(lambda: target.copy_(source))
    up = stopwatch.time(lambda: part.copy_(host, non_blocking=True), can_be_captured=False)
    down = stopwatch.time(lambda: host.copy_(part, non_blocking=True), can_be_captured=False)
    return copy.median_s, up.median_s, down.median_s


def _product(stopwatch: Stopwatch, width: int) -> float:
    a = torch.randn(width, width, device=stopwatch.device, dtype=torch.bfloat16)
    b, out = torch.randn_like(a), torch.empty_like(a)
    return stopwatch.time(lambda: torch.mm(a, b, out=out)).median_s
