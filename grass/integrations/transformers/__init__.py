"""Hugging Face's Trainer: a factory builds the optimizer, a callback logs and checks, a Trainer has both.

::

    trainer = Trainer(model, args, ..., optimizer_cls_and_kwargs=(GrassFactory, {"args": args, "rank": 0.125}))
    trainer.add_callback(GrassCallback(trainer))

is the same as

::

    trainer = GrassTrainer(model, args, ..., grass={"rank": 0.125})

Trainer calls the factory after it has loaded the weights of a checkpoint to resume from, and before it wraps the model
for DDP or FSDP2 or compiles it. This is the moment to convert.
"""

from __future__ import annotations

from grass.integrations.transformers.callback import GrassCallback
from grass.integrations.transformers.factory import GrassFactory
from grass.integrations.transformers.trainer import GrassTrainer, GrassTrainerMixin

__all__ = ["GrassCallback", "GrassFactory", "GrassTrainer", "GrassTrainerMixin"]
