"""Draw the latents of one layer before and after the Hadamard rotation (the paper's Figure 4), for a model and a text.

    python benchmarks/latent_plot.py --model DIR --calibration valid.txt --text test.txt --layer 10 --out latents.png

Two PNG files are made, OUT with "-keys" and "-values" in its name, and the flatness of every layer goes to OUT with the
suffix .json: the root-mean-square magnitude of the largest channel over that of all, before and after. Needs torch,
transformers, safetensors, numpy and matplotlib; works offline, on CUDA if present.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch
from palu_table import calibration_windows, provenance, test_windows
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvslim import palu
from kvslim.evaluating.latents import capture_latents, outlier_ratio, plot_latents


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--calibration", type=Path, nargs="+", required=True, help="text, jsonl, xz or npy windows")
    parser.add_argument("--calibration-windows", type=int, default=32, help="at most this many, of 2048 tokens")
    parser.add_argument("--text", dest="test", type=Path, required=True, help="the text whose latents are drawn")
    parser.add_argument("--tokens", type=int, default=512, help="its first tokens")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.3, help="fraction of the latent channels removed")
    parser.add_argument("--group-size", type=int, default=None, help="KV heads that share a decomposition; none: all")
    parser.add_argument("--prepend-bos", action="store_true", help="start each window with the beginning token")
    parser.add_argument("--out", type=Path, default=Path("latents.png"))
    parser.add_argument("--commit", default="", help="recorded commit, where git is not at hand")
    return parser.parse_args()


def main() -> None:
    """Compress twice from one calibration, capture, draw."""
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).eval()
    ids = test_windows(args.test, tokenizer, args.prepend_bos)[0, : args.tokens]
    config = palu.PaluConfig(rate=args.rate, group_size=args.group_size, bits=4, hadamard=False)
    windows = calibration_windows(args.calibration, tokenizer, args.calibration_windows, args.prepend_bos)
    grams, _ = palu.calibrate(model, config, windows)
    saved, flatness, drawn = palu.snapshot(model), {}, {}
    for label, hadamard in (("before", False), ("after", True)):
        palu.compress_with(model, dataclasses.replace(config, hadamard=hadamard), grams=grams)
        layers = [capture_latents(model, ids, layer) for layer in range(model.config.num_hidden_layers)]
        palu.restore(model, saved)
        drawn[label] = layers[args.layer]
        flatness[label] = [{"keys": outlier_ratio(keys), "values": outlier_ratio(values)} for keys, values in layers]
    for kind, name in enumerate(("keys", "values")):
        target = args.out.with_name(f"{args.out.stem}-{name}.png")
        title = f"{args.model.name}: latents of {name}, layer {args.layer}, {args.rate:.0%} of the rank removed"
        plot_latents({f"{label} Hadamard": pair[kind] for label, pair in drawn.items()}, target, title)
        print(f"wrote {target}")
    about = {"model": args.model.name, "tokens": ids.shape[0], "config": config.to_dict(), "largest_over_rms": flatness}
    args.out.with_suffix(".json").write_text(json.dumps({**provenance(args), **about}, indent=1) + "\n")


if __name__ == "__main__":
    main()
