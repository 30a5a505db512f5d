"""Networks of libraries that are built on PyTorch, before and after `replace`; docs/torch.md has what was found.

`pytest -m peers`, with torch and such a library in .venv.
"""

from __future__ import annotations

import copy

import pytest
from torch_cases import MARKS

torch = pytest.importorskip("torch")
nn = pytest.importorskip("blockcell.torch")

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore")]  # the libraries' own


def compare(model, call, names):
    """Compare outputs and gradients of a model and of a copy in which `replace` takes the modules of these names."""
    other = copy.deepcopy(model)
    assert [*nn.replace(other).changed] == names
    results = []
    for module in (model, other):
        torch.manual_seed(0)
        outputs = call(module)
        torch.autograd.backward(outputs, [torch.cos(output.detach()) for output in outputs])
        results.append([*outputs, *[p.grad for p in module.parameters() if p.grad is not None]])
    assert len(results[0]) > len(outputs)
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4)


def test_sb3_contrib():
    """RecurrentPPO's policy, where episodes start within a sequence; then it learns."""
    sb3_contrib = pytest.importorskip("sb3_contrib")
    ppo = sb3_contrib.RecurrentPPO("MlpLstmPolicy", "CartPole-v1", n_steps=32, batch_size=16, seed=0, device="cpu")
    states = torch.zeros(2, 1, 4, 256).unbind(0)
    rnn_states = type(ppo._last_lstm_states)(states, states)
    start, action = (torch.arange(40) % 7 == 0).float(), torch.arange(40) % 2
    observations = torch.randn(40, 4)

    def call(policy):
        values, log_prob, _ = policy.evaluate_actions(observations, action, rnn_states, start)
        return [values, log_prob]

    compare(ppo.policy, call, ["lstm_actor", "lstm_critic"])
    nn.replace(ppo.policy)
    ppo.learn(64)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_rsl_rl(kind):
    """RNNModel in batches of trajectories, and step by step; its exports look for torch.nn's classes."""
    rnn_model = pytest.importorskip("rsl_rl.models.rnn_model")
    tensordict = pytest.importorskip("tensordict")
    one = tensordict.TensorDict({"policy": torch.randn(4, 6)}, [4])
    options = {"rnn_type": kind, "rnn_hidden_dim": 16, "rnn_num_layers": 2, "hidden_dims": [8]}
    model = rnn_model.RNNModel(one, {"actor": ["policy"]}, "actor", 3, **options)
    steps, masks = tensordict.TensorDict({"policy": torch.randn(10, 4, 6)}, [10, 4]), torch.ones(10, 4, dtype=bool)
    h = torch.zeros(2, 4, 16)

    def call(module):
        module.reset()
        with torch.no_grad():
            module(one)
            module.reset(torch.tensor([1, 0, 0, 1]))
            last = module(one)
        return [module(steps, masks=masks, hidden_state=(h, h) if kind == "lstm" else h) + 0 * last.sum()]

    compare(model, call, ["rnn.rnn"])
    nn.replace(model)
    for export in (model.as_jit, model.as_onnx):
        with pytest.raises(NotImplementedError):
            export()
    nn.restore(model)
    torch.jit.script(model.as_jit())


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_darts(kind):
    """The networks of RNNModel and BlockRNNModel."""
    rnn_model = pytest.importorskip("darts.models.forecasting.rnn_model")
    block = pytest.importorskip("darts.models.forecasting.block_rnn_model")
    common = {"input_size": 2, "hidden_dim": 12, "num_layers": 2, "dropout": 0.0, "nr_params": 1}
    lengths = {"input_chunk_length": 8, "output_chunk_length": 3, "train_sample_shape": None}
    network = rnn_model._RNNModule(name=kind, target_size=1, **common, **lengths)
    x = torch.randn(5, 8, 2)
    compare(network, lambda module: [module((x, None, None))[0]], ["rnn"])
    network = block._BlockRNNModule(
        name=kind, target_size=1, num_layers_out_fc=[], activation="ReLU", future_cov_dim=0, **common, **lengths
    )
    compare(network, lambda module: [module((x, None, None))], ["rnn"])


def test_gluonts():
    """The networks of DeepAR, with samples, and of the temporal fusion transformer."""
    deepar = pytest.importorskip("gluonts.torch.model.deepar.module")
    tft = pytest.importorskip("gluonts.torch.model.tft.layers")
    sizes = {"num_feat_dynamic_real": 1, "num_feat_static_real": 1, "num_feat_static_cat": 1, "cardinality": [1]}
    network = deepar.DeepARModel("D", context_length=8, prediction_length=3, dropout_rate=0.0, **sizes)
    inputs = {
        name: torch.rand(value.shape, dtype=value.dtype) if value.is_floating_point() else value
        for name, value in network.describe_inputs(batch_size=2).zeros().items()
    }
    inputs["past_observed_values"] = torch.ones_like(inputs["past_target"])
    target = torch.rand(2, 3)
    compare(network, lambda module: [module.log_prob(**inputs, future_target=target)], ["rnn"])
    nn.replace(network)
    assert network(**inputs, num_parallel_samples=4).isfinite().all()
    encoder = tft.TemporalFusionEncoder(d_input=6, d_hidden=8)
    past, future, state = torch.randn(2, 8, 6), torch.randn(2, 3, 6), [torch.randn(1, 2, 8), torch.randn(1, 2, 8)]
    compare(encoder, lambda module: [module(past, future, state)], ["encoder_lstm", "decoder_lstm"])
