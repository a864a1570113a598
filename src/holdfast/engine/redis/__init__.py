"""The engine on Redis Streams: one Lua script per verb, the pending list as the lease."""
