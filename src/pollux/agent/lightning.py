"""Lightning with the agent: a permanent alias of `pollux.agent.frameworks.lightning`."""

from pollux.agent.frameworks.lightning import PolluxCallback, PolluxDataLoader

__all__ = ["PolluxCallback", "PolluxDataLoader"]
