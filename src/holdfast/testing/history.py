"""Is this a story that the state table allows? See `holdfast.core.history`."""

from holdfast.core.history import History, Story, check_history, read_history

__all__ = ["History", "Story", "check_history", "read_history"]
