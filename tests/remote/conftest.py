"""A bucket for the tests of this folder, and the environment in which this process reaches it."""

import os
from collections.abc import Iterator

import pytest

from tests.remote.bucket import Bucket, serving


@pytest.fixture(scope="session")
def bucket() -> Iterator[Bucket]:
    with serving() as bucket:
        before = {name: os.environ.get(name) for name in bucket.environment}
        os.environ.update(bucket.environment)  # The native client reads it.
        yield bucket
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
