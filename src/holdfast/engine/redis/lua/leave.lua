-- leave: forget consumers that hold nothing. One that still has pending entries stays: removing it would lose them.
-- KEYS   1-3 streams  4 workers
-- ARGV   1 group  2 the one to forget ('' all that were idle long enough)  3 how long is enough  4 consumer never to forget
-- Reply  how many
local group, worker, enough, parking = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local count = 0
if worker ~= '' then
  redis.call('ZREM', KEYS[4], worker)
else
  redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', number(now_ms() - enough))
end
for line = 1, 3 do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[line], group)
  if not consumers.err then
    for _, info in ipairs(consumers) do
      local name, pending, idle = info[2], info[4], info[6]
      local wanted = (worker == '' and idle >= enough) or name == worker
      if wanted and pending == 0 and name ~= parking then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[line], group, name)
        count = count + 1
      end
    end
  end
end
return count
