"""Trainer on unlike GPUs: ``GrassTrainer(..., deal=[11, 5])`` or ``deal="auto"``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grass.distributed.uneven import Deal, UnevenBatches, agree, deal

LOADER = ("num_workers", "pin_memory", "worker_init_fn", "multiprocessing_context", "prefetch_factor")
"""What the loader of uneven batches takes over from Trainer's own."""

Sizes = str | Sequence[int]


class UnevenTraining(TrainerCallback):
    """Deals Trainer's batches unevenly among its processes.

    Trainer already divides the sum of losses by the tokens of all processes and takes the mean of the gradients. So
    only the batches change: accelerate gives list ``i`` of the batch sampler to process ``i % processes``.

    Args:
        trainer: with a model whose loss takes ``num_items_in_batch``.
        sizes: samples of each process in a micro-batch, of which a step has ``gradient_accumulation_steps``; or
            ``"auto"``, which measures all processes and divides the batch that Trainer would take, also into another
            number of micro-batches. Other sizes of these follow after a refresh, when times have changed. Under FSDP2
            no size is larger than ``per_device_train_batch_size``, which has to fit into memory.

    Raises:
        TypeError: ``sizes`` are neither.
        ValueError: Trainer's arguments do not fit uneven batches.
    """

    def __init__(self, trainer: Any, sizes: Sizes) -> None:
        check_arguments(trainer, sizes)
        self.trainer, self.sizes = trainer, sizes
        self.deal: Deal | None = None
        self.sampler: UnevenBatches | None = None
        self._agreement: RemovableHandle | None = None

    def loader(self, even: DataLoader[Any]) -> DataLoader[Any]:
        """The loader to train with, prepared by accelerate, in place of Trainer's own one."""
        trainer, args = self.trainer, self.trainer.args
        if isinstance(even.dataset, IterableDataset):
            raise ValueError("deal= takes data with a length: an IterableDataset has no samples to deal by their place")
        if trainer.accelerator.is_fsdp2:
            shard(trainer)
        check_loss(trainer, even)
        if self.deal is None:
            self.deal = self._measured(even) if self.sizes == "auto" else self._given()
        args.gradient_accumulation_steps = self.deal.division.micro_batches
        seed = args.seed if args.data_seed is None else args.data_seed
        shuffle = args.train_sampling_strategy != "sequential"
        self.sampler = self.deal.batches(len(even.dataset), all_ranks=True, seed=seed, shuffle=shuffle)  # type: ignore[arg-type]
        options = {name: getattr(even, name) for name in LOADER}
        loader = DataLoader(even.dataset, batch_sampler=self.sampler, collate_fn=even.collate_fn, **options)
        prepared: DataLoader[Any] = trainer.accelerator.prepare(loader)
        return prepared

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Make replicas equal at every refresh, because unlike devices round otherwise."""
        optimizer = getattr(kw["optimizer"], "optimizer", kw["optimizer"])  # without accelerate's wrapper
        if not (self.trainer.is_fsdp_enabled or self.trainer.is_deepspeed_enabled):  # there are replicas
            self._agreement = agree(self.trainer.model, optimizer)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """End that."""
        if self._agreement is not None:
            self._agreement.remove()

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Take the order of this epoch, also where Trainer has wrapped the sampler to resume within one."""
        if self.sampler is not None:
            self.sampler.set_epoch(math.floor((state.epoch or 0) + 1e-6))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Take other sizes, if the processes' times have changed, for the steps that no process has begun to load."""
        if self.deal is None or self.sampler is None:
            return
        if self.deal.end_step(state.global_step, keep_micro_batches=True):
            begun = self.deal.ranks.of_each(lambda: self.sampler.begun)  # type: ignore[union-attr]
            self.sampler.change(self.deal.division, max(begun))

    def _given(self) -> Deal:
        assert not isinstance(self.sizes, str)
        return deal(self.sizes, sum(self.sizes) * self.trainer.args.gradient_accumulation_steps)

    def _measured(self, even: DataLoader[Any]) -> Deal:
        trainer, args = self.trainer, self.trainer.args
        is_sharded = trainer.accelerator.is_fsdp2
        if not is_sharded and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            raise ValueError(
                "deal='auto' cannot tell what a process computes from what it waits for others under DeepSpeed and "
                "FSDP1: use DDP or FSDP2, or give sizes, such as deal=[11, 5]"
            )
        optimizer = trainer.create_optimizer()
        if args.gradient_checkpointing:
            trainer.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs
            )

        def work(size: int) -> None:
            trainer.model.train()
            samples = [even.dataset[i % len(even.dataset)] for i in range(size)]  # type: ignore[arg-type]
            loss_of(trainer, samples, even, items=size).backward()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()

        batch = trainer.get_total_train_batch_size(args)
        intervals = [group["update_interval"] for group in optimizer.param_groups]
        sharded = {"model": trainer.model, "largest": args.per_device_train_batch_size} if is_sharded else {}
        return deal(work, batch, device=args.device, replan_every=min(intervals), **sharded)


