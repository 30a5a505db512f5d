"""For all tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import blockcell
from blockcell import _kernels, _team
from blockcell.optable import OPS

# Their asserts show the values that they compared, as those in test files do.
pytest.register_assert_rewrite("by_formulas", "calls", "convert_cases", "export_cases", "tf_cells")


@pytest.fixture(autouse=True, scope="session")
def _as_many_threads_as_asked_for() -> Iterator[None]:
    """Not one where the machine is busy: a test that compares numbers of threads means them."""
    _team.adapt(False)
    yield
    _team.adapt(True)


@pytest.fixture(scope="module")
def good_calls_afterwards() -> Iterator[None]:
    """After all tests of a module, whatever they did, each op gives the right results."""
    from calls import check, good

    yield
    for op in OPS:
        check(op, good(op))


@pytest.fixture(params=_kernels.available_levels())
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Layers that are made in the test run on the kernels of one CPU level: its name."""
    kernels, work = _kernels.load(request.param)
    monkeypatch.setattr(_kernels, "KERNELS", kernels)
    monkeypatch.setattr(_kernels, "WORK", work)
    return request.param


@pytest.fixture
def set_num_threads() -> Iterator[Callable[[int | None], None]]:
    """`blockcell.set_num_threads`, undone after the test."""
    yield blockcell.set_num_threads
    blockcell.set_num_threads(None)
