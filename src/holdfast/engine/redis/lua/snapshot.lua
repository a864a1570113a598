-- snapshot: which jobs have no record, and where the feed ends, in one atomic step. Reads only.
-- KEYS   1 feed  then records
-- Reply  {now, id of the feed's last entry ('' if it has none), its nonce, then indexes (from 1) of unknown jobs}
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local reply = { format_integer(now_ms()), last and last[1] or '', last and nonce_of(last[2]) or '' }
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then reply[#reply + 1] = i - 1 end
end
return reply
