"""vLLM in a Python of its own, for its requirements clash with ours: one line of JSON in, one out.

Run by `multirate.bench.vllm`: nothing of multirate can be imported here. The first line in
holds arguments of `vllm.LLM`, and is answered by `{"version"}`. Each line after it is a batch,
`{"prompts": [[id, ...], ...], "sampling": arguments of SamplingParams}`, and is answered by
`{"outputs": [[id, ...], ...], "counts": {...}}`, counts of speculative decoding since the start.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any, TextIO

COUNTS = {
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
}


def main() -> None:
    # vLLM logs to stdout: the answers get a descriptor that nothing else writes to.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        settings = json.loads(sys.stdin.readline())
        vllm = import_module("vllm")
        llm = vllm.LLM(**settings)
    except Exception as error:
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
        return
    _answer(answers, {"version": vllm.__version__})
    for line in sys.stdin:
        request = json.loads(line)
        results = llm.generate(
            [{"prompt_token_ids": ids} for ids in request["prompts"]],
            vllm.SamplingParams(**request["sampling"]),
            use_tqdm=False,
        )
        outputs = [list(result.outputs[0].token_ids) for result in results]
        counts = _counts(llm) if settings.get("speculative_config") else None
        _answer(answers, {"outputs": outputs, "counts": counts})


def _counts(llm: Any) -> dict[str, Any]:
    return {
        COUNTS[metric.name]: getattr(metric, "values", None) or getattr(metric, "value", 0)
        for metric in llm.get_metrics()
        if metric.name in COUNTS
    }


def _answer(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
