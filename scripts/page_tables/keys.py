"""Short names of the measured numbers of README.md, so that its source reads well: what each is, and its format."""

_STATE, _GRADIENTS = "mean state_bytes", "mean gradient_bytes"
_MEMORY = "explore=as rank & policy=keep & moments=float32 & checkpointing=True & refresh=False"

KEYS = {
    "loss": ("cells.csv: @wide-8: mean loss_100", ".3f"),
    "adamw-loss": ("cells.csv: @wide-two-rates: mean loss_100", ".3f"),
    "default-loss": ("cells.csv: @wide-8-auto: mean loss_100", ".3f"),
    "step-time": ("[speed_wide.csv: method=grass compact: step_ms] / [speed_wide.csv: method=adamw: step_ms]", ".2f"),
    "mb": (f"([cells.csv: @wide-8: {_STATE}] + [cells.csv: @wide-8: {_GRADIENTS}]) / 1000000", ".0f"),
    "sixteenth-mb": (f"([cells.csv: @wide-16: {_STATE}] + [cells.csv: @wide-16: {_GRADIENTS}]) / 1000000", ".0f"),
    "sixteenth-loss": ("cells.csv: @wide-16: mean loss_100", ".3f"),
    "adamw-mb": (
        f"([cells.csv: @wide-two-rates: {_STATE}] + [cells.csv: @wide-two-rates: {_GRADIENTS}]) / 1000000",
        ".0f",
    ),
    "13b-gb": (f"memory.csv: model=13b & method=Grass & {_MEMORY}: peak_gb", ".1f"),
    "13b-adamw-gb": ("memory.csv: model=13b & method=AdamW: peak_gb", ".1f"),
    "long-loss-quarter": ("cells.csv: @compact-4 & 2150: mean loss_100", ".3f"),
    "long-loss-eighth": ("cells.csv: @compact-8 & 2150: mean loss_100", ".3f"),
    "long-loss-adamw-two-rates": ("cells.csv: @two-rates & 2150: mean loss_100", ".3f"),
    "long-loss-adamw": ("cells.csv: @adamw & 2150: mean loss_100", ".3f"),
}
