"""Stacks compiled ahead of time (torch.export and AOTInductor), kept between runs.

`torch.compile` checks at every call whether its code still fits, and runs Python between kernels: on a
CPU that takes as long as a small layer's own work. A library made ahead of time is one C++ call, and
loads in milliseconds; which one fits is known here. Weights are inputs, so one library serves all layers
of a kind, whatever they are called and wherever they stand.

Libraries lie in the cache (`MULTIRATE_CACHE`), named after everything that went into them.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim, export

from multirate.models.block import Block
from multirate.models.cache import has_built, load_once_built
from multirate.models.kernels import has_compiler, require_compiler
from multirate.models.stack import Call, KeysValues, Stack, run_stack

Run = Callable[[list[Tensor]], list[Tensor]]

# Sizes of examples that nothing else has: equal sizes would be taken for the same one.
ROWS, POSITIONS, VISIBLE, SLOTS = 11, 13, 37, 47

_PREFIX = "layers-"  # of libraries' names

# A step's own loops are so short that starting a second thread costs more than it saves; the matrix
# products and attention between them start theirs.
_OPTIONS = {"cpp.threads": 1}


@dataclass(frozen=True, eq=False)
class _Ready:
    """A stack, ready to be called.

    Attributes:
        signatures: of its modules.
        weights: of all of them.
        kinds: attention types, each once.
        runs: its libraries, by what tells sizes and types of inputs apart.
    """

    signatures: tuple[str, ...]
    weights: list[Tensor]
    kinds: tuple[str, ...]
    runs: dict[tuple[Any, ...], Run] = field(default_factory=dict)


class AheadOfTime:
    """Runs stacks through libraries."""

    def __init__(self) -> None:
        self._stacks: WeakKeyDictionary[Stack, _Ready] = WeakKeyDictionary()
        self._libraries: dict[tuple[Any, ...], Run] = {}

    def __call__(
        self,
        stack: Stack,
        inputs: Sequence[Tensor],
        block: Block,
        memory: Sequence[KeysValues],
    ) -> list[Tensor]:
        """As `run_stack`."""
        if block.visible == 1:  # a size of one is a graph of its own, and this one is too rare
            return run_stack(stack, inputs, block, memory)
        ready = self._stacks.get(stack)
        if ready is None:
            ready = self._stacks[stack] = _ready(stack)
        # A library computes addresses from sizes and checks no strides; an arena's layer is contiguous.
        tensors = [tensor.contiguous() for tensor in inputs]
        rows, positions = block.slots.shape
        key = (rows > 1, positions > 1, *[tensor.dtype for tensor in inputs])
        tensors += block.tensors(ready.kinds)
        for own in memory:
            tensors += own
        leading = len(tensors)
        tensors += ready.weights
        run = ready.runs.get(key)
        if run is None:
            run = ready.runs[key] = self._find(stack, ready, key, tensors, leading)
        return run(tensors)

    def _find(
        self,
        stack: Stack,
        ready: _Ready,
        key: tuple[Any, ...],
        tensors: list[Tensor],
        leading: int,
    ) -> Run:
        """The library for tensors like these; the first `leading` of them are no weights."""
        form = (*ready.signatures, *stack.kinds, *key)
        if form in self._libraries:
            return self._libraries[form]
        name = hashlib.sha256(repr((form, _environment())).encode()).hexdigest()[:16]

        def build(path: Path) -> None:
            compiler = require_compiler(stack.name)
            rows, positions = ("several" if many else "one" for many in key[:2])
            print(
                f"multirate: compiling {stack.name} for {rows} row and {positions} position at a time "
                "(once; 5 to 20 seconds)",
                file=sys.stderr,
                flush=True,
            )
            _compile(_Form(stack, len(key) - 2, ready.kinds), tensors, leading, compiler, path)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of compilers about themselves
            run = self._libraries[form] = load_once_built(f"{_PREFIX}{name}.pt2", build, _load)
        return run


def can_compile() -> bool:
    """Whether there is a compiler, or libraries of one: an image's cache may have been filled."""
    return has_compiler() or has_built(f"{_PREFIX}*.pt2")


def _ready(stack: Stack) -> _Ready:
    modules = cast(tuple[nn.Module, ...], stack.modules)
    return _Ready(
        tuple(_signature(module) for module in modules),
        [tensor for module in modules for tensor in _tensors(module).values()],
        tuple(dict.fromkeys(stack.kinds)),
    )


