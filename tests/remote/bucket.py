"""A bucket on 127.0.0.1: moto's S3 server, which speaks S3 and keeps objects in memory."""

import logging
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import boto3
from moto.server import ThreadedMotoServer

NAME = "models"


@dataclass
class Bucket:
    """`environment` is what clients need to know; `log` holds the server's line for each request."""

    environment: dict[str, str]
    client: object
    log: list[str] = field(default_factory=list)

    def put(self, directory: Path, prefix: str) -> str:
        """Upload every file of `directory`; returns the address."""
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                self.client.put_object(  # type: ignore[attr-defined]
                    Bucket=NAME,
                    Key=f"{prefix}/{path.relative_to(directory).as_posix()}",
                    Body=path.read_bytes(),
                )
        return f"s3://{NAME}/{prefix}"

    def read(self) -> set[str]:
        """Keys of the objects whose content was asked for."""
        pattern = re.compile(rf"GET (?:http://[^/ ]+)?/{NAME}/(\S+) HTTP")
        return {match[1] for line in self.log for match in [pattern.search(line)] if match}


class _Log(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(re.sub(r"\x1b\[\d+m", "", record.getMessage()))


@contextmanager
def serving() -> Iterator[Bucket]:
    """A bucket that answers until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": endpoint,
        "RUNAI_STREAMER_S3_ENDPOINT": endpoint,
    }
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    bucket = Bucket(environment, client)
    logger = logging.getLogger("werkzeug")
    handler, level = _Log(bucket.log), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    try:
        client.create_bucket(Bucket=NAME)
        yield bucket
    finally:
        server.stop()
        logger.removeHandler(handler)
        logger.setLevel(level)
