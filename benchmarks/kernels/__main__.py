"""The command line of the GPU check."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.kernels.preset import Preset, write_json

_NEEDED = {"numpy": (1, 26), "torch": (2, 11), "triton": (3, 6)}
_DESCRIPTION = (
    "Build RAGCache's kernels on this machine's GPU, check them against their PyTorch twins, and time them against "
    "what the machine can do, against the twins and, where vLLM is installed, against its kernels. Measure what a "
    "prefill costs in a model of Llama-3-8B's shape. Needs torch 2.11, triton 3.6 and numpy, or newer, and nothing "
    "else; skips with one line where there is no GPU."
)
_EXAMPLES = """examples:
  make gpu-check PYTHON=python3                    everything; writes build/gpu-check.json and build/gpu-cost-model.json
  python kernels/gpu_check.py                      the same, and writes nothing
  python kernels/gpu_check.py --skip-prefill       the kernels alone
  python kernels/gpu_check.py --cost-model h100.json && ragcache simulate trace.jsonl --cost-model h100.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check and time the kernels on this machine's GPU; return 1 if one does not agree with its reference.

    Where there is no GPU, or a package is missing, it says so in one line and returns 0.
    """
    options = _parser().parse_args(arguments)
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    missing = _missing() or _no_gpu(options.interpret)
    if missing:
        print(f"gpu-check: skipped: {missing}")
        return 0
    for path in filter(None, (options.output, options.cost_model)):
        if path.is_dir():
            print(f"gpu-check: error: {path} is a folder: name a file", file=sys.stderr)
            return 2
    import torch

    with torch.inference_mode():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    import torch

    from benchmarks.kernels import report
    from benchmarks.kernels.agreement import SHAPES, check_all
    from benchmarks.kernels.ceilings import measure_ceilings
    from benchmarks.kernels.speeds import TILES, KernelWorkload, measure_speeds, measure_tiles
    from benchmarks.kernels.stock import find_stock
    from benchmarks.kernels.timing import Stopwatch

    small = options.interpret
    device = torch.device("cpu" if small else "cuda")
    stopwatch = Stopwatch(device, 1 if small else options.repeats)
    machine = _machine(device)
    _print(f"gpu-check on {machine['device']}: torch {machine['torch']}, triton {machine['triton']}")
    if small:
        _print("in Triton's interpreter on the CPU, at toy sizes: no time below means anything")

    found = list(_progress(check_all(device, _toy_shapes() if small else SHAPES), 8 if small else 4 * len(SHAPES)))
    _print(report.agreements(found))
    limits = measure_ceilings(stopwatch, num_bytes=1 << 20, width=64) if small else measure_ceilings(stopwatch)
    _print(report.ceilings(limits))
    stock, why_not = find_stock() if not small else (None, "not in the interpreter")
    workload = KernelWorkload.tiny() if small else KernelWorkload.llama()
    failures: list[str] = []
    speeds = list(_progress(measure_speeds(stopwatch, workload, stock, failures.append), 11))
    if small:  # nothing there is measured against a goal
        speeds = [replace(speed, goal="") for speed in speeds]
    _print(report.speeds(speeds, limits))
    swept = []
    if options.sweep:
        swept = list(_progress(measure_tiles(stopwatch, workload, TILES[:2] if small else TILES, failures.append), 18))
        _print(report.tiles(swept))
    for line in (*failures, *filter(None, [why_not and f"no column for vLLM: {why_not}"])):
        _print(line)
    profile = None if options.skip_prefill else _prefill(stopwatch, machine, limits, options)

    if options.output:
        data = {
            "machine": machine,
            "agreements": [asdict(one) | {"error": _finite(one.error), "is_met": one.is_met} for one in found],
            "ceilings": asdict(limits),
            "speeds": [speed.to_dict() | {"misses_goal": report.misses_goal(speed, limits)} for speed in speeds],
            "tiles": [asdict(tiles) | {"seconds": seconds} for tiles, seconds in swept],
            "not_measured": [*failures, *filter(None, [why_not])],
            "prefill": profile,
        }
        write_json(data, options.output)
        _print(f"written: {options.output}")
    return 0 if all(one.is_met for one in found) and (options.skip_prefill or profile is not None) else 1


def _prefill(stopwatch: Any, machine: dict[str, str], limits: Any, options: argparse.Namespace) -> Any:
    import torch

    from benchmarks.kernels import report
    from benchmarks.kernels.prefill import Sizes, continues_exactly, measure_prefill

    error = continues_exactly(stopwatch.device)
    if not error < (5e-2 if stopwatch.device.type == "cuda" else 1e-4):
        _print(f"no prefill profile: behind a cached prefix the model's logits differ by {error:.2g}")
        return None
    try:
        if options.interpret:
            sizes = Sizes(64, 2, 4, 2, 96, 50, torch.float32)
            measured = measure_prefill(stopwatch, sizes, (0, 8, 16), (1, 4, 8))
        else:
            sizes = Sizes()
            measured = measure_prefill(stopwatch, sizes, progress=lambda points: _progress(points, len(points)))
    except (MemoryError, torch.cuda.OutOfMemoryError) as failure:
        _print(f"no prefill profile: {failure}")
        return None
    _print(report.prefill(measured))
    shared = "" if measured.num_distinct_layers == sizes.num_layers else f", {measured.num_distinct_layers} distinct"
    preset = Preset(
        model=f"{'a toy' if options.interpret else 'Llama-3-8B'}'s shape, random weights{shared}",
        hardware=machine["device"],
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        software=f"torch {machine['torch']}",
        dtype=str(sizes.dtype).removeprefix("torch."),
        num_repeats=stopwatch.num_repeats,
        spread=measured.spread,
        cached_tokens=measured.cached_tokens,
        new_tokens=measured.new_tokens,
        seconds=measured.seconds,
        kv_bytes_per_token=sizes.kv_bytes_per_token,
        host_bytes_per_s=limits.host_to_device_bytes_per_s,
    ).to_dict()
    if options.cost_model:
        write_json(preset, options.cost_model)
        _print(f"written: {options.cost_model}, for ragcache simulate --cost-model {options.cost_model}")
    return preset


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check.py",
        description=textwrap.fill(_DESCRIPTION, 100),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write everything that was found")
    parser.add_argument("--cost-model", type=Path, metavar="FILE", help="write the prefill profile for the simulator")
    parser.add_argument("--skip-prefill", action="store_true", help="leave the prefill profile out (all of it: 25 GiB)")
    parser.add_argument("--sweep", action="store_true", help="time scattered attention in tiles of many sizes, too")
    parser.add_argument("--repeats", type=_positive, default=11, metavar="N", help="of each time [default: 11]")
    parser.add_argument("--interpret", action="store_true", help="try the check itself, without a GPU, at toy sizes")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of times: give 1 or more")
    return int(text)


def _missing() -> str:
    for name, least in _NEEDED.items():
        wanted = ".".join(map(str, least))
        try:
            version = importlib.import_module(name).__version__
        except ImportError:
            return f"{name} is not installed: the check needs {name} {wanted} or newer"
        except OSError as error:  # a build for other libraries than those of this machine
            return f"{name} cannot be loaded here: {error}"
        if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < least:
            return f"{name} {version} is too old: the check needs {wanted} or newer"
    return ""


def _no_gpu(interpret: bool) -> str:
    import torch

    return "" if interpret or torch.cuda.is_available() else "torch finds no GPU on this machine"


def _machine(device: Any) -> dict[str, str]:
    import torch
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    cuda = torch.version.cuda or torch.version.hip or "none"
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__, "cuda": cuda}


def _toy_shapes() -> Any:
    import torch

    from benchmarks.kernels.cases import Shape

    return (Shape(4, 2, 16, 23, 16, 10, False, 1.3), Shape(3, 1, 16, 19, dtype=torch.bfloat16))


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


def _progress(items: Any, total: int) -> Iterator[Any]:
    try:
        from tqdm import tqdm
    except ImportError:
        return iter(items)
    return iter(tqdm(items, total=total, leave=False, disable=None))


def _print(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
