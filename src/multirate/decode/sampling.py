"""From raw logits to the distribution that is sampled, and a draw from it.

Everything is float32 whatever the model's dtype, because acceptance compares probabilities of the
target with those of the draft, and a coarser dtype would bias the output. The processors are
transformers' own classes, in the order of `transformers.generate`.

Shapes: R rows, n positions of a row, V vocabulary, Vd the drafter's (reduced) vocabulary.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import LongTensor, Tensor
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from multirate.config.errors import MultirateError
from multirate.config.generation import GenerationOptions
from multirate.decode.tree import Tree

Processor = Callable[[LongTensor, Tensor], Tensor]

# Known to look at the scores only. Exact types: a subclass may look at the prefix.
_SCORES_ONLY = frozenset(
    {
        EpsilonLogitsWarper,
        EtaLogitsWarper,
        InfNanRemoveLogitsProcessor,
        LogitNormalization,
        MinPLogitsWarper,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    }
)

_RUN = 64  # scores that are compared as vectors


def uniform(shape: Sequence[int], *, generator: torch.Generator) -> Tensor:
    """Uniform numbers in [0, 1) on the generator's device.

    float64, so that events far rarer than float32's step of 2^-24 still happen as often as they
    should; float32 on MPS, which has no float64.
    """
    dtype = torch.float32 if generator.device.type == "mps" else torch.float64
    return torch.rand(shape, dtype=dtype, device=generator.device, generator=generator)


def draw_categorical(weights: Tensor, *, generator: torch.Generator) -> LongTensor:
    """One index per distribution, by inverse CDF, without waiting for the device.

    Args:
        weights: `[..., V]` float32, not negative, not all zero; they need not sum to one.
        generator: the source of randomness, on the device of `weights`.

    Returns:
        LongTensor `[...]`. An index of weight 0 is never drawn: the CDF does not rise there.
    """
    return pick_categorical(weights, uniform(weights.shape[:-1], generator=generator))


def pick_categorical(weights: Tensor, draws: Tensor) -> LongTensor:
    """The index per distribution `[..., V]` that uniform draws `[...]` in [0, 1) fall on.

    The CDF is summed in the draws' dtype.
    """
    cdf = weights.to(draws.dtype).cumsum(dim=-1)
    # right=True finds the first index whose CDF exceeds the draw. The draw stays below the total
    # because (1 - 2^-53) * total rounds below it; the clamp only guards NaN weights.
    index = torch.searchsorted(cdf, draws[..., None] * cdf[..., -1:], right=True)
    return index.squeeze(-1).clamp_(max=weights.shape[-1] - 1)  # type: ignore[return-value]


def best_token(scores: Tensor) -> LongTensor:
    """`scores.argmax(-1)` of `[..., V]`, for several distributions in a third of the time on a CPU.

    There torch finds the largest number by vectors, but where it stands by comparing them one by one: so
    first the largest of each run of numbers, then the run, then the place in it.
    """
    vocabulary = scores.shape[-1]
    if scores.device.type != "cpu" or scores.numel() == vocabulary or vocabulary % _RUN:
        return scores.argmax(-1)  # type: ignore[return-value]
    runs = scores.unflatten(-1, (-1, _RUN))
    run = runs.amax(-1).argmax(-1, keepdim=True)  # [..., 1]
    place = runs.take_along_dim(run[..., None], -2).squeeze(-2).argmax(-1, keepdim=True)
    return (run * _RUN + place).squeeze(-1)


class Sampler:
    """Turns logits into scores, probabilities and tokens, as the options ask.

    Args:
        options: temperature, top-k, top-p, min-p, repetition penalty and seed. Greedy decoding
            leaves out the warpers, which cannot change the best token.
        processors: further logits processors, called as `processor(prefix [1, length], scores
            [1, V])` after the repetition penalty and before the temperature, as in
            `transformers.generate`. They must depend on their two arguments only: they see
            drafted prefixes that may be rejected, possibly more than once.
        device: where logits and the random generator live.

    Raises:
        MultirateError: a processor is not callable.
    """

    def __init__(
        self,
        options: GenerationOptions,
        *,
        processors: Sequence[Processor] = (),
        device: torch.device | str,
    ) -> None:
        for processor in processors:
            if not callable(processor):
                raise MultirateError(
                    f"logits processor {processor!r} is not callable; give functions or "
                    "transformers LogitsProcessor objects of (input_ids, scores)."
                )
        self.greedy = options.greedy
        self.device = torch.device(device)
        self.generator = torch.Generator(device=self.device)
        if options.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(options.seed)

        self._warpers = [] if self.greedy else _warpers(options)
        penalty: list[Processor] = []
        if options.repetition_penalty != 1.0:
            penalty.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
        chain = [*penalty, *processors, *self._warpers]
        # Runs of one kind: [(needs the prefix?, processors)]
        self._stages = [
            (contextual, list(run)) for contextual, run in groupby(chain, key=_needs_prefix)
        ]

    def scores(
        self,
        logits: Tensor,
        contexts: Sequence[Sequence[int] | Tensor],
        drafts: Tensor | None = None,
        tree: Tree | None = None,
    ) -> Tensor:
        """Logits after every processor: softmax of them is the distribution that is sampled.

        Args:
            logits: `[R, n, V]`, raw, any float dtype; not changed.
            contexts: for each row the ids before the token that position 0 predicts (prompt,
                output so far, and the first token of this step's block): a list or a 1-D tensor.
            drafts: `[R, n - 1]` the block's drafted ids; entry i is scored as the continuation of
                `contexts[r]` and the drafts on its path, itself included. Rows with fewer drafts are
                padded with any valid id; scores past a row's own drafts mean nothing. None where n
                is 1.
            tree: of the drafts; None for a chain.

        Returns:
            float32 `[R, n, V]`; the logits themselves (cast) if nothing is set.
        """
        scores = logits.to(torch.float32)
        for contextual, processors in self._stages:
            if contextual:
                scores = _process_each_position(scores, contexts, drafts, tree, processors)
            else:
                scores = _process_flat(scores, processors)
        return scores

    def warp_draft(self, logits: Tensor) -> Tensor:
        """A drafter's logits `[R, Vd]` after temperature, top-k, top-p and min-p, in float32.

        Acceptance is exact for any proposal; proposing from a distribution that is shaped like
        the target's only makes more drafts pass.
        """
        return _process_flat(logits.to(torch.float32), self._warpers)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Softmax over the vocabulary, `[..., V]`."""
        return scores.softmax(dim=-1)

    def draw(self, probs: Tensor) -> LongTensor:
        """One token per distribution `[..., V]`: LongTensor `[...]`."""
        return draw_categorical(probs, generator=self.generator)

    def choose(self, scores: Tensor) -> LongTensor:
        """The next token of each `[..., V]`: greedy or drawn. LongTensor `[...]`.

        Greedy takes the best: among equal scores the lowest id.
        """
        if self.greedy:
            return best_token(scores)
        return self.draw(self.probabilities(scores))


def _warpers(options: GenerationOptions) -> list[Processor]:
    """The warpers that `transformers.generate` would use, in its order."""
    warpers: list[Processor] = []
    if options.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(options.temperature))
    if options.top_k is not None:
        warpers.append(TopKLogitsWarper(options.top_k))
    if options.top_p is not None and options.top_p < 1.0:
        warpers.append(TopPLogitsWarper(options.top_p))
    if options.min_p is not None:
        warpers.append(MinPLogitsWarper(options.min_p))
    return warpers


