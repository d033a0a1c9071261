"""Who may do what: the operator's token and the tokens of jobs. Nothing per job is stored."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from pollux.core.errors import Unauthorised

__all__ = ["JOB_TOKEN_PREFIX", "Caller", "Tokens"]

JOB_TOKEN_PREFIX = "pollux-job"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the operator (`job_id` None), or the agent of one job."""

    job_id: str | None = None


class Tokens:
    """Makes and checks tokens. A job's is an HMAC-SHA256 of its id under the service's secret."""

    def __init__(self, operator: str, secret: str) -> None:
        self._operator = operator.encode()
        self._secret = secret.encode()

    @classmethod
    def random(cls) -> Tokens:
        """Tokens that nobody knows yet."""
        return cls(secrets.token_urlsafe(32), secrets.token_hex(32))

    @property
    def operator(self) -> str:
        """The token that may do everything."""
        return self._operator.decode()

    def for_job(self, job_id: str) -> str:
        """The token that may report for one job, and read it."""
        digest = hmac.new(self._secret, job_id.encode(), hashlib.sha256).hexdigest()
        return f"{JOB_TOKEN_PREFIX}.{job_id}.{digest}"

    def caller(self, authorization: str | None) -> Caller:
        """Who shows this `Authorization` header; raises Unauthorised. Compares in constant time."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthorised(
                "no token was shown; send 'Authorization: Bearer TOKEN' (the file 'token' in POLLUX_HOME)"
            )
        shown = token.strip().encode("utf-8", "surrogateescape")
        if hmac.compare_digest(shown, self._operator):
            return Caller()
        prefix, _, rest = token.strip().partition(".")
        job_id, _, _ = rest.rpartition(".")
        if prefix == JOB_TOKEN_PREFIX and hmac.compare_digest(
            shown, self.for_job(job_id).encode("utf-8", "surrogateescape")
        ):
            return Caller(job_id)
        raise Unauthorised("the token is not known here; the file 'token' in POLLUX_HOME has the right one")
