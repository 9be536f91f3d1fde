"""Rate schedules: which slow layer each accelerated layer aims at (M2R2, arXiv 2502.02040, Eq. 5)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from multirate.config.errors import MultirateError


@dataclass(frozen=True)
class RateSchedule:
    """Gates E_0 < E_1 < ... < E_J of an N-layer model and the rates between them.

    On interval j, from gate E_j to gate E_{j+1}, one accelerated layer stands for
    R_j = (N - E_j) / (E_{j+1} - E_j) slow layers, so that the accelerated stream, which restarts from
    the slow one at every gate, has reached the final state h_N at the next gate.

    Args:
        num_layers: N.
        gates: at least two layer indices in [0, N], strictly increasing.

    Raises:
        MultirateError: gates that are too few, out of range or not increasing.
    """

    num_layers: int
    gates: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "gates", tuple(self.gates))
        n, gates = self.num_layers, self.gates
        if len(gates) < 2:
            raise MultirateError(
                f"A rate schedule needs at least two gates (start and end of one interval), got "
                f"{list(gates)}. For one interval of k layers use gates=(0, k)."
            )
        increasing = all(a < b for a, b in pairwise(gates))
        if not increasing or gates[0] < 0 or gates[-1] > n:
            raise MultirateError(
                f"gates={list(gates)} must be strictly increasing layer indices from 0 to {n}, the "
                f"model's number of layers."
            )

    @property
    def num_intervals(self) -> int:
        return len(self.gates) - 1

    @property
    def layers(self) -> range:
        """Indices of all accelerated layers; layer i takes p_i to p_{i+1}."""
        return range(self.gates[0], self.gates[-1])

    def interval(self, i: int) -> int:
        """The interval that produces p_i: its gate is the last one strictly before i.

        Raises:
            MultirateError: i is not in (E_0, E_J].
        """
        if not self.gates[0] < i <= self.gates[-1]:
            raise MultirateError(
                f"p_{i} is not produced by a schedule with gates {list(self.gates)}; allowed: "
                f"{self.gates[0] + 1} to {self.gates[-1]}."
            )
        return max(j for j, gate in enumerate(self.gates[:-1]) if gate < i)

    def rate(self, interval: int) -> float:
        """R_j: slow layers that one accelerated layer of interval j stands for."""
        start, stop = self.gates[interval], self.gates[interval + 1]
        return (self.num_layers - start) / (stop - start)

    def target_layer(self, i: int) -> int:
        """The slow layer whose state p_i is matched to: min(N, (i - E_j) R_j + E_j), rounded half up."""
        j = self.interval(i)
        start, stop = self.gates[j], self.gates[j + 1]
        # In whole numbers: a rate such as 34 / 28 has no exact float, and halves would round either way.
        span = stop - start
        travelled = (2 * (i - start) * (self.num_layers - start) + span) // (2 * span)
        return min(self.num_layers, start + travelled)
