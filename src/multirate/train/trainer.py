"""Make an accelerator for a base model from text: closed-form start, then training.

One call from token rows to a saved folder, on Hugging Face accelerate. The folder always holds the best
weights that were evaluated so far, whole. What a run needs to go on after it was killed is in a
checkpoint beside it; when checkpoints are written does not influence the result.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from multirate.config.errors import MultirateError
from multirate.config.files import require_writable
from multirate.models.base import BaseModel
from multirate.models.loading import config_fingerprint
from multirate.streams.accelerator import Accelerator
from multirate.streams.folder import (
    find_folder,
    read_config,
    remove_leftovers,
    require_free,
    save_accelerator,
)
from multirate.train import batches as batching
from multirate.train.checkpoint import (
    LOCK_FILE,
    read_checkpoint,
    remove_checkpoint,
    require_same,
    training_folder,
)
from multirate.train.data import Row, digest
from multirate.train.lock import exclusive
from multirate.train.loop import Report, TrainingRun
from multirate.train.memory import memory_advice
from multirate.train.options import TrainingOptions
from multirate.train.processes import Processes

PRESET = "carry"


def open_output(
    output: str | Path, *, resume: bool, overwrite: bool
) -> tuple[Path, dict[str, Any] | None]:
    """Where an accelerator will be saved, and the checkpoint to go on from, if any.

    Raises:
        MultirateError: as `train_accelerator` about its folder, before any work is done for it.
    """
    target = Path(os.path.expanduser(output)).resolve()
    folder = training_folder(target)
    state = read_checkpoint(folder)
    if state is not None and not resume:
        raise MultirateError(
            f"{folder} holds an unfinished training (step {state['step']}). Go on with --resume "
            f"(resume=True), or remove that folder to start from the beginning."
        )
    if state is None:
        require_free(target, overwrite=overwrite)
        require_writable(target.parent, for_=target)
    return target, state


def require_start(
    start_from: str | Path | None,
    output: str | Path,
    *,
    model: str,
    preset: str,
    overrides: Collection[str],
) -> None:
    """Check what can be known before a model is loaded of the accelerator that is trained further.

    Raises:
        MultirateError: there is none, it would be replaced while it is needed, or another shape is asked
            for.
    """
    if start_from is None:
        return
    shape = sorted(overrides) + (["preset"] if preset != PRESET else [])
    if shape:
        raise MultirateError(
            f"An accelerator that is trained further keeps its shape, so {', '.join(shape)} "
            f"cannot be given beside start_from (--start-from). Leave one of the two out."
        )
    folder = find_folder(start_from, model=model)
    read_config(folder)
    if folder.resolve() == Path(os.path.expanduser(output)).resolve():
        raise MultirateError(
            f"{folder} cannot be trained further in its own place: it is replaced during the training, "
            f"which could then not be resumed from it. Save to another folder."
        )


def train_accelerator(
    base: BaseModel,
    rows: Sequence[Row],
    output: str | Path,
    *,
    heldout: Sequence[Row] | None = None,
    preset: str = PRESET,
    start_from: str | Path | None = None,
    name: str = "",
    revision: str | None = None,
    options: TrainingOptions | None = None,
    resume: bool = False,
    teacher_cache: str | Path | None = None,
    teacher_cache_gb: float = 20.0,
    report_to: str | None = None,
    command: str | None = None,
    overwrite: bool = False,
    report: Report = lambda event, values: None,
    **overrides: Any,
) -> Accelerator:
    """Fit, train and save an accelerator.

    Beside `output` a folder `<output>.train` is made: `train.jsonl`, the log, and while the training is
    unfinished its checkpoint. Under `accelerate launch` or `torchrun` every process calls this with the
    same arguments; a step's rows are shared among them.

    Args:
        base: the model, whose parameters are frozen; the text should be what it wrote itself.
        rows: texts to train on.
        output: folder to save to.
        heldout: texts to measure acceptance on; by default some of `rows` are kept back.
        preset: see `config.accelerator.preset_config`.
        start_from: an accelerator of this model, as for `Accelerator.from_pretrained`, that is trained
            further: its shape, draft vocabulary and weights in place of the preset's and the
            closed-form start.
        name: the base model's name, for the saved config.
        revision: its revision.
        options: steps, weights and rates.
        resume: go on from the checkpoint, if there is one. In float32 and one process the result is
            bit for bit that of a run that was not interrupted.
        teacher_cache: folder that keeps the teacher's states for later epochs; see `TeacherCache`.
        teacher_cache_gb: cap of what is written there, in gigabytes (1e9 bytes).
        report_to: trackers of accelerate to log to, separated by commas: tensorboard, wandb, ...
        command: the command line that made it, for the model card.
        overwrite: replace an accelerator that is there.
        report: called on the main process with an event and its values: "start" (texts, tokens, steps),
            "cache" (bytes, wanted_bytes, rows, folder), "fitted" (positions), "evaluated" (step,
            acceptance, length, best), "step" (step, steps, losses, rates, speed), "saved" (path),
            "resumed" (step, steps), "stopped" (step, best), "finished" (speed, memory).
        overrides: fields of `AcceleratorConfig` that replace the preset's.

    Returns:
        Accelerator: the saved one, float32, in eval mode.

    Raises:
        MultirateError: too little text, a setting that is not allowed, a folder that cannot be
            written or that another training is using, an unfinished training that is not to be resumed
            or was another one, memory that does not suffice, or a loss that is not finite. Nothing
            saved so far is lost.
    """
    options = options or TrainingOptions()
    require_start(
        start_from, output, model=base.config.name_or_path, preset=preset, overrides=overrides
    )
    target, state = open_output(output, resume=resume, overwrite=overwrite)
    folder = training_folder(target)
    worst = max((int(row.ids.max()) for row in (*rows, *(heldout or ()))), default=0)
    if worst >= base.vocab_size:
        raise MultirateError(
            f"The text holds token {worst}, outside the model's vocabulary of {base.vocab_size}: its "
            f"tokenizer belongs to another model. Copy the tokenizer files of this one to its folder."
        )
    if heldout is None:
        if len(rows) <= options.heldout_rows:
            raise MultirateError(
                f"The data hold {len(rows)} texts, but {options.heldout_rows} are kept back to measure "
                f"acceptance. Give more text, or keep fewer back with --heldout-rows."
            )
        heldout, rows = batching.split_rows(rows, heldout=options.heldout_rows, seed=options.seed)
    if not rows or not heldout:
        raise MultirateError(
            f"{len(rows)} texts are left to train on and {len(heldout)} to measure acceptance on; "
            f"answers to one prompt stay together. Give text with more prompts, or --heldout-data."
        )
    base.model.requires_grad_(False)  # no gradient is computed for a frozen weight
    torch.manual_seed(options.seed)
    if start_from is not None:
        accelerator = Accelerator.from_pretrained(start_from, base, dtype=torch.float32)
        options = dataclasses.replace(options, closed_form=False)
    else:
        accelerator = Accelerator.from_preset(
            preset, base, **{"base_model_name_or_path": name, "revision": revision, **overrides}
        )
    config = accelerator.config
    if config.draft_vocab_size is not None and start_from is None:
        accelerator.set_draft_ids(
            batching.frequent_tokens(rows, size=config.draft_vocab_size, vocab_size=base.vocab_size)
        )
    settings = {
        **options.binding(),
        "start_from": None if start_from is None else _fingerprint(accelerator),
        **{k: v for k, v in config.to_dict().items() if k != "expected_acceptance"},
        "base_fingerprint": config_fingerprint(base.config),
        "dtype": str(base.dtype),
        # Its numbers are rounded, up to its cap.
        "teacher_cache_gb": None if teacher_cache is None else teacher_cache_gb,
        "text": digest(rows),
        "heldout_text": digest(heldout),
    }
    settings = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
    if state is not None:
        require_same(state["settings"], settings, folder)
        remove_leftovers(target)
    processes = Processes(base, options, folder=folder, report_to=report_to)
    training = TrainingRun(
        accelerator,
        rows,
        heldout,
        options=options,
        settings=settings,
        folder=folder,
        processes=processes,
        report=report if processes.main else lambda event, values: None,
    )
    if teacher_cache is not None:
        training.use_cache(
            Path(os.path.expanduser(teacher_cache)), max_bytes=teacher_cache_gb * 1e9
        )

    def save(replacing: bool) -> None:
        if processes.main:
            save_accelerator(
                training.best_accelerator(), target, command=command, overwrite=replacing
            )
            training.report("saved", {"path": str(target)})
        processes.wait()

    alone = exclusive(folder / LOCK_FILE, output=target) if processes.main else nullcontext()
    with alone, memory_advice(options):
        try:
            training.run(state, save=save, overwrite=overwrite)
        finally:
            training.close()
        if processes.main:
            remove_checkpoint(folder)
    return training.best_accelerator()


def _fingerprint(accelerator: Accelerator) -> str:
    """Of its weights and draft vocabulary."""
    found = hashlib.sha256()
    for name, tensor in sorted(accelerator.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.cpu().numpy().tobytes())
    return found.hexdigest()[:16]
