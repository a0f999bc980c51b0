"""Short names of the measured numbers of README.md, so that its source reads well: what each is, and its format."""

_STATE, _GRADIENTS = "mean state_bytes", "mean gradient_bytes"
_OURS, _ADAMW = "@wide-16-auto & 270", "@wide-two-rates & 270"
_TIME = "speed_wide.csv: rank=0.0625"

_AT_LENGTH = "gpu/cells.csv: 28m-wide & 2150 & seed=0"
_AS_RECIPES = (
    f"{_AT_LENGTH} & settings=lr=0.012 rank=0.125 scale=0.25 explore=0.03125 moment_dtype=8bit "
    "stochastic_rounding=True compact=True autocast=False bf16_weights=True"
)
_ONE_RATE = f"{_AT_LENGTH} & adamw & settings=lr=0.00025"

KEYS = {
    "loss": (f"cells.csv: {_OURS}: mean loss_100", ".3f"),
    "adamw-loss": (f"cells.csv: {_ADAMW}: mean loss_100", ".3f"),
    "longer-loss": ("gpu/cells.csv: @wide-16 & 540: mean loss_100", ".3f"),
    "longer-adamw-loss": ("gpu/cells.csv: @wide-two-rates & 540: mean loss_100", ".3f"),
    "equal-time-loss": ("cells.csv: @wide-16 & 320: mean loss_100", ".3f"),
    "step-time": (f"[{_TIME} & method=grass compact: step_ms] / [{_TIME} & method=adamw: step_ms]", ".2f"),
    "mb": (f"([cells.csv: {_OURS}: {_STATE}] + [cells.csv: {_OURS}: {_GRADIENTS}]) / 1000000", ".0f"),
    "adamw-mb": (f"([cells.csv: {_ADAMW}: {_STATE}] + [cells.csv: {_ADAMW}: {_GRADIENTS}]) / 1000000", ".0f"),
    "recipe-less": (
        f"([{_ONE_RATE}: state_bytes] + [{_ONE_RATE}: gradient_bytes]) / "
        f"([{_AS_RECIPES}: state_bytes] + [{_AS_RECIPES}: gradient_bytes])",
        ".0f",
    ),
    "13b-gb": ("memory.csv: model=13b & method=Grass & explore=0.03125: peak_gb", ".1f"),
    "13b-adamw-gb": ("memory.csv: model=13b & method=AdamW: peak_gb", ".1f"),
    "bytes-loss": ("cells.csv: @bytes-8bit & 2150: mean loss_100", ".3f"),
    "bytes-float32-loss": ("cells.csv: @bytes-float32 & 2150: mean loss_100", ".3f"),
    "long-loss-adamw-two-rates": ("cells.csv: @two-rates & 2150: mean loss_100", ".3f"),
}
