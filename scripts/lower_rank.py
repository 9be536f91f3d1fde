"""Lower the rank of an accelerator's adapters: the nearest matrices of that rank (truncated SVD).

    python scripts/lower_rank.py smollm2-135m my-accelerator --rank 16 --output smaller

Training wants more rank than its result needs: a file of a fraction of the size drafts as well. Prints
what share of each adapter's energy (squared singular values) is lost. With `--mantissa-bits` numbers are
rounded as well, to fewer bits than bfloat16's 7: the file stays as large, but compresses to less.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import mean

import torch

from multirate.models.base import BaseModel
from multirate.models.loading import load_pretrained
from multirate.streams.accelerator import Accelerator
from multirate.streams.adapters import LowRank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("accelerator", help="folder of the accelerator, which stays as it is")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--mantissa-bits", type=int, choices=range(1, 8), default=7)
    parser.add_argument("--output", required=True, help="folder to save to")
    parser.add_argument(
        "--made-by", default="", help="commands before this one, for the model card"
    )
    args = parser.parse_args()

    base = BaseModel(load_pretrained(args.model, dtype="float32", device="cpu").model)
    full = Accelerator.from_pretrained(args.accelerator, base)
    if not 0 < args.rank < full.config.rank:
        parser.error(
            f"--rank {args.rank}: allowed is 1 to {full.config.rank - 1}, below what it has"
        )
    small = Accelerator(replace(full.config, rank=args.rank), base)
    if full.draft_ids is not None:
        small.set_draft_ids(full.draft_ids)
    tensors, lost = full.state_dict(), []
    for name, module in full.named_modules():
        if isinstance(module, LowRank):
            A, B, share = truncate(module, args.rank)
            tensors[f"{name}.A"], tensors[f"{name}.B"] = A, B
            lost.append(share)
    small.load_state_dict({n: rounded(x, args.mantissa_bits) for n, x in tensors.items()})
    command = f"python scripts/lower_rank.py {args.model} {args.accelerator} --rank {args.rank}"
    if args.mantissa_bits < 7:
        command += f" --mantissa-bits {args.mantissa_bits}"
    folder = small.save_pretrained(
        args.output, command="\n".join(filter(None, (args.made_by, command)))
    )
    print(f"lost energy: {mean(lost):.1%} on average, {max(lost):.1%} at most; saved {folder}")


@torch.no_grad()
def truncate(adapter: LowRank, rank: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A `[rank, in]`, B `[out, rank]`, and the share of the energy that is lost."""
    u, s, v = torch.linalg.svd(adapter.B.double() @ adapter.A.double(), full_matrices=False)
    root, energy = s[:rank].sqrt(), s.square()
    lost = float(energy[rank:].sum() / energy.sum().clamp(min=1e-300))
    return (root[:, None] * v[:rank]).float(), (u[:, :rank] * root).float(), lost


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Floating-point numbers with so many bits of mantissa behind the first; others as they are."""
    if not x.is_floating_point():
        return x
    mantissa, exponent = torch.frexp(x.float())  # from 0.5 on
    return torch.ldexp((mantissa * 2 ** (bits + 1)).round(), exponent - (bits + 1))


if __name__ == "__main__":
    main()
