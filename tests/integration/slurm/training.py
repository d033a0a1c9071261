"""A job that trains on digits for tests of the service, and what it has done so far, by its own words.

What the service was told last may be half a minute old: an agent whose model is fitted reports no more often.
"""

from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "demo" / "train.py"
SAMPLES = 1437
EPOCHS = 10


def begin(service, name, epochs=EPOCHS, gpus=2):
    """Submit it; a pass takes more than a second."""
    service.submit(name, [SCRIPT, "--epochs", epochs, "--copies", 1, "--step-wait", 0.02], gpus)


def trained(service, name):
    """The passes that it says to have trained, in that order, from 1."""
    text = service.call(f"/v1/jobs/{name}/logs?replica=0")["text"]
    words = [line.split(":")[0].removeprefix("epoch ") for line in text.splitlines() if line.startswith("epoch ")]
    return [int(word) for word in words]


def has_trained(service, name, epochs):
    """Whether it has trained so many passes."""
    return len(trained(service, name)) >= epochs


def trained_once(service, name, epochs=EPOCHS):
    """Each pass once: nothing was repeated."""
    assert trained(service, name) == [*range(1, epochs + 1)], "passes were trained twice"
