"""What ends a row, and the text it has so far.

A step of speculative decoding accepts several tokens at once. The row may end in the middle of
such a block: `StopChecker.push` cuts the block there. All decisions are taken token by token and
character by character, so the result does not depend on how the tokens were grouped in blocks.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

from multirate.config.errors import MultirateError

FinishReason = Literal["eos", "stop", "length", "context"]

# What a decoder writes for bytes that are not, or not yet, a character.
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of a growing sequence of ids, a piece at a time, in constant time a token.

    Only a window is decoded: the last tokens whose text is complete (a decoder may treat the
    first token of a text differently, so new tokens are never decoded alone) and those after
    them. Text at the end that may still be half a character is kept back.
    """

    # A character has at most 4 bytes, so more pending tokens than this are not one unfinished
    # character but invalid bytes, or tokens without text.
    _MAX_PENDING = 16

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._complete = 0  # tokens of the window whose text is complete
        self._given = 0  # characters of the window's text that were returned already

    def push(self, token: int) -> str:
        """Add a token; return the text that has become certain (often its text, maybe none)."""
        self._window.append(token)
        text = self._decode(self._window)
        certain = text.rstrip(_REPLACEMENT)
        piece = certain[self._given :]
        if piece:
            self._given = len(certain)
            if certain == text:
                self._advance(self._complete)
        elif len(self._window) - self._complete > self._MAX_PENDING:
            piece = self._shorten(text)
        return piece

    def flush(self) -> str:
        """The text kept back, at the end of the sequence; an unfinished character is U+FFFD."""
        piece = self._decode(self._window)[self._given :]
        self._window, self._complete, self._given = [], 0, 0
        return piece

    def _advance(self, start: int) -> None:
        """Let the window begin at `start`; all its tokens are complete."""
        self._window = self._window[start:]
        self._complete = len(self._window)
        self._given = len(self._decode(self._window))

    def _shorten(self, text: str) -> str:
        """Bound the window where the pending tokens bring no complete text."""
        if not text[self._given :]:  # special or unknown tokens
            del self._window[self._complete :]
            return ""
        # Invalid bytes: settle all before the last place where the text falls in two clean parts.
        for cut in range(len(self._window) - 1, self._complete, -1):
            head, tail = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if head + tail == text:
                piece = head[self._given :]
                self._window, self._complete = self._window[cut:], 0
                self._given = max(0, self._given - len(head))
                return piece
        piece = text[self._given :]
        self._advance(self._complete)
        return piece

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        # Clean-up rewrites spaces across token borders and damages code: never wanted here.
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


