"""Classes of jobs by the GPU time of a whole training, as in the published evaluation: small, medium, large, huge."""

from __future__ import annotations

import bisect
from collections.abc import Callable

__all__ = ["CLASSES", "application_class", "class_of"]

CLASSES = ("small", "medium", "large", "huge")
"""Less than 1 GPU-hour, less than 10, less than 100, and the rest."""

_GPU_HOURS = (1.0, 10.0, 100.0)

_PUBLISHED = {"cifar10": 0, "ncf": 0, "bert": 1, "deepspeech2": 1, "yolov3": 2, "imagenet": 3}


def class_of(gpu_hours: float) -> int:
    """The position in `CLASSES` of a job with that GPU time."""
    return bisect.bisect_right(_GPU_HOURS, gpu_hours)


def application_class(name: str, gpu_hours: Callable[[str], float]) -> int:
    """The class of an application: the published one of the published applications, else by its own GPU time."""
    known = _PUBLISHED.get(name)
    return class_of(gpu_hours(name)) if known is None else known