def shard(trainer: Any) -> None:
    """Let accelerate shard the model by FSDP2 now, because Trainer does so after it has asked for a loader.

    When Trainer does, it gets the same model and optimizer. If accelerate prepared them again, it would checkpoint
    activations twice, and take parameters whose shards are empty for each other.
    """
    if isinstance(trainer.model, FSDPModule):
        return
    prepare = trainer.accelerator.prepare
    prepared = prepare(trainer.model, trainer.create_optimizer())
    trainer.model, trainer.optimizer = prepared
    trainer.model_wrapped = trainer.model

    def once(*objects: Any, **options: Any) -> Any:
        is_prepared = len(objects) == 2 and all(one is other for one, other in zip(objects, prepared, strict=True))
        return prepared if is_prepared else prepare(*objects, **options)

    trainer.accelerator.prepare = once


def check_arguments(trainer: Any, sizes: Sizes) -> None:
    """Refuse what would give other batches or another loss."""
    args = trainer.args
    if sizes != "auto" and (isinstance(sizes, str) or not isinstance(sizes, Sequence)):
        raise TypeError(f"Invalid deal={sizes!r}: must be 'auto' or the samples of each process, such as [11, 5]")
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name):
            raise ValueError(f"Invalid {name}=True: deal={sizes!r} needs each process to load its own batches")
    if not args.average_tokens_across_devices:
        raise ValueError(
            f"Invalid average_tokens_across_devices=False: with deal={sizes!r} each process would weigh its tokens by "
            "their number on that process alone"
        )
    if not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func):
        raise ValueError(
            f"Invalid deal={sizes!r}: {type(trainer.model).__name__}.forward does not take num_items_in_batch, by "
            "which a loss is divided. Pass compute_loss_func"
        )
    if args.n_gpu > 1:
        raise ValueError(f"Invalid deal={sizes!r}: DataParallel splits batches evenly; start a process for each GPU")


def check_loss(trainer: Any, loader: DataLoader[Any]) -> None:
    """Refuse a model whose loss takes ``num_items_in_batch`` and ignores it.

    Raises:
        ValueError: twice the items do not halve the loss.
    """
    was_training, samples = trainer.model.training, [loader.dataset[0]]
    trainer.model.eval()
    with torch.no_grad():
        once, twice = (float(loss_of(trainer, samples, loader, items)) for items in (1, 2))
    trainer.model.train(was_training)
    if not math.isclose(once, 2 * twice, rel_tol=1e-2):
        raise ValueError(
            f"The loss of {type(trainer.model).__name__} ignores num_items_in_batch: it is {once:.6g} for one item and "
            f"{twice:.6g} for two. With deal= it must be the sum over tokens divided by num_items_in_batch"
        )


def loss_of(trainer: Any, samples: list[Any], loader: DataLoader[Any], items: int) -> Tensor:
    """Trainer's loss of some samples."""
    assert loader.collate_fn is not None
    inputs = trainer._prepare_inputs(loader.collate_fn(samples))
    with trainer.compute_loss_context_manager():
        loss: Tensor = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=torch.tensor(items))
    return loss
