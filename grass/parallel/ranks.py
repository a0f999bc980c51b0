"""The processes that train one model together, and what they must agree on."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def checksum(rows: Tensor) -> int:
    """64 bits that differ for different row indices."""
    digest = hashlib.blake2b(rows.cpu().numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True)
class Ranks:
    """A process group. ``None`` means a single process: the methods then do nothing."""

    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        """The given group; without one, all processes."""
        if not dist.is_available() or not dist.is_initialized():
            return cls(None)
        group = group or dist.group.WORLD
        return cls(group if group is not None and group.size() > 1 else None)

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return 0 if self.group is None else self.group.rank()

    def mean_(self, tensors: list[Tensor]) -> None:
        """Replace tensors of one dtype by their mean over the ranks, in one all-reduce for all of them."""
        if self.group is None or not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors]).div_(self.group.size())
        dist.all_reduce(flat, group=self.group)
        for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def first_(self, tensors: list[Tensor]) -> None:
        """Replace tensors of one dtype by those of the first rank, in one broadcast for all of them."""
        if self.group is None or not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.broadcast(flat, dist.get_global_rank(self.group, 0), group=self.group)
        for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def gather(self, own: Tensor, sizes: list[int]) -> list[Tensor]:
        """The flat tensors of all ranks, which have one dtype; every rank knows their ``sizes``."""
        assert self.group is not None
        world, every = self.group.size(), own.new_empty(sum(sizes))
        dist.all_to_all_single(every, own.repeat(world), sizes, [own.numel()] * world, group=self.group)
        return list(torch.split(every, sizes))

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set on any rank."""
        return self.any_of_each([flag], device)[0]

    def any_of_each(self, flags: list[bool], device: torch.device) -> list[bool]:
        """Whether each of the flags is set on any rank, in one all-reduce."""
        if self.group is None:
            return flags
        values = torch.tensor(flags, dtype=torch.int64, device=device)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return [bool(value) for value in values.tolist()]

    def verify_selection(self, chosen: list[Tensor]) -> None:
        """Check that all ranks have selected the same rows in this step, by a checksum of 8 bytes.

        Raises:
            RuntimeError: on every rank, naming those whose rows differ from the majority's.
        """
        if self.group is None or not chosen:
            return
        rows = torch.cat(chosen)
        own = torch.tensor([checksum(rows)], device=rows.device)
        every = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(every, own, group=self.group)
        digests = [int(one) for one in every]
        majority = Counter(digests).most_common(1)[0][0]
        differing = [rank for rank, one in enumerate(digests) if one != majority]
        if differing:
            raise RuntimeError(
                f"Ranks {differing} have selected other rows than the {len(digests) - len(differing)} other ranks: "
                "their weights, gradients or seeds differ"
            )

    def any_differs(self, number: int) -> bool:
        """Whether not all ranks have given the same number, of at most 63 bits; for groups that take host tensors.

        A reduction and a broadcast are trees in gloo, whose all-reduce is a ring.
        """
        if self.group is None:
            return False
        extremes = torch.tensor([number, -number], device="cpu")
        root = dist.get_global_rank(self.group, 0)
        dist.reduce(extremes, root, dist.ReduceOp.MAX, group=self.group)
        dist.broadcast(extremes, root, group=self.group)
        return bool(extremes[0] != -extremes[1])

    def verify_settings(self, own: Mapping[str, Any]) -> None:
        """Check that all ranks have the same plain values, given by name.

        Raises:
            ValueError: on every rank, naming the first value that differs and the ranks that have each.
        """
        if self.group is None:
            return
        every: list[Mapping[str, Any]] = [{}] * self.group.size()
        dist.all_gather_object(every, own, group=self.group)
        for name in {name: None for settings in every for name in settings}:
            ranks: dict[str, list[int]] = {}
            for rank, settings in enumerate(every):
                ranks.setdefault(repr(settings.get(name, "nothing")), []).append(rank)
            if len(ranks) > 1:
                found = "; ".join(f"{value} on ranks {holders}" for value, holders in ranks.items())
                raise ValueError(
                    f"The ranks differ in {name}: {found}. If they do not train one model together, set "
                    "optimizer.process_group to the ranks that do"
                )

    def of_each(self, make: Callable[[], T]) -> list[T]:
        """What ``make`` returns on each rank, by rank. Every rank has to call this.

        Raises:
            ValueError: on every rank, naming each rank whose ``make`` has raised a ``ValueError`` or ``TypeError``.
            RuntimeError: likewise, for any other error.
        """
        if self.group is None:
            return [make()]
        own: tuple[T | None, str | None, bool]
        try:
            own = make(), None, False
        except Exception as error:
            own = None, f"{type(error).__name__}: {error}", isinstance(error, (ValueError, TypeError))
        every: list[Any] = [None] * self.group.size()
        dist.all_gather_object(every, own, group=self.group)
        failed = [f"rank {rank}: {error}" for rank, (_, error, _) in enumerate(every) if error is not None]
        if failed:
            invalid = all(is_invalid for _, error, is_invalid in every if error is not None)
            raise (ValueError if invalid else RuntimeError)("; ".join(failed))
        return [value for value, _, _ in every]
