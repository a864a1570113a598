"""Events that are written in the user's own transaction, and brought to a broker afterwards."""
