"""For all tests of conversions."""

import sys

import pytest
from convert_cases import KERAS


@pytest.fixture(autouse=True)
def keras_stand_in(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Provide the module that classes standing for Keras' say they are from; `convert_cases.rng` draws by the seed."""
    monkeypatch.setitem(sys.modules, KERAS.__name__, KERAS)
