"""Time and truncation error of the Flash routes beside an exact SVD, on the same synthetic keys or values.

    python benchmarks/flash_table.py --device cpu --heads 8 32 --tokens 8192 32768 --out benchmarks/results
    python benchmarks/flash_table.py --device cuda --batch 16 --profile --out benchmarks/results

A cell is ``X`` of ``(heads, T, 128)`` with token unfolding ``A = N diag(i^-0.81) Wᵀ``: ``N`` ``(T, n)`` normal, ``W``
``(n, n)`` a random orthogonal matrix of a fixed seed, ``i = 1 … n``, ``n = 128 heads``. Squared singular values thus
fall like ``i^-1.62``, and a truncation to rank 256 leaves an error of about 14 % at 32 heads. All cells share ``W``, as
prompts of one layer would, so each can start from the vectors of another.

``exact`` is ``torch.linalg.svd`` of ``A`` in float32. Errors are relative Frobenius norms of ``A - A V Vᵀ``, in
float64, at rank 256 and at the cap; the excess is over the SVD's. Seconds are the best of ``--repeats`` calls of one
cell, on the clock and of the processor (other processes disturb the first). On a GPU the cells are bfloat16, the time
of a batch is taken too, and ``warm`` starts from another cell's vectors. ``--profile`` times the parts of the route
``gram``, on the device and until the host is done launching.

No network; needs the package, and about 4 GB of memory for 32 heads × 32k tokens on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvslim.decomposing import flash, subspace
from kvslim.decomposing.flash import flash_cap, spectra, spectra_of_many
from kvslim.decomposing.hosvd import SpectrumRoute, feature_shares, unfold
from kvslim.evaluating.results import Environment
from kvslim.files import write_atomically

FEATURES, RANK, FALL = 128, 256, 1.62
ROUTES: tuple[SpectrumRoute, ...] = ("gram", "randomized")
LEAVES = (32, 64, 96, 144, 288)


def make_cells(count: int, heads: int, tokens: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """``count`` cells ``(heads, T, 128)`` as the module's docstring says."""
    n = heads * FEATURES
    rng = torch.Generator(device=device).manual_seed(0)
    turn = torch.linalg.qr(torch.randn(n, n, generator=rng, device=device)).Q
    turn *= torch.arange(1, n + 1, device=device) ** (-FALL / 2)
    cells = []
    for _ in range(count):
        unfolded = torch.randn(tokens, n, generator=rng, device=device) @ turn.T
        cells.append(unfolded.to(dtype).unflatten(1, (heads, FEATURES)).transpose(0, 1).contiguous())
    return cells


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Seconds:
    """Least wall-clock and least processor seconds of some calls; the latter do not see other processes."""

    wall: float
    processor: float


def timed(call: Callable[[], Any], device: str, repeats: int) -> tuple[Any, Seconds]:
    """Result and least seconds of ``repeats`` calls, each waited for."""
    walls, processors, result = [], [], None
    for _ in range(repeats):
        result = None
        synchronize(device)
        start = time.perf_counter(), time.process_time()
        result = call()
        synchronize(device)
        walls.append(time.perf_counter() - start[0])
        processors.append(time.process_time() - start[1])
    return result, Seconds(min(walls), min(processors))


def errors_of(x: Tensor, vectors: Tensor) -> list[float]:
    """Relative error of projecting the tokens onto the first 256 and onto all ``vectors``, in float64."""
    captured, total = torch.zeros(vectors.shape[1], dtype=torch.float64), 0.0
    wide = vectors.double()
    for rows in unfold(x).split(2048):
        part = rows.double()
        captured += (part @ wide).square().sum(0).cpu()
        total += float(part.square().sum())
    return [math.sqrt(max(0.0, 1 - float(captured[:rank].sum()) / total)) for rank in (RANK, vectors.shape[1])]


def exact(x: Tensor, device: str, caps: list[int], repeats: int) -> tuple[dict[int, float], Seconds]:
    """Errors of the SVD at rank 256 and each cap, and its seconds."""
    unfolded = unfold(x.float())
    if device == "cuda":
        torch.linalg.svd(unfolded[:256, :256], full_matrices=False)  # loads the libraries
    parts, seconds = timed(lambda: torch.linalg.svd(unfolded, full_matrices=False), device, repeats)
    energies = parts[1].double().square()
    return {rank: math.sqrt(float(energies[rank:].sum() / energies.sum())) for rank in {RANK, *caps}}, seconds


