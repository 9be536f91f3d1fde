"""Peak memory of speculative decoding over plain decoding, as whole processes.

    python scripts/peak_memory.py [--runs 3] [--max-new-tokens 128] [--dtype bfloat16]

Runs `multirate generate smollm2-135m` with and without the accelerator, in turn, and prints the median
peak resident memory of each, the accelerator's own bytes, and what remains over both.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from statistics import median

from multirate.streams.defaults import require_default

MODEL = "smollm2-135m"
PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."


def peak_bytes(arguments: list[str]) -> int:
    """Peak resident memory of one run of the command line."""
    command = [str(Path(sys.executable).with_name("multirate")), *arguments]
    sink = os.open(os.devnull, os.O_WRONLY)
    redirect = [(os.POSIX_SPAWN_DUP2, sink, 1), (os.POSIX_SPAWN_DUP2, sink, 2)]
    child = os.posix_spawn(command[0], command, os.environ, file_actions=redirect)
    os.close(sink)
    _, status, usage = os.wait4(child, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"{' '.join(command)} failed; run it by hand to see why.")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    common = ["generate", MODEL, PROMPT, "--dtype", args.dtype]
    common += ["--max-new-tokens", str(args.max_new_tokens), "--ignore-eos"]
    choices = {
        "plain": ["--strategy", "plain", "--accelerator", "none"],
        "speculative": ["--strategy", "speculative", "--num-draft-tokens", "4"],
    }
    peaks: dict[str, list[int]] = {name: [] for name in choices}
    for _ in range(args.runs):
        for name, flags in choices.items():
            peaks[name].append(peak_bytes(common + flags))
    for name, values in peaks.items():
        low, high = min(values) / 2**20, max(values) / 2**20
        print(f"{name:12} {median(values) / 2**20:7.1f} MiB ({low:.1f} to {high:.1f})")
    weights = require_default(MODEL) / "accelerator.safetensors"
    size = weights.stat().st_size * (2 if args.dtype == "float32" else 1)  # saved in 16 bits
    plain, speculative = median(peaks["plain"]), median(peaks["speculative"])
    over = (speculative - plain - size) / plain
    print(f"accelerator  {size / 2**20:7.1f} MiB")
    print(f"speculative over plain and accelerator: {100 * over:+.1f}% of plain")


if __name__ == "__main__":
    main()
