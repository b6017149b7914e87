"""Time of the fused residual codec on a GPU beside the bytes that it must move and the eager reference.

    python benchmarks/codec_bench.py --device cuda --out benchmarks/results

One cell of JoLT is encoded (bf16 keys or values minus a float32 backbone) at 2, 4 and 8 bits and decoded (to bf16,
and in place onto a float32 backbone), and keys are un-rotated. Each operation is first checked against its reference. A
time is the median over replays of a CUDA graph of one call, over several sets of buffers in turn, so that no set stays
in the cache; the reference is timed eagerly. GB/s counts every input read once and every output written once; ``copy``
is a device-to-device copy in the same run.

``--sweep`` also times the codec under other launch shapes, to choose the defaults by.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvslim.evaluating.results import Environment
from kvslim.kernels.dispatch import implementation
from kvslim.kernels.launching import LaunchShape
from kvslim.kernels.residual_decode import reference as decode_reference
from kvslim.kernels.residual_encode import reference as encode_reference
from kvslim.kernels.unrotate import reference as unrotate_reference
from kvslim.quantizing.packing import unpack

GAIN, SEED, KIND = 0.25, 7, "lloyd_max"
SETS = 3
"""Sets of buffers used in turn; one set alone is already larger than a GPU's cache."""

Call = Callable[[], Any]


@dataclass(frozen=True)
class Cell:
    """One set of buffers: a cell and its codes."""

    x: Tensor
    backbone: Tensor
    codes: dict[int, tuple[Tensor, Tensor]]

    @classmethod
    def random(cls, shape: tuple[int, int, int], widths: list[int], seed: int, device: str) -> Cell:
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(shape, generator=generator, device=device)
        x *= torch.randn(*shape[:2], 1, generator=generator, device=device).exp2()
        backbone = (x + 0.3 * torch.randn(shape, generator=generator, device=device)) / GAIN
        x = x.to(torch.bfloat16)
        codes = {bits: encode_reference.residual_encode(x, backbone, GAIN, bits, KIND, SEED) for bits in widths}
        return cls(x, backbone, codes)


@dataclass(frozen=True)
class Operation:
    """One row of the table: what runs on a set of buffers, what it must move, and how it is checked."""

    name: str
    kernel: Callable[[Cell], Any]
    reference: Callable[[Cell], Any]
    nbytes: int
    error: Callable[[Any, Any, Cell], float]
    bound: float


def flipped(bits: int, size: int) -> Callable[[Any, Any, Cell], float]:
    """Share of codes that differ under equal scales; infinite where one differs by more than one.

    Also infinite if the scales of more than 1 row in 200 differ by more than a step: a tie while a scale is fitted
    moves it by some steps.
    """

    def error(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], _: Cell) -> float:
        steps = (ours[1].view(torch.int16).int() - theirs[1].view(torch.int16).int()).abs()
        differing, widest, count = 0, 0, 0
        for slab in range(len(steps)):
            codes = unpack(ours[0][slab], bits, size).short() - unpack(theirs[0][slab], bits, size).short()
            codes = codes.abs()[steps[slab] == 0]
            differing, count = differing + int((codes > 0).sum()), count + codes.numel()
            widest = max(widest, int(codes.max()))
        moved = float((steps > 1).double().mean())
        return differing / count if widest <= 1 and moved <= 0.005 else float("inf")

    return error


