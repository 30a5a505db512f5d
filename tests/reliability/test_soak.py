"""Eight Python threads call everything at once, on one to three threads of the kernels: each result has its bits.

What a result should be was computed before by one thread alone. `make test-all` makes many more calls. soak.py runs
in a child, so that a crash is a failed test.
"""

from pathlib import Path

import pytest
from fresh import script

SOAK = Path(__file__).parents[2] / "tools" / "soak.py"


@pytest.mark.parametrize(
    ("calls", "case"), [(300, 0), *(pytest.param(20_000, case, marks=pytest.mark.slow) for case in (1, 2))]
)
def test_everything_at_once(calls, case, seed):
    result = script(SOAK, str(calls), str(seed + case), minutes=30, OMP_WAIT_POLICY="passive")
    print(result.stdout)
    assert result.returncode == 0, result.stderr[-5000:]
