"""The yard: good directories, made once a session."""

import pytest

from tests.hostile.goods import Yard


@pytest.fixture(scope="session")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Yard:
    return Yard(tmp_path_factory.mktemp("hostile"))
