"""Experts on a GPU, where ``grouped_mm`` multiplies all of them in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import grass
from grass import GrassAdamW
from grass.compact_mode import grouped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


@pytest.mark.parametrize("columns", [16, 12])
def test_products_are_those_of_one_expert_after_another(columns: int) -> None:
    """16 columns are aligned as ``grouped_mm`` wants them, 12 are not."""
    x, a = (torch.randn(40, size, device="cuda", dtype=torch.bfloat16) for size in (32, columns))
    matrices = torch.randn(4, columns, 32, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    ends = torch.tensor([7, 7, 30, 36], device="cuda")
    product, inner = grouped.grouped_product(x, matrices, ends), grouped.grouped_inner_product(a, x, ends)
    assert grouped._runs_grouped(a, x) == (columns == 16)
    for expert, tokens in enumerate((slice(0, 7), slice(7, 7), slice(7, 30), slice(30, 36))):
        close: dict[str, Any] = {"rtol": 2e-2, "atol": 5e-2}  # bfloat16, sums of 32 and 23 products
        torch.testing.assert_close(product[tokens], x[tokens] @ matrices[expert], **close)
        torch.testing.assert_close(inner[expert], a[tokens].t() @ x[tokens], **close)
    assert not product[36:].any()


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_mixture_trains_as_on_the_cpu(dim: int, weights: str | None) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.23")  # what experts of it are converted by
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=64, num_local_experts=4)
    ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))

    def run(device: str) -> list[float]:
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM(config)
        grass.compact(model, rank=16, dim=dim, weights=weights)
        model.to(device)
        optimizer, losses = GrassAdamW(model, lr=1e-3, update_interval=4), []
        for _ in range(8):
            loss = model(input_ids=ids.to(device), labels=ids.to(device)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert run("cuda") == pytest.approx(run("cpu"), rel=5e-3)  # 8 steps of float32; codes round at random
