"""Bandwidth of ``row_norms`` along both dimensions: python scripts/bench/kernels/row_norms.py [--smoke]."""

from __future__ import annotations

from collections.abc import Iterator

from harness import SHAPES, Case, main, randn

from grass import kernels


def cases() -> Iterator[Case]:
    for m, n in SHAPES:
        for dim in (0, 1):

            def norms(m: int = m, n: int = n, dim: int = dim):
                x = randn(m, n)
                return lambda: kernels.row_norms(x, dim)

            yield Case(kernel="row_norms", case=f"{m}x{n} dim={dim} bf16", make=norms, bytes=2 * m * n, target=0.85)


if __name__ == "__main__":
    main("row_norms", cases, __doc__)
