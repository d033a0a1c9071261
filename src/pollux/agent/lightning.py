"""Lightning with the agent: an alias that stays, of `pollux.agent.frameworks.lightning`."""

from pollux.agent.frameworks.lightning import PolluxCallback, PolluxDataLoader

__all__ = ["PolluxCallback", "PolluxDataLoader"]
