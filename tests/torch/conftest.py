import pytest


@pytest.fixture
def dynamo():
    """Nothing compiled before, nor left behind."""
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def threads_of_torch_as_before():
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
