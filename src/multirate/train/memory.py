"""Memory and time of a training: peaks, advice when memory does not suffice, seconds by purpose."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from multirate.config.errors import MultirateError
from multirate.train.options import TrainingOptions


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: on the device where it counts them, else resident in this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def memory_advice(options: TrainingOptions) -> Iterator[None]:
    """Turns an error of memory that does not suffice into advice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch.OutOfMemoryError is a RuntimeError, and so is what its CPU allocator raises.
        text = str(error)
        if not (
            isinstance(error, torch.OutOfMemoryError | MemoryError)
            or "out of memory" in text.lower()
            or "can't allocate memory" in text
        ):
            raise
        raise MultirateError(
            f"Memory does not suffice ({text.splitlines()[0] if text else 'no details'}). Use a smaller "
            f"--batch-tokens (now {options.batch_tokens}), compute each step in more parts with "
            f"--gradient-accumulation (now {options.gradient_accumulation}), train fewer --draft-steps "
            f"(now {options.draft_steps}), or load the base model with --dtype bfloat16. What was saved "
            f"is kept; what is shared among the parts may change with --resume."
        ) from error


class Times:
    """Seconds by purpose, and positions."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("teacher", "forward", "backward", "steps"), 0.0)
        self.positions = self.steps = 0

    @contextmanager
    def step(self, device: torch.device) -> Iterator[Callable[[str], None]]:
        """Yields a function that books the time since the last call under a purpose."""
        last = time.perf_counter()

        def lap(purpose: str) -> None:
            nonlocal last
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            now = time.perf_counter()
            self.seconds[purpose] += now - last
            last = now

        yield lap

    def add_step(self, positions: int, seconds: float) -> None:
        self.positions += positions
        self.steps += 1
        self.seconds["steps"] += seconds

    def summary(self, draft_steps: int) -> dict[str, float]:
        """Speed, and the accelerator's cost as shares of the teacher's forward pass."""
        steps = max(1, self.steps)
        teacher, forward, backward = (
            self.seconds[name] / steps for name in ("teacher", "forward", "backward")
        )
        return {
            "positions_per_second": self.positions / max(1e-9, self.seconds["steps"]),
            "teacher_seconds": teacher,
            "draft_step_seconds": forward / draft_steps,
            "accelerator_seconds": forward + backward,
            "draft_step_share": forward / draft_steps / max(1e-9, teacher),
            "accelerator_share": (forward + backward) / max(1e-9, teacher),
        }
