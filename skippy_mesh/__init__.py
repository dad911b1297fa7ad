"""Serve one GGUF model, split by layers over the machines of a Ray cluster.

Start at :mod:`skippy_mesh.engine`, the loop; ``ARCHITECTURE.md`` beside this file is the map.
"""

from importlib.metadata import version

__version__ = version("skippy-mesh")
