"""Quantization methods of the tests' own, which do what CUDA methods do and the CPU's don't.

Importing `tests.methods` registers them all with vLLM's `register_quantization_config`, each under
the name `vss_<behaviour>`. A checkpoint asks for one in its `quantization_config`.
"""

from tests.methods.base import register
from tests.methods.behaviours import BEHAVIOURS

for behaviour in BEHAVIOURS.values():
    register(behaviour)
