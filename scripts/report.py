"""Turn runs' metrics.csv into one static page: curves side by side, and a table of what each run came to.

    python scripts/report.py runs/adamw runs/grass --out report.html
    python scripts/report.py runs/grass --out report.png      # the curves alone

Takes the CSVs of scripts/pretrain.py and scripts/finetune.py, or any other with a column `step`: every other column of
numbers gets a plot. Losses, gradient norms and rates of training are smoothed, which their titles say. The page holds
its images and needs no network.
"""

from __future__ import annotations

from pathlib import Path

from grass.command_line import ArgumentParser
from training.run.report import read_run, write_html, write_png


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run, or a CSV file")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="ends in .html or .png")
    parser.add_argument("--smooth", type=float, default=20, help="span of the moving average, in rows; 1 is off")
    args = parser.parse_args(argv)
    writers = {".html": write_html, ".png": write_png}
    try:
        if args.out.suffix not in writers:
            raise ValueError(f"Invalid --out {args.out}: must end in .html or .png")
        if args.smooth < 1:
            raise ValueError(f"Invalid --smooth {args.smooth}: must be >= 1")
        names = run_names(args.runs)
        writers[args.out.suffix]({name: read_run(path) for name, path in names.items()}, args.out, args.smooth)
    except ValueError as error:
        parser.error(str(error))
    print(args.out)


def run_names(paths: list[Path]) -> dict[str, Path]:
    """The paths by their last part, or by all of it where that would be ambiguous."""
    short = [path.name for path in paths]
    names = short if len(set(short)) == len(short) else [str(path) for path in paths]
    return dict(zip(names, paths, strict=True))


if __name__ == "__main__":
    main()
