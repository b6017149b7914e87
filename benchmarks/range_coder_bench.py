"""Size and speed of the entropy coder of graded codes, on Lloyd-Max codes of Gaussian channels.

    python benchmarks/range_coder_bench.py --out benchmarks/results/range-coder-cpu.json

Every width is coded once on 2048 tokens of 512 channels; sizes are those of the bytes made, beside zlib at level 9.
Rates are of packed bytes, with the threads that torch has; numpy does the work on one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch

from kvslim.evaluating.results import Environment
from kvslim.files import write_atomically
from kvslim.quantizing.channels import encode, layout_of
from kvslim.quantizing.range_coder import measure

TOKENS, CHANNELS = 2048, 512


def main() -> None:
    """Measure and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    latents = torch.randn(TOKENS, CHANNELS, generator=torch.Generator().manual_seed(0))
    widths = {}
    for width in (1, 2, 3, 4, 5, 6, 8):
        layout = layout_of([width], CHANNELS, CHANNELS)
        widths[width] = dataclasses.asdict(measure(encode(latents, layout)[0], layout))
        print(width, widths[width])
    about = {"tokens": TOKENS, "channels": CHANNELS, "environment": dataclasses.asdict(Environment.now())}
    write_atomically(args.out, (json.dumps({**about, "widths": widths}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
