"""axolotl: a plugin that gives its Trainer :class:`grass.GrassAdamW`.

::

    plugins:
      - grass.integrations.axolotl.GrassPlugin
    grass:
      rank: 0.25
    optimizer: adamw_torch_fused
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from grass.integrations.transformers import GrassCallback, GrassFactory
from grass.integrations.transformers.factory import check_keywords, check_optim


class GrassArgs(BaseModel):
    """What the plugin adds to axolotl's configuration: ``grass``, the keywords of ``GrassFactory``."""

    grass: dict[str, Any]


class GrassPlugin(BasePlugin):
    """Puts :class:`grass.integrations.transformers.GrassFactory` and its callback into axolotl's Trainer."""

    def get_input_args(self) -> str:
        """Where axolotl finds the arguments that the plugin adds."""
        return "grass.integrations.axolotl.GrassArgs"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Let the Trainer build its optimizer by Grass. It passes its arguments to the factory itself.

        Raises:
            TypeError: ``grass`` has a key that the factory does not have.
            ValueError: the configuration has no ``grass``, or its optimizer is another one than AdamW, or an adapter
                leaves nothing to convert.
        """
        keywords = dict(cfg.get("grass") or {})
        if not keywords:
            raise ValueError("The configuration has no 'grass': give at least a rank, as in grass: {rank: 0.25}")
        if cfg.get("adapter"):
            raise ValueError(f"Invalid adapter={cfg['adapter']!r}: an adapter freezes the weights that Grass trains")
        check_keywords(keywords)
        check_optim(trainer.args)
        if trainer.optimizer_cls_and_kwargs is not None:
            raise ValueError(f"Invalid optimizer={cfg.get('optimizer')!r}: must be adamw_torch or adamw_torch_fused")
        trainer.optimizer_cls_and_kwargs = GrassFactory, keywords
        trainer.add_callback(GrassCallback(trainer))
