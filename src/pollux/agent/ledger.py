"""Which samples were read: an alias that stays, of `pollux.agent.data.ledger`."""

from pollux.agent.data.ledger import Ledger

__all__ = ["Ledger"]
