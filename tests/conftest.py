"""For all tests."""

from collections.abc import Iterator

import pytest

from blockcell import _team


@pytest.fixture(autouse=True, scope="session")
def _as_many_threads_as_asked_for() -> Iterator[None]:
    """Not one where the machine is busy: a test that compares numbers of threads means them."""
    _team.adapt(False)
    yield
    _team.adapt(True)
