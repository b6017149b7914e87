"""Time to resume a saved conversation against prefilling it again, for one model and one length.

    python benchmarks/session_resume.py --model DIR --tokens 4096 --out benchmarks/results/session-resume.json

Both ways end with the scores of the next token, the same in every run. *Prefill* runs the model over all tokens.
*Resume* reads the session from disk (checks of its hashes, of the model and of its plan included) and computes the last
token only. The prompt is one window of Python's reference topics, or of ``--text``. Times are the least of ``--runs``
runs each, taken in turns in one process; the file is in the page cache, as after a recent save. Works offline, on CUDA
if present.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvslim
from kvslim.attending.compat import cache_keyword
from kvslim.evaluating.results import Environment, ModelFingerprint
from kvslim.evaluating.texts import all_python_topics, read_text
from kvslim.files import write_atomically


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="model directory")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ratio", type=float, default=3.0)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(device).eval()
    text = read_text(args.text) if args.text else all_python_topics()
    ids = AutoTokenizer.from_pretrained(args.model)(text.text, return_tensors="pt")["input_ids"]
    if ids.shape[1] < args.tokens:
        raise SystemExit(f"The text has {ids.shape[1]} tokens; {args.tokens} are needed.")
    ids = ids[:, : args.tokens].to(device)
    found = measure(model, ids, args.ratio, args.runs)
    result = {
        "model": dataclasses.asdict(ModelFingerprint.of(args.model.rstrip("/").rpartition("/")[2], model)),
        "text": text.origin,
        "tokens": args.tokens,
        "ratio": args.ratio,
        "runs": args.runs,
        "threads": torch.get_num_threads(),
        **found,
        "environment": dataclasses.asdict(Environment.now()),
    }
    print(json.dumps({key: value for key, value in result.items() if key not in ("environment", "model")}, indent=1))
    if args.out:
        write_atomically(args.out, (json.dumps(result, indent=2, ensure_ascii=False) + "\n").encode())


@torch.no_grad()
def measure(model: Any, ids: torch.Tensor, ratio: float, runs: int) -> dict[str, Any]:
    """All times in seconds, and bytes."""

    def step(tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
        known = {cache_keyword(model): cache} if cache is not None else {}
        logits: torch.Tensor = model(input_ids=tokens, logits_to_keep=1, **known).logits
        return logits

    step(ids[:, :64])  # warm up
    cache = kvslim.JoltCache(model, ratio=ratio)
    step(ids[:, :-1], cache)
    compress_s, _ = timed(cache.compress)
    report = cache.report()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session.safetensors"
        save_s, _ = timed(lambda: cache.save(path, ids))
        about = kvslim.session_info(path)
        expected = step(ids[:, -1:], cache)
        times: dict[str, list[float]] = {"prefill": [], "load": [], "resume": []}
        for _ in range(runs):
            times["prefill"].append(timed(lambda: step(ids))[0])
            seconds, loaded = timed(lambda: kvslim.load_cache(path, model))
            times["load"].append(seconds)
            more, scores = timed(lambda again=loaded: step(ids[:, -1:], again))
            if not torch.equal(scores, expected):
                raise SystemExit("The resumed session gives other scores than the cache that was saved.")
            times["resume"].append(seconds + more)
    least = {name: min(seconds) for name, seconds in times.items()}
    return {
        "file_bytes": about.total_bytes,
        "dense_bytes": report.dense_nbytes,
        "error": {"keys": report.key_error, "values": report.value_error},
        "compress_s": compress_s,
        "save_s": save_s,
        "load_s": least["load"],
        "resume_s": least["resume"],
        "prefill_s": least["prefill"],
        "speedup": least["prefill"] / least["resume"],
        "all": times,
    }


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that ``work`` takes, on the GPU too, and what it gives."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    wait()
    start = time.perf_counter()
    result = work()
    wait()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main()
