"""Mark single cases of a parametrized test as slow: ``make test-slow`` runs them, ``make test`` does not."""

from typing import Any

import pytest


def slow_cases(*cases: Any) -> list[Any]:
    """Return cases of a parametrized test, each marked slow; a tuple is a case of several arguments."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
