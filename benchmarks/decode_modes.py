"""Time per decode step of one model with its cache exact, decompressed for each step, and attended to as it is stored.

    python benchmarks/decode_modes.py --model DIR --tokens 2048 --out benchmarks/results/handle-mode-smollm2-cpu.json

One prompt from Python's reference topics is prefilled and compressed. Then all modes take the same steps in turns, so
that other load on the machine meets them alike; the figure is the median over the steps of each, as time on the clock
and as CPU time of the process, which other load changes less. Also written: the largest difference of the logits of
both modes, and the largest tensor that a step makes (counted in a step of its own). Needs torch and transformers; works
offline, on CUDA if present.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache, PreTrainedModel

from kvslim.evaluating.results import Environment, ModelFingerprint
from kvslim.evaluating.texts import python_topics
from kvslim.files import write_atomically
from kvslim.jolt import JoltCache


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that is newly made."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it made; views of what is there already do not count."""
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                self.nbytes = max(self.nbytes, x.numel() * x.element_size())
        return out


@dataclass
class Mode:
    """One way to decode.

    Attributes:
        name: what the table says.
        attention: the attention implementation.
        cache: filled with the prompt, and compressed.
        seconds: of each step.
        cpu_seconds: of each step, all threads of the process.
        logits: of each step, on the CPU.
    """

    name: str
    attention: str
    cache: Cache
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def step(self, model: PreTrainedModel, token: Tensor) -> None:
        """Decode one token and keep its logits and the time it took."""
        model.set_attn_implementation(self.attention)
        _wait(token)
        start, start_cpu = time.perf_counter(), time.process_time()
        out = model(token, past_key_values=self.cache)
        _wait(token)
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - start_cpu)
        self.logits.append(out.logits[:, -1].float().cpu())


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


@torch.no_grad()
def modes_for(model: PreTrainedModel, ids: Tensor, ratio: float) -> list[Mode]:
    """The exact cache, and JoLT before and after rotation in both modes; the two modes of one form are equal caches."""
    modes = [Mode("exact", "sdpa", DynamicCache(config=model.config))]
    for form, pre_rope in (("pre-RoPE", True), ("post-RoPE", False)):
        for mode, attention in (("decompress", "sdpa"), ("handle", "kvslim")):
            cache = JoltCache(model, ratio=ratio, pre_rope=pre_rope, seal=None)
            modes.append(Mode(f"JoLT {ratio:g}x {form}, {mode} mode", attention, cache))
    model.set_attn_implementation("sdpa")
    for mode in modes:
        model(ids, past_key_values=mode.cache, logits_to_keep=1)
        if isinstance(mode.cache, JoltCache):
            mode.cache.compress()
    return modes


def measure(model: PreTrainedModel, ids: Tensor, ratio: float, steps: int) -> list[dict[str, Any]]:
    """All modes in turns over the same tokens, the last ``steps + 3`` of ``ids``."""
    warm = 2
    modes = modes_for(model, ids[:, : -steps - warm - 1], ratio)
    for place in range(-steps - warm - 1, -1):
        for mode in modes:
            mode.step(model, ids[:, place, None])
    rows = []
    for index, mode in enumerate(modes):
        times, cpu_times = mode.seconds[warm:], mode.cpu_seconds[warm:]
        with LargestTensor() as largest:
            mode.step(model, ids[:, -1:])
        twin = modes[index - 1] if "handle" in mode.name else mode
        apart = max(float((a - b).abs().max()) for a, b in zip(mode.logits, twin.logits, strict=True))
        rows.append(
            {
                "mode": mode.name,
                "attention": mode.attention,
                "milliseconds_per_step": round(1000 * median(times), 1),
                "cpu_milliseconds_per_step": round(1000 * median(cpu_times), 1),
                "largest_new_tensor_bytes": largest.nbytes,
                "ratio": round(mode.cache.report().ratio, 3) if isinstance(mode.cache, JoltCache) else 1.0,
                "largest_logit_difference_to_decompress_mode": apart if "handle" in mode.name else None,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    parser.add_argument("--steps", type=int, default=20, help="that are timed")
    parser.add_argument("--ratio", type=float, default=3.0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=1, help="of torch on a CPU")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(device).eval()
    text, _ = python_topics(tokenizer, args.tokens + args.steps + 3)
    ids = torch.tensor([text.tokens(tokenizer)[: args.tokens + args.steps + 3]], device=device)
    result = {
        "model": dataclasses.asdict(ModelFingerprint.of(args.model.name, model)),
        "text": text.origin,
        "prompt_tokens": args.tokens,
        "steps": args.steps,
        "threads": args.threads,
        "rows": measure(model, ids, args.ratio, args.steps),
        "environment": dataclasses.asdict(Environment.now()),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.out, (json.dumps(result, indent=2, ensure_ascii=False) + "\n").encode())
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
