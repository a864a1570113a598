"""Once-only effects, steps and transactions, as tasks use them through their context.

Public here: what a check for an effect in doubt answers (`Done`, `NotDone`), and the table of keys for a database of
your own (`create_keys_table`).
"""

from holdfast._platform import unsupported

if (_error := unsupported()) is not None:
    raise _error

from holdfast.effects.functions import Check, Done, InDoubt, NotDone
from holdfast.effects.keys_table import create_keys_table

__all__ = ["Check", "Done", "InDoubt", "NotDone", "create_keys_table"]
