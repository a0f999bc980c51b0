"""One batch on unlike GPUs, divided by their speed and memory (after Cephalo, https://arxiv.org/abs/2411.01075)."""

from grass.distributed.uneven.agreement import agree
from grass.distributed.uneven.deal import Deal, deal
from grass.distributed.uneven.sampler import UnevenBatches

__all__ = ["Deal", "UnevenBatches", "agree", "deal"]