def compare(args: argparse.Namespace, heads: int, tokens: int) -> list[dict[str, Any]]:
    """Rows of one shape: each cap and route, alone and (on a GPU) in a batch."""
    x, other = make_cells(2, heads, tokens, args.dtype, args.device)
    most = min(tokens, heads * FEATURES)
    caps = sorted({min(most, cap or flash_cap(tokens)) for cap in args.caps})
    best, svd = exact(x, args.device, caps, args.exact_repeats)
    rows = []
    for cap in caps:
        start = spectra(other, "gram", cap=cap).token_vectors
        for route in ROUTES:
            for warm in (False, True):
                given = start if warm else None
                call = lambda: spectra(x, route, cap=cap, start=given)  # noqa: B023, E731 - called at once
                found, seconds = timed(call, args.device, args.repeats + 1)
                errors = errors_of(x, found.token_vectors)
                told = math.sqrt(float(found.tail()[cap, -1]))
                rows.append({
                    "heads": heads, "tokens": tokens, "cap": cap, "route": route, "warm": warm,
                    "svd_seconds": svd.wall, "seconds": seconds.wall, "speedup": svd.wall / seconds.wall,
                    "svd_cpu_seconds": svd.processor, "cpu_seconds": seconds.processor,
                    "cpu_speedup": svd.processor / seconds.processor,
                    "svd_error": [best[RANK], best[cap]], "error": errors,
                    "excess": [errors[0] / best[RANK], errors[1] / best[cap]],
                    "error_told": told,
                })  # fmt: skip
                print_row(rows[-1])
    return rows


def batched(args: argparse.Namespace, heads: int, tokens: int) -> list[dict[str, Any]]:
    """Rows of the route ``gram`` over a batch of cells: milliseconds per cell by CUDA events."""
    cells = make_cells(args.batch, heads, tokens, args.dtype, args.device)
    rows = []
    for cap in sorted({min(heads * FEATURES, tokens, cap or flash_cap(tokens)) for cap in args.caps}):
        start = spectra(cells[0], "gram", cap=cap).token_vectors
        for warm in (False, True):
            starts = [start] * len(cells) if warm else None
            call = lambda: spectra_of_many(cells, "gram", cap=cap, starts=starts, workspace=2**36)  # noqa: B023, E731
            device, host = part_times(call, args.device, args.repeats)
            rows.append({"heads": heads, "tokens": tokens, "cap": cap, "batch": len(cells), "warm": warm,
                         "ms_per_cell": device / len(cells), "host_ms_per_cell": host / len(cells)})  # fmt: skip
            print(f"{heads:3} x {tokens:6} cap {cap:3}  batch of {len(cells)} {'warm' if warm else 'cold'}: "
                  f"{device / len(cells):.2f} ms per cell", flush=True)  # fmt: skip
    return rows