class StopChecker:
    """Decides where a row ends, and holds its text.

    Args:
        eos_token_ids: ids that end the sequence. The id stays in the output, its text does not.
        stop: strings that end the output. The text is cut before the string; the ids are kept up
            to and including the token that completes it. Of several strings the one completed
            first counts, of those completed by the same character the longest. A string that is
            exactly one special token is recognised by its id.
        tokenizer: needed for stop strings and for text.
        max_new_tokens: most tokens of the output.
        context_length: most tokens of prompt and output together, None for no limit.
        prompt_tokens: length of the prompt.
        ignore_eos: go on after the end-of-sequence token.

    Raises:
        MultirateError: stop strings without a tokenizer; a prompt that fills the context.
    """

    def __init__(
        self,
        eos_token_ids: Collection[int],
        *,
        stop: Sequence[str] = (),
        tokenizer: PreTrainedTokenizerBase | None,
        max_new_tokens: int,
        context_length: int | None,
        prompt_tokens: int,
        ignore_eos: bool = False,
    ) -> None:
        if stop and tokenizer is None:
            raise MultirateError(
                f"stop={list(stop)!r} needs a tokenizer, and the model has none; load one with it, "
                "or leave stop out."
            )
        if context_length is not None and prompt_tokens >= context_length:
            raise MultirateError(
                f"the prompt has {prompt_tokens} tokens, but prompt and output together may have "
                f"{context_length}; shorten the prompt to at most {context_length - 1} tokens."
            )
        self._eos = frozenset() if ignore_eos else frozenset(eos_token_ids)
        self._stop = tuple(stop)
        self._stop_ids = _special_ids(stop, tokenizer)
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._max_new_tokens = max_new_tokens
        self._max_in_context = None if context_length is None else context_length - prompt_tokens

        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._undecoded: deque[int] = deque()
        self._pieces: list[str] = []  # text that will not change any more
        self._held = ""  # text that may be the beginning of a stop string
        self._num_streamed = 0  # pieces that stream_text has returned
        self._text_ended = False

    @property
    def room(self) -> int:
        """How many more tokens the row may get before a limit ends it; 0 once it has ended."""
        if self.finish_reason is not None:
            return 0
        limit = self._max_new_tokens
        if self._max_in_context is not None:
            limit = min(limit, self._max_in_context)
        return limit - self.num_tokens

    def push(self, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """Add the tokens accepted in one step.

        Returns:
            The tokens that belong to the output, and why the row ends with the last of them, or
            None if it goes on. The earliest token that ends the row counts; if it does so for
            several reasons, the first of eos, stop, length, context.
        """
        assert self.finish_reason is None, "the row has ended"
        for index, token in enumerate(tokens):
            self.num_tokens += 1
            self.finish_reason = self._reason(token)
            if self.finish_reason is not None:
                return list(tokens[: index + 1]), self.finish_reason
        return list(tokens), None

    @property
    def text(self) -> str:
        """The output's text so far, without stop string and special tokens.

        An unfinished character is left out until the row ends. The beginning of a possible stop
        string is part of it until the string is complete.

        Raises:
            MultirateError: there is no tokenizer.
        """
        self._settle()
        return "".join(self._pieces) + self._held

    def stream_text(self) -> str:
        """The text that has become certain since the last call; all of the rest at the end.

        The pieces joined are `text` exactly. Neither half a character nor what may become a stop
        string is ever returned.

        Raises:
            MultirateError: there is no tokenizer.
        """
        self._settle()
        fresh = "".join(self._pieces[self._num_streamed :])
        self._num_streamed = len(self._pieces)
        return fresh

    def _reason(self, token: int) -> FinishReason | None:
        if token in self._eos:
            return "eos"
        if token in self._stop_ids:
            return "stop"
        self._undecoded.append(token)
        if self._stop and self._decode_pending():
            return "stop"
        if self.num_tokens >= self._max_new_tokens:
            return "length"
        if self._max_in_context is not None and self.num_tokens >= self._max_in_context:
            return "context"
        return None

    def _decode_pending(self) -> bool:
        """Decode the tokens pushed since; True if a stop string was completed."""
        assert self._detokenizer is not None
        while self._undecoded:
            if self._append(self._detokenizer.push(self._undecoded.popleft())):
                self._text_ended = True
                return True
        return False

    def _append(self, piece: str) -> bool:
        """Add text; True if it completes a stop string, which is cut off with all after it."""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        # What follows `start` is dropped if it is a stop string, else kept back if it may become
        # one: the longest end of the text that some stop string begins with. Nothing before that
        # can be part of a match, so looking in `held + piece` finds every match.
        start = min(found)[1] if found else self._possible_stop(text)
        if start > 0:
            self._pieces.append(text[:start])
        self._held = "" if found else text[start:]
        return bool(found)

    def _possible_stop(self, text: str) -> int:
        """Where the longest end of `text` begins that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stop):
                return start
        return len(text)

    def _settle(self) -> None:
        """Bring the text up to date; without stop strings this is where decoding happens."""
        if self._detokenizer is None:
            raise MultirateError(
                "the output has no text, because the model has no tokenizer; use its token ids, or "
                "load a model with a tokenizer."
            )
        self._decode_pending()
        if self.finish_reason is not None and not self._text_ended:
            if not self._append(self._detokenizer.flush()) and self._held:
                self._pieces.append(self._held)
                self._held = ""
            self._text_ended = True


def _special_ids(stop: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Ids of the special tokens among the stop strings: text leaves special tokens out."""
    if tokenizer is None or not stop:
        return frozenset()
    added = tokenizer.added_tokens_decoder
    return frozenset(id_ for id_, token in added.items() if token.special and str(token) in stop)
