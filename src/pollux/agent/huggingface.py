"""Hugging Face `Trainer` with the agent: a permanent alias of `pollux.agent.frameworks.huggingface`."""

from pollux.agent.frameworks.huggingface import STATE_NAME, PolluxTrainerMixin, newest_whole

__all__ = ["STATE_NAME", "PolluxTrainerMixin", "newest_whole"]
