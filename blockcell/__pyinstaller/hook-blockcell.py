"""PyInstaller's hook for blockcell: compiled modules import each other, and kernels are imported by computed names."""

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_file_names = [
    file.name for file in Path(__file__).parents[1].iterdir() if file.name.endswith(tuple(EXTENSION_SUFFIXES))
]
hiddenimports = [f"blockcell.{name.partition('.')[0]}" for name in _file_names]
# A program that passes models of PyTorch or Keras to blockcell, or has onnxruntime run a model, imports these itself.
excludedimports = ["jax", "keras", "onnxruntime", "tensordict", "tensorflow", "torch", "torchrl"]
