"""Rows of a transformers batch as rows of the generation loop.

transformers builds logits processors and stopping criteria for a whole batch: a rectangle of ids,
padded on the left, that grows by one column a step. The loop has rows of their own lengths, several
new tokens at once, and drafts that may be rejected. What stands here asks every processor and
criterion about one row at a time, in the form it expects.

Shapes: B rows, P width of the padded prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import LongTensor, Tensor
from transformers import GenerationConfig
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.logits_process import (
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from multirate.config.generation import GenerationOptions
from multirate.decode.sampling import Processor, Sampler
from multirate.decode.stopping import FinishReason, StopChecker
from multirate.decode.tree import Tree

# In the order in which transformers applies them, at the end of its list; the attribute that holds
# the value has the name of our option.
_WARPERS = (
    (TemperatureLogitsWarper, "temperature"),
    (TopKLogitsWarper, "top_k"),
    (TopPLogitsWarper, "top_p"),
    (MinPLogitsWarper, "min_p"),
)

# Known to treat a row by its own ids only. Exact types: a subclass may know its place in the batch.
_ROW_BY_ROW = frozenset(
    {
        ForcedEOSTokenLogitsProcessor,
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        NoRepeatNGramLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
        SuppressTokensAtBeginLogitsProcessor,
    }
)


def sampling(
    logits_processor: LogitsProcessorList,
    config: GenerationConfig,
    *,
    num_draft_tokens: int | None = None,
) -> tuple[GenerationOptions, list[Processor]]:
    """Options for the sampler, and the processors that they do not stand for.

    Warpers at the end of the list become options, because the drafter warps its own distribution
    with those, and drafts from a like distribution are accepted more often.

    Args:
        logits_processor: as `generate` built it.
        config: as `generate` prepared it.
        num_draft_tokens: fixed number of drafts, or None.

    Raises:
        MultirateError: a value that the options do not allow.
    """
    settings: dict[str, Any] = {"num_draft_tokens": num_draft_tokens}
    if isinstance(num_draft_tokens, int):
        settings["max_draft_tokens"] = max(num_draft_tokens, GenerationOptions.max_draft_tokens)
    processors: list[Any] = list(logits_processor)
    if config.do_sample:
        # From torch's own generator, so that manual_seed and set_seed mean what they always do.
        settings |= {"temperature": 1.0, "seed": int(torch.randint(2**63 - 1, ()))}
        for kind, name in reversed(_WARPERS):
            last = processors[-1] if processors else None
            if type(last) is kind and getattr(last, "min_tokens_to_keep", 1) == 1:
                settings[name] = getattr(processors.pop(), name)
    return GenerationOptions(**settings), processors


class RowChecker(StopChecker):
    """A stop checker that also asks transformers' criteria, after every single token.

    Args:
        criteria: those beyond length and end-of-sequence ids; asked about ids `[1, length]`.
        padded: the prompt as transformers has it, padding included.
        device: where criteria expect the ids.
        eos_token_ids: as for `StopChecker`.
        limits: `max_new_tokens`, `context_length` and `prompt_tokens` of `StopChecker`.
    """

    def __init__(
        self,
        criteria: StoppingCriteriaList,
        padded: Sequence[int],
        device: torch.device,
        *,
        eos_token_ids: frozenset[int],
        **limits: Any,
    ) -> None:
        super().__init__(eos_token_ids, tokenizer=None, **limits)
        self._criteria, self._ids, self._device = criteria, list(padded), device

    def push(self, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        for index, token in enumerate(tokens):
            super().push([token])
            self._ids.append(token)
            if self._criteria and self.finish_reason is None:
                ids = torch.tensor([self._ids], device=self._device)
                if bool(self._criteria(cast(LongTensor, ids), None).any()):
                    self.finish_reason = "stop"
            if self.finish_reason is not None:
                return list(tokens[: index + 1]), self.finish_reason
        return list(tokens), None


def row_checkers(
    stopping_criteria: StoppingCriteriaList,
    padded: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    *,
    context_length: int,
    device: torch.device,
) -> list[RowChecker]:
    """One checker a row.

    Args:
        stopping_criteria: as `generate` built them.
        padded: B prompts of width P.
        prompts: the same without padding.
        context_length: of the model.
        device: where criteria expect the ids.

    Raises:
        MultirateError: a prompt fills the context.
    """
    width = len(padded[0])
    max_length, eos, others = width + context_length, set[int](), StoppingCriteriaList()
    for criterion in stopping_criteria:
        if type(criterion) is MaxLengthCriteria:  # counts padding too
            max_length = min(max_length, criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            eos.update(criterion.eos_token_id.flatten().tolist())
        else:
            others.append(criterion)
    return [
        RowChecker(
            others,
            row,
            device,
            eos_token_ids=frozenset(eos),
            max_new_tokens=max(1, max_length - width),
            context_length=context_length,
            prompt_tokens=len(prompt),
        )
        for row, prompt in zip(padded, prompts, strict=True)
    ]


class RowSampler(Sampler):
    """A sampler whose processors see what they would see in transformers: padded rows of a batch.

    Args:
        options: without repetition penalty, which is among the processors.
        processors: as transformers built them.
        padded: B prompts of width P.
        prompts: the same without padding.
        checkers: one a row; a row that has ended has left the batch.
        device: of the logits.
    """

    def __init__(
        self,
        options: GenerationOptions,
        processors: Sequence[Processor],
        *,
        padded: Sequence[list[int]],
        prompts: Sequence[list[int]],
        checkers: Sequence[StopChecker],
        device: torch.device,
    ) -> None:
        super().__init__(options, device=device)
        self._padded, self._prompts, self._checkers = padded, prompts, checkers
        self._row_samplers: list[Sampler] = []
        if processors:
            for row in range(len(padded)):
                own = [_for_row(processor, row, len(padded)) for processor in processors]
                self._row_samplers.append(Sampler(options, processors=own, device=device))

    def scores(
        self,
        logits: Tensor,
        contexts: Sequence[Sequence[int] | Tensor],
        drafts: Tensor | None = None,
        tree: Tree | None = None,
    ) -> Tensor:
        if not self._row_samplers:
            return super().scores(logits, contexts, drafts, tree)
        going = [row for row, checker in enumerate(self._checkers) if checker.finish_reason is None]
        assert len(going) == len(contexts)
        scores = []
        for place, row in enumerate(going):
            output = list(contexts[place])[len(self._prompts[row]) :]
            row_scores = self._row_samplers[row].scores(
                logits[place : place + 1],
                [[*self._padded[row], *output]],
                None if drafts is None else drafts[place : place + 1],
                None if tree is None else tree.row(place),
            )
            scores.append(row_scores)
        return torch.cat(scores)


def _for_row(processor: Any, row: int, rows: int) -> Processor:
    """A processor of a batch, to be asked about a single row of it."""
    if type(processor) is RepetitionPenaltyLogitsProcessor:
        skipped = processor.prompt_ignore_length  # one number a row where prompts are padded
        if isinstance(skipped, Tensor):
            return RepetitionPenaltyLogitsProcessor(
                processor.penalty, prompt_ignore_length=int(skipped[row])
            )
    if rows == 1 or type(processor) in _ROW_BY_ROW:
        return cast(Processor, processor)

    def in_batch(ids: LongTensor, scores: Tensor) -> Tensor:
        # It may tell rows apart by their place: give it a whole batch, of which one row counts.
        whole: Tensor = processor(ids.repeat(rows, 1), scores.repeat(rows, 1))
        return whole[row : row + 1]

    return in_batch
