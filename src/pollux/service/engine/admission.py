"""Checks a request before submission: its folder and command, and its store; also notes for the user."""

from __future__ import annotations

from pollux.backends.protocol import Backend
from pollux.core.errors import InvalidInput, WorkdirMissing
from pollux.service.engine.launch import folders_of, store_of
from pollux.service.engine.notices import note_on_notice
from pollux.service.engine.storage_check import note_on_store, require_store
from pollux.service.settings import ServiceSettings
from pollux.store.protocol import Telemetry
from pollux.wire.job import JobRequest
from pollux.wire.jobfile import check_paths, is_elsewhere

__all__ = ["Admission"]

_SHIP = "'pollux submit --ship' sends yours along"


class Admission:
    """Refuses requests that cannot run here. May be called from any thread; takes seconds if a store is tried."""

    def __init__(self, backend: Backend, telemetry: Telemetry, settings: ServiceSettings) -> None:
        self._backend = backend
        self._telemetry = telemetry
        self._settings = settings

    def check(self, request: JobRequest) -> None:
        """Refuse a job whose folder or command does not exist, or whose checkpoint folder nodes cannot share."""
        faults = check_paths(request)
        if faults:
            raise self._refusal(faults[0], is_elsewhere(request))
        folders = folders_of(request, self._settings.home)
        why = self._backend.refuses(folders)
        if why:
            raise self._refusal(why, bool(self._backend.refuses(folders[:1])))
        self.check_store(request)

    def _refusal(self, why: str, lacks_folder: bool) -> InvalidInput:
        """The error. Sending the folder along puts it in the home, which helps if all nodes share the home."""
        if lacks_folder and not self._backend.refuses((str(self._settings.home),)):
            return WorkdirMissing(f"{why}; {_SHIP}")
        return InvalidInput(why)

    def check_store(self, request: JobRequest) -> None:
        """Refuse a job whose checkpoint store cannot be written to; takes seconds."""
        address = store_of(request)
        if address is not None:
            require_store(address, request.env)

    def note_on(self, request: JobRequest) -> str:
        """Notes for the user about a request that is accepted; often empty."""
        address = store_of(request)
        notes = (
            self._note_on_grace(request),
            note_on_notice(request.name, self._backend.taken_back_seconds, self._telemetry.latest("report")),
            note_on_store(address) if address else "",
        )
        return "; ".join(note for note in notes if note)

    def _note_on_grace(self, request: JobRequest) -> str:
        notice = self._backend.notice_seconds
        if notice is None or request.grace_seconds <= notice:
            return ""
        return (
            f"grace is {request.grace_seconds:g} s, and nodes here are left {notice:g} s before they go: what it has "
            "not saved by then is lost; give a shorter grace, or start the service with a larger margin_seconds"
        )
