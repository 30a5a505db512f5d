"""Where `_stream` finds `ArgumentReader` until it is built again; then this file can go."""

from .argument_reader import ArgumentReader as ArgumentReader
