"""For all tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from blockcell import _kernels, _team


@pytest.fixture(autouse=True, scope="session")
def _as_many_threads_as_asked_for() -> Iterator[None]:
    """Not one where the machine is busy: a test that compares numbers of threads means them."""
    _team.adapt(False)
    yield
    _team.adapt(True)


@pytest.fixture(params=_kernels.available_levels())
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Layers that are made in the test run on the kernels of one CPU level: its name."""
    kernels, work = _kernels.load(request.param)
    monkeypatch.setattr(_kernels, "KERNELS", kernels)
    monkeypatch.setattr(_kernels, "WORK", work)
    return request.param
