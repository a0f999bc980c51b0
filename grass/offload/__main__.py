"""Measure how fast this machine copies and updates, in about a second, and store it for predictions.

python -m grass.offload --out machine.json
python -m grass.memory --model 13b --offload --machine machine.json
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grass.command_line import ArgumentParser
from grass.device import accelerator
from grass.machine.rates import Machine


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and store if the arguments ask for it."""
    parser = ArgumentParser(__doc__, prog="python -m grass.offload")
    add = parser.add_argument
    add("--device", default=str(accelerator()), help="default: the accelerator if there is one, else cpu")
    add("--threads", type=int, help="of the update on the host; default: as many as grass.Offload takes")
    add("--out", type=Path, metavar="FILE", help="where to store the rates, as JSON")
    args = parser.parse_args(argv)
    if args.threads is not None and args.threads < 1:
        parser.error(f"Invalid --threads={args.threads}: must be >= 1")
    try:
        machine = Machine.measure(args.device, threads=args.threads)
        if args.out is not None:
            machine.save(args.out)
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    print(describe(machine))
    if args.out is not None:
        print(f"written to {args.out}")


def describe(machine: Machine) -> str:
    """The rates, one a line."""
    rows = {
        "host update": f"{machine.host_rate / 1e6:,.0f} million elements/s",
        "device update": f"{machine.device_rate / 1e6:,.0f} million elements/s",
        "copies down": f"{machine.down_rate / 1e9:,.2f} GB/s",
        "copies up": f"{machine.up_rate / 1e9:,.2f} GB/s",
        "computing": f"{machine.compute_rate / 1e12:,.2f} TFLOP/s",
    }
    return "\n".join([machine.name, *(f"{name:<14} {rate}" for name, rate in rows.items())])


if __name__ == "__main__":
    main()
