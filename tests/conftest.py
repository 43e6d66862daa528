"""Fixtures that run model-level batches and engines, each once a session."""

from collections.abc import Callable

import pytest

from tests.support.engine_lab import EngineLab
from tests.support.lab import Lab, Zoo


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def lab(
    request: pytest.FixtureRequest, zoo: Zoo, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Lab]:
    """The lab of a way, for every (kind, way, layout) that some collected test has as parameters."""
    root = tmp_path_factory.mktemp("lab")
    cases: dict[str, list[tuple[str, str]]] = {}
    again: dict[str, list[tuple[str, str]]] = {}
    for item in request.session.items:
        if "lab" not in getattr(item, "fixturenames", ()) or not hasattr(item, "callspec"):
            continue
        given = item.callspec.params
        if {"kind", "way", "layout"} <= given.keys():
            case = (given["kind"], given["layout"])
            cases.setdefault(given["way"], []).append(case)
            if item.get_closest_marker("saves_again"):
                again.setdefault(given["way"], []).append(case)
    labs: dict[str, Lab] = {}

    def of(way: str) -> Lab:
        if way not in labs:
            labs[way] = Lab(way, zoo, root, cases.get(way, ()), again.get(way, ()))
        return labs[way]

    return of


@pytest.fixture(scope="session")
def engines(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> EngineLab:
    return EngineLab(zoo, tmp_path_factory.mktemp("engines"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "saves_again: needs what a second generation saved")
