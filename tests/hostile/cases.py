"""The corpus, whole."""

from tests.hostile import (
    byte_cases,
    directory_cases,
    header_cases,
    manifest_cases,
    meaning_cases,
    staged_cases,
)
from tests.hostile.corpus import Case

CORPUS: dict[str, Case] = {}
for _module in (
    directory_cases,
    byte_cases,
    header_cases,
    manifest_cases,
    meaning_cases,
    staged_cases,
):
    for _case in _module.cases():
        assert _case.name not in CORPUS, _case.name
        CORPUS[_case.name] = _case
