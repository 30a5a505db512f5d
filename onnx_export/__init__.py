"""The ops of `blockcell` as ONNX graphs."""

from .build import build

__all__ = ["build"]
