"""Which samples were read: an alias that stays, of `pollux.agent.data.ledger`."""

from pollux.agent.data.ledger import SampleLedger as Ledger

__all__ = ["Ledger"]
