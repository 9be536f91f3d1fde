"""Reading training text: accepted shapes, what is learned, mistakes, and how rows become batches."""

from __future__ import annotations

import gzip
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import tokenizer
from tokenizers import AddedToken
from training import text_rows
from transformers import AutoTokenizer

from multirate.config.errors import MultirateError
from multirate.train.batches import (
    batches,
    frequent_tokens,
    grouped,
    sample_rows,
    schedule,
    split_rows,
)
from multirate.train.data import Row, digest, read_rows

TOKENIZER = tokenizer()
# ChatML as many models have it, with @ for the special tokens' first letter.
CHATML = (
    "{% for m in messages %}{{ '^' + m.role + '~' + m.content + '|~' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '^assistant~' }}{% endif %}"
)


def decoded(row: Row) -> str:
    return TOKENIZER.decode(row.ids)


def learned(row: Row) -> list[str]:
    return [TOKENIZER.decode(row.ids[a:b]) for a, b in row.spans]


def chat_tokenizer() -> Any:
    found = tokenizer()
    found.chat_template = CHATML
    found.add_special_tokens({"eos_token": "|"})
    return found


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": messages, **more}


def test_prompt_and_completion(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "ab", "completion": "cde"})
    (row,) = read_rows(path, TOKENIZER)
    assert (decoded(row), learned(row)) == ("abcde", ["cde"])
    assert row.ids.dtype == np.int32
    (row,) = read_rows(path, TOKENIZER, loss_on="all")
    assert learned(row) == ["bcde"]


