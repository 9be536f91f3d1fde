"""What one training process knows of the others: shares of a step, sums, and whole weights.

With one process everything here is the identity. DDP and FSDP2 are accelerate's, but for FSDP2 on CPUs,
which accelerate leaves out: there the module is sharded with torch's `fully_shard` itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import accelerate
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    broadcast,
    broadcast_object_list,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from multirate.config.errors import MultirateError
from multirate.models.base import BaseModel
from multirate.streams.accelerator import Accelerator
from multirate.train.batches import Batch, collate
from multirate.train.losses import StreamLoss
from multirate.train.options import TrainingOptions

_WHOLE = StateDictOptions(full_state_dict=True)
_PREFIX = "accelerator."  # of the adapters' names in the loss module
_AMP = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Processes:
    """This training process among its peers.

    Args:
        base: the frozen model, on this process's device.
        options: of the training.
        folder: where trackers may write.
        report_to: trackers, separated by commas.

    Raises:
        MultirateError: an unknown tracker, or one that is not installed.
    """

    def __init__(
        self, base: BaseModel, options: TrainingOptions, *, folder: Path, report_to: str | None
    ) -> None:
        trackers = _trackers(report_to)
        self.options = options
        self.accelerate = accelerate.Accelerator(
            # Float32 adapters beside a base of a smaller type: matmuls in that type. With a float32
            # base, what `accelerate launch` was told, or none.
            mixed_precision=_AMP.get(base.dtype),
            gradient_accumulation_plugin=GradientAccumulationPlugin(options.gradient_accumulation),
            cpu=base.device.type == "cpu",
            log_with=trackers or None,
            project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder)),
            kwargs_handlers=[
                DistributedDataParallelKwargs(
                    # A single step never reaches the entry's map for later ones.
                    find_unused_parameters=options.draft_steps == 1,
                )
            ],
        )
        if trackers:
            plain = {k: v for k, v in options.binding().items() if not isinstance(v, tuple)}
            self.accelerate.init_trackers("multirate", config=plain)
        self.main = self.accelerate.is_main_process
        self.count = self.accelerate.num_processes

    # ----------------------------------------------------------------------------- wrapping

    def prepare(self, loss: StreamLoss) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The loss as this kind of training wraps it, and an optimizer of its parameters."""
        sharded = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        if sharded and self.accelerate.distributed_type == DistributedType.MULTI_CPU:
            fully_shard(loss)
            optimizer = self.accelerate.prepare(self._optimizer(loss))
            return loss, optimizer
        if self.accelerate.is_fsdp2:
            # The adapters are small: one unit, gathered once a step.
            self.accelerate.state.fsdp_plugin.auto_wrap_policy = None
        # The buffers (draft vocabulary, scales) never change.
        buffers = [name for name, _ in loss.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(loss, buffers)
        module, optimizer = self.accelerate.prepare(loss, self._optimizer(loss))
        return module, optimizer

    def _optimizer(self, loss: StreamLoss) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            loss.parameters(),
            lr=self.options.learning_rate,
            weight_decay=self.options.weight_decay,
        )

    # ------------------------------------------------------------------------------- shares

    def shares(
        self, whole: Batch, parts: int, collate: Callable[..., Batch] = collate
    ) -> list[Batch]:
        """This process's share of a step's rows, in `parts` batches; blank ones where rows lack."""
        if parts * self.count == 1:
            return [whole]
        rank = self.accelerate.process_index
        places = [rank + self.count * part for part in range(parts)]
        shares = [whole.rows[place :: parts * self.count] for place in places]
        return [collate(rows) if rows else collate(whole.rows[:1], blank=True) for rows in shares]

    def shared_out(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """This process's share of many batches, equally many in every process."""
        for start in range(0, len(batches), self.count):
            place = start + self.accelerate.process_index
            yield (
                batches[place] if place < len(batches) else collate(batches[0].rows[:1], blank=True)
            )

    # ---------------------------------------------------------------------------- agreement

    def total(self, values: dict[str, Tensor]) -> dict[str, float]:
        """Sums over all processes of named scalars."""
        stacked = torch.stack([value.float() for value in values.values()])
        if self.count > 1:
            stacked = self.accelerate.reduce(stacked, "sum")
        return dict(zip(values, stacked.tolist(), strict=True))

    def agree(self, wanted: bool) -> bool:
        """The main process's word, for all."""
        if self.count == 1:
            return wanted
        word = [wanted]
        broadcast_object_list(word, from_process=0)
        return word[0]

    def wait(self) -> None:
        self.accelerate.wait_for_everyone()

    def close(self) -> None:
        """Let trackers write what they hold. The processes stay connected, for what comes next."""
        for tracker in self.accelerate.trackers:
            tracker.finish()

    def share(self, accelerator: Accelerator) -> None:
        """Give every process the main one's weights: what each computed may differ in rounding."""
        if self.count > 1:
            for tensor in accelerator.state_dict().values():
                broadcast(tensor)

    def clip(self, parameters: Sequence[Tensor], limit: float) -> float:
        """Clip gradients to a norm; the norm they had."""
        norm = self.accelerate.clip_grad_norm_(parameters, limit)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    # ------------------------------------------------------------------------- whole weights

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Copies of the accelerator's whole weights, on the CPU."""
        state = get_model_state_dict(module, options=_WHOLE)
        return {
            name.removeprefix(_PREFIX): cast(Tensor, value).detach().cpu().clone()
            for name, value in state.items()
        }

    def load_weights(self, module: nn.Module, weights: dict[str, Tensor]) -> None:
        """Set the accelerator's weights from whole ones, which every process has."""
        named: dict[str, Any] = {f"{_PREFIX}{name}": value for name, value in weights.items()}
        set_model_state_dict(module, named, options=_WHOLE)

    def optimizer_state(self, module: nn.Module, optimizer: Any) -> dict[str, Any]:
        """The optimizer's whole state."""
        inner = getattr(optimizer, "optimizer", optimizer)
        return cast(dict[str, Any], get_optimizer_state_dict(module, inner, options=_WHOLE))

    def load_optimizer(self, module: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        set_optimizer_state_dict(module, inner, state, options=_WHOLE)


def _trackers(names: str | None) -> list[str]:
    """Checked names of trackers."""
    wanted = [name.strip() for name in (names or "").split(",") if name.strip()]
    installed = {str(kind) for kind in accelerate.tracking.get_available_trackers()}
    for name in wanted:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise MultirateError(
                f"report_to={name!r} is not known. Allowed: {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}."
            )
        if name not in installed:
            raise MultirateError(
                f"report_to={name!r} is not installed. Install it (pip install {name}), or leave it "
                f"out: the log is written to a file in any case."
            )
    return wanted
