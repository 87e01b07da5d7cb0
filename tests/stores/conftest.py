from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stores.engines import Process, redis_server, s3_server


@pytest.fixture(scope="session")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with redis_server(tmp_path_factory.mktemp("redis")) as process:
        yield process


@pytest.fixture(scope="session")
def s3_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with s3_server(tmp_path_factory.mktemp("s3")) as process:
        yield process
