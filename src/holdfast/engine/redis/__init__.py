"""The engine on Redis Streams: one Lua script per operation, and the pending list as the lease."""
