"""What is said about S3's own words."""

from __future__ import annotations

import pytest

from promptmill.store.s3_hints import hint


@pytest.mark.parametrize(
    ("error", "word"),
    [
        ("NoCredentialsError: Unable to locate credentials", "AWS_ACCESS_KEY_ID"),
        ("SSLError: SSL validation failed for https://h:9000/ [SSL: WRONG_VERSION_NUMBER]", "http://"),
        ("EndpointConnectionError: Could not connect to the endpoint URL", "AWS_ENDPOINT_URL"),
        ("PermissionError: The AWS Access Key Id you provided does not exist in our records.", "not known"),
        ("PermissionError: The request signature we calculated does not match", "AWS_SECRET_ACCESS_KEY"),
        ("OSError: [Errno 5] The authorization header is malformed; the region 'x' is wrong", "AWS_REGION"),
        ("PermissionError: Access Denied", "put, get, list and delete"),
        ("PermissionError: RequestTimeTooSkewed", "clock"),
    ],
)
def test_hint_names_what_to_set(error: str, word: str) -> None:
    assert word in hint(error)


def test_hint_says_nothing_of_what_it_does_not_know() -> None:
    assert hint("OSError: something else") == ""
