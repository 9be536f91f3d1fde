"""The training loop: steps, evaluations and checkpoints of one accelerator.

It knows nothing of folders that are published or of files of text; `trainer` does. When checkpoints are
written does not influence the result.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from multirate.config.errors import MultirateError
from multirate.streams.accelerator import Accelerator
from multirate.streams.fit import fit_closed_form
from multirate.train import batches as batching
from multirate.train.acceptance import acceptance_rates, mean_acceptance_length
from multirate.train.batches import Batch, collate
from multirate.train.cache import TeacherCache
from multirate.train.checkpoint import LOG_FILE, write_checkpoint
from multirate.train.data import Row
from multirate.train.log import TrainingLog
from multirate.train.losses import StreamLoss
from multirate.train.memory import Times, peak_memory
from multirate.train.options import TrainingOptions
from multirate.train.processes import Processes
from multirate.train.teacher import Needs, TeacherStates, run_teacher

ACCEPTANCE_STEPS = 4  # draft positions whose held-out acceptance is measured

Report = Callable[[str, dict[str, Any]], None]


class TrainingRun:
    """The state of one training run, and what it does with it.

    Args:
        accelerator: float32, at its random start; trained in place.
        rows: texts to train on.
        heldout: texts to measure acceptance on.
        options: steps, weights and rates.
        settings: everything that a checkpoint must share with the run that resumes it.
        folder: of checkpoint and log.
        processes: this process among its peers.
        report: called with events, see `train_accelerator`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        rows: Sequence[Row],
        heldout: Sequence[Row],
        *,
        options: TrainingOptions,
        settings: dict[str, Any],
        folder: Path,
        processes: Processes,
        report: Report,
    ) -> None:
        self.accelerator, self.base = accelerator, accelerator.base
        self.rows, self.options, self.settings = rows, options, settings
        self.folder, self.processes, self.report = folder, processes, report
        self.needs = Needs.of(accelerator.config)
        self.heldout = list(
            batching.batches(heldout, tokens=options.batch_tokens, whole=self.needs.whole)
        )
        self.plan = batching.schedule(
            rows, epochs=options.epochs, tokens=options.batch_tokens, seed=options.seed
        )
        self.eval_steps = options.eval_steps or max(1, -(-len(self.plan) // 10))
        self.step = self.bad = 0
        self.best: dict[str, Any] | None = None
        self.best_weights: dict[str, Tensor] = {}
        self.average: list[Tensor] = []
        self.times = Times()
        self.cache: TeacherCache | None = None
        self.log: TrainingLog | None = None

    # ------------------------------------------------------------------------------- the run

    def run(
        self, state: dict[str, Any] | None, *, save: Callable[[bool], None], overwrite: bool
    ) -> None:
        """Train from a checkpoint's state, or from the start.

        Args:
            state: what `read_checkpoint` gave.
            save: called whenever there are new best weights, with whether it may replace a folder.
            overwrite: whether the first save may.
        """
        tokens = sum(len(row) for row in self.rows)
        self.report("start", {"texts": len(self.rows), "tokens": tokens, "steps": len(self.plan)})
        if state is None and self.options.closed_form:
            self._fit()
        self.module, self.optimizer = self.processes.prepare(
            StreamLoss(self.accelerator, self.options)
        )
        self.parameters = list(self.module.parameters())
        if self.options.ema_decay:
            self.average = [p.detach().clone() for p in self.parameters]
        self.accelerator.train()
        if state is not None:
            self._restore(state)
            save(True)
        else:
            if self.processes.main:
                self.log = TrainingLog(self.folder / LOG_FILE)
            self._evaluate()
            self._checkpoint()
            save(overwrite)
        last_save = time.monotonic()
        while self.step < len(self.plan) and not self._exhausted():
            self.train_step()
            self.step += 1
            evaluate = self.step % self.eval_steps == 0 or self.step == len(self.plan)
            if evaluate and self._evaluate():
                save(True)
            due = time.monotonic() - last_save >= self.options.save_seconds
            if self.processes.agree(due) and self.step < len(self.plan):
                self._checkpoint()
                last_save = time.monotonic()
        if self._exhausted():
            self.report("stopped", {"step": self.step, "best": self.best})
        if self.plan:
            self.report("finished", {**self.times.summary(self.options.draft_steps),
                                     "peak_memory_bytes": peak_memory(self.base.device)})  # fmt: skip

    def _exhausted(self) -> bool:
        return 0 < self.options.patience <= self.bad

    def _fit(self) -> None:
        some = batching.sample_rows(
            self.rows, self.options.closed_form_tokens, seed=self.options.seed
        )
        text = batching.batches(some, tokens=self.options.batch_tokens)
        device = self.base.device
        used = fit_closed_form(self.accelerator, ((b.ids.to(device), b.lengths) for b in text))
        self.processes.share(self.accelerator)
        self.report("fitted", {"positions": used})

    # ------------------------------------------------------------------------------ one step

    def train_step(self) -> None:
        """One step of the optimizer, on this process's share of its rows."""
        options, processes = self.options, self.processes
        started = time.perf_counter()
        rows = [self.rows[i] for i in self.plan[self.step]]
        whole = collate(rows, whole=self.needs.whole)
        counts = [
            int(batching.drafted_positions(whole.trained, s + 1).sum())
            for s in range(options.draft_steps)
        ]
        for group in self.optimizer.param_groups:
            group["lr"] = options.rate(self.step, len(self.plan))
        shares = processes.shares(
            whole, options.gradient_accumulation, partial(collate, whole=self.needs.whole)
        )
        sums: dict[str, Tensor] = {}
        for share in shares:
            batch = share.to(self.base.device)
            with (
                processes.accelerate.accumulate(self.module),
                self.times.step(self.base.device) as lap,
            ):
                teacher = self._teach(batch)
                lap("teacher")
                with processes.accelerate.autocast():
                    loss, parts = self.module(batch, teacher, counts)
                lap("forward")
                # accelerate averages over parts and processes; the loss is a share of a whole.
                processes.accelerate.backward(loss * (len(shares) * processes.count))
                lap("backward")
            for key, value in {"loss": loss.detach(), **parts}.items():
                sums[key] = sums[key] + value if key in sums else value
        parts_now = processes.total(sums)
        norm = processes.clip(self.parameters, options.clip)
        self._require_finite(parts_now["loss"], norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average:
            # Young averages forget faster, or they would hold on to the start.
            decay = min(options.ema_decay, (1 + self.step) / (10 + self.step))
            get_ema_multi_avg_fn(decay)(self.average, self.parameters, None)
        seconds = time.perf_counter() - started
        self.times.add_step(sum(len(row) for row in rows), seconds)
        record = {
            "step": self.step + 1,
            **parts_now,
            "gradient_norm": norm,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "positions_per_second": round(sum(len(row) for row in rows) / seconds, 1),
        }
        self._log(record)
        self.report("step", {**record, "steps": len(self.plan)})

    def use_cache(self, folder: Path, *, max_bytes: float) -> None:
        """Keep the teacher's states in a folder from now on."""
        rows = [*(row for batch in self.heldout for row in batch.rows), *self.rows]
        self.cache = TeacherCache(folder, self.base, self.needs, rows, max_bytes=max_bytes)
        self.report(
            "cache",
            {
                "bytes": self.cache.bytes,
                "wanted_bytes": self.cache.wanted_bytes,
                "rows": len(self.cache.kept),
                "folder": str(self.cache.folder),
            },
        )

    def _teach(self, batch: Batch) -> TeacherStates:
        if self.cache is not None:
            return self.cache.teach(batch)
        return run_teacher(self.base, batch, self.needs)

    def _require_finite(self, loss: float, norm: float) -> None:
        scaled = self.processes.accelerate.scaler is not None  # its first steps overflow on purpose
        if torch.isfinite(torch.tensor([loss, 0.0 if scaled else norm])).all():
            return
        raise MultirateError(
            f"The loss became {loss} (gradient norm {norm}) at step {self.step + 1}. Lower the "
            f"learning rate (now {self.options.learning_rate:g}), or load the base model with --dtype "
            f"float32. The accelerator saved last is as it was."
        )

    # ---------------------------------------------------------------------------- evaluation

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """The averaged weights in place of the trained ones, if there is an average."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, average in zip(self.parameters, self.average, strict=False):
            kept = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(kept)

    def _evaluate(self) -> bool:
        """Measure acceptance on the held-out text; whether it is the best so far."""
        with self._averaged(), torch.no_grad():
            counts = torch.zeros(ACCEPTANCE_STEPS, 2, dtype=torch.long, device=self.base.device)
            for share in self.processes.shared_out(self.heldout):
                batch = share.to(self.base.device)
                teacher = self._teach(batch)
                with self.processes.accelerate.autocast():
                    counts += self.module(batch, teacher, measure=ACCEPTANCE_STEPS)
            counts = self.processes.accelerate.reduce(counts, "sum")
            rates = acceptance_rates(counts)
            length = mean_acceptance_length(rates)
            better = self.best is None or length > self.best["length"]
            if better:
                self.best_weights = self.processes.weights(self.module)
        result = {"step": self.step, "acceptance": list(rates), "length": length}
        if better:
            self.best, self.bad = result, 0
        else:
            self.bad += 1
        self._log({"evaluation": result})
        self.report("evaluated", {**result, "best": better})
        return better

    def best_accelerator(self) -> Accelerator:
        """A whole accelerator of its own with the best weights evaluated so far."""
        assert self.best is not None
        config = dataclasses.replace(
            self.accelerator.config, expected_acceptance=tuple(self.best["acceptance"])
        )
        with torch.random.fork_rng(devices=[]):
            result = Accelerator(config, self.base)
        if self.accelerator.draft_ids is not None:
            result.set_draft_ids(self.accelerator.draft_ids)
        result.load_state_dict(self.best_weights)
        return result.eval()

    # --------------------------------------------------------------------------- checkpoints

    def _checkpoint(self) -> None:
        processes = self.processes
        state = {
            "settings": self.settings,
            "step": self.step,
            "bad": self.bad,
            "best": self.best,
            "best_weights": self.best_weights,
            "weights": processes.weights(self.module),
            "optimizer": processes.optimizer_state(self.module, self.optimizer)
            if self.step
            else {},
        }
        if self.average:
            with self._averaged():
                state["average"] = processes.weights(self.module)
        if processes.accelerate.scaler is not None:
            state["scaler"] = processes.accelerate.scaler.state_dict()
        if self.log is not None:
            state["log_bytes"] = self.log.sync()
            write_checkpoint(self.folder, state)
        processes.wait()

    def _restore(self, state: dict[str, Any]) -> None:
        processes = self.processes
        self.step, self.bad, self.best = state["step"], state["bad"], state["best"]
        self.best_weights = state["best_weights"]
        if self.average:
            processes.load_weights(self.module, state["average"])
            self.average = [p.detach().clone() for p in self.parameters]
        processes.load_weights(self.module, state["weights"])
        if state["optimizer"]:
            processes.load_optimizer(self.module, self.optimizer, state["optimizer"])
        if processes.accelerate.scaler is not None and "scaler" in state:
            processes.accelerate.scaler.load_state_dict(state["scaler"])
        if processes.main:
            self.log = TrainingLog(self.folder / LOG_FILE, keep=state["log_bytes"])
        self.report("resumed", {"step": self.step, "steps": len(self.plan)})

    def _log(self, record: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.write(record)
        values = record.get("evaluation", record)
        numbers = {k: v for k, v in values.items() if isinstance(v, float)}
        if "acceptance" in values:
            numbers = {f"acceptance_{i}": a for i, a in enumerate(values["acceptance"], 1)}
            numbers["mean_acceptance_length"] = values["length"]
        self.processes.accelerate.log(numbers, step=values["step"])

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
        self.processes.close()