class _Form(nn.Module):
    """A stack as a function of tensors alone: its inputs, slots, positions, what each kind of attention
    needs, each layer's keys and values, and all weights."""

    stack: Stack
    parts: tuple[nn.Module, ...]

    def __init__(self, stack: Stack, inputs: int, kinds: Sequence[str]) -> None:
        super().__init__()
        # Not submodules: their weights are inputs.
        self.__dict__.update(stack=stack, parts=stack.modules)
        self.inputs, self.kinds = inputs, list(kinds)
        self.names = [list(_tensors(module)) for module in self.parts]

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        end = self.inputs + 2 + 3 * len(self.kinds)
        inputs, rest = tensors[: self.inputs], tensors[end:]
        block = Block.of_tensors(tensors[self.inputs : end], self.kinds)
        memory = []
        for _ in self.stack.layers:
            keys, values, *rest = rest
            memory.append((keys, values))
        calls = []
        for module, names in zip(self.parts, self.names, strict=True):
            calls.append(_with_weights(module, dict(zip(names, rest, strict=False))))
            rest = rest[len(names) :]
        return run_stack(self.stack.with_modules(calls), inputs, block, memory)


def _with_weights(module: nn.Module, weights: dict[str, Tensor]) -> Call:
    return lambda *args, **kwargs: torch.func.functional_call(module, weights, args, kwargs)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Everything that a module computes with, by name."""
    return {n: t.detach() for n, t in (*module.named_parameters(), *module.named_buffers())}


def _compile(form: _Form, tensors: list[Tensor], leading: int, compiler: str, path: Path) -> None:
    """Write a library for tensors like these; the first `leading` of them are no weights."""
    # By place: which dimension of an input has which size. What has a size of one keeps it.
    places = [{0: ROWS, 1: POSITIONS}] * (form.inputs + 2)
    for _ in form.kinds:
        places += [{0: ROWS, 2: POSITIONS, 3: VISIBLE}, *[{0: ROWS, 1: POSITIONS}] * 2]
    places += [{0: ROWS, 2: SLOTS}] * (leading - len(places))
    examples, dynamic = [], []
    for tensor, sizes in zip(tensors, places, strict=False):
        sizes = {dim: size for dim, size in sizes.items() if tensor.shape[dim] > 1}
        shape = [sizes.get(dim, size) for dim, size in enumerate(tensor.shape)]
        examples.append(torch.zeros(shape, dtype=tensor.dtype))
        dynamic.append(dict.fromkeys(sizes, Dim.DYNAMIC))
    program = export(
        form,
        ([*examples, *tensors[leading:]],),
        dynamic_shapes=([*dynamic, *[None] * (len(tensors) - leading)],),
        strict=False,
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    # By itself inductor would take CXX also where there is no such program.
    options = {**_OPTIONS, "cpp.cxx": (None, compiler)}
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(path), inductor_configs=options
    )


def _load(path: Path) -> Run:
    """The function in a library.

    torch's own loader first runs programs to tell which vectors the CPU has, which takes 0.7 s; a
    library's name stands for the CPU already.
    """
    try:
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    except TypeError:  # another torch's takes something else
        loader = torch._inductor.aoti_load_package(str(path)).loader
    run: Run = loader.run
    return run


# ---------------------------------------------------------------- what a library depends on


def _signature(whole: nn.Module) -> str:
    """Equal for modules that compute the same of equal tensors."""
    config = getattr(getattr(whole, "self_attn", None), "config", None)
    facts: list[Any] = []
    if config is not None:
        facts.append({k: v for k, v in config.to_dict().items() if k != "_name_or_path"})
        facts.append(config._attn_implementation)  # which no config's dict names
    facts += [(n, t.shape, t.stride(), t.dtype) for n, t in _tensors(whole).items()]
    for name, module in whole.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)}
        plain.pop("layer_idx", None)  # the arena goes by slots
        kind = type(module)
        facts.append((name, kind.__qualname__, kind.__module__, _code(kind.__module__), plain))
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _code(module: str) -> str | None:
    """A hash of the room of one of our own modules, whose functions it may call; versions stand for
    others' code."""
    if module.partition(".")[0] != __name__.partition(".")[0]:
        return None
    file = sys.modules[module].__file__
    return None if file is None else _hash(Path(file).parent)


def _hash(room: Path) -> str:
    code = hashlib.sha256()
    for file in sorted(room.glob("*.py")):
        code.update(file.read_bytes())
    return code.hexdigest()


@cache
def _environment() -> tuple[str, ...]:
    """Versions, our own code and the CPU: inductor compiles for the machine it runs on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        flags = platform.processor()
    return (
        torch.__version__,
        transformers.__version__,
        platform.machine(),
        flags,
        _hash(Path(__file__).parent),
    )
