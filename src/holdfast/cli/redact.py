"""Nothing that this program prints may carry a password (requirement T7): what is looked for is in `observe.redact`."""

from holdfast.observe.redact import redact

__all__ = ["redact"]
