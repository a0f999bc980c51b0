"""Bandwidth of ``shrink_``: python scripts/bench/kernels/shrink.py [--smoke]."""

from __future__ import annotations

from collections.abc import Iterator

from harness import SHAPES, Case, main, randn

from grass import kernels


def cases() -> Iterator[Case]:
    for m, n in SHAPES:
        for contiguous in ("rows", "columns"):

            def shrink(m: int = m, n: int = n, contiguous: str = contiguous):
                x = randn(m, n) if contiguous == "rows" else randn(n, m).t()
                return lambda: kernels.shrink_([x], 0.999, [5])

            yield Case(
                kernel="shrink",
                case=f"{m}x{n} bf16, {contiguous} contiguous",
                make=shrink,
                bytes=4 * m * n,
                target=0.85,
            )


if __name__ == "__main__":
    main("shrink", cases, __doc__)
