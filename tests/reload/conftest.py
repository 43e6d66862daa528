"""Runs the jobs that the collected tests ask for, one process a way and plugin."""

from collections.abc import Callable

import pytest

from tests.reload import cases
from tests.reload.lab import ReloadLab


@pytest.fixture(scope="session")
def reload_lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], ReloadLab]:
    """The lab of a way, with the jobs of the tests that were collected."""
    root = tmp_path_factory.mktemp("reload")
    wanted: dict[str, set[str]] = {}
    for item in request.session.items:
        if "reload_lab" in getattr(item, "fixturenames", ()):
            params = item.callspec.params if hasattr(item, "callspec") else {}
            marker = item.get_closest_marker("jobs")
            names = set(marker.args) if marker else {params["job"]}
            for name in names:
                wanted.setdefault(cases.way_of(name), set()).add(name)
    labs: dict[str, ReloadLab] = {}

    def of(way: str) -> ReloadLab:
        if way not in labs:
            names = sorted(wanted.get(way, ()))
            jobs = {name: cases.JOBS[name] for name in names}
            labs[way] = ReloadLab(way, root, jobs, {cases.kind_of(name) for name in names})
        return labs[way]

    return of


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "jobs(*names): the jobs that a test of reloads looks at")
