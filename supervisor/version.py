"""The version, read once from the installed distribution."""

from importlib.metadata import version

VERSION = version("gpuward")
