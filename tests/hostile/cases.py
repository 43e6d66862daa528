"""The corpus, whole."""

from tests.hostile import byte_cases, header_cases
from tests.hostile.corpus import Case

CORPUS: dict[str, Case] = {}
for _module in (byte_cases, header_cases):
    for _case in _module.cases():
        assert _case.name not in CORPUS, _case.name
        CORPUS[_case.name] = _case
