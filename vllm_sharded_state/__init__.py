"""Weights that come back: exact save and load of vLLM's sharded state.

The package plugs into vLLM through its entry-point group `vllm.general_plugins`; importing it does
nothing by itself and imports neither torch nor vLLM.
"""

__version__ = "0.1.0"
