"""Fake runs of experts' products have the shapes and strides that the kernel writes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from varuna_capslog.model import hollow  # noqa: F401  (it makes the shapes known)


def product_layouts(columns: int, groups: int = 2) -> list[tuple]:
    """Return size, strides and type of an experts' product in float32, and of its gradients."""
    tokens = torch.zeros(8, 16, requires_grad=True)
    experts = torch.zeros(groups, 16, columns, requires_grad=True)
    ends = torch.full((groups,), 8, dtype=torch.int32)
    product = functional.grouped_mm(tokens, experts, offs=ends)
    gradients = torch.autograd.grad(product, (tokens, experts), torch.zeros(8, columns))
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in (product, *gradients)]


@pytest.mark.parametrize("columns", [32, 4])
def test_an_experts_product_in_float32_has_the_layout_of_the_kernel(columns):
    run = product_layouts(columns)
    with FakeTensorMode():
        assert product_layouts(columns) == run


def test_rows_of_a_product_begin_at_multiples_of_16_bytes():
    def layout() -> tuple:
        experts = torch.zeros(2, 30, 16).transpose(1, 2)  # stored as weights of a linear layer
        product = functional.grouped_mm(torch.zeros(8, 16), experts, offs=torch.full((2,), 8, dtype=torch.int32))
        return product.shape, product.stride()

    run = layout()
    with FakeTensorMode():
        assert layout() == run == ((8, 30), (32, 1))


def test_a_batch_of_products_has_the_layout_of_the_kernel():
    def layout() -> tuple:
        product = functional.grouped_mm(torch.zeros(2, 8, 16), torch.zeros(2, 16, 12))
        return product.shape, product.stride(), product.dtype

    run = layout()
    with FakeTensorMode():
        assert layout() == run


def test_other_types_take_torchs_own_function():
    with FakeTensorMode():
        half = functional.grouped_mm(
            torch.zeros(8, 16, dtype=torch.bfloat16),
            torch.zeros(2, 16, 32, dtype=torch.bfloat16),
            offs=torch.zeros(2, dtype=torch.int32),
        )
        assert half.dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match=r"Expected (mat_a|inputs of BF16)"):
            functional.grouped_mm(
                torch.zeros(8, 16, dtype=torch.float64),
                torch.zeros(2, 16, 32, dtype=torch.float64),
                offs=torch.zeros(2, dtype=torch.int32),
            )
