"""Stacks of decoder layers compiled ahead of time (torch.export and AOTInductor), kept between runs.

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
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim, export

from multirate.models.cache import load_once_built
from multirate.models.kernels import require_compiler

# Keys and values of a layer, `[rows, kv_heads, max_len, head_dim]` each.
KeysValues = tuple[Tensor, Tensor]
Rotary = tuple[Tensor, Tensor]
Run = Callable[[list[Tensor]], list[Tensor]]

# Sizes of examples that nothing else has: equal sizes would be taken for the same one.
ROWS, POSITIONS, VISIBLE, SLOTS = 11, 13, 37, 47

# A step's own loops are so short that starting a second thread costs more than it saves; the matrix
# products and attention between them start theirs.
_OPTIONS = {"cpp.threads": 1}


class AheadOfTime:
    """Calls `stack(layers, kinds, h, slots, positions, masks, rotary, memory)` through a library.

    Args:
        stack: `models.compiled.run_stack`.
    """

    def __init__(self, stack: Callable[..., list[Tensor]]) -> None:
        self.stack = stack
        self._layers: WeakKeyDictionary[nn.Module, tuple[str, list[Tensor]]] = WeakKeyDictionary()
        self._libraries: dict[tuple[Any, ...], Run] = {}

    def __call__(
        self,
        layers: Sequence[nn.Module],
        kinds: Sequence[str],
        h: Tensor,
        slots: Tensor,
        positions: Tensor,
        masks: Mapping[str, Tensor],
        rotary: Mapping[str, Rotary],
        memory: Sequence[KeysValues],
    ) -> list[Tensor]:
        """As the stack itself."""
        tensors = [h, slots, positions]
        for kind in dict.fromkeys(kinds):
            tensors += (masks[kind], *rotary[kind])
        # A library computes addresses from sizes and checks no strides; an arena's layer is contiguous.
        tensors = [tensor.contiguous() for tensor in tensors]
        for own in memory:
            tensors += own
        signatures = []
        for layer in layers:
            signature, weights = self._known(layer)
            signatures.append(signature)
            tensors += weights
        mask = masks[kinds[0]]
        if mask.shape[-1] == 1:  # a size of one is a graph of its own, and this one is too rare
            return self.stack(layers, kinds, h, slots, positions, masks, rotary, memory)
        key = (*signatures, *kinds, h.shape[0] > 1, h.shape[1] > 1, h.dtype, mask.dtype)
        run = self._libraries.get(key)
        if run is None:
            run = self._libraries[key] = self._load(layers, kinds, key, tensors)
        return run(tensors)

    def _known(self, layer: nn.Module) -> tuple[str, list[Tensor]]:
        known = self._layers.get(layer)
        if known is None:
            known = self._layers[layer] = _signature(layer), list(_tensors(layer).values())
        return known

    def _load(
        self,
        layers: Sequence[nn.Module],
        kinds: Sequence[str],
        key: tuple[Any, ...],
        tensors: list[Tensor],
    ) -> Run:
        name = hashlib.sha256(repr((key, _environment())).encode()).hexdigest()[:16]

        def build(path: Path) -> None:
            what = "a decoder layer" if len(layers) == 1 else f"{len(layers)} decoder layers as one"
            compiler = require_compiler(what)
            print(f"multirate: compiling {what} (once)", file=sys.stderr, flush=True)
            form = _Form(self.stack, layers, kinds)
            _compile(form, tensors, len(tensors) - form.weights, compiler, path)

        def load(path: Path) -> Run:
            run: Run = torch._inductor.aoti_load_package(str(path)).loader.run
            return run

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of compilers about themselves
            return load_once_built(f"layers-{name}.pt2", build, load)


class _Form(nn.Module):
    """A stack as a function of tensors alone: h, slots, positions, what each kind of attention needs,
    each layer's keys and values, and the weights of all layers."""

    stack: Callable[..., list[Tensor]]
    layers: Sequence[nn.Module]

    def __init__(
        self,
        stack: Callable[..., list[Tensor]],
        layers: Sequence[nn.Module],
        kinds: Sequence[str],
    ) -> None:
        super().__init__()
        # Not submodules: their weights are inputs.
        self.__dict__.update(stack=stack, layers=layers)
        self.kinds = list(kinds)
        self.names = [list(_tensors(layer)) for layer in layers]

    @property
    def weights(self) -> int:
        return sum(map(len, self.names))

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        h, slots, positions, *rest = tensors
        masks, rotary = {}, {}
        for kind in dict.fromkeys(self.kinds):
            masks[kind], cos, sin, *rest = rest
            rotary[kind] = (cos, sin)
        memory = []
        for _ in self.layers:
            keys, values, *rest = rest
            memory.append((keys, values))
        calls = []
        for layer, names in zip(self.layers, self.names, strict=True):
            calls.append(_with_weights(layer, dict(zip(names, rest, strict=False))))
            rest = rest[len(names) :]
        out: list[Tensor] = self.stack(
            calls, self.kinds, h, slots, positions, masks, rotary, memory
        )
        return out


def _with_weights(layer: nn.Module, weights: dict[str, Tensor]) -> Callable[..., Any]:
    return lambda *args, **kwargs: torch.func.functional_call(layer, weights, args, kwargs)


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Everything that a layer computes with, by name."""
    return {n: t.detach() for n, t in (*layer.named_parameters(), *layer.named_buffers())}


def _compile(form: _Form, tensors: list[Tensor], leading: int, compiler: str, path: Path) -> None:
    """Write a library for tensors like these; the first `leading` of them are no weights."""
    rows = ROWS if tensors[0].shape[0] > 1 else 1
    positions = POSITIONS if tensors[0].shape[1] > 1 else 1
    kinds = len(dict.fromkeys(form.kinds))
    # By place: which dimension of an input has which size.
    places = [{0: rows, 1: positions}] * 3
    for _ in range(kinds):
        places += [{0: rows, 2: positions, 3: VISIBLE}, *[{0: rows, 1: positions}] * 2]
    places += [{0: rows, 2: SLOTS}] * (leading - len(places))
    examples, dynamic = [], []
    for tensor, sizes in zip(tensors, places, strict=False):
        shape = [sizes.get(dim, size) for dim, size in enumerate(tensor.shape)]
        examples.append(torch.zeros(shape, dtype=tensor.dtype))
        dynamic.append({d: Dim.DYNAMIC if n > 1 else Dim.STATIC for d, n in sizes.items()})
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


# ---------------------------------------------------------------- what a library depends on


def _signature(layer: nn.Module) -> str:
    """Equal for layers that compute the same of equal tensors."""
    config = getattr(getattr(layer, "self_attn", None), "config", None)
    facts: list[Any] = []
    if config is not None:
        facts.append({k: v for k, v in config.to_dict().items() if k != "_name_or_path"})
    facts += [(n, t.shape, t.stride(), t.dtype) for n, t in _tensors(layer).items()]
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)}
        plain.pop("layer_idx", None)  # the arena goes by slots
        facts.append((name, type(module).__qualname__, type(module).__module__, plain))
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _environment() -> tuple[str, ...]:
    """Versions, our own code and the CPU: inductor compiles for the machine it runs on."""
    code = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        code.update(file.read_bytes())
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
        code.hexdigest(),
    )
