"""Whose update is so large that it is left out of a round; the same answer on all sites."""

from collections.abc import Sequence
from math import isfinite
from statistics import median


def outliers(norms: Sequence[float], factor: float | None) -> tuple[int, ...]:
    """The sites whose update's norm is more than `factor` times the median of the others'.

    Args:
        norms: by site, as all sites were told them.
        factor: None leaves nobody out.
    """
    if factor is None:
        return ()
    found = []
    for site, norm in enumerate(norms):
        usual = median(others) if (others := [*norms[:site], *norms[site + 1 :]]) else norm
        if not isfinite(norm) or norm > factor * usual > 0:
            found.append(site)
    return tuple(found)
