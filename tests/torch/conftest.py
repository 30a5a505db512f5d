import pytest


@pytest.fixture
def dynamo():
    """Nothing compiled before, nor left behind."""
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
