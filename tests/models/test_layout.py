"""Which layers share a traced body."""

import pytest

from jla.models.layout import Run, find_run


@pytest.mark.parametrize(
    ("kinds", "run"),
    [
        ("", Run(0, 0, 1)),
        ("a", Run(0, 1, 1)),
        ("ab", Run(0, 2, 1)),
        ("aaaa", Run(0, 1, 4)),
        ("ababab", Run(0, 2, 3)),
        ("aaab", Run(0, 1, 3)),
        ("baaa", Run(1, 1, 3)),
        ("aabaabaab", Run(0, 3, 3)),
        ("xabababy", Run(1, 2, 3)),
        ("abcd", Run(0, 4, 1)),
    ],
)
def test_the_run_that_leaves_the_fewest_bodies(kinds, run):
    found = find_run(kinds)
    assert found == run
    bodies = len(kinds) - found.period * (found.repeats - 1)
    assert bodies == fewest_bodies(kinds)


def fewest_bodies(kinds):
    """By trying everything."""
    best = len(kinds)
    for start in range(len(kinds)):
        for period in range(1, len(kinds)):
            piece, repeats = kinds[start : start + period], 1
            while len(piece) == period and kinds[start:].startswith(piece * (repeats + 1)):
                repeats += 1
            best = min(best, len(kinds) - period * (repeats - 1))
    return best