def test_every_answer_of_a_chat_is_learned(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", chat("hi", "yo", "and", "so"))
    (row,) = read_rows(path, chat_tokenizer())
    assert decoded(row) == "^user~hi|~^assistant~yo|~^user~and|~^assistant~so|"
    assert learned(row) == ["yo|", "so|"]


def test_a_cut_answer_does_not_teach_to_stop(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", chat("hi", "yo", "and", "so", complete=False))
    (row,) = read_rows(path, chat_tokenizer())
    assert learned(row) == ["yo|", "so"]


def test_a_turn_may_end_with_a_token_that_has_no_role(tmp_path: Path) -> None:
    """As in Phi-3 and Gemma: the tokenizer's own end token is that of documents."""
    found = chat_tokenizer()
    found.add_tokens([AddedToken("<end>", special=True)])
    found.chat_template = CHATML.replace("|~", "<end>~")
    found.save_pretrained(tmp_path / "saved")
    found = AutoTokenizer.from_pretrained(tmp_path / "saved")
    (row,) = read_rows(jsonl(tmp_path / "a.jsonl", chat("hi", "yo", "and", "so")), found)
    assert [found.decode(row.ids[a:b]) for a, b in row.spans] == ["yo<end>", "so<end>"]


def test_a_template_that_refuses_messages(tmp_path: Path) -> None:
    found, path = chat_tokenizer(), jsonl(tmp_path / "a.jsonl", chat("hi", "yo"))
    found.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(MultirateError, match=r"row 1: .*roles must alternate"):
        read_rows(path, found)
    found.chat_template = None
    with pytest.raises(MultirateError, match=r"row 1: .*no chat template; give 'prompt' and"):
        read_rows(path, found)


def test_a_template_that_rewrites_earlier_turns(tmp_path: Path) -> None:
    """What the model did not see when it wrote is not in the row; only the last answer remains."""
    found = chat_tokenizer()
    found.chat_template = CHATML.replace("m.content", "(m.content if loop.last else '...')")
    (row,) = read_rows(jsonl(tmp_path / "a.jsonl", chat("hi", "yo", "and", "so")), found)
    assert decoded(row) == "^user~...|~^assistant~...|~^user~and|~^assistant~so|"
    assert learned(row) == ["so|"]


def test_long_rows(tmp_path: Path) -> None:
    """Chats are cut, raw text is split."""
    path = jsonl(
        tmp_path / "a.jsonl", {"prompt": "abcd", "completion": "efghijkl"}, {"text": "m" * 20}
    )
    rows = read_rows(path, TOKENIZER, max_length=8)
    assert [decoded(row) for row in rows] == ["abcdefgh", "m" * 8, "m" * 8, "m" * 4]
    assert [learned(row) for row in rows] == [["efgh"], ["m" * 7], ["m" * 7], ["m" * 3]]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL", "a.jsonl.gz", "a.json", "a.txt", "a.md"])
def test_kinds_of_files(tmp_path: Path, name: str, mark: bytes) -> None:
    values = [{"text": "abcdefgh"}, {"text": "ijklmnop"}]
    content = json.dumps(values)
    if ".jsonl" in name.lower():
        content = "\r\n\r\n".join(json.dumps(value) for value in values)
    elif name in ("a.txt", "a.md"):
        content = "abcdefghijklmnop"
    data = mark + content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    rows = read_rows(tmp_path / name, TOKENIZER, max_length=8)
    assert [decoded(row) for row in rows] == ["abcdefgh", "ijklmnop"]


def test_long_plain_text_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multirate.train.data._TEXT_CHUNK", 10)
    lines = [f"line {i} " for i in range(29)]
    path = tmp_path / "a.txt"
    path.write_text("\n".join(lines))
    rows = read_rows(path, TOKENIZER, max_length=16)
    assert "".join(decoded(row) for row in rows) == "?".join(lines)  # its line ends
    assert {len(row) for row in rows[:-1]} == {16}


def test_max_tokens(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", *({"text": "abcdefgh"} for _ in range(10)))
    assert len(read_rows(path, TOKENIZER, max_tokens=20)) == 3
    with pytest.raises(MultirateError, match="max_tokens=0"):
        read_rows(path, TOKENIZER, max_tokens=0)


def test_texts_without_a_position_to_train_are_left_out(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "abc"}, {"text": "abcd"})
    assert [decoded(row) for row in read_rows(path, TOKENIZER)] == ["abcd"]
    with pytest.raises(MultirateError, match=r"holds no usable text.*within 512 tokens"):
        read_rows(jsonl(path, {"text": "abc"}), TOKENIZER)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', "row 2: is not JSON"),
        ('{"words": "a"}', "row 2: needs 'messages'"),
        ("[1, 2]", "row 2: needs 'messages'"),
        ("7", "row 2: cannot be used"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "not the assistant's"),
        ('{"messages": [{"content": "a"}]}', "row 2: cannot be used"),
        ('{"prompt": 3, "completion": "a"}', "row 2: cannot be used"),
        ('{"prompt": ["a", "b"], "completion": "a"}', "row 2: cannot be used"),
        ('{"text": ["ab", "cd"]}', "row 2: .*is list, not a string"),
        ('{"text": "a\\ud800"}', "row 2: .*surrogates not allowed"),
    ],
)
def test_rows_of_no_accepted_shape(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abcd"}\n' + line + "\n")
    with pytest.raises(MultirateError, match=message):
        read_rows(path, TOKENIZER)


def test_sources_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.jsonl.gz").write_bytes(b"no gzip")
    (tmp_path / "c.jsonl").write_text("")
    damaged = bytearray(gzip.compress(b'{"text": "abcdefgh"}' * 99))
    damaged[20:24] = b"\xff" * 4
    (tmp_path / "e.jsonl.gz").write_bytes(damaged)
    for name, message in [
        ("a.txt", "as UTF-8 text"),
        ("b.jsonl.gz", "as UTF-8 text"),
        ("e.jsonl.gz", "as UTF-8 text"),
        ("c.jsonl", "no usable text"),
        ("d.jsonl", "No such data file"),
    ]:
        with pytest.raises(MultirateError, match=message):
            read_rows(tmp_path / name, TOKENIZER)
    with pytest.raises(MultirateError, match="loss_on='x'"):
        read_rows(tmp_path / "a.txt", TOKENIZER, loss_on="x")  # type: ignore[arg-type]


class FakeDatasets(types.ModuleType):
    """Stands in for the `datasets` package."""

    def __init__(self) -> None:
        super().__init__("datasets")
        self.asked: list[tuple[Any, ...]] = []
        self.read = 0

    def load_dataset(self, name: str, config: str | None = None, **more: Any) -> Iterator[Any]:
        self.asked.append((name, config, more))
        if name == "owner/none":
            raise FileNotFoundError("no such data set")

        def rows() -> Iterator[Any]:
            for _ in range(1000):
                self.read += 1
                yield {"text": "abcdefgh"}

        return rows()


def test_data_sets_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeDatasets()
    monkeypatch.setitem(sys.modules, "datasets", fake)
    for source, expected in [
        ("owner/name", ("owner/name", None, "train")),
        ("owner/name:en@test", ("owner/name", "en", "test")),
        ("name@train[:10]", ("name", None, "train[:10]")),
    ]:
        rows = read_rows(source, TOKENIZER, max_tokens=30)
        assert [decoded(row) for row in rows] == ["abcdefgh"] * 4
        name, config, more = fake.asked[-1]
        assert (name, config, more) == (*expected[:2], {"split": expected[2], "streaming": True})
    assert fake.read < 20  # a stream: no more is read than is used
    parquet = tmp_path / "a.parquet"
    parquet.write_bytes(b"PAR1")
    assert len(read_rows(parquet, TOKENIZER, max_tokens=8)) == 1
    assert fake.asked[-1][2]["data_files"] == str(parquet)
    with pytest.raises(MultirateError, match="data set owner/none: no such data set"):
        read_rows("owner/none", TOKENIZER)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(MultirateError, match=r"pip install 'multirate\[data\]'"):
        read_rows("owner/name", TOKENIZER)


# ------------------------------------------------------------------------------------ batches


def test_groups_hold_every_row_once_and_keep_to_their_size() -> None:
    rows = text_rows(count=60)
    for seed in (None, 3):
        groups = grouped(rows, tokens=100, seed=seed)
        assert sorted(i for group in groups for i in group) == list(range(60))
        assert all(len(g) * max(len(rows[i]) for i in g) <= 100 for g in groups)
    assert [i for group in grouped(rows, tokens=100) for i in group] == list(range(60))
    assert grouped(rows, tokens=100, seed=3) != grouped(rows, tokens=100, seed=4)
    lengths = [[len(rows[i]) for i in group] for group in grouped(rows, tokens=100, seed=3)]
    padding = sum(max(g) * len(g) - sum(g) for g in lengths)
    assert padding < 0.1 * sum(map(sum, lengths))


def test_parts_of_epochs() -> None:
    rows = text_rows(count=60)
    one = schedule(rows, epochs=1, tokens=100, seed=0)
    assert schedule(rows, epochs=0, tokens=100, seed=0) == []
    more = schedule(rows, epochs=1.5, tokens=100, seed=0)
    assert more[: len(one)] == one and len(more) - len(one) == round(len(one) / 2)
    assert more[len(one) :] != one[: len(one) // 2]


def test_batches_are_padded_on_the_right() -> None:
    rows = text_rows(count=5)
    found = list(batches(rows, tokens=60))
    assert [len(row) for batch in found for row in batch.rows] == [len(row) for row in rows]
    for batch in found:
        for ids, row in zip(batch.ids, batch.rows, strict=True):
            assert ids[: len(row)].tolist() == row.ids.tolist() and not ids[len(row) :].any()
    some = sample_rows(rows, 30, seed=1)
    assert sum(map(len, some)) >= 30 > sum(map(len, some[:-1]))
    assert some != sample_rows(rows, 30, seed=2)  # from all over the text, not its beginning


def test_answers_to_one_prompt_are_held_out_together() -> None:
    rows = [Row(np.array([i // 2, i // 2, i, 9], dtype=np.int32), ((2, 4),)) for i in range(40)]
    kept, rest = split_rows(rows, heldout=5, seed=0)
    assert len(kept) == 6 and len(kept) + len(rest) == 40
    assert not {row.prompt for row in kept} & {row.prompt for row in rest}
    raw = [Row(row.ids, ((1, 4),)) for row in rows]  # raw text has no prompt to share
    assert len(split_rows(raw, heldout=5, seed=0)[0]) == 5


def test_frequent_tokens_of_answers() -> None:
    rows = [Row(np.array([7, 7, 7, 3, 3, 5], dtype=np.int32), ((3, 6),))]
    assert frequent_tokens(rows, size=4, vocab_size=9).tolist() == [3, 5, 0, 1]
    assert torch.equal(frequent_tokens(rows, size=9, vocab_size=9).sort().values, torch.arange(9))


def test_digest_tells_texts_apart() -> None:
    rows = text_rows(count=3)
    found = {
        digest(rows), digest(rows[::-1]), digest(rows[:2]),
        digest([*rows[:2], Row(rows[2].ids, ((1, 2),))]),
    }  # fmt: skip
    assert len(found) == 4 and digest(rows) == digest(text_rows(count=3))
