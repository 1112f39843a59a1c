"""What to look at when S3 refuses, by the words of its error. Pure."""

from __future__ import annotations

_HINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("unable to locate credentials", "partial credentials", "nocredentials"),
        "no key was found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    ),
    (
        ("ssl validation", "sslerror", "ssl:"),
        "the endpoint does not speak https: is it http:// in AWS_ENDPOINT_URL?",
    ),
    (
        (
            "could not connect",
            "endpointconnection",
            "connecttimeout",
            "connect timeout",
            "name or service not",
        ),
        "nobody answers there: see AWS_ENDPOINT_URL (unset: Amazon's own)",
    ),
    (("invalid endpoint", "invalidendpoint"), "AWS_ENDPOINT_URL is no address: http://HOST:PORT is wanted"),
    (
        ("invalidaccesskeyid", "access key id you provided", "access key id does not exist"),
        "AWS_ACCESS_KEY_ID is not known there",
    ),
    (("signaturedoesnotmatch", "signature we calculated"), "AWS_SECRET_ACCESS_KEY is not that key's"),
    (("requesttimetooskewed", "difference between the request time"), "this host's clock is wrong"),
    (
        (
            "permanentredirect",
            "permanent redirect",
            "authorizationheadermalformed",
            "locationconstraint",
            "region",
        ),
        "the region is another one: set AWS_REGION to the bucket's",
    ),
    (
        ("accessdenied", "access denied", "forbidden", "permissionerror"),
        "the key may not do that: it needs to put, get, list and delete objects there",
    ),
)


def hint(error: str) -> str:
    """One sentence for the words of an error, as an addition to it; empty where nothing is known."""
    said = error.lower()
    return next((f" ({text})" for words, text in _HINTS if any(word in said for word in words)), "")
