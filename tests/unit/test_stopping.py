"""StopChecker: where a row ends inside a block, and the text that comes out."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from multirate.config.errors import MultirateError
from multirate.decode.stopping import Detokenizer, StopChecker

END, PAD = "<|end|>", "<|pad|>"


def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind: a token is any run of bytes, also half a character or more than a word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["stop here. full stop. END\nEND\n", "größer 😀😁 日本 stop", "x😀x🦀x🎉x🚀"] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END, PAD],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama-2's kind: words with a leading-space mark, and single bytes for what is not known."""
    words = [END, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abo", "▁a", "▁bo", "▁▁"]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
TOKENIZERS = {"byte-level": BYTE_LEVEL, "byte-fallback": BYTE_FALLBACK}
EOS = int(BYTE_LEVEL.convert_tokens_to_ids(END))


def encode(text: str) -> list[int]:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert decode(ids) == text
    return list(ids)


def one_by_one(text: str) -> list[int]:
    """The bytes of a text, a token each."""
    tokens = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [int(BYTE_LEVEL.convert_tokens_to_ids(c)) for piece, _ in tokens for c in piece]


def decode(ids: Sequence[int], tokenizer: PreTrainedTokenizerFast = BYTE_LEVEL) -> str:
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


def make_checker(**changes: Any) -> StopChecker:
    arguments: dict[str, Any] = {
        "tokenizer": BYTE_LEVEL,
        "max_new_tokens": 1000,
        "context_length": None,
        "prompt_tokens": 5,
    }
    return StopChecker(changes.pop("eos_token_ids", [EOS]), **arguments | changes)


# Where a row ends


def test_a_block_that_ends_nothing_passes_whole() -> None:
    checker = make_checker()
    assert checker.push([4, 5, 6]) == ([4, 5, 6], None)
    assert checker.push([]) == ([], None)
    assert (checker.num_tokens, checker.finish_reason) == (3, None)


def test_eos_in_the_middle_of_a_block_is_kept_but_has_no_text() -> None:
    a, b, c = encode("a") + encode("b") + encode("c")
    checker = make_checker()
    assert checker.push([a, b, EOS, c]) == ([a, b, EOS], "eos")
    assert (checker.num_tokens, checker.text) == (3, "ab")


def test_eos_that_is_an_ordinary_token_has_no_text_either() -> None:
    a, b = encode("a") + encode("b")
    checker = make_checker(eos_token_ids=[b, EOS], stop=["b"])
    assert checker.push([a, b]) == ([a, b], "eos")
    assert checker.text == "a"


def test_ignore_eos_goes_on() -> None:
    a = encode("a")[0]
    checker = make_checker(ignore_eos=True, max_new_tokens=3)
    assert checker.push([EOS, a, EOS, a]) == ([EOS, a, EOS], "length")
    assert checker.text == "a"


def test_stop_string_across_tokens_and_blocks() -> None:
    ids = one_by_one("ab##c")
    checker = make_checker(stop=["##"])
    assert checker.push(ids[:3]) == (ids[:3], None)
    assert checker.stream_text() == "ab"
    assert checker.push(ids[3:]) == (ids[3:4], "stop")
    assert checker.stream_text() == ""
    assert checker.text == "ab"


def test_stop_string_inside_a_token() -> None:
    token = next(i for i in range(len(BYTE_LEVEL)) if decode([i]).strip() == "stop")
    a, b = encode("a") + encode("b")
    checker = make_checker(stop=["to"])
    assert checker.push([a, token, b]) == ([a, token], "stop")
    assert checker.text == "a" + decode([token]).partition("to")[0]


def test_text_after_the_stop_string_in_its_token_is_dropped_with_a_half_character() -> None:
    emoji = one_by_one("😀")
    checker = make_checker(stop=["x"])
    checker.push([*one_by_one("a"), *emoji[:2]])
    assert checker.push([*emoji[2:], *one_by_one("xb")])[1] == "stop"
    assert checker.text == "a😀"


def test_stop_string_that_begins_but_does_not_complete() -> None:
    checker = make_checker(stop=["END."])
    pieces = []
    for token in one_by_one("aENENDb"):
        assert checker.push([token])[1] is None
        pieces.append(checker.stream_text())
    assert pieces == ["a", "", "", "EN", "", "", "ENDb"]
    assert checker.text == "aENENDb"


def test_beginning_of_a_stop_string_is_released_at_the_end() -> None:
    checker = make_checker(stop=["END."])
    ids = one_by_one("aEND")
    checker.push(ids)
    assert (checker.stream_text(), checker.text) == ("a", "aEND")
    checker.push([EOS])
    assert (checker.stream_text(), checker.text) == ("END", "aEND")


def test_first_completed_stop_string_counts_and_of_those_the_longest() -> None:
    for stop, text in [(["bc", "abcd"], "xa"), (["c", "abc"], "x"), (["d", "bcd", "cd"], "xa")]:
        for ids in (one_by_one("xabcdy"), encode("xabcdy")):
            checker = make_checker(stop=stop)
            checker.push(ids)
            assert (checker.finish_reason, checker.text) == ("stop", text)


def test_stop_string_that_is_a_special_token() -> None:
    a, pad = encode("a")[0], int(BYTE_LEVEL.convert_tokens_to_ids(PAD))
    assert make_checker().push([a, pad, a])[1] is None
    checker = make_checker(stop=[PAD, "b"])
    assert checker.push([a, pad, a]) == ([a, pad], "stop")
    assert (checker.stream_text(), checker.text) == ("a", "a")


@pytest.mark.parametrize("block", [1, 2, 3, 4, 7])
def test_max_new_tokens_at_and_inside_a_block(block: int) -> None:
    checker = make_checker(max_new_tokens=6)
    kept: list[int] = []
    stream = list(range(10, 24))
    while checker.finish_reason is None:
        assert checker.room == 6 - len(kept)
        tokens, reason = checker.push(stream[len(kept) : len(kept) + block])
        kept += tokens
        assert (reason == "length") == (len(kept) == 6)
    assert kept == stream[:6]
    assert checker.room == 0


def test_context_full_inside_a_block() -> None:
    checker = make_checker(context_length=8)
    assert checker.room == 3
    assert checker.push([9, 9]) == ([9, 9], None)
    assert checker.push([9, 9]) == ([9], "context")


def test_the_earliest_token_wins() -> None:
    a, b, c = encode("a") + encode("b") + encode("c")
    stops: dict[str, Any] = {"stop": ["b"], "max_new_tokens": 3}
    assert make_checker(**stops).push([a, b, c, EOS]) == ([a, b], "stop")
    assert make_checker(**stops).push([a, EOS, b, c]) == ([a, EOS], "eos")
    assert make_checker(**stops).push([a, a, c, b]) == ([a, a, c], "length")
    assert make_checker(**stops, context_length=7).push([a, a, b]) == ([a, a], "context")


def test_order_at_the_same_token() -> None:
    a, b = encode("a") + encode("b")
    limits: dict[str, Any] = {"max_new_tokens": 2, "context_length": 7}
    full = make_checker(**limits, eos_token_ids=[b], stop=["b"])
    assert full.push([a, b, a]) == ([a, b], "eos")
    assert make_checker(**limits, stop=["b"]).push([a, b, a]) == ([a, b], "stop")
    assert make_checker(**limits).push([a, b, a]) == ([a, b], "length")
    assert make_checker(context_length=7).push([a, b, a]) == ([a, b], "context")


# Text


def test_emoji_across_tokens_and_blocks_comes_whole() -> None:
    ids = one_by_one("a😀b")
    checker = make_checker()
    pieces = []
    for block in (ids[:2], ids[2:4], ids[4:5], ids[5:]):
        checker.push(block)
        pieces.append(checker.stream_text())
    assert pieces == ["a", "", "😀", "b"]


def test_half_a_character_shows_only_when_the_row_ends() -> None:
    ids = one_by_one("a😀")[:3]
    checker = make_checker(max_new_tokens=3)
    checker.push(ids[:2])
    assert (checker.stream_text(), checker.text) == ("a", "a")
    assert checker.push(ids[2:])[1] == "length"
    assert (checker.stream_text(), checker.text) == ("\ufffd", "a\ufffd")
    assert checker.text == decode(ids)


@pytest.mark.parametrize("n", [1, 50])
def test_leading_space_of_a_word_survives_special_tokens(n: int) -> None:
    ids = BYTE_FALLBACK.convert_tokens_to_ids(["▁a", *[END] * n, "▁bo", "▁▁", *[END] * n, "▁a"])
    checker = make_checker(tokenizer=BYTE_FALLBACK, eos_token_ids=[])
    _, pieces = stream(checker, [[token] for token in ids])
    assert [piece for piece in pieces if piece] == ["a", " bo", "  ", " a"]


def blocks_of(ids: list[int], cuts: Sequence[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in pairwise(edges)]


def stream(checker: StopChecker, blocks: Sequence[list[int]]) -> tuple[list[int], list[str]]:
    """Push blocks until the row ends; the ids kept and the text streamed after each block."""
    kept: list[int] = []
    pieces: list[str] = []
    for block in blocks:
        tokens, reason = checker.push(block)
        kept += tokens
        pieces.append(checker.stream_text())
        if reason is not None:
            break
    return kept, pieces


# Mostly ids of a few kinds, so that characters and stop strings do come about.
byte_level_ids = st.lists(
    st.one_of(
        st.sampled_from(one_by_one("aEND\n 😀é")),
        st.sampled_from(encode("stop END\n") + encode("größer 😀")),
        st.integers(0, len(BYTE_LEVEL) - 1),
    ),
    max_size=40,
)
cuts = st.lists(st.integers(0, 40), max_size=6)
stop_strings = st.lists(st.text("aENDstop\n 😀é", min_size=1, max_size=4), max_size=3)


@given(byte_level_ids, cuts, stop_strings, st.integers(1, 45))
@example(one_by_one("a😀")[:-1], [1], [], 45)
def test_against_decoding_everything_anew(
    ids: list[int], cuts: list[int], stop: list[str], max_new_tokens: int
) -> None:
    """The reference decodes the whole output after every token and looks for each stop string."""
    reason, end, text = None, len(ids), decode(ids).rstrip("\ufffd")
    for n, token in enumerate(ids, start=1):
        if token == EOS:
            reason, end, text = "eos", n, decode(ids[:n])
            break
        certain = decode(ids[:n]).rstrip("\ufffd")
        found = [(certain.find(s) + len(s), certain.find(s)) for s in stop if s in certain]
        if found:
            reason, end, text = "stop", n, certain[: min(found)[1]]
            break
        if n == max_new_tokens:
            reason, end, text = "length", n, decode(ids[:n])
            break

    checker = make_checker(stop=stop, max_new_tokens=max_new_tokens)
    kept, pieces = stream(checker, blocks_of(ids, cuts))
    assert (kept, checker.finish_reason, checker.text) == (ids[:end], reason, text)
    streamed = "".join(pieces)
    if reason is None:  # only the beginning of a stop string may be kept back
        assert text.startswith(streamed)
        held = text[len(streamed) :]
        assert held == "" or any(s.startswith(held) for s in stop)
    else:
        assert streamed == text


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_join_to_the_text_whatever_the_blocks(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=60))
    stop = data.draw(st.lists(st.text("ab o", min_size=1, max_size=3), max_size=2))
    outcomes = []
    for _ in range(2):
        blocks = blocks_of(ids, data.draw(cuts))
        checker = make_checker(
            tokenizer=tokenizer, eos_token_ids=[], stop=stop, max_new_tokens=len(ids)
        )
        kept, pieces = stream(checker, blocks)
        assert "".join(pieces) == checker.text
        assert all(s not in checker.text for s in stop)
        outcomes.append((kept, checker.finish_reason, checker.text))
    assert outcomes[0] == outcomes[1]


@given(st.text("ab o😀é日", max_size=12))
def test_byte_fallback_text_is_that_of_its_decoder(text: str) -> None:
    tokens = []
    for character in f"▁{text.replace(' ', '▁')}":
        known = BYTE_FALLBACK.convert_tokens_to_ids(character) is not None
        tokens += [character] if known else [f"<0x{byte:02X}>" for byte in character.encode()]
    ids = BYTE_FALLBACK.convert_tokens_to_ids(tokens)
    checker = make_checker(tokenizer=BYTE_FALLBACK, eos_token_ids=[], max_new_tokens=len(ids))
    _, pieces = stream(checker, [[token] for token in ids])
    assert "".join(pieces) == checker.text == decode(ids, BYTE_FALLBACK) == text


class CountingTokenizer:
    """Counts how many tokens are decoded."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        self.decoded += len(ids)
        return str(BYTE_LEVEL.decode(ids, **kwargs))


@pytest.mark.parametrize(
    "unit",
    [encode("stop here. "), one_by_one("😀"), one_by_one("😀")[:1], [EOS], one_by_one("\ufffd")],
    ids=["words", "emoji", "invalid bytes", "special tokens", "replacement characters"],
)
def test_a_long_output_costs_the_same_per_token(unit: list[int]) -> None:
    ids = unit * (2000 // len(unit)) + one_by_one("a😀")
    tokenizer = CountingTokenizer()
    detokenizer = Detokenizer(tokenizer)
    text = "".join([*map(detokenizer.push, ids), detokenizer.flush()])
    assert text == decode(ids)
    assert tokenizer.decoded < 60 * len(ids)  # all anew each time: 1000 a token


@pytest.mark.parametrize("n", range(40))
def test_characters_after_invalid_bytes_stay_whole(n: int) -> None:
    """Wherever the window is cut among invalid bytes, it is not in the middle of a character."""
    half = int(BYTE_LEVEL.convert_tokens_to_ids("xðŁ"))  # x and the first half of an emoji
    first, _, *rest = one_by_one("😀")
    ids = [first] * n + [half, *rest, half, *rest[:1], *[first] * n, first, *one_by_one("😀y")[1:]]
    checker = make_checker(max_new_tokens=len(ids))
    _, pieces = stream(checker, [[token] for token in ids])
    assert "".join(pieces) == decode(ids)


# Mistakes


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    for prompt_tokens in (8, 9):
        with pytest.raises(MultirateError, match="shorten the prompt to at most 7 tokens"):
            make_checker(prompt_tokens=prompt_tokens, context_length=8)
    assert make_checker(prompt_tokens=7, context_length=8).room == 1


def test_without_a_tokenizer_there_are_ids_but_no_text() -> None:
    with pytest.raises(MultirateError, match="needs a tokenizer"):
        make_checker(tokenizer=None, stop=["x"])
    checker = make_checker(tokenizer=None)
    assert checker.push([4, EOS, 5]) == ([4, EOS], "eos")
    with pytest.raises(MultirateError, match="no tokenizer"):
        _ = checker.text
    with pytest.raises(MultirateError, match="no tokenizer"):
        checker.stream_text()


def test_a_row_that_has_ended_takes_no_more() -> None:
    checker = make_checker()
    checker.push([EOS])
    with pytest.raises(AssertionError):
        checker.push([4])
