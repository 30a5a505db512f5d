"""TensorFlow's fused RNN block cells, forward and backward, without TensorFlow."""

__version__ = "0.1.0.dev0"
