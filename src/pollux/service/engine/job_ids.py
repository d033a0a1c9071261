"""Ids of new jobs: free ones, and those of earlier submissions with the same idempotency key."""

from __future__ import annotations

import hashlib
import json
import logging
import os.path
from collections import OrderedDict
from collections.abc import Mapping

from pollux.controller import ENDED, JobRecord
from pollux.core.errors import Conflict, StoreFailed
from pollux.service.settings import ServiceSettings
from pollux.store.protocol import Store
from pollux.wire.codec import encode_json
from pollux.wire.job import JobRequest

__all__ = ["JobIds"]

_log = logging.getLogger("pollux.service")
_REMEMBERED_KEYS = 256
_JOB_FOLDERS = ("checkpoints", "logs", "receipts")
_SETTING = "idempotency"


class JobIds:
    """Chooses the ids of jobs. Called in the engine's thread only."""

    def __init__(self, store: Store, settings: ServiceSettings) -> None:
        self._store = store
        self._settings = settings
        self._warned = False

    def of_submission(self, request: JobRequest, key: str | None, jobs: Mapping[str, JobRecord]) -> tuple[str, bool]:
        """The id for a submission, and whether the same submission was accepted before; writes its key down."""
        digest = hashlib.sha256(encode_json(request).encode()).hexdigest()
        known = self._known_keys()
        job_id, known_digest = ("", "") if key is None else known.get(key, ("", ""))
        if job_id in jobs:
            if known_digest != digest:
                raise Conflict(f"idempotency key '{key}' was used for another job; use a new key for a new job")
            return job_id, True
        job_id = self.free_id(request.name, jobs)
        # A key with a free id belongs to a submission that was refused.
        left = OrderedDict((name, entry) for name, entry in known.items() if entry[0] != job_id)
        if key is not None:
            # Written before the job; after a crash in between there is no such job, and the next submission makes it.
            left[key] = (job_id, digest)
            while len(left) > _REMEMBERED_KEYS:
                left.popitem(last=False)
        if left != known:
            self._store.set_setting(_SETTING, json.dumps(left))
        return job_id, False

    def _known_keys(self) -> OrderedDict[str, tuple[str, str]]:
        """The keys of earlier submissions; none if they cannot be read, which is logged and mended by the next key."""
        try:
            known = json.loads(self._store.setting(_SETTING) or "{}")
            keys = OrderedDict((key, (str(job_id), str(digest))) for key, (job_id, digest) in known.items())
            self._warned = False
        except (StoreFailed, ValueError, TypeError, AttributeError, RecursionError) as error:
            keys = OrderedDict()
            if not self._warned:
                _log.warning(
                    "the idempotency keys in the store cannot be read (%s): none is known; a submission that is sent "
                    "again under an earlier key makes a second job",
                    type(error).__name__,
                )
            self._warned = True
        return keys

    def free_id(self, name: str, jobs: Mapping[str, JobRecord]) -> str:
        """The name, with a number if earlier jobs had it; Conflict if a job of this name has not ended.

        Ids of forgotten jobs with folders are not used again, since a new job would continue from their checkpoints.
        """
        job_id, number = name, 1
        while (record := jobs.get(job_id)) is not None or self._has_folders(job_id):
            if record is not None and record.state not in ENDED:
                raise Conflict(
                    f"job '{job_id}' is {record.state}; cancel it with 'pollux cancel {job_id}', "
                    "or give the new one another name"
                )
            number += 1
            job_id = f"{name}-{number}"
        return job_id

    def _has_folders(self, job_id: str) -> bool:
        """Whether an earlier job left folders. Without a log (`pollux run --home`) a new job continues from them."""
        home = self._settings.home
        # Links are not followed, since their target may hang the engine's thread.
        return self._settings.store != "memory" and any(os.path.lexists(home / kind / job_id) for kind in _JOB_FOLDERS)
