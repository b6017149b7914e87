"""Time and memory of compressing a long prefill beside the prefill itself, on shapes of 7B models.

    python benchmarks/compress_bench.py --device cuda --tokens 32768 --out benchmarks/results

The model has random weights of the real shape, as its time does not depend on them; its prefill runs with transformers'
``sdpa``. The cache that is compressed in one go holds synthetic keys and values with a falling spectrum (random weights
give none): a low-rank part with energies ~ 1 / rank and white noise. Peaks are of allocated GPU memory.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvslim.evaluating.results import Environment
from kvslim.files import write_atomically
from kvslim.jolt import JoltCache, Price

SHAPES = {"llama-2-7b": (32, 11008), "mistral-7b": (8, 14336)}
"""KV heads and intermediate size; 32 layers, 32 query heads of 128 features in both."""
RANK = 512


@dataclass(frozen=True)
class Timed:
    """One measured step: median seconds, and peak bytes above what was allocated before it."""

    seconds: float
    peak_extra: int


def build(name: str, device: str, layers: int) -> LlamaForCausalLM:
    """A model of shape ``name`` with random bf16 weights."""
    kv_heads, intermediate = SHAPES[name]
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=kv_heads, vocab_size=32000, max_position_embeddings=1 << 17, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device=device).eval()
    rng = torch.Generator(device=device).manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02, generator=rng)
    rotary = type(model.model.rotary_emb)(config, device=device)  # its buffers were left empty too
    model.model.rotary_emb = rotary
    return model


def synthetic(heads: int, tokens: int, device: str, seed: int) -> torch.Tensor:
    """``(1, heads, tokens, 128)`` bfloat16: energies ~ 1 / rank over ``RANK`` directions, and 2 % noise."""
    rng = torch.Generator(device=device).manual_seed(seed)
    token = torch.randn(tokens, RANK, generator=rng, device=device)
    token *= torch.arange(1, RANK + 1, device=device).rsqrt()
    basis = torch.randn(RANK, heads * 128, generator=rng, device=device)
    flat = (token.to(torch.bfloat16) @ basis.to(torch.bfloat16)).float()
    noise = torch.randn(flat.shape, generator=rng, device=device)
    flat = flat / flat.std() + 0.14 * noise
    return flat.to(torch.bfloat16).unflatten(1, (heads, 128)).transpose(0, 1)[None].contiguous()


def timed(run: Callable[[], Any], prepare: Callable[[], Any], device: str, repeats: int) -> Timed:
    """Median over ``repeats`` after one warm-up; ``prepare`` is not timed."""
    cuda, seconds, peaks = device.startswith("cuda"), [], []
    for _ in range(repeats + 1):
        prepare()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        started = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        peaks.append((torch.cuda.max_memory_allocated() if cuda else 0) - before)
    return Timed(statistics.median(seconds[1:]), max(peaks[1:]))


class Bench:
    """One model shape; every step leaves its cache in :attr:`cache`."""

    def __init__(self, name: str, device: str, tokens: int, layers: int, repeats: int, profile: bool) -> None:
        self.profile = profile
        self.name, self.device, self.tokens, self.repeats = name, device, tokens, repeats
        self.model = build(name, device, layers)
        self.ids = torch.randint(0, 32000, (1, tokens), device=device)
        self.cache: Any = None

    def prefill(self) -> None:
        with torch.no_grad():
            self.model(input_ids=self.ids, past_key_values=self.cache, logits_to_keep=1)

    def fresh(self, make: Callable[[], Any]) -> None:
        self.cache = None
        self.cache = make()

    def filled(self, **settings: Any) -> None:
        """A cache with synthetic contents, not yet compressed."""
        self.fresh(lambda: JoltCache(self.model, **settings))
        heads = SHAPES[self.name][0]
        for index in range(len(self.cache.layers)):
            keys, values = (synthetic(heads, self.tokens, self.device, 2 * index + kind) for kind in range(2))
            self.cache.update(keys, values, index)

    def _profile(self, settings: dict[str, Any]) -> None:
        """Print the kernels and the Python functions that one compression spends most in."""
        self.filled(**settings)
        with torch.profiler.profile() as kernels:
            self.cache.compress()
            torch.cuda.synchronize()
        averages = kernels.key_averages()
        print(averages.table(sort_by="self_cuda_time_total", row_limit=16, max_name_column_width=50))
        self.filled(**settings)
        with cProfile.Profile() as calls:
            self.cache.compress()
            torch.cuda.synchronize()
        pstats.Stats(calls).sort_stats("tottime").print_stats(28)

    def measure(self, ratio: float, routes: list[str]) -> dict[str, Any]:
        dense = 2 * 2 * len(self.model.model.layers) * SHAPES[self.name][0] * 128 * self.tokens
        prefill = timed(
            self.prefill, lambda: self.fresh(lambda: DynamicCache(config=self.model.config)), self.device, self.repeats
        )
        steps: dict[str, Any] = {"prefill": asdict(prefill)}
        print(f"{self.name} {self.tokens}: prefill {prefill.seconds:.3f} s", flush=True)
        price: Price | None = None
        for route in routes:
            for pre_rope in (True, False):
                settings = {"ratio": ratio, "spectra": route, "pre_rope": pre_rope}
                step = timed(
                    lambda: self.cache.compress(),  # noqa: PLW0108  # the cache is another one each time
                    lambda s=settings: self.filled(**s),
                    self.device,
                    self.repeats,
                )
                report = self.cache.report()
                price = self.cache.price
                kept = asdict(step) | {
                    "share_of_prefill": step.seconds / prefill.seconds,
                    "ratio": report.ratio, "key_error": report.key_error, "value_error": report.value_error,
                    "plans": sorted({cell.plan for cell in report.cells}),
                }  # fmt: skip
                steps[f"compress, {route}, {'pre' if pre_rope else 'post'}-RoPE"] = kept
                print(
                    f"  compress {route} {'pre' if pre_rope else 'post'}: {step.seconds:.3f} s, "
                    f"{kept['share_of_prefill']:.1%} of the prefill, peak {step.peak_extra / dense:.1%} of dense more, "
                    f"errors {report.key_error:.4f} {report.value_error:.4f}",
                    flush=True,
                )
                if self.profile:
                    self._profile(settings)
        settings = {"ratio": ratio, "spectra": routes[0], "pre_rope": False}
        step = timed(
            self.prefill, lambda: self.fresh(lambda: JoltCache(self.model, price=price, **settings)),
            self.device, self.repeats,
        )  # fmt: skip
        steps["prefill, compressed as layers arrive"] = asdict(step)
        saved = prefill.peak_extra - step.peak_extra
        print(
            f"  prefill compressing on arrival: {step.seconds:.3f} s (+{step.seconds / prefill.seconds - 1:.1%}), peak "
            f"{step.peak_extra / 1e9:.2f} GB against {prefill.peak_extra / 1e9:.2f} GB, {saved / dense:.1%} of the "
            "dense cache saved",
            flush=True,
        )
        self.cache = None
        return {"model": self.name, "tokens": self.tokens, "ratio": ratio, "dense_bytes": dense, "steps": steps}


def main() -> None:
    """Measure every model asked for, print as it goes, write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ratio", type=float, default=3)
    parser.add_argument("--routes", nargs="+", default=["gram"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print the kernels of one compression")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    results = []
    for name in args.models:
        bench = Bench(name, args.device, args.tokens, args.layers, args.repeats, args.profile)
        results.append(bench.measure(args.ratio, args.routes))
        del bench
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()
    data = {"results": results, "environment": asdict(Environment.now())}
    path = args.out / f"compress-{args.tokens}.json"
    write_atomically(path, (json.dumps(data, indent=2) + "\n").encode())
    print(f"kept as {path}")


if __name__ == "__main__":
    main()
