-- groups: both groups on every line, from the beginning: never `$`, which would skip what waits already.
-- KEYS   1-3 streams  4 wake
-- ARGV   1 group  2 wake group
-- Reply  how many messages are there
-- XDEL comes first: it is allowed on a full Redis, and then so is the rest. A first worker must be able to drain one.
redis.call('XDEL', KEYS[4], '0-0')
for line = 1, 4 do
  for name = line < 4 and 1 or 2, 2 do
    local made = redis.pcall('XGROUP', 'CREATE', KEYS[line], ARGV[name], '0', 'MKSTREAM')
    if made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then return made end
  end
end
return redis.call('XLEN', KEYS[1]) + redis.call('XLEN', KEYS[2]) + redis.call('XLEN', KEYS[3])
