"""Short names of the measured numbers of README.md, so that its source reads well: what each is, and its format."""

_STATE, _GRADIENTS = "mean state_bytes", "mean gradient_bytes"
_OURS, _ADAMW = "@wide-16-auto & 270", "@wide-two-rates & 270"
_TIME = "speed_wide.csv: rank=0.0625"

_GPU_LONG = "gpu/cells.csv: 28m-wide & 2150 & seed=0 & settings=lr=0.012"

KEYS = {
    "gpu-long-adamw": (
        f"{_GPU_LONG} rank=1.0 update_interval=1000000 scale=0.03125 selection=top_r dim=auto state_policy=reset "
        "explore=0: loss_100",
        ".3f",
    ),
    "gpu-long-quarter": (f"{_GPU_LONG} scale=0.0625 explore=0.25 compact=True: loss_100", ".3f"),
    "gpu-long-eighth": (f"{_GPU_LONG} rank=0.125 scale=0.125 explore=0.125 compact=True: loss_100", ".3f"),
    "gpu-long-sixteenth": (f"{_GPU_LONG} rank=0.0625 scale=0.25 explore=0.0625 compact=True: loss_100", ".3f"),
    "loss": (f"cells.csv: {_OURS}: mean loss_100", ".3f"),
    "adamw-loss": (f"cells.csv: {_ADAMW}: mean loss_100", ".3f"),
    "longer-loss": ("cells.csv: @wide-16 & 540: mean loss_100", ".3f"),
    "longer-adamw-loss": ("cells.csv: @wide-two-rates & 540: mean loss_100", ".3f"),
    "equal-time-loss": ("cells.csv: @wide-16 & 340: loss_100", ".3f"),
    "step-time": (f"[{_TIME} & method=grass compact: step_ms] / [{_TIME} & method=adamw: step_ms]", ".2f"),
    "mb": (f"([cells.csv: {_OURS}: {_STATE}] + [cells.csv: {_OURS}: {_GRADIENTS}]) / 1000000", ".0f"),
    "adamw-mb": (f"([cells.csv: {_ADAMW}: {_STATE}] + [cells.csv: {_ADAMW}: {_GRADIENTS}]) / 1000000", ".0f"),
    "13b-gb": ("memory.csv: model=13b & method=Grass & explore=0.03125: peak_gb", ".1f"),
    "13b-adamw-gb": ("memory.csv: model=13b & method=AdamW: peak_gb", ".1f"),
    "long-loss-quarter": ("cells.csv: @compact-4 & 2150: mean loss_100", ".3f"),
    "long-loss-eighth": ("cells.csv: @compact-8 & 2150: mean loss_100", ".3f"),
    "long-wide-loss-half": ("cells.csv: @long-wide-2 & 2150: loss_100", ".3f"),
    "long-wide-loss-quarter": ("cells.csv: @long-wide-4 & 2150: loss_100", ".3f"),
    "long-wide-loss-adamw": ("cells.csv: @long-wide-two-rates & 2150: loss_100", ".3f"),
    "bytes-loss": ("cells.csv: @bytes-8bit & 2150: mean loss_100", ".3f"),
    "bytes-float32-loss": ("cells.csv: @bytes-float32 & 2150: mean loss_100", ".3f"),
    "long-loss-adamw-two-rates": ("cells.csv: @two-rates & 2150: mean loss_100", ".3f"),
    "long-loss-quarter-best": ("cells.csv: @float32-compact-4 & 2150: mean loss_100", ".3f"),
    "long-loss-adamw-best": ("cells.csv: @float32-two-rates & 2150: mean loss_100", ".3f"),
    "long-loss-adamw": ("cells.csv: @adamw & 2150: mean loss_100", ".3f"),
}
