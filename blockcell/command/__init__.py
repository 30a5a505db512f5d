"""The command `blockcell`: the only part of the package that uses `onnx_export`, and packages that draw."""

from .cli import main

__all__ = ["main"]
