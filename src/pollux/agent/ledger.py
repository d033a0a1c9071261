"""Which samples were read: a permanent alias of `pollux.agent.data.ledger`."""

from pollux.agent.data.ledger import SampleLedger as Ledger

__all__ = ["Ledger"]