def relative(ours: Tensor, theirs: Tensor, _: Cell) -> float:
    """Norm of the difference over the norm."""
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def operations(
    kernels: dict[str, ModuleType], shape: tuple[int, int, int], widths: list[int], device: str
) -> list[Operation]:
    """All rows of the table for one shape."""
    slabs, tokens, size = shape
    count, rows = slabs * tokens * size, slabs * tokens
    freq = 1e4 ** -(torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)
    encode, decode = kernels["residual_encode"].residual_encode, kernels["residual_decode"].residual_decode
    turn = kernels["unrotate"].unrotate
    found = []
    for bits in widths:
        stored = count * bits // 8 + 2 * rows
        rest = (bits, KIND, SEED)
        found.append(
            Operation(
                f"encode {bits} bits",
                lambda cell, rest=rest: encode(cell.x, cell.backbone, GAIN, *rest),
                lambda cell, rest=rest: encode_reference.residual_encode(cell.x, cell.backbone, GAIN, *rest),
                6 * count + stored,
                flipped(bits, size),
                1e-3,
            )
        )
    for bits in widths:
        stored = count * bits // 8 + 2 * rows
        rest = (bits, size, KIND, SEED, GAIN)
        found.append(
            Operation(
                f"decode {bits} bits to bf16",
                lambda cell, bits=bits, rest=rest: decode(*cell.codes[bits], *rest, torch.bfloat16),
                lambda cell, bits=bits, rest=rest: decode_reference.residual_decode(
                    *cell.codes[bits], *rest, torch.bfloat16
                ),
                2 * count + stored,
                relative,
                1e-3,
            )
        )
        found.append(
            Operation(
                f"decode {bits} bits onto a backbone",
                lambda cell, bits=bits, rest=rest: decode(*cell.codes[bits], *rest, torch.float32, cell.backbone),
                lambda cell, bits=bits, rest=rest: decode_reference.residual_decode(
                    *cell.codes[bits], *rest, torch.float32, cell.backbone
                ),
                8 * count + stored,
                relative,
                1e-5,
            )
        )
    found.append(
        Operation(
            "unrotate bf16 to fp32",
            lambda cell: turn(cell.x, freq, size, 4, True, torch.float32),
            lambda cell: unrotate_reference.unrotate(cell.x, freq, size, 4, True, torch.float32),
            6 * count,
            relative,
            1e-6,
        )
    )
    found.append(
        Operation(
            "copy", lambda cell: cell.backbone.clone(), lambda cell: cell.backbone.clone(), 8 * count, relative, 0.0
        )
    )
    return found


def check(operation: Operation, cell: Cell) -> float:
    """The error of the kernel against the reference on fresh copies; raises where it is above its bound."""
    theirs = operation.reference(dataclasses.replace(cell, backbone=cell.backbone.clone()))
    ours = operation.kernel(dataclasses.replace(cell, backbone=cell.backbone.clone()))
    error = operation.error(ours, theirs, cell)
    if not error <= operation.bound:
        raise ArithmeticError(f"{operation.name}: error {error:.3g} is above {operation.bound:.3g}")
    return error


