"""For all tests."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest
from cases import SEED

import blockcell
from blockcell import _kernels, _team
from blockcell.optable import OPS

# Their asserts show the values that they compared, as those in test files do.
pytest.register_assert_rewrite("by_formulas", "calls", "convert_cases", "export_cases", "tf_cells")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let hypothesis draw by BLOCKCELL_SEED, as its own option says, which it reads after this."""
    config.option.hypothesis_seed = getattr(config.option, "hypothesis_seed", None) or SEED


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `more` what a test marked `meet(n)` has of combinations in which no n values meet for the first time."""
    tests = defaultdict(list)
    for item in items:
        for mark in item.iter_markers("meet"):
            tests[item.path, item.originalname, mark.args[0]].append(item)  # type: ignore[attr-defined]
    for (_, _, n), combined in tests.items():
        values = {item: sorted((name, id(value)) for name, value in item.callspec.params.items()) for item in combined}
        combinations_left = {item: set(combinations(values[item], n)) for item in combined}
        met: set[object] = set()
        for new in range(max(map(len, combinations_left.values())), 0, -1):  # those with most that is new come first
            for item in [item for item in combinations_left if len(combinations_left[item] - met) >= new]:
                if len(combinations_left[item] - met) >= new:
                    met |= combinations_left.pop(item)
        for item in combinations_left:
            item.add_marker("more")


@pytest.fixture
def seed() -> int:
    """Return BLOCKCELL_SEED, from which a test's draws follow, and print it, which pytest shows where a test fails."""
    print(f"BLOCKCELL_SEED={SEED}")
    return SEED


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
    monkeypatch.setattr(_kernels, "ENGINES", _kernels.load(request.param))
    return request.param


@pytest.fixture
def set_num_threads() -> Iterator[Callable[[int | None], None]]:
    """`blockcell.set_num_threads`, undone after the test."""
    yield blockcell.set_num_threads
    blockcell.set_num_threads(None)
