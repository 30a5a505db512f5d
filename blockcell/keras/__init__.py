"""LSTM, GRU and SimpleRNN of a Keras 3 model, computed by blockcell on the CPU.

`replace` makes the layers of a model compute by blockcell, in place, and `restore` undoes it.  Weights, names, configs
and files stay Keras' own.  Keras computes by PyTorch, TensorFlow, JAX or numpy, whichever it was started with.
``import blockcell`` alone does not import Keras.

=================  =================================================================================================
``swap.py``        `replace` and `restore`
``computation.py`` what a layer computes, forward and backward, of numpy arrays
``by_torch.py``    the computation as a function of PyTorch, with its gradient
``by_tf.py``       as one of TensorFlow
``by_jax.py``      as one of JAX
``xla_calls.py``   how programs that JAX has compiled call it
``by_numpy.py``    as one of numpy, which has no gradients
=================  =================================================================================================
"""

try:
    import keras as _keras
except ImportError as error:
    raise ImportError(f"blockcell.keras needs Keras 3: pip install keras ({error})") from error
if _keras.__version__.startswith("2."):
    raise ImportError(f"blockcell.keras needs Keras 3; Keras {_keras.__version__} is installed: pip install 'keras>=3'")

from .swap import replace, restore

__all__ = ["replace", "restore"]