def graphed(call: Call) -> Call:
    """A replay of one call as a CUDA graph, which leaves out what Python costs."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def median_microseconds(calls: list[Call], rounds: int) -> float:
    """Median device time of one call, over ``rounds`` passes through ``calls``."""
    for call in calls:
        call()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds * len(calls))
    ]
    for i, (start, end) in enumerate(events):
        start.record()
        calls[i % len(calls)]()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in events)


def measure(operation: Operation, cells: list[Cell], rounds: int) -> dict[str, Any]:
    """Check, then time the kernel and the reference."""
    error = check(operation, cells[0])
    kernel = median_microseconds([graphed(lambda cell=cell: operation.kernel(cell)) for cell in cells], rounds)
    eager = median_microseconds([lambda cell=cell: operation.reference(cell) for cell in cells[:1]], 3)
    torch.cuda.empty_cache()
    return {
        "operation": operation.name,
        "us": round(kernel, 1),
        "gb_per_s": round(operation.nbytes / kernel / 1e3, 1),
        "must_move_mb": round(operation.nbytes / 1e6, 1),
        "reference_us": round(eager, 1),
        "error": error,
    }


@contextmanager
def launched_as(module: ModuleType, shape: LaunchShape) -> Iterator[None]:
    """Let ``module`` launch its kernel as ``shape`` says."""
    kept = module.launch_shape
    module.launch_shape = lambda *_: shape  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.launch_shape = kept  # type: ignore[attr-defined]


def sweep(kernels: dict[str, ModuleType], cells: list[Cell], shape: tuple[int, int, int], widths: list[int]) -> None:
    """Print times under other launch shapes, and with lookups at more widths."""
    encode = kernels["residual_encode"]
    compared = encode.COMPARED_BITS
    for operation in operations(kernels, shape, widths, "cuda"):
        module = kernels.get("residual_" + operation.name.split()[0])
        if module is None:
            continue
        for limit in (compared, 4) if operation.name == "encode 4 bits" else (compared,):
            encode.COMPARED_BITS = limit  # type: ignore[attr-defined]
            for rows, warps, stages, per in (
                (64, 4, 1, 2), (64, 4, 1, 3), (64, 4, 2, 1), (64, 4, 2, 2), (64, 8, 1, 2), (64, 8, 1, 3),
                (128, 8, 1, 1), (128, 8, 1, 2), (128, 8, 2, 1),
            ):  # fmt: skip
                with launched_as(module, LaunchShape(rows, warps, stages, per)):
                    try:
                        calls = [graphed(lambda cell=cell: operation.kernel(cell)) for cell in cells]  # noqa: B023
                        took = f"{median_microseconds(calls, 5):8.1f} us"
                    except Exception as error:  # a shape that does not fit this GPU is a result too
                        took = type(error).__name__
                print(f"{operation.name:32} lookups above {limit} bits, {rows=} {warps=} {stages=} {per=}: {took}")
        encode.COMPARED_BITS = compared  # type: ignore[attr-defined]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda"], help="where to run; the kernels need a GPU")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the JSON file")
    parser.add_argument("--slabs", type=int, nargs="+", default=[32, 8], help="layers of a cell times its KV heads")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--size", type=int, default=128, help="features per head")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=20, help="timed passes over the sets of buffers")
    parser.add_argument("--sweep", action="store_true", help="also time other launch shapes")
    return parser.parse_args()


def main() -> None:
    """Check and time every operation, print a table, write one JSON file."""
    args = arguments()
    if implementation() != "triton":
        raise SystemExit("This needs a CUDA device, Triton, and KVSLIM_REFERENCE unset.")
    from kvslim.kernels.residual_decode import triton as decode
    from kvslim.kernels.residual_encode import triton as encode
    from kvslim.kernels.unrotate import triton as turn

    torch.backends.cuda.matmul.allow_tf32 = False
    kernels = {"residual_encode": encode, "residual_decode": decode, "unrotate": turn}
    results = []
    for slabs in args.slabs:
        shape = (slabs, args.tokens, args.size)
        cells = [Cell.random(shape, args.bits, seed, args.device) for seed in range(SETS)]
        print(f"{slabs} x {args.tokens} x {args.size}")
        print(
            f"{'operation':32} {'us':>8} {'GB/s':>7} {'must move MB':>12} {'reference us':>12} {'error':>9}", flush=True
        )
        for operation in operations(kernels, shape, args.bits, args.device):
            row = measure(operation, cells, args.rounds)
            results.append({"shape": list(shape), **row})
            print(
                f"{row['operation']:32} {row['us']:8.1f} {row['gb_per_s']:7.0f} {row['must_move_mb']:12.1f} "
                f"{row['reference_us']:12.0f} {row['error']:9.2g}",
                flush=True,
            )
        if args.sweep:
            sweep(kernels, cells, shape, args.bits)
        del cells
        torch.cuda.empty_cache()
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / f"codec-{torch.cuda.get_device_name().lower().replace(' ', '-')}.json"
    environment = dataclasses.asdict(Environment.now())
    environment["versions"]["triton"] = version("triton")
    target.write_text(json.dumps({**environment, "results": results}, indent=1) + "\n")
    print(target)


if __name__ == "__main__":
    main()
