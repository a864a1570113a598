"""Once-only effects, steps and transactions, as tasks use them through their context.

Public: the answers of a check for an effect in doubt (`Done`, `NotDone`), and the table of keys in your own database
(`create_keys_table`).
"""

from holdfast._platform import unsupported_error

if (_error := unsupported_error()) is not None:
    raise _error

from holdfast.effects.functions import Check, Done, InDoubt, NotDone
from holdfast.effects.keys_table import create_keys_table

__all__ = ["Check", "Done", "InDoubt", "NotDone", "create_keys_table"]
