#!/usr/bin/env python
"""Make a prompt file for `multirate bench` out of a data set of your own, row by row.

The file is CSV or JSONL; `--template` is Python's format string over a row's fields:

    make_prompts.py testset_w_refs.csv --category e2e_nlg --unique \\
        --template "Write a sentence that describes this restaurant.\\n\\n{mr}" >> prompts.jsonl
    make_prompts.py wikisql.jsonl --category sql --limit 20 \\
        --template "Table {table}, columns {columns}\\n\\nQuestion: {question}\\nSQL:" >> prompts.jsonl
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".csv":
            yield from csv.DictReader(file)
        else:
            yield from (json.loads(line) for line in file if line.strip())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="a .csv or .jsonl file")
    parser.add_argument("--template", required=True, help=r"with {field} for fields, \n for lines")
    parser.add_argument("--category", help="of all these prompts")
    parser.add_argument("--limit", type=int, help="only the first so many prompts")
    parser.add_argument("--unique", action="store_true", help="each prompt once")
    options = parser.parse_args()
    template = options.template.replace("\\n", "\n")
    seen: list[str] = []
    for row in rows(options.data):
        if options.limit is not None and len(seen) >= options.limit:
            break
        fields = {k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()}
        try:
            prompt = template.format(**fields)
        except KeyError as error:
            sys.exit(f"No field {error} in {options.data}; there are {', '.join(fields)}.")
        if options.unique and prompt in seen:
            continue
        seen.append(prompt)
        line = {"prompt": prompt} | ({"category": options.category} if options.category else {})
        print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    main()