def _needs_prefix(processor: Processor) -> bool:
    return type(processor) not in _SCORES_ONLY


def _process_flat(scores: Tensor, processors: Sequence[Processor]) -> Tensor:
    """Processors that look at scores only: one call each for all positions at once."""
    if not processors:
        return scores
    flat = scores.reshape(-1, scores.shape[-1])  # warpers want [batch, V]
    no_prefix: LongTensor = flat.new_empty((flat.shape[0], 0), dtype=torch.long)  # type: ignore[assignment]
    for processor in processors:
        flat = processor(no_prefix, flat)
    return flat.reshape(scores.shape)


def _process_each_position(
    scores: Tensor,
    contexts: Sequence[Sequence[int] | Tensor],
    drafts: Tensor | None,
    tree: Tree | None,
    processors: Sequence[Processor],
) -> Tensor:
    """Processors that look at the prefix: one call for each row and block entry.

    Rows differ in length, and padding them to one batch would change what a processor sees
    (a padding id would count as a repeated token), so each gets its exact prefix.
    """
    rows, entries, _ = scores.shape
    assert len(contexts) == rows, "one context for each row"
    assert entries == 1 or (drafts is not None and drafts.shape == (rows, entries - 1))
    scores = scores.clone()  # processors may write in place, and the caller keeps its logits
    paths = (tree or Tree.chain(entries - 1, scores.device)).mask[:, :, 1:].expand(rows, -1, -1)
    for row, context in enumerate(contexts):
        prefix = torch.as_tensor(context, dtype=torch.long, device=scores.device)
        for entry in range(entries):
            ids = prefix[None]
            if (
                entry > 0 and drafts is not None
            ):  # a path's entries stand in the order of their depth
                path = drafts[row, paths[row, entry]]
                ids = torch.cat([prefix, path.to(prefix)])[None]
            processed = scores[row, entry][None]  # [1, V]
            for processor in processors:
                processed = processor(ids, processed)  # type: ignore[arg-type]
            scores[row, entry] = processed[0]
    return scores
