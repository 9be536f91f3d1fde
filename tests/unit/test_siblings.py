"""Layers that read the same input are one product, and give what each gave alone."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn

from multirate.models.packed import pack_linears
from multirate.models.siblings import Sibling


class Counting(nn.Module):
    """A linear layer that counts its calls."""

    calls = 0

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.linear(x)


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 12, bias=bias)
        self.k_proj = nn.Linear(8, 4, bias=bias)
        self.v_proj = nn.Linear(8, 4, bias=bias)
        self.o_proj = nn.Linear(12, 8, bias=bias)


@pytest.mark.parametrize("bias", [False, True])
def test_siblings_give_what_each_gave_alone_in_one_product(bias: bool) -> None:
    module = Attention(bias)
    x, other = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    names = ("q_proj", "k_proj", "v_proj")
    expected = {n: (getattr(module, n)(x), getattr(module, n)(other)) for n in names}
    pack_linears(module, Counting)
    Counting.calls = 0
    for i, of in enumerate((x, other)):
        for n in names:
            torch.testing.assert_close(getattr(module, n)(of), expected[n][i])
    assert Counting.calls == 2
    # In any order and with inputs that differ, each is still right.
    for n, i in (("v_proj", 0), ("q_proj", 1), ("k_proj", 0), ("q_proj", 0)):
        torch.testing.assert_close(getattr(module, n)((x, other)[i]), expected[n][i])
    assert isinstance(module.o_proj, Counting) and not isinstance(module.o_proj, Sibling)


def test_nothing_of_an_input_is_kept_once_all_have_read_it() -> None:
    module = Attention(False)
    pack_linears(module, Counting)
    x = torch.randn(1, 8)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(module, name)(x)
    first = module.get_submodule("q_proj")
    assert isinstance(first, Sibling) and first.joint._known is None


def test_weights_are_in_the_module_tree_once() -> None:
    module = Attention(False)
    before = sum(p.numel() for p in module.parameters())
    pack_linears(module, Counting)
    assert sum(p.numel() for p in module.parameters()) == before


def test_layers_with_and_without_bias_are_left_apart() -> None:
    module = Attention(False)
    module.k_proj = nn.Linear(8, 4, bias=True)
    pack_linears(module, Counting)
    assert not any(isinstance(m, Sibling) for m in module.modules())


def test_a_packed_model_makes_four_products_a_layer() -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    ids = torch.tensor([[3, 1, 4, 1]])
    expected = model(ids).logits
    pack_linears(model, Counting)
    Counting.calls = 0
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert Counting.calls == 2 * 4 + 1
