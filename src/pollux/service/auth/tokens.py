"""The tokens of operator, viewer and jobs. Nothing is stored for single jobs."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Literal

from pollux.core.errors import Unauthorised

__all__ = ["JOB_TOKEN_PREFIX", "Caller", "Role", "Tokens"]

JOB_TOKEN_PREFIX = "pollux-job"

Role = Literal["operator", "viewer"]
"""The roles of people: an operator may do everything, a viewer only read."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: a person (`job_id` None) with a role, or the agent of one job.

    `session_id` is that of a person's browser; None for a caller with a token.
    """

    job_id: str | None = None
    role: Role = "operator"
    session_id: str | None = field(default=None, repr=False)


class Tokens:
    """Makes and checks tokens. A job's is an HMAC-SHA256 of its id under the service's secret.

    Without a `viewer` token there is no viewer.
    """

    def __init__(self, operator: str, secret: str, viewer: str | None = None) -> None:
        self._operator = operator.encode()
        self._secret = secret.encode()
        self._viewer = None if viewer is None else viewer.encode()

    @classmethod
    def random(cls) -> Tokens:
        """New random tokens."""
        return cls(secrets.token_urlsafe(32), secrets.token_hex(32), secrets.token_urlsafe(32))

    @property
    def operator(self) -> str:
        """The operator's token."""
        return self._operator.decode()

    @property
    def viewer(self) -> str | None:
        """The viewer's token; None if there is none."""
        return None if self._viewer is None else self._viewer.decode()

    def role_of(self, token: str) -> Role | None:
        """The role of a person's token; None for any other token. Compares in constant time."""
        shown = token.encode("utf-8", "surrogateescape")
        if hmac.compare_digest(shown, self._operator):
            return "operator"
        if self._viewer is not None and hmac.compare_digest(shown, self._viewer):
            return "viewer"
        return None

    def mark_of(self, role: Role) -> str:
        """A mark that changes with the role's token, and says nothing about the token."""
        return self.sign("token", self.operator if role == "operator" else self.viewer or "")

    def sign(self, purpose: str, text: str) -> str:
        """HMAC-SHA256 of the text under the service's secret, for one purpose."""
        return hmac.new(
            self._secret, f"{purpose}\0{text}".encode("utf-8", "surrogateescape"), hashlib.sha256
        ).hexdigest()

    def for_job(self, job_id: str) -> str:
        """The token of one job's agent, which may report for the job and read it."""
        digest = hmac.new(self._secret, job_id.encode(), hashlib.sha256).hexdigest()
        return f"{JOB_TOKEN_PREFIX}.{job_id}.{digest}"

    def caller(self, authorization: str | None) -> Caller:
        """The caller with this `Authorization` header; raises Unauthorised. Compares in constant time."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthorised(
                "the request has no token; send 'Authorization: Bearer TOKEN' (the file 'token' in POLLUX_HOME)"
            )
        shown = token.strip().encode("utf-8", "surrogateescape")
        role = self.role_of(token.strip())
        if role is not None:
            return Caller(role=role)
        prefix, _, rest = token.strip().partition(".")
        job_id, _, _ = rest.rpartition(".")
        if prefix == JOB_TOKEN_PREFIX and hmac.compare_digest(
            shown, self.for_job(job_id).encode("utf-8", "surrogateescape")
        ):
            return Caller(job_id)
        raise Unauthorised("this service does not know the token; the file 'token' in POLLUX_HOME has the right one")