def part_times(call: Callable[[], Any], device: str, repeats: int) -> tuple[float, float]:
    """Median milliseconds of a call on the device, and until it returned to the host."""
    call()
    on_device, on_host = [], []
    for _ in range(max(3, repeats)):
        synchronize(device)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device == "cuda" else []
        start = time.perf_counter()
        if marks:
            marks[0].record()
        call()
        if marks:
            marks[1].record()
        on_host.append(1000 * (time.perf_counter() - start))
        synchronize(device)
        on_device.append(marks[0].elapsed_time(marks[1]) if marks else on_host[-1])
    return sorted(on_device)[len(on_device) // 2], sorted(on_host)[len(on_host) // 2]


def profile(args: argparse.Namespace, heads: int, tokens: int) -> dict[str, list[float]]:
    """Milliseconds per cell of each part of the route ``gram`` with columns on the Gram side, device and host."""
    cells = make_cells(args.batch if args.device == "cuda" else 1, heads, tokens, args.dtype, args.device)
    count, n, x = len(cells), heads * FEATURES, cells[0]
    cap = min(n, flash_cap(tokens))
    settings = flash._Settings(x, "gram", cap, None, 0)
    unfolded = unfold(x)
    grams = torch.stack([subspace.token_gram(one) for one in cells])
    operator = subspace.GramOperator(grams)
    y = subspace.sketch(grams.split(settings.width, dim=1), settings.width, 0)
    fill = settings.fill(y)
    basis = subspace.orthonormalize(y, fill)
    h = basis.mT @ operator.precise(basis)
    rotation = subspace.nested_eigenvectors(h, flash._RITZ_STEPS)[0][..., :cap].float()
    feature_grams = grams[:, :FEATURES, :FEATURES].contiguous()
    feature_basis = subspace.nested_eigenvectors(feature_grams, flash._FEATURE_STEPS)[0].float()
    wide = basis.double()
    s = wide.mT @ wide
    parts: dict[str, tuple[int, Callable[[], Any]]] = {  # how many cells a call serves
        "energy": (1, lambda: flash._energy(x) if args.device == "cpu" else torch.linalg.vector_norm(x, dim=-1)),
        "unfold": (1, lambda: unfold(x)),
        "gram": (1, lambda: subspace.gram(unfolded)),
        "unfold and gram": (1, lambda: subspace.token_gram(x)),
        "stack of Gram matrices": (count, lambda: torch.stack(list(grams))),
        "half-precision parts": (count, lambda: subspace.GramOperator(grams)),
        "sketch": (count, lambda: subspace.sketch(grams.split(settings.width, dim=1), settings.width, 0)),
        "orthonormalize, rough": (count, lambda: subspace.orthonormalize(y, fill, rough=True)),
        "orthonormalize": (count, lambda: subspace.orthonormalize(y, fill)),
        "G Q": (count, lambda: operator(basis)),
        "Ritz matrix": (count, lambda: basis.mT @ operator.precise(basis)),
        "nested eigenvectors": (count, lambda: subspace.nested_eigenvectors(h, flash._RITZ_STEPS)),
        "basis": (count, lambda: basis @ rotation),
        "feature basis": (count, lambda: subspace.nested_eigenvectors(feature_grams, flash._FEATURE_STEPS)),
        "core table": (count, lambda: feature_shares(basis[..., :cap], feature_basis, heads)),
        "Gram of the basis, float64": (count, lambda: wide.mT @ wide),
        **{f"inverse Cholesky, leaf {leaf}": (count, lambda leaf=leaf: subspace.inverse_cholesky(s, leaf))
           for leaf in LEAVES},
        "whole, cold": (count, lambda: spectra_of_many(cells, "gram", cap=cap, workspace=2**36)),
    }  # fmt: skip
    times = {}
    print(f"\nparts, {heads} heads x {tokens} tokens, cap {cap}, batch {count}: ms per cell on the device, host")
    for name, (served, call) in parts.items():
        device, host = part_times(call, args.device, args.repeats)
        times[name] = [device / served, host / served]
        print(f"  {name:30} {times[name][0]:9.3f} {times[name][1]:9.3f}", flush=True)
    return times


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    shape = f"{row['heads']:3} x {row['tokens']:6} cap {row['cap']:3}"
    times = f"svd {row['svd_seconds']:8.3f} s  ours {row['seconds']:8.4f} s  {row['speedup']:5.1f}x"
    times += f" (processor {row['svd_cpu_seconds']:7.2f} / {row['cpu_seconds']:7.3f} {row['cpu_speedup']:5.1f}x)"
    errors = "  ".join(
        f"{error:.4f} (x{excess:.4f})" for error, excess in zip(row["error"], row["excess"], strict=True)
    )
    print(f"{shape}  {row['route']:10} {'warm' if row['warm'] else 'cold'}  {times}  error {errors}", flush=True)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16 on CUDA")
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--caps", type=int, nargs="+", default=[RANK, 0], help="0: FlashJoLT's cap for these tokens")
    parser.add_argument("--batch", type=int, default=16, help="cells of a batch, on CUDA")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--exact-repeats", type=int, default=1, help="of the SVD")
    parser.add_argument("--profile", action="store_true", help="time the parts of the route gram too")
    parser.add_argument("--profile-only", action="store_true", help="only these")
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    args = parser.parse_args()
    args.dtype = getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float32"))
    return args


def main() -> None:
    """Measure every shape; the JSON file is written anew after each."""
    args = arguments()
    result: dict[str, Any] = {
        "environment": dataclasses.asdict(Environment.now()),
        "threads": torch.get_num_threads(),
        "dtype": str(args.dtype).removeprefix("torch."),
        "generator": "A = N diag(i^-0.81) W^T; N normal, W random orthogonal",
        "rows": [],
        "batches": [],
        "parts_ms": {},
    }
    for heads in args.heads:
        for tokens in args.tokens:
            if not args.profile_only:
                result["rows"] += compare(args, heads, tokens)
                result["batches"] += batched(args, heads, tokens) if args.device == "cuda" else []
            if args.profile or args.profile_only:
                result["parts_ms"][f"{heads}x{tokens}"] = profile(args, heads, tokens)
            if args.out is not None:
                args.out.mkdir(parents=True, exist_ok=True)
                target = args.out / f"flash_table-{args.device}.json"
                write_atomically(target, (json.dumps(result, indent=1) + "\n").encode())
                print(f"wrote {target}", flush=True)


if __name__ == "__main__":
    main()
